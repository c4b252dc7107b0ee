"""The benchmarks: the stored results are whole, and every case runs at a tiny size. Times are never tested here."""
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import continual, few_shot, harness, images, layer   # noqa: E402, F401
from benchmarks.check import misses                                   # noqa: E402
from benchmarks.table import line                                     # noqa: E402

KINDS = ({"ours_ms", "reference_ms", "ratio", "gflops", "steady"}, {"value", "unit"}, {"at", "ms", "exponent", "growth"}, {"ops", "calls"})


def whole(row): return any(kind <= set(row) for kind in KINDS) and line(row)


@pytest.mark.skipif(not harness.RESULTS.exists(), reason="no stored results yet: make bench")
def test_stored_results_are_whole():
    stored = json.loads(harness.RESULTS.read_text())
    assert {"gflops", "gbs", "threads", "cpu", "torch", "clock"} <= set(stored["machine"])
    assert all(whole(r) and r["of"] in harness.CASES for r in stored["rows"])
    assert {r["of"] for r in stored["rows"]} == set(harness.CASES)


@pytest.mark.parametrize("name", [n for n in harness.CASES if n not in ("paper_run", "imports")])
def test_case_runs(name):
    for row in harness.CASES[name][1](harness.PLANS["tiny"]): assert whole(row)


def test_misses_are_named():
    row = dict(case="x", ours_ms=dict(median=1.), reference_ms=dict(median=4.), ratio=dict(median=4., low=3., high=5.), steady=True, bar=6, reference_of_release=1.)
    assert misses([row]) == ["MISS x: 4.0x, bar 6x"]
    assert misses([dict(row, bar=4)]) == []
    assert "does not count" in misses([dict(row, bar=4, reference_of_release=1.31)])[0]
    assert misses([dict(case="y", value=.4, unit="s", bar=.3, at_most=True)]) and not misses([dict(case="y", value=.4, unit="s", bar=.3, at_most=False)])
    assert misses([dict(case="z", at=[1, 2], ms=[1, 2], exponent=1., growth=2., bar=1.5)])
