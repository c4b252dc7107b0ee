"""Records: which answer is found, which code signs it, and what is no record."""

import json
import subprocess
from pathlib import Path

import pytest

from aim_nb.engine import records
from aim_nb.core import AimError
from aim_nb.config import Protocol, budget


def made(accuracy):
    return records.new_record(
        "fewshot",
        "glyphs",
        "sib",
        0,
        budget("smoke"),
        Protocol(),
        dict(backbone="conv4", n_shot=1),
        "0123",
        dict(accuracy=accuracy, ci95=0.5),
    )


@pytest.fixture
def project(tmp_path, monkeypatch):
    "Somebody's project with a repository of its own, where the user stands."
    (tmp_path / "nbs").mkdir()
    (tmp_path / "settings.ini").touch()

    def git(*args):
        return subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", tmp_path, *args], check=True, capture_output=True
        )

    git("init")
    git("add", "settings.ini")
    git("commit", "-m", "theirs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    return tmp_path


def test_a_fresh_run_is_found_before_the_kept_one(project):
    kept, fresh = made(50.0), made(60.0)
    assert kept["key"] == fresh["key"] and records.find_record(fresh) is None
    records.save_record(kept, records.kept_dir())
    assert records.find_record(fresh) == kept
    records.save_record(fresh)
    assert records.find_record(fresh) == fresh
    records.keep()
    assert records.read_records() == [fresh], "and is what is kept from then on"


def test_the_commit_is_that_of_the_package_not_of_where_the_user_stands(project, monkeypatch):
    commit, theirs = (
        records.code_commit.__wrapped__,
        subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip(),
    )
    assert commit().removesuffix("+") != theirs
    monkeypatch.chdir(Path(records.__file__).parent)
    inside = commit()
    monkeypatch.chdir(project)
    assert commit() == inside, "the same from everywhere"


def test_a_package_that_no_repository_tracks_has_no_commit(project, monkeypatch):
    package = project / "venv/aim_nb"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(records, "files", lambda name: package)
    assert records.code_commit.__wrapped__() == ""
    subprocess.run(["git", "add", "-f", package], check=True)
    assert records.code_commit.__wrapped__().endswith("+"), "tracked, and not committed yet"


def test_a_record_that_was_changed_by_hand_is_refused(project):
    rec = made(50.0)
    better = rec | dict(metrics=rec["metrics"] | dict(accuracy=99.0))
    with pytest.raises(AimError, match="its seal does not fit; it was changed after it was written"):
        records.save_record(better)
    path = records.save_record(records.sealed(better))
    path.write_text(path.read_text().replace("99.0", "98.0"))
    with pytest.warns(UserWarning, match="left out: .*its seal does not fit"):
        assert records.find_record(rec) is None


def test_kept_records_lie_by_task_and_dataset_and_are_read_at_any_depth(project):
    records.save_record(made(50.0))
    (path,) = records.keep()
    assert path == records.kept_dir() / "fewshot" / "glyphs" / records.record_name(made(50.0))
    assert records.read_records() == [records.read_record(path)]


OUTSIDE = dict(task="../../x", method="../../x", dataset="../../x")


@pytest.mark.parametrize("field", OUTSIDE)
def test_nothing_is_kept_outside_the_results(project, field):
    "Its key and its seal fit: somebody made it so."
    rec = made(50.0) | {field: OUTSIDE[field]}
    rec["key"] = records.record_key(rec)
    rec["seal"] = records.record_seal(rec)
    records.records_dir().mkdir(parents=True)
    (records.records_dir() / "r.json").write_text(json.dumps(rec))
    with pytest.warns(UserWarning, match=f"left out: .*r.json: its {field} is not one that this version knows"):
        assert records.keep() == []
    assert not records.kept_dir().exists()


@pytest.mark.parametrize("dataset, name", [("folder:../../birds", "../../up"), ("folder:/a b/..", "a/b")])
def test_names_of_ones_own_stay_in_their_folder(project, dataset, name):
    "A folder of pictures and a budget may be called anything."
    rec = made(50.0)
    rec = records.sealed(rec | dict(dataset=dataset, budget=rec["budget"] | dict(name=name)))
    records.save_record(rec)
    (path,) = records.keep()
    assert path.parent.parent == records.kept_dir() / "fewshot" and records.read_records() == [rec]


def deep(n):
    return [] if n == 0 else [deep(n - 1)]


STRANGE = {
    "nothing": None,
    "a list": [1],
    "a deep history": dict(history=[dict(step=1, loss=deep(900))]),
    "a row without a step": dict(history=[dict(loss=1.0)]),
    "rows that are none": dict(history=[3]),
    "an accuracy in words": dict(metrics=dict(accuracy="high", ci95=1.0)),
    "no interval": dict(metrics=dict(accuracy=50.0)),
    "an infinite accuracy": dict(metrics=dict(accuracy=float("inf"), ci95=1.0)),
    "an accuracy beyond all": dict(metrics=dict(accuracy=10**400, ci95=1.0)),
    "a budget of one field": dict(budget=dict(name="paper")),
    "steps in words": dict(budget=budget("smoke").asdict() | dict(steps="many")),
    "an unknown switch": dict(protocol=dict(gate="raw", colour="red")),
    "an unknown value": dict(protocol=dict(gate=["raw"])),
    "parameters that are lists": dict(parameters=dict(n_shot=[1, 5])),
    "a format of its own": dict(format={}),
    "another task's method": dict(method="oml"),
    "curves of other lengths": dict(
        task="continual", method="oml", metrics=dict(accuracy=50.0, ci95=1.0, n_classes=[10, 20], test=[[50.0]])
    ),
    "curves that are none": dict(
        task="continual", method="oml", metrics=dict(accuracy=50.0, ci95=1.0, n_classes=3, test="high")
    ),
    "a use of mechanisms without masks": dict(task="activation", metrics=dict(classes=["a"])),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_is_no_record_is_named_and_left_out(project, what):
    "A key and a seal that fit do not help."
    good, bad = made(60.0), STRANGE[what]
    if isinstance(bad, dict):
        bad = made(50.0) | bad
        bad["key"] = records.record_key(bad)
        bad["seal"] = records.record_seal(bad)
    records.save_record(good)
    (records.records_dir() / "strange.json").write_text(json.dumps(bad))
    with pytest.warns(UserWarning, match="left out: .*strange.json") as said:
        assert records.read_records(records.records_dir()) == [good]
    assert "\n" not in str(said[0].message)
    with pytest.warns(UserWarning, match="left out"):
        assert len(records.keep()) == 1
