"""Few-shot: one training step, test episodes, a whole paper run."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from aim_nb.aim import AIM, Identity, linear_twin
from aim_nb.core import threads, torch_rng
from aim_nb.engine.evaluate import evaluate
from aim_nb.kernels.episodes import block_length, episodes
from aim_nb.reference import PlainAIM, PlainFewshot, PlainLinear, PlainSIB, copy_weights, plain_episode
from aim_nb.sib import SIBHead, SIBParams
from aim_nb.data.tasks import draw_episodes
from aim_nb.engine.train_fewshot import Episodic, FlatSGD, double_step, paper_rates

from .harness import CLOCK, case, compare, floors, median, own_process, seconds, steadily, value_row
from .work import aim_episode, fewshot_step

CORES = 2  # for which the bars are set
SIZES = {"256->400": (256, 400), "640->800": (640, 800), "1600->800": (1600, 800)}
TINY = {"256->400": (16, 20)}
RELEASE_STEP = {"256->400": 0.065, "640->800": 0.218, "1600->800": 0.713}
RELEASE_EPISODE = {"256->400": 0.033, "640->800": 0.119, "1600->800": 0.455}


def sizes(plan):
    return TINY if plan["tiny"] else SIZES


def make_features(d, classes=20, each=40, seed=0):
    """Stand-ins for a frozen network's features: non-negative, two thirds zero, alike within a class; (N, d) and the rows of each class.
    An episode of 80 touches 31 of 32 or 153 of 256 untrained mechanisms (Conv-4-64 features of CIFAR-FS: 31 and 151)."""
    g = torch_rng(seed, "features", d)
    centre = torch.randn(classes, 1, d, generator=g)
    x = (
        torch.randn(classes, each, d, generator=g).mul_(0.7).add_(0.7 * centre).sub_(0.4).relu_().flatten(0, 1)
    )  # in place: a whole run's memory is measured with it
    return x, [torch.arange(c * each, (c + 1) * each).numpy() for c in range(classes)]


def model(method, d, v, M=32, seed=0, l=2):
    "Layer and head of the project, layer and head of the reference, with the same weights."
    aim = AIM(d, v, M=M, l=l, generator=torch_rng(seed, "aim"))
    layer, plain = {
        "sib": lambda: (Identity(d), None),
        "sib+aim": lambda: (aim, copy_weights(aim, PlainAIM(d, v, M, l=l))),
        "sib+linear": lambda: twins(aim),
    }[method]()
    head = SIBHead(layer.d_out, generator=torch_rng(seed, "head"))
    return layer, head, plain, copy_weights(head, PlainSIB(layer.d_out))


def twins(aim):
    layer = linear_twin(aim, generator=torch_rng(0, "linear"))
    return layer, copy_weights(layer, PlainLinear(layer.d_in, layer.d_out))


def blocks(layer, items):
    "Episodes' features and ranks, as many together as training takes."
    T = block_length(layer)
    return [
        (torch.stack(z), *map(list, ranks)) for z, *ranks in (zip(*items[i : i + T]) for i in range(0, len(items), T))
    ]


class Stepper:
    "The project's training steps on all of some episodes that are in memory, block after block as in training; what a validation adds (6 ms every 1,000 steps with 32 mechanisms) is not in it."

    def __init__(self, layer, head, items, n_shot=1, n_query=15):
        ys, yq = (torch.arange(5).repeat_interleave(k) for k in (n_shot, n_query))
        Y, rates = lambda y: F.one_hot(y, 5).float(), paper_rates()
        self.opt, adapt = (
            FlatSGD(list(head.params()), rates.nu_sib, rates.momentum, rates.decay),
            not isinstance(layer, Identity),
        )
        self.t = Episodic(
            SIBParams(*(p.detach() for p in head.params())),
            head.average(n_shot),
            len(ys),
            Y(ys),
            Y(yq),
            head.steps,
            head.eps,
            rates,
            "inplace",
            adapt,
        )
        self.run = episodes(layer.train(), len(ys) if adapt else 0)
        self.blocks = blocks(layer, items)
        if not isinstance(layer, AIM):  # nothing to choose
            self.blocks = [(Z,) for Z, *_ in self.blocks]

    def __call__(self):
        for Z, *ranks in self.blocks:
            self.run.begin(Z, *ranks)
            for t in range(len(Z)):
                self.opt.step(double_step(self.t, self.run[t])[1])


def draws(d, n_shot, n=16, seed=0):
    "Episodes' features and ranks, the same for both sides."
    x, rows = make_features(d)
    e = draw_episodes(rows, seed, range(n), n_shot=n_shot)
    z = [x[torch.cat([torch.as_tensor(t[i]).flatten() for t in (e.support, e.query)])] for i in range(n)]
    return [(z[i], *(torch.randperm(10, generator=torch_rng(seed, i, j))[:8] for j in range(2))) for i in range(n)]


def in_turn(fn, items):
    "A function without arguments that runs `fn` on one item after the other, round and round."
    state = [0]

    def call():
        state[0] = (state[0] + 1) % len(items)
        return fn(*items[state[0]])

    return call


@torch.no_grad()
def aim_work(layer, items, n_shot) -> tuple:
    "Multiply-adds and bytes that AIM's share of a training step cannot do without, and the distinct mechanisms of a block."
    D, V, rows, T = layer.d_in, layer.d_out, 5 * n_shot + 75, block_length(layer)
    distinct, run = 0, episodes(layer, 5 * n_shot)
    for Z, *ranks in blocks(layer, items):
        run.begin(Z, *ranks)
        distinct += int(run.known.flatten(0, 1).any(0).sum()) / len(
            items
        )  # a block's mechanisms, shared among its steps
    macs = (
        2 * rows * D * (layer.K * V + layer.d_k) + 3 * layer.M * layer.d_h * layer.d_k / T
    )  # every row's output once, every update once: the inner step shares both
    moved = (
        4 * 3 * (distinct * (D * V + layer.d_h * layer.d_k) + D * layer.d_k)
    )  # read for the output; read and written by the update
    return dict(macs=int(macs), bytes=int(moved)), distinct * T


def aim_share(layer, items, n):
    "Only AIM's part of the steps: outputs and updates, of support and of all rows, for all of the episodes."
    g = [
        torch.randn(len(z), layer.d_out, generator=torch_rng(9, len(z))) * 1e-4 for z in (items[0][0][:n], items[0][0])
    ]
    run, own = episodes(layer, n), blocks(layer, items)

    @torch.no_grad()
    def call():
        for Z, *ranks in own:
            run.begin(Z, *ranks)
            for t in range(len(Z)):
                s = run[t]
                s.support()
                s.adapt(g[0], 1e-3)
                s.output()
                s.write_(g[1], 1e-3)

    return call


def step_row(method, size, d, v, n_shot, plan, cores=0):
    "A training step; `cores`: those of the plain side, and of our wide products alone, as training has it (0: as many as there are, for both)."
    layer, head, plain, plain_head = model(method, d, v, 12 if plan["tiny"] else 32)
    items, ref = draws(d, n_shot), PlainFewshot(plain, plain_head, paper_rates(), n_shot)
    step, layer.threads = Stepper(layer, head, items, n_shot), cores

    def ours():
        with threads(1 if cores else 0):
            step()

    own, distinct = aim_work(layer, items, n_shot) if method == "sib+aim" else (None, 0)
    release = RELEASE_STEP[size] if own and n_shot == 1 else None
    with threads(cores):
        row = compare(
            f"training step {method} {size} {n_shot}-shot" + (f", {cores} threads" if cores else ""),
            ours,
            in_turn(ref.step, items),
            plan,
            per=len(items),
            release=release,
            work=fewshot_step(layer, 5 * n_shot, 75, own),
            items=("episodes", 1),
            size=size,
            shots=n_shot,
            method=method,
        )
    return row | share_row(layer, items, n_shot, own, distinct, row, plan) if own and not cores else row


def share_row(layer, items, n_shot, own, distinct, row, plan):
    "AIM's share of a step beside its floor: the larger of its multiply-adds and its bytes at the machine's own rates."
    call = aim_share(layer, items, 5 * n_shot)
    call()
    share, seen = steadily(lambda: median([seconds(call) / len(items) for _ in range(plan["repeats"])]), plan)
    floor = max(floors(own, seen))
    return dict(
        share_ms=1e3 * share,
        floor_ms=1e3 * floor,
        share_of_floor=share / floor,
        distinct=distinct,
        steady=row["steady"] and seen["steady"],
    )


@case("few-shot")
def training_step(plan):
    "Inner and outer step of one episode, features in memory."
    for m in ("sib+aim", "sib", "sib+linear"):
        for s, dv in sizes(plan).items():
            for n in (1, 5):
                yield step_row(m, s, *dv, n, plan)


@case("few-shot")
def on_all_cores(plan):
    "The same with two cores on both sides: the reference as torch shares its work out, ours with both for its wide products alone, as training has it."
    for s, dv in sizes(plan).items():
        yield step_row("sib+aim", s, *dv, 1, plan, CORES)


@case("few-shot")
def evaluation(plan):
    "Test episodes: adapt to the support set, answer the queries. Time per episode: ours over all of them at once, the reference one at a time."
    for size, (d, v) in sizes(plan).items():
        layer, head, plain, plain_head = model("sib+aim", d, v)
        n, (x, classes) = (4, make_features(d, 8, 30)) if plan["tiny"] else (2000, make_features(d, 20, 600))
        e = draw_episodes(classes, 0, range(n), stream="test")
        every = [torch.cat([torch.as_tensor(t[i]).flatten() for t in (e.support, e.query)]) for i in range(n)]
        one = in_turn(partial(plain_episode, plain, plain_head), [(x[r],) for r in every[:16]])
        few = dict(plan, seconds=0.0, repeats=min(plan["repeats"], 3))
        yield compare(
            f"test episode {size}",
            partial(evaluate, layer.eval(), head, x, e),
            one,
            few,
            work=aim_episode(layer, len(x), n, 5, 75),
            items=("episodes", 1),
            release=RELEASE_EPISODE[size],
            per=n,
            size=size,
            episodes=n,
        )


@case("few-shot")
def sampling(plan):
    "Episodes drawn a second."
    classes = make_features(2, 64, 600)[1]
    n = 20 if plan["tiny"] else 2000

    def naive():  # as a loader would: a generator of its own for each episode, a choice without replacement for classes and images
        for i in range(n):
            rng = np.random.default_rng([0, i])
            for c in rng.choice(64, 5, replace=False):
                rng.choice(classes[c], 16, replace=False)

    return [
        compare(
            "sampling 5-way 1-shot",
            lambda: draw_episodes(classes, 0, range(n)),
            naive,
            dict(plan, seconds=0.0),
            items=("episodes", n),
        )
    ]


@case("few-shot")
def paper_run(plan):
    "The paper's budget from measured parts, on two cores, each run in a process of its own so that its memory can be told: 50,000 steps, 50 validations, two tests."
    methods = ("sib+aim",) if plan["tiny"] else ("sib", "sib+linear", "sib+aim")

    def run(method):
        return own_process("benchmarks.paper_run", method, "tiny" if plan["tiny"] else "full", CLOCK[0], threads=CORES)

    with threads(CORES):
        found = {m: steadily(partial(run, m), plan, tries=2) for m in methods}
    aim, seen = found["sib+aim"]
    rows = [value_row(f"paper run {m}", own.pop("minutes"), "minutes", s, **own) for m, (own, s) in found.items()] + [
        value_row("paper run sib+aim, peak memory", aim["memory_gb"], "GB", seen)
    ]
    if plan["tiny"]:
        return rows
    linear, also = rows[1]["value"] / rows[2]["value"], found["sib+linear"][1]
    return rows + [
        value_row(
            "paper run, sib+linear over sib+aim", linear, "x", seen | dict(steady=seen["steady"] and also["steady"])
        )
    ]
