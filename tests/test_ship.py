"""tools/ship.py: a run's model becomes a file that answers to the run's own identity, smaller and as accurate."""

import hashlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aim_nb.engine import train_continual
from aim_nb.engine.checkpoints import load_tensors, read_saved
from aim_nb.config import Budget, preset
from aim_nb.engine.records import record_name, records_dir
from aim_nb.engine.train_fewshot import run_fewshot, training_checkpoints

ROOT = Path(__file__).resolve().parent.parent


def ship(record, into):
    return subprocess.run(
        [sys.executable, ROOT / "tools/ship.py", records_dir() / record_name(record), "--into", into],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_a_model_is_shipped_under_its_identity(tmp_path, monkeypatch):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    rec = run_fewshot(dataset="glyphs", method="sib+aim", budget="smoke", steps=4)
    done = ship(rec, tmp_path / "shipped")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "shipped").iterdir()
    checkpoints = training_checkpoints(rec)
    shipped, own = read_saved(path, checkpoints.identity), checkpoints.weights(rec["metrics"]["best_step"])
    assert shipped.step == own.step and shipped.tensors.keys() == own.tensors.keys()
    _, meta = load_tensors(path)
    assert abs(meta["accuracy"] - rec["metrics"]["accuracy"]) <= 0.05 and meta["record"]["key"] == rec["key"]
    kind = getattr(torch, meta["dtype"])
    assert all(
        t.dtype in (kind, torch.int64) and torch.allclose(t.float(), own.tensors[k].float(), rtol=1e-3, atol=1e-6)
        for k, t in shipped.tensors.items()
    )
    assert all(
        x in done.stdout
        for x in (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            f"{meta['accuracy']:.2f} %",
            f"{sum(t.numel() for t in shipped.tensors.values()):,} numbers",
        )
    )


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_continual_model_is_shipped_with_the_weights_that_were_tested(tmp_path, monkeypatch, which):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    falling = itertools.count(100, -1)
    monkeypatch.setattr(train_continual, "validate_continual", lambda *a, **k: dict(accuracy=float(next(falling))))
    b = Budget("tiny", "continual", steps=3, val_every=1, width=4, runs=1, rates=1, rate_runs=1, classes=4)
    protocol = preset("ours", "glyphs", weights=which)
    rec = train_continual.run_continual("glyphs", "oml+aim", 0, b, protocol, M=6, K=2, l=1, inner=3, random=8)
    done = ship(rec, tmp_path / "shipped")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "shipped").iterdir()
    saved = read_saved(path, train_continual.training_checkpoints(rec).identity)
    assert saved.step == dict(last=3, best=1)[which]


def test_what_cannot_be_shipped_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    plain = run_fewshot(dataset="glyphs", method="sib", budget="smoke", steps=2)
    done = ship(plain, tmp_path / "shipped")
    assert done.returncode and done.stderr.startswith("ship: sib has no AIM") and "Traceback" not in done.stderr
    assert not (tmp_path / "shipped").exists()
