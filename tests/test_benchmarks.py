"""The benchmarks: the stored results are whole, and every case runs at a tiny size. Times are never tested here."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from aim_nb.aim import AIM  # noqa: E402
from aim_nb.oml import Tail  # noqa: E402
from aim_nb.engine.train_fewshot import paper_rates  # noqa: E402
from aim_nb.sib import adapted_logits, training_step  # noqa: E402
from benchmarks import authors, continual, few_shot, harness, images, layer, profiles, work  # noqa: E402, F401
from benchmarks.__main__ import main, merge, run  # noqa: E402
from benchmarks.authors import PlainSIB  # noqa: E402
from benchmarks.check import BARS, misses  # noqa: E402
from benchmarks.kept import inside  # noqa: E402
from benchmarks.table import line  # noqa: E402

SEEN = {"gflops", "gbs", "steady", "threads", "clock", "plan"}  # what a row was measured with
KINDS = ({"ours_ms", "reference_ms", "ratio"}, {"value", "unit"}, {"at", "ms", "exponent", "growth"}, {"ops", "calls"})


def whole(row):
    return any(kind <= set(row) for kind in KINDS) and line(row)


@pytest.mark.skipif(not harness.RESULTS.exists(), reason="no stored results yet: make bench")
def test_stored_results_are_whole():
    stored = json.loads(harness.RESULTS.read_text())
    assert {"gflops", "gbs", "threads", "cpu", "torch", "clock"} <= set(stored["machine"])
    assert all(whole(r) and r["of"] in harness.CASES for r in stored["rows"])
    missing = [
        name
        for name in harness.CASES
        if not (rows := [r for r in stored["rows"] if r["of"] == name]) or any(SEEN - set(r) for r in rows)
    ]
    if missing:
        pytest.skip("never measured, or before rows said with what: python -m benchmarks " + " ".join(missing))


@pytest.mark.parametrize("name", [n for n in harness.CASES if n not in ("paper_run", "imports")])
def test_case_runs(name):
    for row in harness.CASES[name][1](harness.PLANS["tiny"]):
        assert whole(row) and SEEN <= set(row)


def test_a_partial_run_leaves_the_other_rows_as_they_were_measured():
    old = [
        dict(case="a", of="sampling", plan="full", threads=2),
        dict(case="gone", of="inner_loop", plan="full", threads=2),
    ]
    kept, new = merge(old, run(["inner_loop"], "tiny", lambda rows: None, "this machine"))
    assert kept == old[0] and (new["of"], new["plan"], new["threads"], new["measured_on"]) == (
        "inner_loop",
        "tiny",
        torch.get_num_threads(),
        "this machine",
    )


def just_met():
    "Rows that stand at every bar."
    rows = {}
    for (case, what), (_, bar) in BARS.items():
        rows.setdefault(case, dict(case=case, steady=True, plan="full"))[what] = (
            dict(median=bar) if what == "ratio" else bar
        )
    return list(rows.values())


def test_a_row_that_was_never_stored_is_a_miss():
    rows = just_met()
    assert misses(rows) == []
    for r in rows:
        assert misses([x for x in rows if x is not r]) == [f"MISS {r['case']}: never measured"]


@pytest.mark.parametrize("case, what", BARS)
def test_misses_are_named(case, what):
    rows, (way, bar) = just_met(), BARS[case, what]
    row, worse = next(r for r in rows if r["case"] == case), bar * (0.9 if way == ">=" else 1.1)
    row[what] = dict(median=worse) if what == "ratio" else worse
    (found,) = misses(rows)
    assert found.startswith(f"MISS {case}: ") and found.endswith(f", bar {way} {bar}")
    for key, value, words in (
        ("steady", False, "the machine was not steady: run it again"),
        ("plan", "quick", "measured with plan quick: run it in full"),
    ):
        row[key] = value
        assert misses(rows) == [f"MISS {case}: {words}"]


def multiplied(fn, *args):
    with FlopCounterMode(display=False) as counter:
        fn(*args)
    return counter.get_total_flops() // 2


def test_work_is_what_the_plain_equations_multiply():
    assert 3 * multiplied(PlainSIB(6), torch.randn(5, 6), torch.randn(15, 6)) == work.sib(5, 15, 6)["macs"]
    M, d_h, d_k = 4, 3, 2
    tail = Tail(6, 5, lambda d: AIM(d, d, M, K=M, l=0, d_h=d_h, d_k=d_k, gate="raw"), d_reduce=8)  # all are in use
    biases = 8 + 5
    dense = tail.double()  # the layer's dense form multiplies by all mechanisms
    assert multiplied(dense, torch.ones(1, 6).double()) == work.tail_weights(tail) - biases + M * d_k


@pytest.mark.parametrize("method", ["sib", "sib+linear", "sib+aim"])
def test_the_authors_way_computes_what_the_definition_does(method):
    "Two training steps and a test episode, in double precision; an inner rate that is off by one percent is noticed."
    gaps = []
    for rates in (paper_rates(), paper_rates()._replace(nu_in=1.01 * paper_rates().nu_in)):
        own, head, plain, plain_head = (m if m is None else m.double() for m in few_shot.model(method, 16, 20))
        optimizer = torch.optim.SGD(
            head.parameters(), rates.nu_sib, rates.momentum, weight_decay=rates.decay, nesterov=True
        )
        reference = authors.PlainFewshot(plain, plain_head, rates)
        for z, *ranks in few_shot.draws(16, 1, 2):
            given = paper_rates()
            training_step(own, head, z.double(), 5, optimizer, given.nu_in, given.nu_out, ranks)
            reference.step(z.double(), *ranks)
        z = few_shot.draws(16, 1, 1)[0][0].double()
        ours = [*own.parameters(), *head.parameters(), adapted_logits(own.eval(), head, z, 5)]
        theirs = [*(plain.parameters() if plain else ()), *plain_head.parameters()]
        theirs.append(authors.plain_episode(plain, plain_head, z, lr=rates.nu_in))
        gaps.append(max((a - b).abs().max().item() for a, b in zip(ours, theirs)))
    assert gaps[0] < 1e-10 and (gaps[1] > 1e-9 or method == "sib"), gaps


def test_the_convolutions_are_timed_after_the_tail():
    net, _, shape = continual.nets("oml", "omniglot", "raw", True, tiny=True)
    step, order = continual.own_step("oml", net, *continual.meta_batch(shape, tiny=True)), []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name.split(".")[0]))
    assert inside(net.rln, step) > 0 and order == sorted(order, reverse=True)  # tail, tail, ..., rln, rln


def test_an_unknown_case_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["benchmarks", "no_such_case", "--out", str(tmp_path / "r.json")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert (
        stop.value.code == 2
        and "no case is called 'no_such_case'" in capsys.readouterr().err
        and not (tmp_path / "r.json").exists()
    )


@pytest.mark.parametrize(
    "rates, steady",
    [
        ([(90, 40), (89, 36)], True),
        ([(90, 40), (80, 40)], False),
        ([(60, 40), (90, 40)], False),
        ([(90, 40), (90, 30)], False),
    ],
)
def test_a_row_is_steady_while_the_machine_is_at_its_best(monkeypatch, rates, steady):
    gflops, gbs = (iter(r) for r in zip(*rates))
    monkeypatch.setattr(harness, "BEST", {})
    monkeypatch.setattr(harness, "matmul_rate", lambda *a: next(gflops))
    monkeypatch.setattr(harness, "bandwidth", lambda *a: next(gbs))
    found, seen = harness.steadily(lambda: 7, dict(harness.PLANS["tiny"]))
    assert found == 7 and seen["steady"] is steady
