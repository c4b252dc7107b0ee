"""Where the time goes."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from aim_nb.engine.train_fewshot import paper_rates

from .authors import PlainFewshot
from .continual import metatest_pair, outer_pair
from .few_shot import Stepper, draws, in_turn, model, sizes
from .harness import case, steadily


def operators(name, steps, n, plan):
    "One row: the operators of a call that does `n` steps, by their own time."

    def run():
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            steps()
        return sorted(prof.key_averages(), key=lambda e: -e.self_cpu_time_total)

    steps()
    found, seen = steadily(run, plan, tries=1)
    total = sum(e.self_cpu_time_total for e in found)
    return dict(
        case=f"operators of {name}",
        calls=sum(e.count for e in found) / n,
        ops=[dict(op=e.key, share=e.self_cpu_time_total / total, calls=e.count / n) for e in found[:10]],
        **seen,
    )


def training_pair(d, v):
    "Steps of both sides on 16 episodes, one after the other."
    layer, head, plain, plain_head = model("sib+aim", d, v)
    items = draws(d, 1)
    one = in_turn(PlainFewshot(plain, plain_head, paper_rates()).step, items)
    return Stepper(layer, head, items), lambda: [one() for _ in items]


def several(step, n):
    return lambda: [step() for _ in range(n)]


@case("few-shot")
def where_time_goes(plan):
    "The operators of a training step, of an outer step and of a meta-test step by their own time, ours and the plain way's."
    (size, dv), tiny = next(iter(sizes(plan).items())), plan["tiny"]

    def pairs():
        yield f"a training step {size}", 16, training_pair(*dv)
        yield "an outer step oml+aim omniglot", 1, outer_pair("oml", "omniglot", "raw", True, tiny)[-2:]
        yield "a meta-test step oml+aim omniglot", 10, [several(step, 10) for step in metatest_pair(tiny)[:2]]

    for name, n, pair in pairs():
        for side, steps in zip(("ours", "reference"), pair):
            yield operators(f"{name}, {side}", steps, n, plan)
