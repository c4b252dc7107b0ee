"""Few-shot learning the way the authors' code computes it, for the stopwatch: all mechanisms for all tokens, dense autograd, torch's optimisers, copied weights."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from aim_nb.sib import class_labels


class PlainAIM(nn.Module):
    "All `M` mechanisms for all tokens, then a mask; parameters named and shaped as those of `AIM`."

    def __init__(self, d_in, d_out, M=32, K=8, l=2, d_h=256, d_k=128, gate="sigmoid"):
        super().__init__()
        self.K, self.l, self.gate = K, l, gate
        for name, shape in dict(h=(M, d_h), W_Q=(M, d_h, d_k), W_K=(d_in, d_k), W_M=(M, d_in, d_out)).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.register_parameter("b_K", nn.Parameter(torch.zeros(d_k)) if gate == "raw" else None)

    def attention(self, tokens, ranks=None):  # (B, T, D); positions among the best K + l
        "(B, T, M) weights of tokens and mechanisms, zero where the mechanism is not in use."
        q, k = torch.bmm(self.h[:, None], self.W_Q)[:, 0], tokens @ self.W_K
        if self.b_K is not None:
            k = k + self.b_K
        s = k @ q.T / math.sqrt(q.shape[1])
        a = s.softmax(1) if self.gate == "sigmoid" else s
        best = a[:, 0].topk(self.K + self.l if ranks is not None else self.K).indices
        used = torch.zeros_like(a[:, 0]).scatter(1, best if ranks is None else best[:, ranks], 1.0)
        return a * used[:, None]

    def forward(self, z, ranks=None):  # (B, D)
        tokens = torch.stack([z, torch.zeros_like(z)], 1) if self.gate == "sigmoid" else z[:, None]
        a = self.attention(tokens, ranks)
        values = torch.bmm(tokens.flatten(0, 1).expand(len(self.W_M), -1, -1), self.W_M)  # (M, B*T, V)
        out = (a.flatten(0, 1).T[..., None] * values).sum(0).unflatten(0, a.shape[:2]).sum(1)
        return out if self.gate == "sigmoid" else F.normalize(out, dim=-1)


@torch.no_grad()
def copy_weights(
    src,
    dst,  # modules whose parameters come in the same order and shapes
):
    "Give `dst` the weights of `src`; returns `dst` in the same dtype."
    a, b = list(src.parameters()), list(dst.parameters())
    if [t.shape for t in a] != [t.shape for t in b]:
        raise ValueError("The two modules differ in their parameters.")
    dst.to(a[0].dtype)
    for s, d in zip(a, dst.parameters()):
        d.copy_(s)
    return dst


class PlainSIB(nn.Module):
    "Cosine classifier whose class vectors take synthetic gradient steps."

    def __init__(self, d, n_way=5, steps=3, eps=1e-3):
        super().__init__()
        self.n_way, self.steps, self.eps, H = n_way, steps, eps, 8 * n_way
        self.w, self.scale, self.bias = (nn.Parameter(torch.tensor(v)) for v in ([1.0] * d, 10.0, 0.0))
        self.dni = nn.Sequential(
            nn.Linear(n_way, H),
            nn.ReLU(),
            nn.BatchNorm1d(H),
            nn.Linear(H, H),
            nn.ReLU(),
            nn.BatchNorm1d(H),
            nn.Linear(H, n_way),
        )

    def scores(self, theta, Q):
        return self.scale * (F.normalize(Q, dim=-1) @ F.normalize(theta, dim=-1).T + self.bias)

    def forward(self, S, Q):  # (n, d) support class by class, (q, d) queries
        theta = self.w * F.normalize(S, dim=-1).unflatten(0, (self.n_way, -1)).mean(1)
        for _ in range(self.steps):
            s = self.scores(theta, Q)
            (slope,) = torch.autograd.grad(s, theta, self.dni(s), create_graph=True)
            theta = theta - self.eps * slope
        return self.scores(theta, Q)


class PlainLinear(nn.Module):
    "One matrix, no bias."

    def __init__(self, d_in, d_out):
        super().__init__()
        self.W = nn.Parameter(torch.zeros(d_in, d_out))

    def forward(self, z, ranks=None):
        return z @ self.W


class PlainFewshot:
    "Few-shot training as the release does it."

    def __init__(
        self,
        layer,
        head,  # PlainAIM | PlainLinear | None; PlainSIB
        rates,  # nu_in, nu_out, nu_sib, momentum, decay
        n_shot=1,
    ):
        nu_in, nu_out, nu_sib, momentum, decay = rates
        self.layer, self.head, self.n = layer, head, head.n_way * n_shot
        sgd = torch.optim.SGD
        self.inner, self.outer = (
            (None, None) if layer is None else (sgd(layer.parameters(), nu_in), sgd(layer.parameters(), nu_out))
        )
        self.sib = sgd(head.parameters(), nu_sib, momentum=momentum, weight_decay=decay, nesterov=True)

    def out(self, z, ranks):
        return z if self.layer is None else self.layer(z, ranks)

    def loss(self, S, Q):
        s = self.head(S, Q)
        return s, F.cross_entropy(s, class_labels(self.head.n_way, len(s)))

    def step(self, z, ranks_in=None, ranks_out=None):  # (n + q, D) support rows, then queries
        "Inner and outer step in place; returns the logits of the queries."
        if self.layer is not None:
            out = self.out(z[: self.n], ranks_in)
            self._update(self.loss(out, out)[1], self.inner)
        s, loss = self.loss(self.out(z[: self.n], ranks_out), self.out(z[self.n :], ranks_out))
        self._update(loss, self.outer, self.sib)
        return s.detach()

    def _update(self, loss, *optimisers):
        optimisers = [o for o in optimisers if o]
        for p in (*self.head.parameters(), *(self.layer.parameters() if self.layer is not None else ())):
            p.grad = None
        loss.backward()
        for o in optimisers:
            o.step()


def plain_episode(
    layer,
    head,  # PlainAIM | PlainLinear | None; PlainSIB
    z,  # (n + q, D) features, support rows first
    n_shot=1,
    lr=3e-3,  # of the one step
):
    "Logits of the queries after one SGD step on a copy of the layer."
    n = head.n_way * n_shot
    if layer is None:
        return head(z[:n], z[n:]).detach()
    own = copy.deepcopy(layer)
    out = own(z[:n])
    loss = F.cross_entropy(head(out, out), class_labels(head.n_way, n))
    for p, g in zip(own.parameters(), torch.autograd.grad(loss, list(own.parameters()))):
        p.data.sub_(g, alpha=lr)
    with torch.no_grad():
        S, Q = own(z[:n]), own(z[n:])
    return head(S, Q).detach()
