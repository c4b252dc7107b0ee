"""`make reproduce`: every experiment is asked for, every table and figure of the paper that needs no WRN-28-10 is made, and made again it is the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aim_nb.engine.notebook_runs import parameters_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
EXPERIMENTS = [p for p in sorted((ROOT / "nbs").glob("[23][0-9]_*.ipynb")) if "budget" in parameters_of(p)]
TABLES = {f"{t}_glyphs_conv4.csv" for t in ("few-shot", "soft_hard", "sto_count", "active_mech")} | {
    "continualz_glyphs.csv",
    "activation.csv",
}
FIGURES = {
    "AIM",
    "applying_aims",
    "activation_glyphs",
    "activation_glyphs_continual",
    "attn_weight_conv_glyphs",
    "benchmark_continual_glyphs",
    "latency_comparison_glyphs",
    "mask-cont_glyphs",
    "mask-glyphs_1shot_conv",
    "mask-glyphs_5shot_conv",
}


def test_every_experiment_gets_dataset_budget_and_the_papers_shots():
    from reproduce import values

    for path in EXPERIMENTS:
        asked = values(path, "glyphs", "smoke", parameters_of(path))
        assert asked[:6] == ["-p", "dataset", "glyphs", "-p", "budget", "smoke"], path.stem
        assert (asked[6:9] == ["-p", "shots", "1,5"]) == path.stem.startswith("2"), path.stem
        assert ("1,2,4,8,12,16,20,24,28,32" in asked and "0,2,4,8,12,16,20,24" in asked) == (
            path.stem == "21_fewshot_ablation"
        ), path.stem
    assert values(EXPERIMENTS[-1], "cifar-fs", "paper", {"dataset"}) == ["-p", "dataset", "cifar100"]


def test_every_kind_of_figure_has_a_glyphs_twin():
    "What the paper shows on its data is made for glyphs, but for what needs WRN-28-10."
    from aim_nb.paper import paper_labels

    stems = {
        r["label"].removeprefix("fig:")
        for r in paper_labels()
        if r["kind"] == "figure" and r["backbones"] != ["wrn-28-10"]
    }

    def twin(stem):
        if stem in ("AIM", "applying_aims"):
            return stem
        if "cont_" in stem:
            return "mask-cont_glyphs"
        return f"mask-glyphs_{stem.split('_', 1)[1]}" if stem.startswith("mask-") else f"{stem}_glyphs"

    assert {twin(s) for s in stems} | {"activation_glyphs_continual"} == FIGURES


def test_a_wrong_word_is_refused_at_once():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/reproduce.py", "glyphs", "smokey"], capture_output=True, text=True
    )
    assert done.returncode != 0 and "smokey" in done.stderr and len(done.stderr.splitlines()) == 1


def reproduce(runs):
    "`make reproduce DATASET=glyphs BUDGET=smoke` into an empty folder; its tables."
    shutil.rmtree(runs, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, ROOT / "tools/reproduce.py", "glyphs", "smoke"],
        cwd=ROOT,
        env={**os.environ, "AIM_RUNS": str(runs)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {p.name: p.read_text() for p in (runs / "tables").iterdir()}


@pytest.mark.stress
def test_everything_is_made_and_made_again_the_same(tmp_path):
    "Minutes. Runs are deleted between the two, so nothing is found, all is computed."
    first = reproduce(tmp_path / "runs")
    made = {p.stem for p in (tmp_path / "runs/figures").glob("*.png")}
    assert TABLES <= set(first) and FIGURES <= made, (TABLES - set(first), FIGURES - made)
    assert reproduce(tmp_path / "runs") == first
