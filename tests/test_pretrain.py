"""Pretraining and feature banks: killed and resumed, reused by key, damaged files, plugged-in modules and arrays."""

import json
import os
import resource
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from accidents import Child, die, warm
from aim_nb.engine import pretrain
from aim_nb.data.files import Bank
from aim_nb.engine.checkpoints import load_tensors
from aim_nb.core import AimError, numpy_rng
from aim_nb.config import Budget
from aim_nb.engine.pretrain import FeatureCache, feature_bank, features_from_arrays, pretrained_backbone
from aim_nb.data.tasks import draw_episodes


def fill_array(folder, shape, make, **kw):
    return FeatureCache(folder, shape).fill(make, **kw)


BUDGET = Budget("smoke", "fewshot", 0, 0, val_episodes=20, pretrain_epochs=8)


def toy_bank(classes=(6, 5, 5), n=20):
    "Classes that are noise around a random image."
    rng, C = numpy_rng("toy"), sum(classes)
    means = rng.integers(0, 256, (C, 1, 28, 28, 1))
    images = np.clip(means + rng.normal(0, 60, (C, n, 28, 28, 1)), 0, 255).astype(np.uint8).reshape(-1, 28, 28, 1)
    at = np.cumsum((0, *classes)).tolist()
    parts = {s: list(range(at[i], at[i + 1])) for i, s in enumerate(("train", "val", "test"))}
    labels, names = np.repeat(np.arange(C), n), [str(c) for c in range(C)]
    return Bank("glyphs", images, labels, np.zeros(C * n, np.uint8), names, parts, dict(sha256="toy"))


class Killer:
    "A callback that kills the process at a step."

    def __init__(self, death):
        self.death = death

    def on_step(self, i, metrics):
        if self.death == f"step:{i}":
            die()


def pretrain_and_fill(runs, death):
    "In a child: pretrain and compute features, saving often, and die where told."
    os.environ["AIM_RUNS"] = str(runs)
    loop, fill, make = pretrain.run_loop, pretrain.FeatureCache.fill, pretrain.block_features
    blocks = [0]

    def watched(*args):
        blocks[0] += 1
        if death == f"block:{blocks[0]}":
            die()
        return make(*args)

    pretrain.run_loop = lambda *args, **kw: loop(*args, save_every=2, **kw)
    pretrain.FeatureCache.fill = lambda *args, **kw: fill(*args, every=0, **kw)
    pretrain.block_features = watched
    pretrain.BLOCK = 16
    bank = toy_bank()
    net, _ = pretrained_backbone(bank, "conv4", BUDGET, width=4, callbacks=[Killer(death)])
    feature_bank(net, bank, views=2)
    print("blocks", blocks[0])


def work(runs, death=""):
    "Exit code of a process that pretrains and computes features, and what it said."
    warm()
    child = Child(lambda: pretrain_and_fill(runs, death), f"{runs}.txt")
    return child.wait(), child.text


def products(runs):
    "Weights (without the seconds they took) and features that a worker left."
    (weights,) = Path(runs, "backbones").glob("*.safetensors")
    tensors, meta = load_tensors(weights)
    return (
        tensors,
        meta["history"],
        {p.parent.name: p.read_bytes() for p in Path(runs, "features").glob("*/features.npy")},
    )


def test_killed_and_resumed_is_bit_for_bit(tmp_path):
    "SIGKILL in a training step and in the filling of the features: weights, history and features are the same in every bit."
    code, text = work(tmp_path / "whole")
    assert code == 0 and "blocks 22" in text, text
    assert work(tmp_path / "cut", "step:5")[0] == -signal.SIGKILL
    assert work(tmp_path / "cut", "block:4")[0] == -signal.SIGKILL
    code, text = work(tmp_path / "cut")
    assert code == 0 and "blocks 19" in text, text  # three of eight blocks were there already
    a, b = products(tmp_path / "whole"), products(tmp_path / "cut")
    assert a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0])
    assert a[1] == b[1] and a[2] == b[2] and len(a[2]) == 3


@pytest.fixture
def bank(tmp_path, monkeypatch):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    return toy_bank()


def test_reused_by_key_and_another_seed_is_another(bank):
    a, first = pretrained_backbone(bank, "conv4", BUDGET, width=4)
    b, second = pretrained_backbone(bank, "conv4", BUDGET, width=4)
    c, third = pretrained_backbone(bank, "conv4", BUDGET, width=4, seed=1)
    assert [i["source"] for i in (first, second, third)] == ["trained", "reused", "trained"]
    assert first["sha"] == second["sha"] != third["sha"]
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    assert not a.training and not any(p.requires_grad for p in a.parameters())
    _, again = pretrained_backbone(bank, "conv4", BUDGET, width=4, fresh=True)
    assert again["source"] == "trained" and again["sha"] == first["sha"]  # same seed, same weights


def test_shipped_weights_are_found(bank, tmp_path, monkeypatch):
    _, info = pretrained_backbone(bank, "conv4", BUDGET, width=4)
    (own,) = (tmp_path / "runs" / "backbones").glob("*.safetensors")
    (tmp_path / "package" / "weights").mkdir(parents=True)
    own.rename(tmp_path / "package" / "weights" / own.name)
    monkeypatch.setattr(pretrain, "SHIPPED", tmp_path / "package" / "weights")
    _, found = pretrained_backbone(bank, "conv4", BUDGET, width=4)
    assert found["source"] == "shipped" and found["sha"] == info["sha"]


def test_a_damaged_backbone_is_refused(bank, tmp_path):
    pretrained_backbone(bank, "conv4", BUDGET, width=4)
    (own,) = (tmp_path / "runs" / "backbones").glob("*.safetensors")
    own.write_bytes(own.read_bytes()[:-8])
    with pytest.raises(AimError, match="damaged"):
        pretrained_backbone(bank, "conv4", BUDGET, width=4)


def test_own_module_and_features(bank, tmp_path):
    net, info = pretrained_backbone(bank, torch.nn.Sequential(torch.nn.AvgPool2d(7), torch.nn.Flatten()))
    assert info["source"] == "given" and net.d_out == 16
    f = feature_bank(net, bank, views=3)
    assert {s: a.shape for s, a in f.arrays.items()} == dict(train=(120, 3, 16), val=(100, 1, 16), test=(100, 1, 16))
    assert f.info["views"] == 3 and f.tensor("train").dtype == torch.float32
    before = (tmp_path / "runs" / "features").stat().st_mtime_ns, feature_bank(net, bank, views=3).sha
    assert before == ((tmp_path / "runs" / "features").stat().st_mtime_ns, f.sha)  # found, not made again
    assert feature_bank(net, bank, views=3, seed=1).sha != f.sha


def test_own_module_is_left_as_it_was(bank):
    "A copy of it is frozen."
    own = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    net, info = pretrained_backbone(bank, own)
    assert own.training and not hasattr(own, "d_out") and all(p.requires_grad for p in own.parameters())
    assert not net.training and net.d_out == 4 and not any(p.requires_grad for p in net.parameters())
    assert info["sha"] == pretrain.module_sha(own, (1, 28, 28)) == pretrain.module_sha(net, (1, 28, 28))
    with torch.no_grad():
        own[0].weight.zero_()
    assert net[0].weight.any()


def test_an_episode_never_holds_two_views_of_an_image(bank):
    net, _ = pretrained_backbone(bank, torch.nn.Sequential(torch.nn.AvgPool2d(7), torch.nn.Flatten()))
    f = feature_bank(net, bank, views=4)
    e = draw_episodes(f.class_rows("train"), 0, range(30), n_shot=5)
    rows = np.concatenate([e.support, e.query], -1).reshape(30, -1)
    pool = f.pool_rows("train", rows, seed=0, index=0)
    assert (pool // 4 == rows).all() and all(len(set(r)) == len(r) for r in pool // 4)
    assert f.take("train", e.support).shape == (30, 5, 5, 16)


def test_views_differ_and_exact_ones_do_not_depend_on_the_seed(bank):
    net, _ = pretrained_backbone(bank, torch.nn.Sequential(torch.nn.AvgPool2d(7), torch.nn.Flatten()))
    a, b = feature_bank(net, bank, views=2, seed=0), feature_bank(net, bank, views=2, seed=1)
    assert not torch.equal(a.tensor("train"), b.tensor("train")) and torch.equal(a.tensor("test"), b.tensor("test"))
    assert not np.array_equal(a.arrays["train"][:, 0], a.arrays["train"][:, 1])


def test_a_full_disk_is_said_before_the_work(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(AimError, match="no room for features"):
            fill_array(tmp_path / "f", (1000, 2, 50), lambda a, b: pytest.fail("work was begun"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (tmp_path / "f").iterdir()] == [".lock"]


def ones(start, stop):
    return torch.ones(stop - start, 1, 4)


def test_features_where_space_cannot_be_reserved(tmp_path, monkeypatch):
    "As on macOS."
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert (fill_array(tmp_path / "f", (300, 1, 4), ones) == 1).all()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot reserve space")
def test_a_stop_while_space_is_reserved_leaves_nothing_to_go_on_from(tmp_path, monkeypatch):
    "The second call reserves it again."
    reserved, reserve = [], os.posix_fallocate

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", stopped)
    with pytest.raises(KeyboardInterrupt):
        fill_array(tmp_path / "f", (300, 1, 4), ones)
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: (reserved.append(args[-1]), reserve(*args)))
    assert (fill_array(tmp_path / "f", (300, 1, 4), ones) == 1).all()
    assert reserved == [(tmp_path / "f" / "features.npy").stat().st_size]
    assert sorted(p.name for p in (tmp_path / "f").iterdir()) == [".lock", "features.json", "features.npy"]


# ---- cached features are checked


def numbers(start, stop):
    "No row is zero, no two are equal."
    return (1.0 + torch.arange(start, stop))[:, None, None].expand(-1, 2, 4).contiguous()


SHAPE = (1000, 2, 4)
WHOLE = numbers(0, 1000).numpy()
CALLS = {
    "array created": (FeatureCache, "reserve"),
    "space reserved": (os, "posix_fallocate"),
    "flushed": (np.memmap, "flush"),
    "noted": (pretrain, "atomic_write"),
    "synced": (os, "fsync"),
    "renamed": (os, "replace"),
}


def filled(folder, make, **kw):
    "What is on disk after `fill_array`."
    fill_array(folder, SHAPE, make, **kw)
    return np.load(folder / "features.npy")


def fill_and_die(folder, call, number, before):
    "In a child: fill an array and die just before or just after call `number` of a function."
    owner, name = CALLS[call]
    function, calls = getattr(owner, name), [0]

    def watched(*args, **kw):
        calls[0] += 1
        if before and calls[0] == number:
            die()
        out = function(*args, **kw)
        if calls[0] == number:
            die()
        return out

    setattr(owner, name, watched)
    fill_array(folder, SHAPE, numbers, every=0)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("deleted", [False, True])
def test_killed_between_any_two_calls(call, deleted, tmp_path):
    "SIGKILL just before and just after each call that touches the disk; then the array may be deleted, too: no row is ever missing."
    if call == "space reserved" and not hasattr(os, "posix_fallocate"):
        pytest.skip("this system cannot reserve space")
    warm()
    kills = 0
    for number in (1, 2, 5, 8, 10):
        for before in (True, False):
            folder = tmp_path / f"{number}-{before}"
            child = Child(partial(fill_and_die, folder, call, number, before), tmp_path / "said.txt")
            assert child.wait() in (0, -signal.SIGKILL), child.text
            kills += child.code != 0
            if deleted:
                (folder / "features.npy").unlink(missing_ok=True)
            assert np.array_equal(filled(folder, numbers), WHOLE), (call, number, before)
            assert not list(folder.glob(".*.part"))
    assert kills >= 2


def zero_half(folder):
    a = np.load(folder / "features.npy", mmap_mode="r+")
    a[500:] = 0
    a.flush()


def one_nan(folder):
    a = np.load(folder / "features.npy", mmap_mode="r+")
    a[700, 1, 2] = np.nan
    a.flush()


def cut_short(folder):
    path = folder / "features.npy"
    path.write_bytes(path.read_bytes()[:-100])


def break_header(folder):
    path = folder / "features.npy"
    path.write_bytes(b"no array" + path.read_bytes()[8:])


def lose_note(folder):
    (folder / "features.json").unlink()


def break_note(folder):
    (folder / "features.json").write_text("[]")


def older_version(folder):
    "What an earlier version left: an array without checksum, and its own notes."
    lose_note(folder)
    zero_half(folder)
    (folder / "done.json").write_text(json.dumps(dict(rows=500)))


@pytest.mark.parametrize("damage", [zero_half, one_nan, cut_short, break_header, lose_note, break_note, older_version])
def test_damaged_features_are_computed_again(damage, tmp_path, capsys):
    folder = tmp_path / "f"
    fill_array(folder, SHAPE, numbers)
    damage(folder)
    capsys.readouterr()
    assert np.array_equal(filled(folder, numbers), WHOLE)
    assert "computing them again" in capsys.readouterr().out
    assert np.array_equal(fill_array(folder, SHAPE, lambda *_: pytest.fail("computed a third time")), WHOLE)
    assert capsys.readouterr().out == ""


def test_a_bank_whose_cache_was_damaged(bank, tmp_path):
    "From the images: zeroed rows and NaN in the cache never reach an experiment."
    net, _ = pretrained_backbone(bank, torch.nn.Sequential(torch.nn.AvgPool2d(7), torch.nn.Flatten()))
    before = {split: a.copy() for split, a in feature_bank(net, bank, views=2).arrays.items()}
    for bad in (0, np.nan):
        for path in (tmp_path / "runs" / "features").glob("*/features.npy"):
            a = np.load(path, mmap_mode="r+")
            a[len(a) // 2 :] = bad
            a.flush()
        after = feature_bank(net, bank, views=2)
        assert all(np.array_equal(before[split], after.arrays[split]) for split in before)


class Divides(torch.nn.Module):
    "Not finite where an image of the batch is bright; the probe's images are not."

    d_out = 1

    def forward(self, x):
        z = x.flatten(1).mean(1, keepdim=True)
        return torch.where(z > z.median(), z / 0, z) if len(x) > 4 else z


@pytest.mark.parametrize("views", [2, 0])
def test_features_that_are_not_finite_are_refused(bank, views):
    net, _ = pretrained_backbone(bank, Divides())
    with pytest.raises(AimError, match="features of glyphs/train.* are not finite; look at the weights"):
        feature_bank(net, bank, ("train",), views=views).take("train", range(100))


def test_a_second_process_waits_for_the_features(tmp_path):
    "Both end well, the features are computed once."
    folder = tmp_path / "f"
    warm()

    def slow(start, stop):
        with open(tmp_path / "blocks.txt", "a") as f:
            f.write(f"{start}\n")
        time.sleep(0.1)
        return numbers(start, stop)

    def fill():
        assert np.array_equal(fill_array(folder, SHAPE, slow), WHOLE)

    first = Child(fill, tmp_path / "first.txt")
    while not (tmp_path / "blocks.txt").exists():
        assert first.wait(0.01) is None, first.text
    second = Child(fill, tmp_path / "second.txt")
    assert (first.wait(), second.wait()) == (0, 0), first.text + second.text
    assert second.text.count("waiting for it") == 1 and "waiting" not in first.text
    assert len((tmp_path / "blocks.txt").read_text().split()) == 8


def test_fresh_leaves_open_features_alone(tmp_path):
    "A process that reads the old array keeps it."
    old = fill_array(tmp_path / "f", SHAPE, numbers)
    new = fill_array(tmp_path / "f", SHAPE, lambda start, stop: -numbers(start, stop), fresh=True)
    assert np.array_equal(old, WHOLE) and np.array_equal(new, -WHOLE)


# ---- a module of one's own is keyed by what it computes


class Flagged(torch.nn.Module):
    "Prints the same and holds the same weights, whatever its flags."

    def __init__(self, absolute=False, scale=1.0, noise=0.0):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 8, 5)
        with torch.no_grad():
            self.conv.weight.copy_(torch.from_numpy(numpy_rng("flagged").normal(size=(8, 1, 5, 5))))
            self.conv.bias.zero_()
        self.absolute, self.scale, self.noise = absolute, scale, noise

    def forward(self, x):
        z = self.conv(x)
        z = (z.abs() if self.absolute else z.relu()).mean((2, 3)) * self.scale
        return z + self.noise * torch.randn_like(z)


def test_modules_that_differ_in_a_flag_have_keys_of_their_own(bank):
    nets = [Flagged(), Flagged(absolute=True), Flagged(scale=2.0), Flagged()]
    given = [pretrained_backbone(bank, net) for net in nets]
    shas = [info["sha"] for _, info in given]
    assert len(set(shas)) == 3 and shas[0] == shas[3]
    banks = [feature_bank(net, bank, ("test",)) for net, _ in given]
    assert len({f.sha for f in banks}) == 3 and banks[0].sha == banks[3].sha
    view = pretrain.BankView(bank)
    for (net, _), f in zip(given, banks):
        direct = pretrain.extract(net, view, np.concatenate(bank.class_rows("test")))
        assert torch.allclose(f.tensor("test"), direct, atol=1e-5)


def test_a_module_that_is_random_in_eval_mode_is_refused(bank):
    with pytest.raises(AimError, match="Flagged gives other features each time .* remove what is random"):
        pretrained_backbone(bank, Flagged(noise=0.1))


def test_a_probe_leaves_the_module_and_the_random_numbers_alone(bank):
    own = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(), torch.nn.Flatten())
    before = {k: v.clone() for k, v in own.state_dict().items()}
    state = torch.get_rng_state()
    pretrain.module_sha(own, (1, 28, 28))
    assert torch.equal(state, torch.get_rng_state()) and own.training
    assert all(torch.equal(v, before[k]) for k, v in own.state_dict().items())


def test_backbones_built_by_name_keep_their_keys(bank):
    "Structure and weights, as ever: features and records made before are found."
    net, _ = pretrained_backbone(bank, "conv4", BUDGET, width=4)
    assert feature_bank(net, bank, ("test",)).info["backbone"] == pretrain.module_sha(net)
    net, info = pretrained_backbone(bank, net)
    assert feature_bank(net, bank, ("test",)).info["backbone"] == info["sha"] != pretrain.module_sha(net)


def test_arrays_must_be_float32_and_finite():
    X, y = np.ones((6, 3), np.float32), [0, 0, 1, 1, 2, 2]
    assert features_from_arrays(test=(X, y)).d == 3
    for bad in (X.astype(np.float16), X.astype(np.float64), X * np.nan, X[:4], X[0]):
        with pytest.raises(AimError):
            features_from_arrays(test=(bad, y))
