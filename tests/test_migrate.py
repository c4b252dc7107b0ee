"""The one-time move of kept records to format 2: nothing measured has changed, and every question still finds its answer."""

import json
import subprocess

import pytest
from aim_nb import train_fewshot
from aim_nb.core import Budget, Protocol
from aim_nb.records import kept_dir, read_records, record_key

BEFORE = "e6f6522"


def old_records():
    names = subprocess.run(["git", "ls-tree", "--full-tree", "-r", "--name-only", BEFORE, "results/"], capture_output=True, text=True).stdout
    for name in filter(lambda n: n.endswith(".json"), names.split()):
        text = subprocess.run(["git", "show", f"{BEFORE}:{name}"], capture_output=True, text=True).stdout
        yield json.loads(text)


@pytest.fixture(scope="module")
def new():
    return read_records(kept_dir())


def test_every_record_is_there_with_the_same_measurements(new):
    by_time = {(r["created"], r["task"], r["method"], r["seed"], r["commit"], json.dumps(r["history"])): r for r in new}
    for old in old_records():
        found = by_time[
            (old["created"], old["task"], old["method"], old["seed"], old["commit"], json.dumps(old["history"]))
        ]
        assert old["metrics"].items() <= found["metrics"].items() or old["task"] == "activation"
        assert found["seconds"] == old["seconds"] and found["budget"] == old["budget"]


def test_few_shot_questions_find_their_records(new):
    for r in new:
        if r["task"] == "fewshot" and not r["parameters"]["backbone"].startswith("own-"):
            q = dict(r["parameters"])
            sizes = {k: q.pop(k, 1) for k in ("M", "K", "l")}
            asked = train_fewshot.fewshot_identity(
                r["dataset"],
                r["method"],
                r["seed"],
                Budget(**r["budget"]),
                Protocol(**r["protocol"]),
                r["data_sha"],
                q.pop("backbone"),
                **sizes,
                **q,
            )
            assert record_key(asked) == r["key"], r["key"]


def test_a_continual_record_names_its_preset(new):
    continual = [r for r in new if r["task"] == "continual"]
    assert continual and all(
        r["preset"] in ("ours", "release", "paper") and "weights" in r["changed"] or r["protocol"]["weights"] == "last"
        for r in continual
    )
