"""The shipped weights are what their card says, small, and readable without running anything."""

import hashlib, pathlib, re

import pytest
import torch
from aim_nb.engine.checkpoints import load_tensors
from aim_nb.core import AimError

WEIGHTS = pathlib.Path(__file__).parent.parent / "aim_nb" / "weights"
CARD = (WEIGHTS / "README.md").read_text()
FILES = sorted(WEIGHTS.glob("*.safetensors"))


def test_the_card_names_every_file_with_its_checksum():
    named = dict(re.findall(r"`([\w.+-]+\.safetensors)`.*`([0-9a-f]{64})`", CARD))
    assert named == {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in FILES}


def test_they_are_small():
    assert FILES and sum(f.stat().st_size for f in FILES) < 20e6


def test_accuracies_on_the_card_are_those_in_the_files():
    for f in FILES:
        tensors, meta = load_tensors(f)
        row = next(line for line in CARD.splitlines() if f.name in line)
        assert f"{meta['accuracy']:.2f} %" in row and f"{sum(t.numel() for t in tensors.values()):,} numbers" in row


def test_glyphs_backbone_is_the_one_that_the_demo_asks_for():
    from aim_nb.data.banks import open_bank
    from aim_nb.engine.pretrain import pretrained_backbone

    bank, (_, meta) = open_bank("glyphs"), load_tensors(next(WEIGHTS.glob("glyphs-conv4-*")))
    if meta["identity"]["images"]["data"] != bank.sha:
        pytest.skip("this machine draws other glyphs (another Pillow or matplotlib), so it trains its own backbone")
    net, info = pretrained_backbone(bank, "conv4", "quick", seed=0)
    assert info["source"] == "shipped" and info["d_out"] == 256 and not net.training


def test_shipped_models_load_and_stand_as_their_record_says(tmp_path, monkeypatch):
    "Without a run of its own, a reader gets the model from the package."
    from aim_nb.engine import train_continual
    from aim_nb.engine import train_fewshot
    from aim_nb.data.banks import open_bank

    monkeypatch.setenv("AIM_RUNS", str(tmp_path))
    models = [meta["record"] for f in FILES for meta in [load_tensors(f)[1]] if "record" in meta]
    assert {r["task"] for r in models} == {"fewshot", "continual"}
    for r in models:
        if open_bank(r["dataset"]).sha != r["data_sha"]:
            pytest.skip("this machine draws other glyphs, so it trains its own models")
        net = (train_fewshot.load_fewshot if r["task"] == "fewshot" else train_continual.load_continual)(r)[0]
        assert not net.training and all(p.dtype == torch.float32 and p.isfinite().all() for p in net.parameters())
        with pytest.raises(AimError, match="run it again"):
            (train_fewshot.load_fewshot if r["task"] == "fewshot" else train_continual.load_continual)(
                r | dict(seed=77)
            )
