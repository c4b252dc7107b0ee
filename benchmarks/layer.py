"""AIM alone, and how its cost grows."""

from __future__ import annotations

from functools import partial

import torch

from aim_nb.aim import AIM
from aim_nb.core import torch_rng
from aim_nb.engine.evaluate import evaluate
from aim_nb.kernels.episodes import episodes
from aim_nb.reference import PlainAIM, copy_weights
from aim_nb.data.tasks import draw_episodes

from .few_shot import Stepper, aim_share, aim_work, draws, in_turn, make_features, model
from .harness import calls_for, case, compare, exponent, floors, median, reached, seconds, steadily, value_row
from .work import aim_pass

EPISODES = 16  # that `draws` gives
VALIDATION = 1000  # steps between two of them in training
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


def batch_one(M, d, v):
    "One fused step of one image."
    layer = AIM(d, v, M=M, l=0, generator=torch_rng(0, "aim", M))
    x, g = make_features(d)[0], torch.randn(1, v, generator=torch_rng(0, "g")) * 1e-4
    run_of_one = episodes(layer, alone=True)

    @torch.no_grad()
    def run(z):
        run_of_one.begin(z[None])
        s = run_of_one[0]
        s.output()
        s.write_(g, 1e-3)

    return in_turn(run, [(x[i : i + 1],) for i in range(0, len(x), 7)])


@case("scaling")
def against_M(plan):
    "A training step, and one image, against the number of mechanisms at K = 8; and the growth that the step cannot do without."
    d, v, Ms = (16, 20, (16, 32)) if plan["tiny"] else (256, 400, (32, 64, 128, 256))
    items, layers = draws(d, 1), [model("sib+aim", d, v, M)[:2] for M in Ms]
    step = [Stepper(*m, items) for m in layers]
    one = [batch_one(M, d, v) for M in Ms]
    times, seen = each(step, plan, len(items))
    times = [t + settling(s) / VALIDATION for t, s in zip(times, step)]
    return [
        flat("training step 256->400 against M", Ms, times, seen),
        floor_growth([m for m, _ in layers], items, times[0], seen, plan),
        flat("one image 256->400 against M", Ms, *steadily(lambda: together(one, plan), plan)),
    ]


def settling(step) -> float:
    "Milliseconds to bring the weights out of the frame in which training keeps h and W_Q between validations."

    def once():
        step()
        return seconds(step.run.write_)

    return 1e3 * median([once() for _ in range(3)])


def each(fns, plan, n=1):
    "Times of functions that take long, over `n`, in turn, and what they were measured with."
    times, seen = steadily(lambda: together(fns, dict(plan, seconds=0.0)), plan)
    return [t / n for t in times], seen


def floor_growth(layers, items, step_ms, seen, plan):
    "How much the step must grow: more distinct mechanisms are more bytes. AIM at its floor, the rest of the step (the head) as it is with the fewest mechanisms."
    works, distinct = zip(*(aim_work(layer, items, 1) for layer in layers))
    head, ms = (
        max(0.0, step_ms - alone(aim_share(layers[0], items, 5), plan) / len(items)),
        [1e3 * max(floors(w, seen)) for w in works],
    )
    return value_row(
        "training step 256->400 against M, floor of growth",
        (ms[-1] + head) / (ms[0] + head),
        "x",
        seen,
        floor_ms=ms,
        head_ms=head,
        distinct=distinct,
        moved_mb=[w["bytes"] / 1e6 for w in works],
        mmacs=[w["macs"] / 1e6 for w in works],
    )


def together(fns, plan):
    "Times of several functions, taken in turn."
    n = [calls_for(f, plan["seconds"]) for f in fns]
    times = [[seconds(f, k) for f, k in zip(fns, n)] for _ in range(plan["repeats"])]
    return [1e3 * median(t) for t in zip(*times)]


@case("scaling")
def against_sizes(plan):
    "AIM's share of a training step against K and D; an evaluation against its number of episodes."
    tiny, rows = plan["tiny"], []
    Ks, Ds, Es = ((2, 4), (16, 32), (4, 8)) if tiny else ((2, 4, 8, 16), (128, 256, 512, 1024), (250, 500, 1000, 2000))
    d, v = (16, 20) if tiny else (256, 400)
    shares = []
    for K in Ks:
        layer = AIM(d, v, K=K, l=0, generator=torch_rng(0, "aim"))
        shares.append(aim_share(layer, [(z, None, None) for z, *_ in draws(d, 1)], 5))
    rows.append(flat(f"AIM's share {d}->{v} against K", Ks, *each(shares, plan, EPISODES)))
    shares = [aim_share(AIM(D, v, generator=torch_rng(0, "aim")).train(), draws(D, 1), 5) for D in Ds]
    rows.append(flat(f"AIM's share D->{v} against D", Ds, *each(shares, plan, EPISODES)))
    layer, head, *_ = model("sib+aim", d, v)
    x, classes = make_features(d, 20, 30 if tiny else 600)
    sets = [draw_episodes(classes, 0, range(n), stream="test") for n in Es]
    rows.append(
        flat(
            f"evaluation {d}->{v} against episodes",
            Es,
            *each([lambda e=e: evaluate(layer.eval(), head, x, e) for e in sets], plan),
        )
    )
    return rows
