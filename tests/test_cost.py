"""What checkpoints cost, measured at the paper's sizes with the loop's own spacing; shown, not judged by a clock."""

import numpy as np
import pytest

from accidents import tiny_bank
from aim_nb.data.files import load_bank
from aim_nb.engine.checkpoints import Checkpoints
from aim_nb.core import numpy_rng
from aim_nb.config import Budget
from aim_nb.engine.loop import run_loop
from aim_nb.engine.train_continual import ContinualTrainee
from aim_nb.engine.train_fewshot import train_fewshot


def show(tally, what, history, folder):
    "Note the share of the time that went into saves, and how many megabytes one of them is."
    size = max(p.stat().st_size for p in folder.rglob("*.safetensors")) / 1e6
    tally.figures.append(
        dict(
            what=f"checkpoints of {what}, {size:.0f} MB each: share of the run's {history.seconds:.0f} s",
            value=100 * history.save_seconds / history.seconds,
            unit="%",
        )
    )
    assert 0 < history.save_seconds < history.seconds and list(folder.glob("step-*"))


@pytest.mark.stress
def test_cost_in_fewshot_training(tmp_path, tally):
    rng = numpy_rng("cost")

    def split():
        return rng.normal(size=(40 * 30, 256)).astype(np.float32), np.repeat(np.arange(40), 30)

    r = train_fewshot(
        dict(train=split(), val=split(), test=split()),
        budget=Budget("cost", "fewshot", 1500, 500, 50, 20),
        checkpoints=Checkpoints(tmp_path, {}),
    )
    show(tally, "SIB+AIM", r.history, tmp_path)


@pytest.mark.stress
def test_cost_in_continual_training(tmp_path, tally):
    b = Budget("cost", "continual", 96, 48, width=32, classes=4)
    t = ContinualTrainee(load_bank(tiny_bank(tmp_path / "data") / "glyphs"), "oml+aim", 0, b, n_out=300)
    show(tally, "OML+AIM", run_loop(t, b.steps, b.val_every, Checkpoints(tmp_path / "run", {})), tmp_path / "run")
