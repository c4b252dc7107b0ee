"""Defaults in the code are the paper's (or, where it is silent, the release's) numbers, which stand in one place: aim_nb/paper_data."""

import inspect, pathlib, re

import pytest
from aim_nb.aim import AIM
from aim_nb.data.banks import open_bank
from aim_nb.config import Protocol, budget, preset_size
from aim_nb.engine.metatest import AUTHORS_RATES, POINTS
from aim_nb.oml import make_tail
from aim_nb.paper import hyperparameters
from aim_nb.engine.pretrain import PEAK
from aim_nb.sib import SIBHead
from aim_nb.engine.train_continual import ContinualTrainee, make_continual, run_continual
from aim_nb.engine.train_fewshot import paper_rates, run_fewshot, train_fewshot

ROOT = pathlib.Path(__file__).parent.parent


def default(fn, name):
    "The default of a parameter, of a class that of the first in its line which names it."
    for f in inspect.getmro(fn) if inspect.isclass(fn) else (fn,):
        if name in (parameters := inspect.signature(f.__init__ if inspect.isclass(f) else f).parameters):
            return parameters[name].default
    raise AssertionError(f"{fn.__name__} has no parameter {name}")


def number(task, name, source="paper"):
    return hyperparameters(task, source)[name].value


@pytest.mark.parametrize("fn", [AIM, train_fewshot, run_fewshot])
@pytest.mark.parametrize("name", ["M", "K", "l"])
def test_fewshot_mechanisms(fn, name):
    assert default(fn, name) == number("fewshot", name)


def test_fewshot_widths():
    assert default(AIM, "d_h") == number("fewshot", "d_hidden") and default(AIM, "d_k") == number("fewshot", "d")


@pytest.mark.parametrize("fn", [make_continual, run_continual])
@pytest.mark.parametrize("name", ["M", "K", "l"])
def test_continual_mechanisms(fn, name):
    value = default(fn, name) or preset_size("paper", "omniglot")  # 0: the preset's number of mechanisms
    assert value == number("continual", name)


def test_mechanisms_of_the_release():
    for where, M in number("continual", "M", "release").items():
        assert preset_size("release", where.split()[1]) == M != preset_size("ours", where.split()[1])


def test_continual_layer():
    aim = make_tail(6, 10, "aim").layer
    got = dict(M=aim.M, K=aim.K, l=aim.l, d=aim.d_k, d_hidden=aim.d_h)
    assert got == {name: number("continual", name) for name in got}


def test_rates_and_steps():
    assert default(SIBHead, "eps") == number("fewshot", "eps") and default(SIBHead, "steps") == number(
        "fewshot", "sib_steps", "release"
    )
    assert default(ContinualTrainee, "lr_in") == number("continual", "nu_in") and default(
        ContinualTrainee, "lr_out"
    ) == number("continual", "nu_out")
    trainee = ContinualTrainee(open_bank("glyphs"), "oml", 0, budget("smoke", "continual"))
    assert trainee.inner == number("continual", "inner_steps", "release")
    assert PEAK == number("fewshot", "pretrain_rate", "release")
    assert number("fewshot", "nu_in") in paper_rates() and number("fewshot", "nu_out") in paper_rates()


def test_paper_budgets():
    few, cont = budget("paper"), budget("paper", "continual")
    assert (few.steps, few.val_episodes, few.test_episodes) == tuple(
        number("fewshot", n) for n in ("steps", "val_episodes", "test_episodes")
    )
    assert few.pretrain_epochs == number("fewshot", "pretrain_epochs", "release")
    assert (cont.steps, cont.runs) == (number("continual", "steps"), number("continual", "runs"))
    assert (cont.rates, cont.rate_runs) == (
        len(number("continual", "rates", "release")),
        number("continual", "rate_runs", "release"),
    )


def test_metatest_points_and_rates():
    assert list(AUTHORS_RATES) == number("continual", "rates", "release")
    assert {k: list(v) for k, v in POINTS.items() if k in number("continual", "n_classes")} == number(
        "continual", "n_classes"
    )


def test_protocol_default_is_the_papers_order():
    assert Protocol().order == number("continual", "order")


def test_no_table_figure_outside_the_paper_data():
    "A few unmistakable accuracies of the paper's tables stand in no module and no notebook's code."
    from aim_nb.paper import paper_table

    figures = {f"{row['accuracy']:.2f}" for row in paper_table("few-shot") if not row["literature"] and row["ci"]}
    figures = {f for f in figures if not f.endswith("0")}
    for path in (ROOT / "aim_nb").rglob("*.py"):
        assert not [f for f in figures if re.search(rf"(?<![\d.]){re.escape(f)}(?!\d)", path.read_text())], path.name
