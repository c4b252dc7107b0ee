"""The report: what a record becomes in the table, verdicts, coverage and claims by hand-made cases, and every text and figure from the kept records."""

import io
import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbclient import NotebookClient

from aim_nb.config import SWITCHES, Protocol, budget, preset
from aim_nb.engine import activation
from aim_nb.engine.evaluate import pack_hits
from aim_nb.engine.records import new_record, save_record
from aim_nb.engine.train_continual import nearest_preset, relevant
from aim_nb.paper import bands, claims, errata, paper_cells, paper_table, paper_value
from aim_nb.report import claims as report_claims
from aim_nb.report import compare, figures, schema, tables
from aim_nb.report.compare import Verdict

ROOT = Path(__file__).resolve().parent.parent


def fewshot(
    method="sib", shift=0.0, name="paper", seed=0, dataset="cifar-fs", n_shot=1, ci95=0.4, sizes=(8, 2), **protocol
):
    "A made-up record, `shift` points from the paper's figure of that method; `sizes`: K and l."
    where = dict(dataset=dataset, backbone="conv4", n_shot=n_shot)
    known = paper_table("few-shot", method=method, **where)
    accuracy = (known[0]["accuracy"] if known else 60.0) + shift
    aim = dict(M=32, K=sizes[0], l=sizes[1]) if method == "sib+aim" else {}
    parameters = dict(backbone="conv4", n_shot=n_shot, **aim)
    metrics = dict(accuracy=accuracy, ci95=ci95)
    return new_record("fewshot", dataset, method, seed, budget(name), Protocol(**protocol), parameters, "0", metrics)


def continual(
    method="oml", shift=0.0, name="paper", dataset="omniglot", base="ours", seed=0, n_runs=2, switches=None, **effort
):
    "A made-up continual record, `shift` points from the paper's figures; `switches` of the preset `base` are changed."
    protocol = relevant(method, preset(base, dataset, **(switches or {})))
    nearest, changed = nearest_preset(dataset, method, protocol)
    rows = paper_table("continualz", dataset=dataset, method=method)
    test = [[row["accuracy"] + shift + off for row in rows] for off in np.linspace(-0.2, 0.2, n_runs)]
    train = [[min(100.0, accuracy + 2) for accuracy in run] for run in test]
    metrics = dict(n_classes=[row["n_classes"] for row in rows], test=test, train=train, accuracy=50.0, ci95=1.0)
    plan = replace(budget(name, "continual"), runs=n_runs, **effort)
    aim = dict(M=64, K=10, l=2) if "aim" in method else {}
    return new_record(
        "continual", dataset, method, seed, plan, protocol, aim, "0", metrics, preset=nearest, changed=changed
    )


def use(dataset="cifar-fs", method="sib+aim", n_shot=1, last=None, name="paper"):
    "A made-up activation record that ends with the class masks `last`."
    is_fewshot = "sib" in method
    run = (
        fewshot(method, n_shot=n_shot, dataset=dataset, name=name)
        if is_fewshot
        else continual(method, dataset=dataset, name=name)
    )
    first = np.full((8, 32), 0.25)
    last = np.eye(8, 32) if last is None else last
    log = dict(step=[0, 1, 2], mask=np.stack([first, first, last]), score=np.stack([first, first, last]))
    more = dict(test=activation.pack(last), test_classes=list("abcdefgh"), attention_gap=0.2, attention_gap_start=0.1)
    return activation.activation_record(run, log, list("abcdefgh"), "adapted" if is_fewshot else "slow", **more)


def with_hits(record, hits):
    "The record with the number of right queries of each of its test episodes."
    metrics = dict(
        accuracy=float(np.mean(hits)) / 75 * 100, ci95=1.96 * float(np.std(hits, ddof=1)) / 75 * 100 / len(hits) ** 0.5
    )
    metrics |= dict(hits=pack_hits(np.array(hits), 75), episodes=len(hits))
    parameters = record["parameters"] | dict(n_way=5, n_query=15)
    return new_record(
        "fewshot", "cifar-fs", record["method"], record["seed"], budget("paper"), Protocol(), parameters, "0", metrics
    )


def main(records, table="few-shot"):
    return compare.main_rows(compare.comparison(table, schema.records_table(records)))


def totals(records):
    "Cells run at the paper's length, of these within or above, shorter, and not run."
    row = compare.coverage(schema.records_table(records)).loc["all"]
    return row.run, row.within_or_above, row.shorter, row.not_run


def decided(id, *records):
    (result,) = report_claims.decide(list(records), [id])
    return result


# the table


def test_a_row_for_each_measured_cell():
    table = schema.records_table([fewshot(), continual(), use()])
    assert table.groupby("task").size().to_dict() == {"fewshot": 1, "continual": 9, "activation": 1}
    row = table[table.n_classes == 600].iloc[0]
    assert (
        row.accuracy == pytest.approx(44.56)
        and row.train_accuracy == pytest.approx(46.56)
        and row.gap == pytest.approx(2.0)
    )
    assert row.interval == pytest.approx(1.96 * np.std([-0.2, 0.2], ddof=1) / 2**0.5)


def test_presets_and_changed_switches_are_told_apart():
    records = [
        continual("oml+aim"),
        continual("oml+aim", base="release"),
        continual("oml+aim", switches=dict(mask="fixed", norm="affine")),
    ]
    table = schema.records_table(records).drop_duplicates("key")
    assert list(table.preset) == ["ours", "release", "ours"]
    assert list(table.aim_switches) == [(), (), (("mask", "fixed"),)]
    assert list(table.switches) == [(), (), (("norm", "affine"),)]
    assert list(table.rate_rule) == ["validation", "test", "validation"]
    assert [schema.switches_text(row) for _, row in table.iterrows()] == ["", "release", "mask=fixed, norm=affine"]


def test_no_gap_where_the_test_images_are_those_learnt_from():
    assert schema.records_table([continual(base="release")]).gap.isna().all()
    assert schema.records_table([continual(base="release", dataset="cifar100")]).gap.notna().all()


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r["metrics"].pop("accuracy"),
        lambda r: r["metrics"].update(ci95="wide"),
        lambda r: r["budget"].pop("steps"),
        lambda r: r["protocol"].update(gates="raw"),
        lambda r: r.update(method="<script>"),
        lambda r: r.update(protocol=None),
        lambda r: r["parameters"].pop("n_shot") and r.update(task="continual"),
    ],
)
def test_a_record_that_cannot_be_tabulated_is_named_and_left_out(damage):
    bad, good = json.loads(json.dumps(fewshot("sib+aim"))), fewshot()
    damage(bad)
    with pytest.warns(UserWarning, match="left out: record .*" + bad["key"]):
        assert schema.good_records([bad, good]) == [good]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tables.report_text([bad, good]) == tables.report_text([good])
        assert figures.all_figures([bad, good], only="benchmark").keys() == set()


def test_the_papers_cells_are_all_there_and_nothing_of_the_literature():
    theirs = schema.paper_frame()
    assert len(theirs) == len(paper_cells()) == 319 and set(theirs.method) < set(schema.METHODS)
    assert theirs.accuracy.sum() == pytest.approx(sum(cell["accuracy"] for cell in paper_cells()))


def test_results_csv_holds_ours_and_the_papers_and_is_up_to_date():
    again = pd.read_csv(io.StringIO(schema.results_csv([fewshot(), continual()])), keep_default_na=False)
    assert again.groupby("source").size().to_dict() == {"ours": 10, "paper": 319}
    assert (ROOT / "results/results.csv").read_text() == schema.results_csv(), "run `make figures`"


# verdicts


@pytest.mark.parametrize(
    "shift, name, dataset, word",
    [
        (0.5, "paper", "cifar-fs", Verdict.REPRODUCED),
        (-0.5, "paper-onecycle", "cifar-fs", Verdict.REPRODUCED),
        (1.5, "paper", "cifar-fs", Verdict.ABOVE),
        (-1.5, "paper", "cifar-fs", Verdict.BELOW),
        (0.0, "quick", "cifar-fs", Verdict.SHORTER),
        (0.0, "paper@4000", "cifar-fs", Verdict.SHORTER),
        (0.0, "paper", "glyphs", Verdict.OTHER_DATA),
    ],
)
def test_verdicts(shift, name, dataset, word):
    rows = main([fewshot(shift=shift, name=name, dataset=dataset)])
    assert list(rows[rows.ours.notna()].verdict) == [word]


def test_the_spread_of_seeds_widens_a_verdict_and_is_pooled_for_single_seeds():
    apart = [fewshot(shift=shift, seed=seed) for seed, shift in enumerate((0.0, 2.0, 4.0))]
    row = main(apart).query("ours.notna()").iloc[0]
    assert (row.seeds, row.sd, row.verdict) == (3, pytest.approx(2.0), Verdict.REPRODUCED)
    alone = fewshot("sib+linear", 3.0)
    assert main([alone]).query("ours.notna()").verdict.item() == Verdict.ABOVE
    assert main([alone, *apart]).query("method == 'sib+linear' and ours.notna()").verdict.item() == Verdict.REPRODUCED


def test_a_narrow_network_is_not_of_the_papers_length():
    rows = compare.comparison("continualz", schema.records_table([continual(width=48)]))
    assert set(rows[rows.ours.notna()].verdict) == {Verdict.SHORTER}


# coverage


def test_coverage_counts_cells():
    assert totals([]) == (0, 0, 0, 319)
    assert totals([fewshot()]) == (1, 1, 0, 318)
    assert totals([fewshot(shift=-9), fewshot("sib+aim", 9.0)]) == (
        3,
        2,
        0,
        316,
    )  # K = 8, l = 2 stands in tab:sto_count, too
    assert totals([fewshot(name="quick")]) == (0, 0, 1, 318)
    assert totals([fewshot(seed=seed) for seed in range(3)]) == (1, 1, 0, 318)
    assert totals([fewshot("sib+aim", sizes=(8, 0))])[0] == 3  # in three tables


def test_the_longest_training_speaks_for_a_cell():
    rows = main([fewshot(shift=5.0, name="paper@4000"), fewshot()])
    assert list(rows[rows.ours.notna()].steps) == [50_000]


@pytest.mark.parametrize(
    "changes", [dict(gate="sigmoid"), dict(mask="random"), dict(order="second"), dict(inputs="release")]
)
def test_moved_switches_cover_no_cell(changes):
    assert totals([continual("oml+aim", switches=changes)])[0] == 0
    assert totals([continual("oml+aim", switches=dict(norm="affine", precision="bf16"))])[0] == 9


def test_other_readings_of_the_update_and_other_data_cover_no_cell():
    assert totals([fewshot("sib+aim", aim_update="episode"), fewshot(dataset="glyphs")])[0] == 0


# pairs


def test_differences_are_taken_by_test_episode():
    rng = np.random.default_rng(0)
    hard = rng.integers(30, 70, 200)
    plain, aim = with_hits(fewshot(), hard), with_hits(fewshot("sib+aim"), hard + rng.integers(0, 3, 200))
    row = compare.gains([plain, aim]).iloc[0]
    assert 0 < row.interval < 0.2 < plain["metrics"]["ci95"]
    without = [r | dict(metrics={k: v for k, v in r["metrics"].items() if k != "hits"}) for r in (plain, aim)]
    assert compare.gains(without).iloc[0].interval == pytest.approx(
        np.hypot(plain["metrics"]["ci95"], aim["metrics"]["ci95"])
    )
    assert compare.gains(without).iloc[0]["value"] == pytest.approx(row["value"])


def test_other_episodes_are_not_paired():
    rng = np.random.default_rng(0)
    hits = rng.integers(30, 70, 200)
    plain, aim = with_hits(fewshot(), hits), with_hits(fewshot("sib+aim"), hits[:100])
    assert compare.gains([plain, aim]).iloc[0].interval > 1


def test_a_pair_shares_preset_switches_steps_and_the_rule_for_rates():
    aim = continual("oml+aim", 1.0)
    partners = {
        "same": continual("oml"),
        "longer": continual("oml", name="paper@4000"),
        "norm": continual("oml", switches=dict(norm="affine")),
        "precision": continual("oml", switches=dict(precision="bf16")),
        "preset": continual("oml", base="release"),
        "few rates": continual("oml", rates=7),
        "rate by test images": continual("oml", switches=dict(metatest_rate="test")),
        "protocol": continual("oml", switches=dict(protocol="release")),
        "class means": continual("oml", switches=dict(metatest_update="means")),
    }
    paired = {name for name, plain in partners.items() if decided("aim-beats-oml", aim, plain).status != "untested"}
    assert paired == {"same"}


def test_aim_with_everything_moving_is_compared_with_the_plain_head():
    result = decided(
        "aim-beats-oml", continual("oml"), continual("oml+aim", 1.0, switches=dict(metatest_update="fast"))
    )
    assert result.status == "supported" and set(result.settings["update"]) == {"fast"}


def test_a_seed_tested_twice_counts_once_by_the_larger_test():
    few, many = continual(shift=9.0, n_runs=3), continual(n_runs=10)
    row = compare.summarise(schema.records_table([many, few])).query("n_classes == 600").iloc[0]
    assert (row.seeds, row.accuracy, row["keys"]) == (1, pytest.approx(44.56), (many["key"],))


# claims


def test_every_claim_has_a_result_and_nothing_is_untested_by_accident():
    results = report_claims.decide([])
    assert [r.claim["id"] for r in results] == [c["id"] for c in claims()] and {r.status for r in results} == {
        "untested"
    }


def test_signs_and_intervals_decide():
    assert decided("aim-beats-sib", fewshot(), fewshot("sib+aim")).status == "supported"  # +2.39
    assert decided("aim-beats-sib", fewshot(shift=5.0), fewshot("sib+aim")).status == "contradicted"
    assert decided("aim-beats-sib", fewshot(shift=2.4), fewshot("sib+aim")).status == "mixed"
    assert decided("aim-beats-sib", fewshot(), fewshot("sib+aim", name="quick")).status == "untested"


def test_one_contradicted_setting_is_not_supported():
    five = [fewshot(n_shot=5, shift=9.0), fewshot("sib+aim", n_shot=5)]
    result = decided("aim-beats-sib", fewshot(), fewshot("sib+aim"), *five)
    assert result.status == "mixed" and result.weakest.n_shot == 5
    assert (
        "mixed: -6.22 ± 0.57 on cifar-fs, conv4, 5-shot (2 settings, 1 for, 1 against, 1 seed)"
        == report_claims.decision_text(result)
    )


def test_short_trainings_decide_only_so_far():
    short = [fewshot(shift=9.0, name="paper@4000"), fewshot("sib+aim", name="paper@4000")]
    early, later = decided("aim-beats-sib", *short), decided("aim-beats-sib", *short, fewshot(), fewshot("sib+aim"))
    assert (early.status, early.so_far, later.status, later.so_far) == ("contradicted", True, "supported", False)
    assert "contradicted so far" in report_claims.decision_text(
        early
    ) and "at 4,000 steps" in report_claims.decision_text(early)
    assert len(later.settings) == 1 and len(later.others) == 1


@pytest.mark.parametrize(
    "changes", [dict(gate="sigmoid"), dict(mask="fixed"), dict(inputs="release"), dict(metatest_rate="test")]
)
def test_moved_switches_and_rates_by_test_images_decide_no_claim(changes):
    result = decided(
        "aim-beats-oml",
        continual("oml", switches=changes if "gate" not in changes else {}),
        continual("oml+aim", -60.0, switches=changes),
    )
    assert result.status == "untested"


def test_a_switch_that_moves_on_both_sides_may_be_one_of_few():
    both = [continual(m, s, switches=dict(norm="affine")) for m, s in (("oml", 0.0), ("oml+aim", -60.0))]
    assert decided("aim-beats-oml", *both).status == "contradicted"


def test_omniglot_is_left_out_where_the_claim_leaves_it_out():
    assert decided("aim-beats-anml", continual("anml"), continual("anml+aim")).status == "untested"
    both = [continual(m, dataset="mini-imagenet") for m in ("anml", "anml+aim")]
    assert decided("aim-beats-anml", *both).status == "supported"


def test_smoke_runs_narrow_networks_and_other_data_decide_nothing():
    for records in (
        [fewshot(name="smoke"), fewshot("sib+aim", name="smoke")],
        [fewshot(dataset="glyphs"), fewshot("sib+aim", dataset="glyphs")],
    ):
        assert decided("aim-beats-sib", *records).status == "untested"
    assert decided("aim-beats-oml", continual(width=48), continual("oml+aim", width=48)).status == "untested"


def test_claims_about_the_use_of_mechanisms():
    shared = np.zeros((8, 32))
    shared[:, :3] = 1
    assert decided("shared-mechanisms", use(last=shared)).status == "supported"
    assert decided("shared-mechanisms", use()).status == "contradicted"
    assert decided("use-becomes-sparse", use()).status == "supported"
    assert decided("clear-separation", use()).status == "supported"
    assert (
        decided("omniglot-is-sparser", use("omniglot", "oml+aim"), use("cifar100", "oml+aim", last=shared)).status
        == "supported"
    )


def test_a_gap_says_nothing_of_a_method_that_has_not_learnt():
    plain, aim = continual("oml"), continual("oml+aim")
    assert (
        len(report_claims.measure("small-generalisation-gap", compare.summarise(schema.records_table([plain, aim]))))
        == 9
    )
    dead = continual("oml+aim", -78.0)
    assert (
        len(report_claims.measure("small-generalisation-gap", compare.summarise(schema.records_table([plain, dead]))))
        == 0
    )


def test_omniglot_minus_the_others_at_ten_classes():
    records = [
        continual(m, s, dataset=d) for d in ("omniglot", "cifar100") for m, s in (("oml", 0.0), ("oml+aim", 5.0))
    ]
    result = decided("omniglot-gains-most", *records)
    paper = {
        d: [paper_value("continualz", dataset=d, method=m, n_classes=10)[0] for m in ("oml", "oml+aim")]
        for d in ("omniglot", "cifar100")
    }
    assert result.weakest.value == pytest.approx(np.diff(paper["omniglot"])[0] - np.diff(paper["cifar100"])[0])


# text


def test_the_report_is_plain_short_and_complete():
    text = tables.report_text([fewshot(), fewshot("sib+aim"), use()])
    assert all(c["id"] in text for c in claims()) and all(f"tab:{t}" in text for t in compare.TABLE_NAMES)
    assert "319 cells: 3 run at the paper's length, 3 of these within or above; 0 shorter training, 316 not run" in text
    assert "\x1b" not in text
    assert "nan" not in text.lower().split() and len(text.splitlines()) < 40
    assert "3 records" in text and "1 record;" in tables.report_text([fewshot()])
    whole = tables.report_text([fewshot(), fewshot("sib+aim"), use()], show_all=True)
    assert all(line in whole for line in text.splitlines()) and "SIB+AIM" in whole


HOSTILE = 'folder:/x/<script>alert(1)</script>|[a](javascript:b)`"\x1b[2J'


def test_what_stands_in_a_record_is_escaped():
    records = [fewshot(dataset=HOSTILE), fewshot("sib+aim", dataset=HOSTILE)]
    text = tables.compact(
        compare.comparison("few-shot", schema.records_table([*records, fewshot()])).query("ours.notna()")
    )
    for shown in (tables.table_markdown(text), tables.show_table(text, HOSTILE).to_html()):
        assert "<script" not in shown and "\x1b" not in shown.split("caption")[0]
    assert all(line.count("|") == len(text.columns) + 1 for line in tables.table_markdown(text).splitlines())
    assert "[a](" not in tables.table_markdown(text)
    assert "\x1b" not in tables.table_text(text) + tables.report_text(records, show_all=True)
    assert all(re.fullmatch(r"[\w.+-]+", name) for name in figures.all_figures(records))


def test_constant_columns_are_dropped_and_moved_switches_are_named():
    rows = compare.comparison("few-shot", schema.records_table([fewshot(), fewshot("sib+aim")]))
    assert list(tables.compact(rows[rows.ours.notna()])) == ["Method", "Ours", "Paper", "Difference", "Verdict"]
    rows = compare.comparison(
        "few-shot", schema.records_table([fewshot("sib+aim"), fewshot("sib+aim", aim_update="episode")])
    )
    text = tables.compact(rows[rows.ours.notna()])
    assert sorted(text.Switches) == ["aim_update=episode", "–"]


def test_continual_curves_are_a_line_each():
    rows = compare.comparison(
        "continualz", schema.records_table([continual("oml", 1.0), continual("oml+aim", name="paper@2000")])
    )
    text = tables.curves(rows[rows.ours.notna()])
    assert list(text.Method) == ["OML", "OML+AIM"] and list(text.Verdict) == ["above the paper", "shorter training"]
    assert text["600"].iloc[0] == "45.6 (44.6)"


def test_nothing_is_typed_by_hand():
    "Another number in the records is another number in the report."
    one, other = (tables.report_text([fewshot(), fewshot("sib+aim", shift)]) for shift in (0.0, 0.5))
    assert "+2.39" in one and "+2.89" in other and "+2.39" not in other


# figures


def test_every_figure_is_drawn_from_the_kept_records():
    drawn = figures.all_figures()
    assert {"few-shot_cifar-fs_conv4", "benchmark_continual_omniglot", "length_omniglot", "forgetting_omniglot"} <= set(
        drawn
    )
    assert {
        "latency_comparison_cifar-fs",
        "mask-cifarfs_1shot_conv",
        "attn_weight_conv_cifar-fs",
        "mask-cont_omni",
    } <= set(drawn)
    assert all(re.fullmatch(r"[\w.+-]+", name) for name in drawn)
    kept = {path.stem for path in (ROOT / "figures").glob("*.png")}
    assert kept == set(drawn) | {"AIM", "applying_aims"}, "run `make figures`"


def lines(figure):
    return [line for ax in figure.axes for line in ax.get_lines() if len(line.get_xdata()) > 1]


def test_a_figure_shows_what_the_records_say():
    few = [
        continual("oml"),
        continual("oml+aim", -10.0),
        continual("oml", base="release", switches=dict(protocol="heldout")),
    ]
    drawn = figures.all_figures(few, only="benchmark")
    assert set(drawn) == {"benchmark_continual_omniglot", "benchmark_continual_omniglot_release"}
    shown = lines(drawn["benchmark_continual_omniglot"])
    paper = [row["accuracy"] for row in paper_table("continualz", dataset="omniglot", method="oml+aim")]
    assert any(np.allclose(line.get_ydata(), np.array(paper) - 10) for line in shown)
    assert any(np.allclose(line.get_ydata(), paper) for line in shown)


def test_lines_of_one_figure_have_had_the_same_training():
    records = [continual(m, name="paper@500") for m in ("oml", "oml+aim")] + [continual("oml")]
    rows = compare.comparison("continualz", schema.records_table(records))
    assert set(figures.same_training(rows).steps) == {500}


def test_a_length_needs_two_trainings():
    assert "length_omniglot" not in figures.all_figures([continual()], only="length")
    both = [continual(), continual(shift=-5.0, name="paper@2000")]
    (figure,) = figures.all_figures(both, only="length_omniglot").values()
    assert any(list(line.get_xdata()) == [2000, 20_000] for line in lines(figure))
    assert set(bands("oml")) & {10, 200, 600}


def test_halving_and_slow_masks_never_pose_as_the_papers():
    halving = activation.activation_record(
        fewshot("sib+aim"), dict(step=[0, 1], mask=np.ones((2, 4, 32))), "abcd", "slow", "halving"
    )
    assert figures.all_figures([halving]) == {}


def test_activation_records_are_small_and_whole(tmp_path):
    path = save_record(use(), tmp_path)
    assert path.stat().st_size < 20_000
    assert (activation.unpack(json.loads(path.read_text())["metrics"]["last"]) == np.eye(8, 32)).all()


# the notebooks


def test_errata_name_real_switches():
    assert {e["switch"] for e in errata()} - {""} <= {*SWITCHES, "seeds"}


@pytest.mark.parametrize("stem", ["90_report", "91_errata"])
def test_report_notebooks_run(stem):
    "From the records that are kept, in a process of their own."
    nb = nbformat.read(ROOT / "nbs" / f"{stem}.ipynb", 4)
    where = {"metadata": {"path": str(ROOT / "nbs")}}
    NotebookClient(nb, timeout=600, kernel_name="python3", resources=where).execute()
    assert not [o for c in nb.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "error"]


def test_report_imports_without_a_display():
    code = "import aim_nb.report.tables as r; print(len(r.report_text([]).splitlines()))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0 and int(out.stdout) > 25, out.stderr
