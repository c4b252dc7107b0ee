"""SIGKILL anywhere in whole experiments (data to record), again and again; the end is the same in every bit as if nothing had happened."""

import random, signal

import numpy as np
import pytest
import torch

from accidents import METHODS, draws, left, run_child, strange, unlike
from aim_nb.engine import train_continual
from aim_nb.engine import train_fewshot

WHAT = {
    "sib+aim": "few-shot with SIB+AIM: pretraining, features, meta-training, test",
    "oml+aim": "continual with OML+AIM: meta-training, meta-test",
    "anml+aim": "continual with ANML+AIM: meta-training, meta-test",
}


def kill_once(method, folder, data, rng, whole, where):
    "Start or go on, and die somewhere: at a place that counts its calls, or at any moment. Whether it died."
    _, seconds, calls = whole
    if where == "moment":
        child = run_child(method, folder, data)
        if child.wait(rng.uniform(0, 0.8 * seconds)) is None:
            child.kill()
    else:
        child = run_child(method, folder, data, where, rng.randint(1, 1 + calls[where] // 2))
    assert child.wait() in (0, -signal.SIGKILL), child.text
    return child.code != 0


def lost(folder, reference):
    "What differs between an interrupted run and the reference: files, tensors, fields, draws; empty when nothing does."
    once, again = draws(reference), draws(folder)
    moved = [
        f"draw {k}" for k in sorted(once.keys() | again.keys()) if again.get(k) != once.get(k)
    ]  # every attempt at a step, the first one after a kill too, drew the same indices
    return (
        unlike(left(folder), left(reference))
        + strange(folder, reference)
        + moved
        + [str(p.name) for p in (folder / "runs").rglob(".*.part")]
    )


@pytest.mark.both
@pytest.mark.parametrize("method", METHODS)
def test_killed_anywhere_ends_the_same(method, data, whole, tmp_path, tally, many):
    rng = random.Random(METHODS.index(method))
    places = ["moment", "step", "write", "sync", "rename"] + ["trajectory"] * (method != "sib+aim")
    rounds = (
        [rng.sample(["moment", "step", "write"], 3)]
        if many(1, 0)
        else [rng.choices(places, k=6) for _ in range(many(0, 16))]
    )
    for i, deaths in enumerate(rounds):
        folder = tmp_path / str(i)
        kills = sum(kill_once(method, folder, data, rng, whole(method), where) for where in deaths)
        child = run_child(method, folder, data)
        assert child.wait() == 0, child.text
        gone = lost(folder, whole(method)[0])
        tally.add(
            f"SIGKILL, {WHAT[method]}",
            "the same command went on; every tensor, draw and metric as without",
            gone,
            kills,
        )
        assert not gone and (kills or i), (deaths, gone)


def forget(method):
    "In a child: resume without the optimiser's memory."
    if method != "sib+aim":
        train_continual.load_optimizer = lambda optimizer, tensors: None
        return
    load = train_fewshot.FewshotTrainee.load_state_dict
    train_fewshot.FewshotTrainee.load_state_dict = lambda self, t: load(self, {**t, "momentum": t["momentum"] * 0})


@pytest.mark.both
@pytest.mark.parametrize("method", ["sib+aim", *(pytest.param(m, marks=pytest.mark.stress) for m in METHODS[1:])])
def test_the_comparison_can_fail(method, data, whole, tmp_path, tally):
    "Negative control: a run that forgets its momentum when it is resumed is found out, and so is one that draws another episode."
    step, weights = (20, "head.") if method == "sib+aim" else (6, "net.")
    assert run_child(method, tmp_path, data, "step", step).wait() == -signal.SIGKILL
    child = run_child(method, tmp_path, data, before=lambda: forget(method))
    assert child.wait() == 0, child.text
    gone = lost(tmp_path, whole(method)[0])
    tally.add("negative control: a resumed run that forgets its momentum", "the comparison finds it", not gone)
    assert any(f": {weights}" in g for g in gone) and any("metrics" in g for g in gone)
    assert len([g for g in gone if g.startswith("state ") and "pretrain" not in g]) == 2  # both of the kept checkpoints
    noted = tmp_path / "draws.txt"
    first = noted.read_text().splitlines()[0]
    noted.write_text(noted.read_text() + first[:-1] + ("0" if first[-1] != "0" else "1") + "\n")
    kind, i, _ = first.split()
    assert f"draw {(kind, int(i))}" in lost(tmp_path, whole(method)[0])


@pytest.mark.both
@pytest.mark.parametrize("method", METHODS)
def test_global_generators_have_no_say(method, data, whole, tmp_path, tally):
    "Whatever state the process's own generators are in, first weights and draws are the same."

    def seeds():
        torch.manual_seed(99)
        np.random.seed(99)
        random.seed(99)

    child = run_child(method, tmp_path, data, before=seeds)
    assert child.wait() == 0, child.text
    gone = lost(tmp_path, whole(method)[0])
    tally.add("other seeds in the global generators of Python, numpy and torch", "the same end", gone)
    assert not gone, gone
