"""Few-shot: one training step, test episodes, a whole paper run."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from aim_nb.aim import AIM, Identity, linear_twin
from aim_nb.core import threads, torch_rng
from aim_nb.engine.evaluate import evaluate
from aim_nb.kernels.episodes import fast_training_step
from aim_nb.sib import SIBHead
from aim_nb.data.tasks import draw_episodes
from aim_nb.engine.train_fewshot import paper_rates

from .authors import PlainAIM, PlainFewshot, PlainLinear, PlainSIB, copy_weights, plain_episode
from .harness import CLOCK, case, compare, own_process, steadily, value_row
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


class Stepper:
    "The project's training steps on all of some episodes that are in memory, one after the other."

    def __init__(self, layer, head, items, n_shot=1):
        rates = paper_rates()
        self.layer = layer.train()
        self.head = head
        self.items = items
        self.n = 5 * n_shot
        self.rates = rates
        self.optimizer = torch.optim.SGD(
            head.parameters(), rates.nu_sib, rates.momentum, weight_decay=rates.decay, nesterov=True, fused=True
        )

    def __call__(self):
        nu_in, nu_out = self.rates.nu_in, self.rates.nu_out
        for z, *ranks in self.items:
            fast_training_step(self.layer, self.head, z, self.n, self.optimizer, nu_in, nu_out, ranks)


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
def aim_work(layer, items, n_shot) -> dict:
    "Multiply-adds and bytes that AIM's share of a training step cannot do without: every row's output once, every update once."
    D, V, rows = layer.d_in, layer.d_out, 5 * n_shot + 75
    distinct = sum(int(layer.attention(z).mask.any(0).sum()) for z, *_ in items) / len(items)
    macs = 2 * rows * D * (layer.K * V + layer.d_k) + 3 * layer.M * layer.d_h * layer.d_k
    moved = 4 * 3 * (distinct * (D * V + layer.d_h * layer.d_k) + D * layer.d_k)  # read; read and written by the update
    return dict(macs=int(macs), bytes=int(moved))


def step_row(method, size, d, v, n_shot, plan, cores=0):
    "A training step; `cores`: those of the plain side, ours keeping to one (0: as many as there are, for both)."
    layer, head, plain, plain_head = model(method, d, v, 12 if plan["tiny"] else 32)
    items = draws(d, n_shot)
    reference = PlainFewshot(plain, plain_head, paper_rates(), n_shot)
    step = Stepper(layer, head, items, n_shot)

    def ours():
        with threads(1 if cores else 0):
            step()

    own = aim_work(layer, items, n_shot) if method == "sib+aim" else None
    with threads(cores):
        return compare(
            f"training step {method} {size} {n_shot}-shot" + (f", {cores} threads" if cores else ""),
            ours,
            in_turn(reference.step, items),
            plan,
            per=len(items),
            release=RELEASE_STEP[size] if own and n_shot == 1 else None,
            work=fewshot_step(layer, 5 * n_shot, 75, own),
            items=("episodes", 1),
            size=size,
            shots=n_shot,
            method=method,
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
    "The same with two cores for the reference; ours keeps to one, as training has it."
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
