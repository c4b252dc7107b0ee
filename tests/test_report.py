"""The report: its coverage rule, its claims and its two notebooks, with no records, made-up records and records that must not count."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from aim_nb.engine import activation

from aim_nb.report import findings
from aim_nb.config import Protocol, budget, preset
from aim_nb.paper import bands, claims, errata, paper_cells, paper_labels, paper_table, paper_value
from aim_nb.engine.records import new_record, save_record
from aim_nb.report.tables import trajectory_markdown, variant
from aim_nb.engine.train_continual import nearest_preset, relevant

ROOT = Path(__file__).resolve().parent.parent


def fewshot(
    method="sib",
    shift=0.0,
    name="paper",
    seed=0,
    dataset="cifar-fs",
    n_shot=1,
    K=8,
    l=2,
    decision="hard",
    ci95=0.4,
    **protocol,
):
    "A made-up record, `shift` points from the paper's figure of that method."
    where = dict(dataset=dataset, backbone="conv4", n_shot=n_shot)
    base = (
        paper_value("few-shot", method=method, **where)[0] if paper_table("few-shot", method=method, **where) else 60.0
    )
    sizes = dict(M=32, K=K, l=l) if method == "sib+aim" else {}
    parameters = dict(backbone="conv4", n_shot=n_shot, **sizes)
    return new_record(
        "fewshot",
        dataset,
        method,
        seed,
        budget(name),
        Protocol(decision=decision, **protocol),
        parameters,
        "0",
        dict(accuracy=base + shift, ci95=ci95),
    )


def continual(
    method="oml",
    shift=0.0,
    name="paper",
    dataset="omniglot",
    runs=2,
    n_classes=None,
    switches=None,
    base="ours",
    **effort,
):
    "A made-up continual record, `shift` points from the paper's figures; `switches` of the preset `base` are changed."
    protocol = relevant(method, preset(base, dataset, **(switches or {})))
    nearest, changed = nearest_preset(dataset, method, protocol)
    rows = [
        r
        for r in paper_table("continualz", dataset=dataset, method=method)
        if n_classes is None or r["n_classes"] <= n_classes
    ]
    test = [[r["accuracy"] + shift + e for r in rows] for e in np.linspace(-0.2, 0.2, runs)]
    metrics = dict(
        n_classes=[r["n_classes"] for r in rows],
        test=test,
        train=[[min(100.0, a + 2) for a in run] for run in test],
        accuracy=50.0,
        ci95=1.0,
    )
    return new_record(
        "continual",
        dataset,
        method,
        0,
        replace(budget(name, "continual"), runs=runs, classes=n_classes or 0, **effort),
        protocol,
        dict(M=64, K=10, l=2) if "aim" in method else {},
        "0",
        metrics,
        preset=nearest,
        changed=changed,
    )


def use(dataset="cifar-fs", method="sib+aim", n_shot=1, last=None, name="paper"):
    "A made-up activation record that ends with the class masks `last`."
    run = (
        fewshot("sib+aim", n_shot=n_shot, dataset=dataset, name=name)
        if "sib" in method
        else continual(method, dataset=dataset, name=name)
    )
    first = np.full((8, 32), 0.25)
    last = np.eye(8, 32) if last is None else last
    log = dict(step=[0, 1, 2], mask=np.stack([first, first, last]), score=np.stack([first, first, last]))
    more = dict(test=activation.pack(last), test_classes=list("abcdefgh"), attention_gap=0.2, attention_gap_start=0.1)
    return activation.activation_record(run, log, list("abcdefgh"), "adapted" if "sib" in method else "slow", **more)


def covered(records, name="paper"):
    return next((c["cells"] for c in findings.coverage(records) if c["budget"] == name), 0)


# coverage


def test_nothing_run_nothing_covered_everything_listed():
    rows = findings.cell_rows([])
    assert len(rows) == len(paper_cells()) and {r["verdict"] for r in rows} == {"not run"}
    assert covered([]) == 0 and findings.coverage([])[0]["figures"] == 2


def test_no_literature_among_the_cells():
    assert not [
        r
        for r in findings.cell_rows([])
        if r.get("method")
        and r["method"] not in ("sib", "sib+linear", "sib+aim", "oml", "oml+linear", "oml+aim", "anml", "anml+aim")
    ]


@pytest.mark.parametrize("off, cells", [(0.0, 3), (2.9, 3), (-3.2, 0), (12.0, 0)])
def test_a_cell_counts_only_with_a_right_plain_method(off, cells):
    "SIB, SIB+AIM, and the latter's second place in tab:sto_count."
    assert covered([fewshot("sib", off), fewshot("sib+aim", 5.0)]) == cells


def test_aim_alone_does_not_count():
    records = [fewshot("sib+aim")]
    assert covered(records) == 0
    assert {r["verdict"] for r in findings.cell_rows(records) if r["ours"] is not None} == {"not reached"}


def test_shorter_trainings_say_whether_they_count():
    def said(off):
        return {
            r["verdict"]
            for r in findings.cell_rows([fewshot(m, off, name="quick") for m in ("sib", "sib+aim")])
            if r["ours"] is not None
        }

    assert (said(1.0), said(-9.0)) == ({"other budget"}, {"other budget, not reached"})


def test_a_one_cycle_backbone_is_named_in_the_verdict():
    rows = findings.cell_rows([fewshot(m, name="paper-onecycle") for m in ("sib", "sib+aim")])
    assert {r["verdict"] for r in rows if r["ours"] is not None} == {"reproduced (no spread, one-cycle backbone)"}


def test_another_budgets_plain_method_does_not_help():
    records = [fewshot("sib", name="quick"), fewshot("sib+aim")]
    assert (covered(records), covered(records, "quick")) == (0, 1)


def test_other_data_and_moved_switches_do_not_count():
    assert (
        covered(
            [fewshot("sib", dataset="glyphs", name="quick"), fewshot("sib+aim", dataset="glyphs", name="quick")],
            "quick",
        )
        == 0
    )
    assert covered([fewshot("sib"), fewshot("sib+aim", aim_update="episode")]) == 1  # SIB alone


def test_seeds_are_one_cell():
    assert covered([fewshot("sib", seed=s) for s in range(3)]) == 1


def test_a_stronger_plain_method_counts_on_omniglot():
    "Above the bands of independent re-runs, far above the paper's own figure at 600 classes."
    records = [continual("oml", 15.0), continual("oml+aim", 1.0)]
    points = {n for n in bands("oml") if n in {r["n_classes"] for r in paper_table("continualz", dataset="omniglot")}}
    assert len(points) >= 4 and covered(records) == 2 * len(paper_table("continualz", dataset="omniglot", method="oml"))
    assert covered([continual("oml", -30.0), continual("oml+aim", 1.0)]) == 0


def test_another_norm_is_another_setting():
    "A plain method with the other norm neither counts nor makes its AIM count."
    n = len(paper_table("continualz", dataset="omniglot", method="anml"))
    assert covered([continual("anml"), continual("anml+aim", 1.0)]) == 2 * n
    assert covered([continual("anml", switches=dict(norm="affine")), continual("anml+aim", 1.0)]) == 0
    assert list(findings.all_figures([continual("anml"), continual("anml", switches=dict(norm="affine"))])) == [
        "benchmark_continual_omniglot"
    ]


def test_figures_need_all_their_parts():
    def have(records):
        return {r["label"] for r in findings.figure_rows(records) if r["have"]["paper"] == r["needs"]}

    drawn = {"fig:AIM", "fig:applying_aims"}
    assert have([use()]) == drawn | {"fig:mask-cifarfs_1shot_conv"}
    assert have([use(), use("cifar100", "oml+aim")]) == drawn | {"fig:mask-cifarfs_1shot_conv", "fig:activation"}
    assert have([use(name="quick")]) == drawn


# claims


def test_every_claim_has_a_row():
    assert [r["id"] for r in findings.claim_rows([])] == [c["id"] for c in claims()]
    assert {r["verdict"] for r in findings.claim_rows([])} == {"not measured"}


def verdicts(records, id):
    return [r["verdict"] for r in findings.claim_rows(records, [id])]


def test_signs_of_a_difference():
    def seeds(method, shift):
        return [fewshot(method, shift, seed=s) for s in range(3)]

    assert verdicts(seeds("sib", 0) + seeds("sib+aim", 0), "aim-beats-sib") == ["supported"]
    assert verdicts(seeds("sib", 5) + seeds("sib+aim", 0), "aim-beats-sib") == ["contradicted"]
    assert verdicts([fewshot("sib", 2.4), fewshot("sib+aim")], "aim-beats-sib") == ["undecided (one seed)"]
    assert verdicts([fewshot("sib"), fewshot("sib+aim", name="quick")], "aim-beats-sib") == ["not measured"]


def test_claims_about_use():
    shared = np.zeros((8, 32))
    shared[:, :3] = 1
    assert verdicts([use(last=shared)], "shared-mechanisms") == ["supported (one seed, no interval)"]
    assert verdicts([use()], "shared-mechanisms") == ["contradicted (one seed, no interval)"]
    assert verdicts([use()], "use-becomes-sparse") == ["supported (one seed, no interval)"]
    assert verdicts([use()], "clear-separation") == ["supported (one seed, no interval)"]
    both = [use("omniglot", "oml+aim"), use("cifar100", "oml+aim", last=shared)]
    assert verdicts(both, "omniglot-is-sparser") == ["supported (one seed, no interval)"]


def test_continual_claims_have_a_row_for_each_number_of_classes():
    rows = findings.claim_rows(
        [continual("oml"), continual("oml+aim", 1.0)], ["aim-beats-oml", "small-generalisation-gap"]
    )
    n = len(paper_table("continualz", dataset="omniglot", method="oml"))
    assert len(rows) == 2 * n and all(r["paper"] is not None for r in rows[:n])


def test_claims_for_a_reader_show_the_longest_training_once():
    "Nine numbers of classes on one line, a shorter training on none; an AIM with the other norm has no partner."
    records = [
        continual("oml"),
        continual("oml+aim", 1.0),
        continual("oml", name="paper@500"),
        continual("oml+aim", 1.0, name="paper@500"),
    ]
    lines = findings.claims_markdown(findings.claim_rows(records, ["aim-beats-oml"])).splitlines()[2:]
    assert (
        len(lines) == 1
        and "10: +" in lines[0]
        and "600: +" in lines[0]
        and "9 supported" in lines[0]
        and "paper@500" not in lines[0]
    )
    assert verdicts([continual("oml"), continual("oml+aim", 1.0, switches=dict(norm="affine"))], "aim-beats-oml") == [
        "not measured"
    ]


def test_meta_tests_of_unequal_effort_are_compared_where_both_have_points():
    "Ten runs beside five, a linear layer that was only followed to 100 classes with three: same training, same n, no fall back to a shorter one."
    long = [
        continual("oml", name="paper@2000", runs=10),
        continual("oml+aim", 1.0, name="paper@2000", runs=5, rates=2, rate_runs=1),
        continual("oml+linear", 60.0, name="paper@2000", runs=3, n_classes=100),
    ]
    short = [continual(m, name="paper@500", runs=3) for m in ("oml", "oml+aim", "oml+linear")]
    rows = findings.claim_rows(long + short, ["aim-beats-oml", "aim-beats-oml-linear"])

    def at(id, b):
        return [r["where"]["n_classes"] for r in rows if (r["id"], r["budget"]) == (id, b)]

    assert len(at("aim-beats-oml", "paper@2000")) == 9 and at("aim-beats-oml-linear", "paper@2000") == [10, 50, 75, 100]
    assert all("2,000 of the paper's" in line for line in findings.gain_lines(long + short))
    again = findings.points(
        [long[0], continual("oml", 9.0, name="paper@2000", runs=3)]
    )  # a second, smaller test is no second seed
    assert {(p.values["accuracy"].n, p.keys[0]) for p in again} == {(1, long[0]["key"])}
    wide = long[1] | dict(budget=long[1]["budget"] | dict(width=48))
    assert [r["verdict"] for r in findings.claim_rows([long[0], wide], ["aim-beats-oml"])] == ["not measured"]


def test_a_longer_training_never_stands_as_a_partner():
    "ANML after 4,000 steps has an extra row; beside ANML+AIM stands ANML after 2,000."
    records = [continual(m, name="paper@2000") for m in ("oml", "anml", "anml+aim")] + [
        continual("anml", 9.0, name="paper@4000", runs=3)
    ]
    lines = [line.split(" | ")[:2] for line in trajectory_markdown(records, "omniglot").splitlines()[2:]]
    assert lines == [["| OML", "2,000"], ["| ANML", "2,000"], ["| ANML+AIM", "2,000"], ["| ANML", "4,000"]]
    assert "2,000 of the paper's" in findings.gain_lines(records)[0]


def test_sentences_to_quote():
    records = [
        continual("oml", 2.0),
        continual("oml", 5.0, name="paper@500"),
        continual("oml+aim", 1.0, name="paper@500"),
        fewshot("sib"),
        fewshot("sib+aim", -1.0),
    ]
    (sib, plain), gains = findings.plain_lines(records), findings.gain_lines(records)
    assert "SIB on cifar-fs, conv4, 1-shot" in sib and "68.7 % (paper: 68.7)" in sib
    assert (
        "OML on omniglot" in plain
        and "the paper's 20,000 steps, one seed" in plain
        and "96.3 % after 10 classes (paper: 94.3)" in plain
    )
    assert (
        len(gains) == 2
        and "AIM over SIB on cifar-fs, conv4, 1-shot" in gains[0]
        and "+1.4 ± 0.6 points (paper: +2.4)" in gains[0]
    )
    assert "500 of the paper's 20,000 steps" in gains[1] and "after 600 classes" in gains[1]


def test_the_linear_layer_is_said_to_learn_only_where_it_does():
    def say(shift):
        return findings.plain_lines([continual("oml+linear", shift, name="paper@500")])[0]

    assert "it learns" in say(50.0) and "it learns" not in say(0.0)
    (line,) = findings.gain_lines(
        [continual("oml+linear", 50.0, name="paper@500"), continual("oml+aim", 1.0, name="paper@500")]
    )
    assert "AIM over OML+Linear on omniglot" in line


def test_where_plain_methods_are_heading():
    "Four points a doubling from 30 below the paper's ANML: 20,000 steps are 5.3 doublings on; two lengths make no trend, and a narrow network is none of them."
    lengths = [continual("anml", -30.0 + 4 * i, name=f"paper@{500 * 2**i}") for i in range(3)]
    (line,) = findings.band_lines([*lengths, continual("anml", 20.0, name="quick")])
    assert (
        "gains 4.0 points at 600 classes" in line
        and "extrapolation" in line
        and f"would give {63.4 - 30 + 4 * np.log2(40):.0f} %" in line
        and "not met" in line
    )
    assert "extrapolation" not in findings.band_lines(lengths[:2])[0]
    other = continual("anml", 20.0, name="paper@4000")
    other["parameters"] = dict(lr_in=0.1)  # another inner rate is another method
    assert (
        findings.band_lines([*lengths, other]) == findings.band_lines(lengths)
        and covered([*lengths, other], "paper@4000") == 0
    )


def test_fine_rates_are_compared_with_fine_rates_only():
    "The finer search of the longest training is what stands beside the bands; the trend stays that of the lengths that share their rates, and no claim mixes the two."
    lengths = [continual("anml", -30.0 + 4 * i, name=f"paper@{500 * 2**i}") for i in range(3)]
    (before,), (after,) = (
        findings.band_lines(lengths),
        findings.band_lines([*lengths, continual("anml", 1.0, name="paper@2000", rates=14)]),
    )
    assert "not met" in before and "rates as fine" not in before and "are met" in after and "rates as fine" in after
    assert before[before.index(" Over ") :] == after[after.index(" Over ") :]
    best = continual("anml", 2.0, name="paper@2000", rates=14, switches=dict(weights="best"))
    assert "rates as fine as the release has them, weights=best)" in findings.band_lines([*lengths, best])[0]
    mixed = [continual("anml", name="paper@500"), continual("anml+aim", 1.0, name="paper@500", rates=14)]
    assert (
        verdicts(mixed, "aim-beats-anml") == ["not measured"]
        and len(verdicts([*mixed, continual("anml", name="paper@500", rates=14)], "aim-beats-anml")) == 9
    )


def test_claims_in_boxes():
    def boxes(records):
        return {
            line[2:]: b.splitlines()[0]
            for b in findings.summary_markdown(records).split("\n\n**")
            for line in b.splitlines()[2:]
        }

    def where(records, text):
        return next(b.strip("*") for line, b in boxes(records).items() if line.startswith(text))

    def runs(shift, name):
        return [continual("oml", shift, name=name), continual("oml+aim", 1.0, name=name)]

    assert where(runs(0.0, "paper"), "Adding AIM to OML") == findings.HELD
    assert where(runs(45.0, "paper@500"), "Adding AIM to OML") == findings.NOT_HELD + findings.SO_FAR
    assert where(runs(-40.0, "paper"), "Adding AIM to OML") == where([], "Adding AIM to OML") == findings.UNTESTED
    assert (
        where([continual("anml"), continual("anml+aim")], "Adding AIM to ANML") == findings.UNTESTED
    )  # the claim leaves Omniglot out


OLD = dict(gate="sigmoid", aim_scale="1/K", row_reset="kaiming", weights="best")  # the switches of the first records


def test_moved_switches_decide_no_claim():
    "AIM behind a right OML, but with a gate of its own: named and listed, not counted."
    records = [continual("oml", switches=dict(weights="best")), continual("oml+aim", -60.0, switches=OLD)]
    assert variant(records[1]) == "gate=sigmoid, aim_scale=1/K, row_reset=kaiming, weights=best"
    untested = findings.summary_markdown(records).split(f"**{findings.UNTESTED}**")[1]
    line = next(x for x in untested.splitlines() if "Adding AIM to OML" in x)
    assert "not counted, since the plain method is off or a switch was moved: 9 untested at paper" in line
    assert "contradicted" not in findings.report_text(records)
    assert not findings.gain_lines(records)
    (line,) = findings.gain_lines(records, moved=True)
    assert "AIM over OML on omniglot, gate=sigmoid, aim_scale=1/K, row_reset=kaiming, weights=best" in line
    counted = [continual("oml"), continual("oml+aim", -60.0)]
    assert (
        "Adding AIM to OML" in findings.summary_markdown(counted).split(f"**{findings.NOT_HELD}**")[1].split("\n\n")[1]
    )


def test_presets_and_precisions_never_share_a_row():
    records = [continual("oml"), continual("oml", base="release"), continual("oml", switches=dict(precision="bf16"))]
    rows = {r["variant"]: r["covered"] for r in findings.cell_rows(records) if r["ours"] is not None}
    assert rows == {"": True, "preset=release": True, "precision=bf16": False}
    assert len(trajectory_markdown(records, "omniglot").splitlines()) == 2 + 3
    mixed = [continual("oml"), continual("oml+aim", 1.0, switches=dict(precision="bf16"))]
    assert verdicts(mixed, "aim-beats-oml") == ["not measured"]
    figures = findings.all_figures([*records, continual("oml", switches=dict(metatest_update="means"))])
    names = [
        "benchmark_continual_omniglot",
        "benchmark_continual_omniglot_means",
        "benchmark_continual_omniglot_release",
    ]
    assert sorted(figures) == names


def test_a_figure_is_of_one_budget_with_the_most_methods():
    few, many = continual("oml"), [continual(m, name="paper@500") for m in ("oml", "oml+aim")]
    assert [r["budget"]["name"] for r in findings._one_budget([few, *many])] == ["paper@500"] * 2
    assert findings._one_budget([few, many[0]]) == [few]


def test_the_paper_against_its_own_claims():
    "The signs that the errata tell of are found by the same code."

    def own(id):
        return {findings.setting(p.where): v for p, v, _, _ in findings.claim_values(id, findings.paper_points())}

    assert min(own("aim-beats-anml").values()) < 0 and min(own("aim-beats-sib").values()) > 0
    assert max(own("linear-is-at-chance").values()) < 0.01
    assert [s for s, v in own("soft-wins-wrn").items() if v < 0] == ["mini-imagenet, wrn-28-10, 1-shot"]


# text and pictures


def test_text_is_plain_and_complete():
    text = findings.report_text([fewshot("sib"), fewshot("sib+aim"), use()])
    assert all(r["label"] in text for r in paper_labels()) and all(c["id"] in text for c in claims())
    assert "3 of 319 table cells" in text and "\x1b" not in text and "nan" not in text.lower()
    assert all(len(line) < 200 for line in text.splitlines())


def test_figures_are_named_as_the_paper_names_them():
    names = set(
        findings.all_figures(
            [use(), use(n_shot=5), use("glyphs"), use("omniglot", "oml+aim"), continual("oml"), continual("oml+aim")]
        )
    )
    assert {
        "mask-cifarfs_1shot_conv",
        "mask-cifarfs_5shot_conv",
        "mask-glyphs_1shot_conv",
        "activation_cifar-fs",
        "attn_weight_conv_cifar-fs",
        "mask-cont_omni",
        "benchmark_continual_omniglot",
    } <= names
    assert all(re.fullmatch(r"[\w.+-]+", n) for n in names)


def test_forgetting_is_drawn_and_numbered():
    def ages(method, *by_age):
        return (r := continual(method, name="paper@500")) | dict(
            metrics=r["metrics"] | dict(by_age=list(by_age), forgetting=by_age[-1] - by_age[0])
        )

    records = [
        ages("oml", 80.0, 70.0, 60.0, 75.0),
        ages("oml+aim", 10.0, 20.0, 60.0, 90.0),
        continual("anml", name="paper@500"),
    ]
    assert "forgetting_omniglot" in findings.all_figures(records) and "forgetting_omniglot" not in findings.all_figures(
        records[2:]
    )
    assert [line.split(" | ")[-1] for line in findings.forgetting_markdown(records).splitlines()[2:]] == [
        "-5.0 |",
        "+80.0 |",
    ]


def test_halving_and_slow_masks_never_pose_as_the_papers():
    halving = activation.activation_record(
        fewshot("sib+aim"), dict(step=[0, 1], mask=np.ones((2, 4, 32))), "abcd", "slow", "halving"
    )
    assert findings.all_figures([halving]) == {}


def test_activation_records_are_small_and_whole(tmp_path):
    path = save_record(use(), tmp_path)
    assert path.stat().st_size < 20_000
    assert (activation.unpack(json.loads(path.read_text())["metrics"]["last"]) == np.eye(8, 32)).all()


def test_errata_name_real_switches():
    from aim_nb.config import SWITCHES

    assert {e["switch"] for e in errata()} - {""} <= {*SWITCHES, "seeds"}


@pytest.mark.parametrize("stem", ["90_report", "91_errata"])
def test_report_notebooks_run(stem, tmp_path):
    "From the records that are kept, in a process of their own."
    nb = nbformat.read(ROOT / "nbs" / f"{stem}.ipynb", 4)
    NotebookClient(
        nb, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "nbs")}}
    ).execute()
    assert not [o for c in nb.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "error"]


def test_report_imports_without_a_display():
    code = "import aim_nb.report.findings as r; print(len(r.report_text([]).splitlines()))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0 and int(out.stdout) > 45, out.stderr
