"""Records: which answer is found, and which code signs it."""

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
