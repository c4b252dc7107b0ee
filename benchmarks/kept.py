"""python -m benchmarks.kept norms|steps|convolutions|trajectory SIZE REPEATS CLOCK [WHAT]: outer steps and meta-test with memory kept, as `run_loop` has it, which needs a process of its own; JSON."""

from __future__ import annotations

import json
import sys
from functools import partial

import numpy as np
import torch

from aim_nb.backbones import ConvNet
from aim_nb.core import keep_memory, torch_rng
from aim_nb.engine.metatest import FeatureCache, TailLearner, follow, fresh_head
from aim_nb.oml import OML
from aim_nb.data.tasks import draw_trajectory

from .continual import make_images, meta_batch, nets, own_step
from .harness import CLOCK, CLOCKS, median, peak_gb, seconds
from .layer import together


def omniglot_net(tiny, norm="instance"):
    return OML(
        (1, 28, 28),
        1000,
        "aim",
        norm=norm,
        width=8 if tiny else 112,
        generator=torch_rng(0, "oml"),
        M=12 if tiny else 64,
        K=10,
        l=2,
    )


def norms(tiny, repeats):
    "Milliseconds of a step with either norm."
    x, y, T = meta_batch((1, 28, 28), tiny)
    steps = [own_step("oml", omniglot_net(tiny, norm).train(), x, y, T) for norm in ("affine", "instance")]
    return dict(zip(("affine_ms", "instance_ms"), together(steps, dict(seconds=0.0, repeats=repeats))))


def steps(tiny, repeats, method, precision):
    "Seconds of an outer step under the authors' switches, and of its quickest run."
    net, _, shape = nets(method, "omniglot", "raw", True, tiny)
    for part in net.children():
        if isinstance(part, ConvNet):
            part.precision = precision
    x, y, T = meta_batch(shape, tiny)
    step = own_step(method, net, x, y, T, **(dict(fast_set="release") if method == "anml" else {}))
    for _ in range(1 if tiny else 3):
        step()
    found = [seconds(step) for _ in range(2 if tiny else 2 * repeats)]
    return dict(step=median(found), quickest=min(found))


def inside(net, step):
    "Seconds that `net` takes within a step: forward, then backward from the gradient of its features to that of its last weight. Autograd runs what was made last first, so nothing else falls between."
    at = {}

    def mark(name):
        at[name] = CLOCKS[CLOCK[0]]()

    def made(net, x, features):
        mark("made")
        features.register_hook(lambda g: mark("back"))

    hooks = [
        net.register_forward_pre_hook(lambda *_: mark("start")),
        net.register_forward_hook(made),
        *(p.register_post_accumulate_grad_hook(lambda p: mark("last")) for p in net.parameters()),
    ]
    step()
    for h in hooks:
        h.remove()
    return at["made"] - at["start"] + at["last"] - at["back"]


def convolutions(tiny, repeats, data):
    "Images a second through the convolutions within a step, over the best rate that they reach alone, in batches up to six times as large."
    net, _, shape = nets("oml", data, "raw", True, tiny)
    x, y, T = meta_batch(shape, tiny)
    step, batches = own_step("oml", net, x, y, T), {k * len(x): x.repeat(k, 1, 1, 1) for k in (1, 2, 4, 6)}

    def alone(images):
        net.rln.zero_grad()
        net.rln(images).sum().backward()

    def once():
        return [inside(net.rln, step) / len(x), *(seconds(partial(alone, b)) / n for n, b in batches.items())]

    once()
    own, *each = (1e3 * median(t) for t in zip(*(once() for _ in range(repeats))))
    return dict(share=min(each) / own, image_ms=own, alone_ms=dict(zip(batches, each)))


def trajectory(tiny, repeats, n):
    "Peak memory of one meta-test trajectory of `n` classes beside the model's: 15 images a class to learn from, 5 to be tested on, all of the tail under Adam."
    n, net = int(n), omniglot_net(tiny).eval()
    with torch.no_grad():
        net.features(make_images(1, 50, 1, 28)[0])
    before = peak_gb()  # with the libraries, the network and a batch through it
    with torch.no_grad():
        f = torch.cat([net.features(make_images(1, 20, 1, 28, seed=c)[0]) for c in range(n)])
    rows = np.arange(20 * n).reshape(n, 20)
    fc = net.tail.fc
    head = fresh_head(fc.in_features, fc.out_features, ("memory", n))
    trajectory = draw_trajectory(rows[:, :15], rows[:, 15:], 0, 0, n)
    follow(TailLearner(net.tail, FeatureCache(len(f), f.__getitem__), 1e-3, head), trajectory, (n,))
    return dict(gb=peak_gb() - before, before_gb=before)


def main(what, size, repeats, clock, *data):
    keep_memory()
    CLOCK[0] = clock
    print(
        json.dumps(
            dict(norms=norms, steps=steps, convolutions=convolutions, trajectory=trajectory)[what](
                size == "tiny", int(repeats), *data
            )
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
