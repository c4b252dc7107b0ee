"""AIM alone, and how its cost grows."""

from __future__ import annotations

from functools import partial

import torch

from aim_nb.aim import AIM
from aim_nb.core import torch_rng
from aim_nb.engine.evaluate import evaluate
from aim_nb.data.tasks import draw_episodes
from aim_nb.sib import SIBHead

from .authors import PlainAIM, copy_weights
from .few_shot import Stepper, draws, make_features, model
from .harness import calls_for, case, compare, exponent, median, reached, seconds, steadily, value_row
from .work import aim_pass

EPISODES = 16  # that `draws` gives
LIMIT = 2**26  # numbers that the reference may hold of its values (M, 2B, V); beyond it only our own side is timed


def passes(net, z, backward):
    "Output, or output and all gradients through autograd."
    params = list(net.parameters())

    def run():
        out = net(z)
        if backward:
            torch.autograd.grad(out.sum(), params)

    return run


def alone(fn, plan):
    return 1e3 * median([seconds(fn, calls_for(fn, plan["seconds"])) for _ in range(plan["repeats"])])


@case("AIM")
def aim_alone(plan):
    "Forward, and forward with backward, for batches of 1 to 1024 and 8 to 256 mechanisms."
    d, v, Bs, Ms = (
        (16, 20, (1, 8), (8, 16)) if plan["tiny"] else (256, 400, (1, 4, 16, 64, 256, 1024), (8, 32, 64, 256))
    )
    x = make_features(d, 16, 64)[0]
    plan = dict(plan, repeats=min(plan["repeats"], 5), seconds=plan["seconds"] / 2)
    for M in Ms:
        aim = AIM(d, v, M=M, l=0, generator=torch_rng(0, "aim", M)).eval()
        plain = copy_weights(aim, PlainAIM(d, v, M, l=0))
        for B in Bs:
            z = x[torch.randperm(len(x), generator=torch_rng(1, B))[:B]]
            for back in (False, True):
                name, where, ours = (
                    f"AIM {'forward+backward' if back else 'forward'} B={B} M={M}",
                    dict(B=B, M=M, backward=back),
                    passes(aim, z, back),
                )
                if M * 2 * B * v <= LIMIT:
                    yield compare(
                        name,
                        ours,
                        passes(plain, z, back),
                        plan,
                        tries=1,
                        work=aim_pass(aim, z, back),
                        items=("rows", B),
                        **where,
                    )
                else:
                    ms, seen = steadily(partial(alone, ours, plan), plan, tries=1)
                    yield value_row(name, ms, "ms", seen, **reached(aim_pass(aim, z, back), ms / 1e3, seen), **where)


def flat(name, Ms, times, seen):
    "A scaling row: times against a size, and the fitted exponent."
    return dict(case=name, at=list(Ms), ms=times, exponent=exponent(Ms, times), growth=times[-1] / times[0], **seen)


@case("scaling")
def against_M(plan):
    "A training step against the number of mechanisms at K = 8."
    d, v, Ms = (16, 20, (16, 32)) if plan["tiny"] else (256, 400, (32, 64, 128, 256))
    items = draws(d, 1)
    steps = [Stepper(*model("sib+aim", d, v, M)[:2], items) for M in Ms]
    return [flat("training step 256->400 against M", Ms, *each(steps, plan, len(items)))]


def each(fns, plan, n=1):
    "Times of functions that take long, over `n`, in turn, and what they were measured with."
    times, seen = steadily(lambda: together(fns, dict(plan, seconds=0.0)), plan)
    return [t / n for t in times], seen


def together(fns, plan):
    "Times of several functions, taken in turn."
    n = [calls_for(f, plan["seconds"]) for f in fns]
    times = [[seconds(f, k) for f, k in zip(fns, n)] for _ in range(plan["repeats"])]
    return [1e3 * median(t) for t in zip(*times)]


@case("scaling")
def against_sizes(plan):
    "A training step against K and D; an evaluation against its number of episodes."
    tiny, rows = plan["tiny"], []
    Ks, Ds, Es = ((2, 4), (16, 32), (4, 8)) if tiny else ((2, 4, 8, 16), (128, 256, 512, 1024), (250, 500, 1000, 2000))
    d, v = (16, 20) if tiny else (256, 400)
    for name, sizes in ((f"training step {d}->{v} against K", Ks), (f"training step D->{v} against D", Ds)):
        steps = []
        for n in sizes:
            at = dict(d=d, K=n, l=0) if sizes is Ks else dict(d=n)
            layer = AIM(at.pop("d"), v, **at, generator=torch_rng(0, "aim"))
            items = [(z, *((None, None) if sizes is Ks else ranks)) for z, *ranks in draws(layer.d_in, 1)]
            steps.append(Stepper(layer, SIBHead(v, generator=torch_rng(0, "head")), items))
        rows.append(flat(name, sizes, *each(steps, plan, EPISODES)))
    layer, head, *_ = model("sib+aim", d, v)
    x, classes = make_features(d, 20, 30 if tiny else 600)
    sets = [draw_episodes(classes, 0, range(n), stream="test") for n in Es]
    evaluations = [partial(evaluate, layer.eval(), head, x, e) for e in sets]
    rows.append(flat(f"evaluation {d}->{v} against episodes", Es, *each(evaluations, plan)))
    return rows
