"""WRN-28-10 from real images to a record: a pretraining step, features, SIB+AIM, at a budget of seconds."""

import numpy as np
import pytest
from PIL import Image

from aim_nb.data.banks import bank_dir, open_bank
from aim_nb.config import Budget
from aim_nb.engine.train_fewshot import load_fewshot, run_fewshot

PER_CLASS = dict(train=4, val=16, test=3)  # validation episodes of pretraining ask for fifteen images a class


@pytest.fixture
def few_images(tmp_path):
    "Five classes of each split of CIFAR-FS with a handful of images each, as a folder of a user's own."
    if not (bank_dir("cifar-fs") / "bank.json").exists():
        pytest.skip("needs CIFAR-100's images: set AIM_DATA to where `aim-nb data prepare cifar-fs` put them")
    bank = open_bank("cifar-fs")
    for split, n in PER_CLASS.items():
        for c, rows in zip(bank.classes(split)[:5], bank.class_rows(split)):
            (folder := tmp_path / "few" / split / bank.class_names[c].replace("/", "-")).mkdir(parents=True)
            for r in rows[:n]:
                Image.fromarray(np.asarray(bank.images[r])).save(folder / f"{r}.png")
    return tmp_path / "few"


def test_wrn_28_10_end_to_end_on_real_images(few_images, tmp_path, monkeypatch):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("AIM_DATA", str(tmp_path / "data"))
    budget = Budget(
        "smoke", "fewshot", steps=4, val_every=2, val_episodes=4, test_episodes=4, pretrain_epochs=1, views=1
    )
    kw = dict(
        dataset=f"folder:{few_images}@16", backbone="wrn-28-10", budget=budget, n_shot=1, n_query=2
    )  # half the side: a quarter of the cost
    rec = run_fewshot(method="sib+aim", **kw)
    assert rec["parameters"]["backbone"] == "wrn-28-10" and rec["metrics"]["backbone"]["source"] == "trained"
    assert (rec["metrics"]["d_in"], rec["metrics"]["d_out"]) == (640, 800) and 0 <= rec["metrics"]["accuracy"] <= 100
    assert [h["step"] for h in rec["history"]] == [2, 4] and rec["metrics"]["mechanisms_used"] >= 8
    layer, head = load_fewshot(rec)
    assert layer.M == 32 and layer.d_in == 640 and head is not None
    assert run_fewshot(method="sib", **kw)["metrics"]["backbone"]["source"] == "reused", (
        "the second method finds backbone and features"
    )
