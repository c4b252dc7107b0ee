"""The stopwatch: machine rates, alternating repeats, ratios with their spread."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results.json"
RELEASE_GFLOPS = 166.0  # the machine on which the release was measured (quiet, 2 cores, AVX2)
CASES = {}  # name -> (group, function)
PLANS = {  # how much work a run puts in
    "full": dict(name="full", seconds=0.08, repeats=9, tiny=False),
    "quick": dict(name="quick", seconds=0.03, repeats=5, tiny=False),
    "tiny": dict(name="tiny", seconds=0.0, repeats=2, tiny=True),  # tests: the cases run, their times mean nothing
}


def case(group):
    "Register a function `plan -> list of rows` as the cases of its name."

    def register(fn):
        CASES[fn.__name__] = (group, fn)
        return fn

    return register


CLOCKS = dict(
    wall=time.perf_counter, cpu=time.process_time
)  # cpu: for a machine that others use, too; all threads are counted
CLOCK = ["wall"]


def seconds(fn, n=1, clock="") -> float:
    "Mean time of one call out of `n`; `clock`: another than the run's."
    now = CLOCKS[clock or CLOCK[0]]
    start = now()
    for _ in range(n):
        fn()
    return (now() - start) / n


def median(xs):
    return sorted(xs)[len(xs) // 2] if len(xs) % 2 else sum(sorted(xs)[len(xs) // 2 - 1 : len(xs) // 2 + 1]) / 2


def spread(xs) -> dict:
    "Median and extremes."
    return dict(median=median(xs), low=min(xs), high=max(xs))


def matmul_rate(n=1024, repeats=7) -> float:
    "GFLOP/s of a float32 matrix product."
    a, b, out = torch.ones(n, n), torch.ones(n, n), torch.empty(n, n)
    torch.mm(a, b, out=out)
    return 2 * n**3 / 1e9 / median([seconds(lambda: torch.mm(a, b, out=out)) for _ in range(repeats)])


def bandwidth(mb=256, repeats=5) -> float:
    "GB/s, read and written, of an in-place pass over an array that no cache holds, with the threads that torch has at the moment."
    x = torch.zeros(mb * 2**18)
    x.add_(1.0)
    return 2 * x.numel() * 4 / 1e9 / median([seconds(lambda: x.add_(1.0)) for _ in range(repeats)])


def machine() -> dict:
    "This machine in numbers."
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        cpu = next(
            (
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            cpu,
        )
    return dict(
        cpu=cpu,
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        gflops=matmul_rate(),
        gbs=bandwidth(),
        clock=CLOCK[0],
        wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
        device="cpu (a GPU would run the same code; none was here to be measured)",
    )


def calls_for(fn, target) -> int:
    "How many calls take about `target` seconds."
    fn()
    return max(1, math.ceil(target / max(seconds(fn), 1e-7))) if target else 1


def alternate(ours, reference, plan) -> tuple:
    "Times of both, taken in turn."
    n = [calls_for(f, plan["seconds"]) for f in (ours, reference)]
    pairs = [(seconds(ours, n[0]), seconds(reference, n[1])) for _ in range(plan["repeats"])]
    return [p[0] for p in pairs], [p[1] for p in pairs]


BEST = {}  # threads -> the best rates that this process has seen


def look(tiny) -> tuple:
    "The rates of products and of memory now."
    now, n = (matmul_rate(256), bandwidth(1, 1)) if tiny else (matmul_rate(), bandwidth()), torch.get_num_threads()
    BEST[n] = tuple(map(max, now, BEST.get(n, now)))
    return now


def steadily(measure, plan, tries=3) -> tuple:
    "What `measure` gives between two looks at the machine, again (at most `tries` times) if it was slower at one of them than it can be; and what it was measured with."
    for _ in range(1 if plan["tiny"] else tries):
        before, found, after = look(plan["tiny"]), measure(), look(plan["tiny"])
        gflops, gbs = BEST[n := torch.get_num_threads()]
        if steady := all(a >= 0.9 * gflops and b >= 0.8 * gbs for a, b in (before, after)):
            break
    gflops, gbs = ((x + y) / 2 for x, y in zip(before, after))
    return found, dict(gflops=gflops, gbs=gbs, steady=steady, threads=n, clock=CLOCK[0], plan=plan["name"])


def compare(name, ours, reference, plan, tries=3, per=1, **more) -> dict:
    "One row: both timed in turn. A call of `ours` does the work of `per` calls of the reference."
    (a, b), seen = steadily(lambda: alternate(ours, reference, plan), plan, tries)
    return ratio_row(name, [t / per for t in a], b, seen, **more)


def ratio_row(name, a, b, seen, work=None, items=(), release=None, **more) -> dict:
    "What is stored of a comparison; `work`: its `macs` and `bytes`; `items`: what is done, and how many of them; `release`: its own time in seconds on a machine of 166 GFLOP/s."
    ours, ref = median(a), median(b)
    row = dict(
        case=name,
        ours_ms=spread([1e3 * t for t in a]),
        reference_ms=spread([1e3 * t for t in b]),
        ratio=dict(spread([y / x for x, y in zip(a, b)]), median=ref / ours),
        **seen,
        **more,
    )
    if work:
        row |= reached(work, ours, seen)
    if items:
        row |= dict(items=items[0], per_second=items[1] / ours)
    if release:
        row |= dict(release_ms=1e3 * release, reference_of_release=ref * seen["gflops"] / RELEASE_GFLOPS / release)
    return row


def floors(work, seen) -> tuple:
    "Seconds that multiply-adds and bytes take at the machine's own rates."
    return 2 * work["macs"] / seen["gflops"] / 1e9, work["bytes"] / seen["gbs"] / 1e9


def reached(work, seconds, seen) -> dict:
    "Some work, and the share of the machine's rates at which it was done."
    return work | dict(zip(("of_matmul", "of_bandwidth"), (t / seconds for t in floors(work, seen))))


def value_row(name, value, unit, seen, **more) -> dict:
    "A case that is not a comparison: a number with a unit."
    return dict(case=name, value=value, unit=unit, **seen, **more)


def own_process(module, *args, threads=0) -> dict:
    "What `python -m module args` prints as JSON in its last line; `threads` 0: as many as here."
    env = dict(os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {}))
    out = subprocess.run(
        [sys.executable, "-m", module, *args], capture_output=True, text=True, cwd=Path(__file__).parent.parent, env=env
    )
    if out.returncode:
        raise RuntimeError(out.stderr)
    return json.loads(out.stdout.splitlines()[-1])


def peak_gb() -> float:
    "The most memory that this process has held. (Linux: what `getrusage` tells may be that of the process which started this one.)"
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    kb = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if kb is None else kb) / 2**20


def exponent(xs, ys) -> float:
    "Slope of log y over log x."
    x, y = ([math.log(v) for v in vs] for vs in (xs, ys))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


def write(rows, path=RESULTS, **head):
    path.write_text(json.dumps(dict(head, rows=rows), indent=1) + "\n")
