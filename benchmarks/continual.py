"""Continual learning: outer steps, the inner loop alone, meta-test under Adam."""

from __future__ import annotations

import copy
from itertools import product

import torch
import torch.nn.functional as F

from aim_nb.aim import AIM
from aim_nb.anml import ANML
from aim_nb.backbones import PRECISIONS, has_bf16
from aim_nb.core import torch_rng
from aim_nb.engine.metatest import PlainLearner
from aim_nb.kernels.fastweights import FastAIM, FastTail, anml_loss, inner_steps, oml_loss
from aim_nb.kernels.idle_adam import AdamTail
from aim_nb.oml import OML, meta_loss
from aim_nb.oml import inner_loop as plain_inner_loop
from .authors import PlainAIM, copy_weights

from .harness import CLOCK, case, compare, median, own_process, seconds, steadily, value_row
from .layer import flat, together
from .work import adam_step, outer_step
from .work import inner_loop as inner_work

SIZE = {
    "omniglot": dict(side=28, n_out=1000, release_channels=3, channels=1),
    "cifar": dict(side=32, n_out=100, release_channels=3, channels=3),
}
RELEASE_OUTER = {("oml", "omniglot"): 2.85, ("oml", "cifar"): 10.7, ("anml", "omniglot"): 16.6}


def make_images(n_classes, each, channels, side, seed=0):
    "Images that are alike within a class: a smooth field and noise; (n_classes, each, C, side, side)."
    g = torch_rng(seed, "images")
    field = F.interpolate(torch.randn(n_classes, channels, 6, 6, generator=g), size=(side, side), mode="bilinear")
    return field[:, None] + 0.5 * torch.randn(n_classes, each, channels, side, side, generator=g)


def nets(method, data, gate, release, tiny=False):
    "OML+AIM or ANML+AIM twice, with the same weights: the project's, and one that computes all mechanisms for every input, as the authors do."
    size = SIZE[data]
    channels = size["release_channels" if release else "channels"]
    shape = (channels, size["side"], size["side"])
    width, M = (8, 12) if tiny else (112, 64)
    make = OML if method == "oml" else ANML
    how = dict(norm="affine", width=width, generator=torch_rng(0, method), M=M, K=10, l=2, gate=gate)
    fast = make(shape, size["n_out"], "aim", **how).train()
    plain = copy.deepcopy(fast)
    aim = fast.tail.layer
    plain.tail.layer = copy_weights(aim, PlainAIM(aim.d_in, aim.d_out, M, 10, 2, aim.d_h, aim.d_k, gate))
    return fast, plain, shape


def meta_batch(shape, tiny=False, n_classes=40):
    "84 images and labels; the last 20 are the trajectory."
    T, R = (3, 4) if tiny else (20, 64)
    x, own = make_images(n_classes, 2, *shape[:2], seed=1), make_images(1, T, *shape[:2], seed=2)[0]
    return (
        torch.cat([x.flatten(0, 1)[:R], own]),
        torch.cat([torch.arange(n_classes).repeat_interleave(2)[:R], torch.full((T,), n_classes)]),
        T,
    )


def own_step(method, fast, x, y, T, **own):
    "The project's outer step on one meta-batch."
    optimizer = torch.optim.Adam(fast.parameters(), 1e-3, fused=True)
    return outer(fast, oml_loss if method == "oml" else anml_loss, optimizer, x, y, T, **own)


def outer(net, loss_of, optimizer, x, y, T, **how):
    "An outer step with one of the meta-losses."
    generator = torch_rng(0, "ranks")

    def step():
        loss, _ = loss_of(net, x, y, n_inner=T, generator=generator, **how)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def outer_pair(method, data, gate, release, tiny=False):
    "One outer step of both sides on the same meta-batch."
    fast, plain, shape = nets(method, data, gate, release, tiny)
    x, y, T = meta_batch(shape, tiny)
    fast_set = "release" if release else "paper"
    own = dict(fast_set=fast_set) if method == "anml" else {}
    optimizer = torch.optim.Adam(plain.parameters(), 1e-3)
    ours = own_step(method, fast, x, y, T, **own)
    return fast, x, T, ours, outer(plain, meta_loss, optimizer, x, y, T, fast_set=fast_set)


@case("continual")
def outer_steps(plan):
    "Outer steps at the release's switches and at the project's defaults."
    few = dict(plan, seconds=0.0, repeats=min(3, plan["repeats"]))
    for method, data in product(("oml", "anml"), SIZE):
        for release in (True, False):
            fast, x, T, ours, ref = outer_pair(method, data, "raw" if release else "sigmoid", release, plan["tiny"])
            yield compare(
                f"outer step {method}+aim {data}, {'release' if release else 'default'} switches",
                ours,
                ref,
                few,
                tries=2 if release else 1,
                work=outer_step(fast, x.shape[1:], len(x), T, fast_p=not release),
                items=("images", len(x)),
                release=RELEASE_OUTER.get((method, data)) if release else None,
            )
            del fast, x, ours, ref  # the networks of the next size need the memory


def kept(what, plan, *data, tries=2, threads=0):
    "What `benchmarks.kept` finds in a process of its own (`threads` 0: as many as here), and what it was measured with."
    size = "tiny" if plan["tiny"] else "full"

    def run():
        return own_process("benchmarks.kept", what, size, str(plan["repeats"]), CLOCK[0], *data, threads=threads)

    return steadily(run, plan, tries)


@case("continual")
def seconds_a_step(plan):
    "An outer step at Omniglot's size under the authors' switches, by precision of the convolutions and by threads, memory kept as in training."
    precisions = [p for p in PRECISIONS if p == "float32" or has_bf16()]
    for method, precision, threads in product(("oml", "anml"), precisions, (1, 2)):
        found, seen = kept("steps", plan, method, precision, threads=threads)
        yield value_row(
            f"outer step {method}+aim omniglot, {precision}, {threads} thread{'s'[: threads - 1]}",
            found.pop("step"),
            "s",
            dict(seen, threads=threads),
            **found,
        )


@case("continual")
def convolutions(plan):
    "The convolutions within an outer step of OML+AIM against the best that they reach alone, memory kept as in training."
    for data in SIZE:
        found, seen = kept("convolutions", plan, data)
        yield value_row(
            f"convolutions of the outer step oml+aim {data}",
            found.pop("share"),
            "of their best rate alone",
            seen,
            **found,
        )


@case("continual")
def per_image_norm(plan):
    "An outer step of OML+AIM at Omniglot size with per-image norm over one with the affine map, memory kept as in training."
    found, seen = kept("norms", plan)
    return [
        value_row(
            "outer step oml+aim omniglot, per-image norm over affine",
            found["instance_ms"] / found["affine_ms"],
            "x",
            seen,
            **found,
        )
    ]


@case("continual")
def meta_test_memory(plan):
    "Peak memory of a meta-test trajectory of OML+AIM on Omniglot beside the model's, against its length; each in a process of its own."
    ns = (2, 4) if plan["tiny"] else (75, 150, 300, 600)
    found = [kept("trajectory", plan, str(n), tries=1) for n in ns]
    gb, seen = [r["gb"] for r, _ in found], dict(found[-1][1], steady=True)  # no time is told
    return [
        value_row(
            f"meta-test of {ns[-1]} classes oml+aim omniglot, peak memory beside the model",
            gb[-1],
            "GB",
            seen,
            classes=list(ns),
            gb=gb,
            before_gb=found[-1][0]["before_gb"],
        )
    ]


@case("continual")
def inner_loop(plan):
    "Twenty batch-1 SGD steps of the tail of OML+AIM at Omniglot size, features given."
    fast, plain, shape = nets("oml", "omniglot", "raw", True, plan["tiny"])
    x, y, T = meta_batch(shape, plan["tiny"])
    with torch.no_grad():
        f = fast.rln(x[-T:])
    ranks = [torch.randperm(12, generator=torch_rng(3, t))[:10] for t in range(T)]

    def ours():
        inner_steps(FastTail(fast.tail), f, y[-T:], ranks)

    def plainly():
        plain_inner_loop(plain.tail, f, y[-T:], ("reduce", "layer", "fc"), ranks=ranks)

    few = dict(plan, repeats=min(5, plan["repeats"]))
    row = compare(
        "inner loop oml+aim omniglot, features given",
        ours,
        plainly,
        few,
        tries=2,
        work=inner_work(fast.tail, T),
        items=("images", T),
        release=2.17,
    )
    return [row]


@case("scaling")
def inner_against_M(plan):
    "One batch-1 inner step against the number of mechanisms."
    D, Ms = (16, (16, 32)) if plan["tiny"] else (504, (16, 32, 64, 128, 256))
    x, g = torch.randn(20, D, generator=torch_rng(0, "z")).relu(), torch.randn(1, D, generator=torch_rng(0, "g")) * 1e-3

    def loop(M):
        aim = AIM(D, D, M=M, K=10, l=0, d_h=128, generator=torch_rng(0, "aim", M))

        @torch.no_grad()
        def run():
            fast = FastAIM(aim, 1e-2)
            for z in x:
                fast(z[None])
                fast.step(g)

        return run

    loops = [loop(M) for M in Ms]
    return [flat(f"inner loop of 20 steps, D={D}, against M", Ms, *steadily(lambda: together(loops, plan), plan))]


def in_turn(learn, rows, labels):
    "A step that learns the next row, round and round."
    state = dict(t=0)

    def step():
        t = state["t"] = (state["t"] + 1) % len(rows)
        learn(rows[t], labels[t])

    return step


def adam_trajectory(fast, f, y):
    "AdamTail learning f in order, round and round."
    return in_turn(AdamTail(fast.tail, 1e-3, fast.tail.fc.weight.detach().clone()).learn, f, y)


def metatest_pair(tiny):
    "A step of a trajectory of both sides, ours after a hundred; and what it learns from: network, features, labels, images a class."
    fast, plain, shape = nets("oml", "omniglot", "raw", True, tiny)
    n, T = (3, 2) if tiny else (40, 15)
    x, y = make_images(n, T, *shape[:2], seed=3).flatten(0, 1), torch.arange(n).repeat_interleave(T).tolist()
    fast.eval()
    with torch.no_grad():
        f = torch.cat([fast.rln(part) for part in x.split(50)])
    step = adam_trajectory(fast, f, y)
    for _ in range(2 if tiny else 100):
        step()
    learner = PlainLearner(plain, x.__getitem__, 1e-3, fast.tail.fc.weight.detach().clone(), "fast")
    return step, in_turn(learner.learn, range(len(x)), y), (fast, f, y, T)


@case("continual")
def meta_test(plan):
    "One step of a meta-test trajectory, every fast parameter under exact Adam."
    step, plain_step, on = metatest_pair(plan["tiny"])
    yield compare(
        "meta-test step oml+aim omniglot, exact Adam",
        step,
        plain_step,
        dict(plan, seconds=4 * plan["seconds"]),
        work=adam_step(on[0].tail),
        items=("images", 1),
        release=0.176,
    )
    yield against_classes(*on, plan)


def against_classes(fast, f, y, T, plan):
    "Seconds of a whole trajectory against the number of images in it."
    ns = (1, 2) if plan["tiny"] else (5, 10, 20, 40)

    def run(n):
        step = adam_trajectory(fast, f[: n * T], y[: n * T])
        return 1e3 * seconds(step, n * T) * n * T

    def times():
        return [median([run(n) for _ in range(1 if plan["tiny"] else 3)]) for n in ns]

    return flat("meta-test trajectory against classes", ns, *steadily(times, plan))
