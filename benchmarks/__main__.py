"""python -m benchmarks [NAMES ...] [--plan full|quick|tiny] [--check]: run the cases, print the table, write results.json."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch: idle threads sleep, so that other processes do not slow the timed ones down

from . import continual, few_shot, harness, images, layer, profiles  # noqa: E402, F401
from .check import misses  # noqa: E402
from .table import line  # noqa: E402


def run(names, plan, keep, cpu) -> list:
    "Rows of the cases whose names were asked for (all if none was); `keep` is called with all rows so far after each row."
    rows = []
    for name, (group, fn) in harness.CASES.items():
        if names and not any(n in name for n in names):
            continue
        print(f"\n{group}: {name.replace('_', ' ')}. {fn.__doc__}", flush=True)
        for row in fn(harness.PLANS[plan]):
            rows.append(dict(row, group=group, of=name, measured_on=cpu))
            print(line(rows[-1]), flush=True)
            keep(rows)
    return rows


def merge(old, new) -> list:
    "The new rows in the place of all that their cases gave before; the rest stays as it was measured."
    names = {r["of"] for r in new}
    return [r for r in old if r["of"] not in names] + new


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of case names: " + ", ".join(harness.CASES))
    parser.add_argument("--plan", default="full", choices=harness.PLANS)
    parser.add_argument(
        "--clock",
        default="wall",
        choices=harness.CLOCKS,
        help="cpu: processor time, for a machine that is not quiet (use one thread)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run nothing: compare results.json with the bars; exit 1 with each miss named",
    )
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    a = parser.parse_args()
    if unknown := [n for n in a.names if not any(n in name for name in harness.CASES)]:
        parser.error(f"no case is called {unknown[0]!r}; there are {', '.join(harness.CASES)}.")
    harness.CLOCK[0] = a.clock
    if not a.check:
        here = harness.machine()
        print(
            f"{here['cpu']}, {here['threads']} threads: {here['gflops']:.0f} GFLOP/s, {here['gbs']:.0f} GB/s, torch {here['torch']}"
        )
        old, start = json.loads(a.out.read_text())["rows"] if a.out.exists() and a.names else [], time.time()
        run(
            a.names,
            a.plan,
            lambda rows: harness.write(merge(old, rows), a.out, machine=here, seconds=round(time.time() - start)),
            here["cpu"],
        )
    if not a.out.exists():
        sys.exit(f"{a.out} is not there yet: make bench first.")
    stored = json.loads(a.out.read_text())
    found, kinds = (
        misses(stored["rows"]),
        Counter(
            "{} thread(s), {} clock, plan {}".format(*map(r.get, ("threads", "clock", "plan"))) for r in stored["rows"]
        ),
    )
    print(
        "\n" + "; ".join(f"{n} rows with {kind}" for kind, n in kinds.items()),
        *(found or ["every bar is met"]),
        sep="\n",
    )
    if a.check:
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
