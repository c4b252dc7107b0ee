"""AIM under torch.compile, torch.export, autocast and vmap, called as users call them."""

import shutil

import pytest
import torch
from torch import nn

from aim_nb.aim import AIM, can_group, random_masks
from aim_nb.core import torch_rng

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler on a CPU"
)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    "A compiler that has seen nothing yet, and its counters."
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch.compiler.reset()


def make_net(**options):
    rng = torch_rng("net")
    layer = AIM(16, 12, **{**dict(M=8, K=3, l=0, d_h=8, d_k=8), **options}, generator=rng)
    last = nn.Linear(12, 5)
    for p in last.parameters():
        nn.init.normal_(p, std=0.3, generator=rng)
    return nn.Sequential(layer, nn.ReLU(), last)


def rows(n, seed=0):
    return torch.randn(n, 16, generator=torch_rng("rows", n, seed))


def train(net, forward, batches):
    "Losses of some SGD steps, and the weights after them."
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    losses = []
    for n in batches:
        loss = nn.functional.cross_entropy(forward(rows(n)), torch.arange(n) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in net.parameters()]


def test_eager_training_goes_by_groups():
    assert can_group(rows(3), make_net()[0].W_M, torch.ones(3, 8))


@needs_compiler
@pytest.mark.parametrize("options", [dict(), pytest.param(dict(gate="raw", mask="fixed"), marks=pytest.mark.stress)])
def test_compiled_training_is_eager_training_and_is_compiled_for_all_batches(options, compiler):
    batches = [7, 12, 5, 31, 16, 9, 24, 3]
    plain, twin = make_net(**options), make_net(**options)
    losses, weights = train(plain, plain, batches)
    compiled, compiled_weights = train(twin, torch.compile(twin, fullgraph=True), batches)
    assert compiled == pytest.approx(losses, abs=1e-5)
    for a, b in zip(weights, compiled_weights):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert compiler["stats"]["unique_graphs"] <= 2  # one for the first batch, one for all others
    other = make_net(**options, K=2)
    assert train(other, other, batches)[0] != pytest.approx(losses, abs=1e-5)


def test_training_under_autocast_is_training():
    "The linear layers run in bfloat16, AIM in its own precision; both learn, and the losses are nearly those of float32."
    plain, twin = make_net(), make_net()
    losses, weights = train(plain, plain, [30] * 8)

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return twin(x)

    mixed, mixed_weights = train(twin, forward, [30] * 8)
    assert mixed == pytest.approx(losses, rel=0.02) and mixed != losses
    assert all(p.dtype == torch.float32 for p in mixed_weights) and losses[-1] < losses[0]
    assert (mixed_weights[0] - weights[0]).abs().max() < 0.01


def test_gradients_of_each_sample():
    net = make_net().eval()
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights, x, y):
        out = torch.func.functional_call(net, weights, (x[None],))
        return nn.functional.cross_entropy(out, y[None])

    x, y = rows(9), torch.arange(9) % 5
    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
    whole = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    for name, gradient in zip(weights, whole):
        torch.testing.assert_close(each[name].mean(0), gradient, rtol=0, atol=1e-5)


@needs_compiler
def test_compiled_training_may_draw(compiler):
    "While it trains with l > 0 it draws its ranks: three of five for every row."
    layer = torch.compile(make_net(l=2)[0].train(), fullgraph=True)
    for n in (6, 11, 4):
        out, attention = layer(rows(n), return_attention=True)
        assert out.shape == (n, 12) and (attention.mask.sum(1) == 3).all()
    assert compiler["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("options", [dict(), dict(gate="raw"), dict(decision="soft"), dict(mask="fixed")])
def test_export_takes_any_batch(options):
    net = make_net(**options).eval()
    batch = torch.export.Dim("batch", min=2, max=4096)
    program = torch.export.export(net, (rows(6),), dynamic_shapes=({0: batch},)).module()
    for n in (2, 6, 40):
        torch.testing.assert_close(program(rows(n)), net(rows(n)), rtol=0, atol=1e-5)
    assert (program(rows(6)) - net(rows(6, seed=1))).abs().max() > 1e-2


def test_export_takes_masks():
    layer = make_net(mask="random")[0].eval()
    masks = random_masks(9, 8, 3, seed=0)
    batch = torch.export.Dim("batch", min=2, max=4096)
    program = torch.export.export(layer, (rows(6), masks[:6]), dynamic_shapes=({0: batch}, {0: batch})).module()
    torch.testing.assert_close(program(rows(9), masks), layer(rows(9), masks), rtol=0, atol=1e-5)
