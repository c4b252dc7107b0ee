"""The multiply-adds and bytes that a computation cannot do without.
Multiply-adds are those of the equations with idle mechanisms and the null token left out (a convolution's: the direct ones). A step reads a weight once, however many passes use it, and writes it once if it moves."""

from __future__ import annotations

from math import prod

import torch

from aim_nb.aim import LinearTwin, count_parameters
from aim_nb.backbones import count_macs

ADAM, MOMENTUM = 24, 16  # bytes a weight: itself and its averages, two or one, read and written


def total(*parts) -> dict:
    return {k: sum(p[k] for p in parts) for k in ("macs", "bytes")}


def sib(n, q, d, way=5, steps=3):
    "SIB, forward and backward: scores before and after each refinement and the slope between, the small network that makes it."
    H = 8 * way
    return dict(macs=3 * (q * way * d * (1 + 2 * steps) + steps * q * H * (2 * way + H)), bytes=4 * (n + q) * d)


def linear_step(D, V, rows):
    "Every row's output once, every update once: a step on some of the rows, held in factors, shares both."
    return dict(macs=2 * rows * D * V, bytes=4 * 3 * D * V)


def fewshot_step(layer, n, q, own=None):
    "Inner and outer step of an episode; `own`: what AIM's share takes."
    if isinstance(layer, LinearTwin):
        own = linear_step(layer.d_in, layer.d_out, n + q)
    return total(sib(n, q, layer.d_out), *([own, sib(n, n, layer.d_out)] if own else []))


def aim_episode(aim, images, episodes, n, q):
    "One of many test episodes: its share of z W_m and keys, once an image, then the step in factors for support and query rows, then SIB."
    D, V, rows = aim.d_in, aim.d_out, n + q
    once = dict(
        macs=images * D * (aim.K * V + aim.d_k) / episodes, bytes=4 * (images * aim.K * V + aim.W_M.numel()) / episodes
    )
    step = dict(
        macs=rows * (aim.K * V + n * (D + V + aim.d_k) + aim.M * aim.d_k) + aim.M * aim.d_k * (n + aim.d_k),
        bytes=4 * rows * (aim.K * V + D),
    )
    return total(once, step, sib(n, n, V), sib(n, q, V))


@torch.no_grad()
def aim_pass(aim, z, back):
    "AIM alone: mechanisms in use read; with `back` the gradients of all parameters, which autograd wants written."
    mask, P = aim.attention(z).mask, count_parameters(aim)
    macs = int(mask.sum()) * aim.d_in * aim.d_out + len(z) * aim.d_k * (aim.d_in + aim.M) + aim.W_Q.numel()
    return dict(
        macs=macs * (2 if back else 1), bytes=4 * (P - int((~mask.any(0)).sum()) * aim.d_in * aim.d_out + P * back)
    )


def convolutions(net, shape, images, back=True):
    "Forward, and both gradients of all but the first layer, whose images need none."
    macs = count_macs(net, shape)
    return dict(macs=images * (3 * macs[""] - macs["blocks.0"] if back else macs[""]), bytes=4 * images * prod(shape))


def tail_weights(tail):
    "Weights that one image meets in a tail: K mechanisms, all of the rest."
    aim = tail.layer
    return (
        count_parameters(tail.reduce)
        + count_parameters(tail.fc)
        + aim.W_K.numel()
        + aim.K * (aim.W_M[0].numel() + aim.W_Q[0].numel())
    )


def inner_loop(tail, steps):
    "Output, gradient of the inputs (but of the features); the updates stay factors."
    return dict(
        macs=steps * (2 * tail_weights(tail) - count_parameters(tail.reduce)), bytes=4 * steps * tail_weights(tail)
    )


def adam_step(tail):
    "The same with every weight's gradient and Adam."
    return dict(macs=3 * tail_weights(tail) - count_parameters(tail.reduce), bytes=ADAM * tail_weights(tail))


def outer_step(net, shape, images, steps, fast_p=False):
    "Convolutions, inner loop and tail of the meta-batch, Adam on everything; `fast_p`: ANML's P moves in the inner loop, too."
    parts = [
        inner_loop(net.tail, steps),
        dict(macs=3 * images * tail_weights(net.tail), bytes=ADAM * count_parameters(net)),
    ]
    if hasattr(net, "rln"):
        return total(*parts, convolutions(net.rln, shape, images))
    gate = dict(macs=3 * images * net.gate.weight.numel(), bytes=0)
    p = total(
        convolutions(net.p, shape, images + fast_p * steps),
        dict(macs=0, bytes=fast_p * steps * 4 * 3 * count_parameters(net.p)),
    )
    return total(*parts, gate, convolutions(net.nm, shape, images), p)
