"""Pretraining and feature banks: killed and resumed, reused by key, damaged files, plugged-in modules and arrays."""

import os, resource, signal, sys, textwrap
from pathlib import Path
import numpy as np, pytest, torch
from accidents import Child, warm
from aim_nb import pretrain
from aim_nb.bank_files import Bank
from aim_nb.checkpoints import load_tensors
from aim_nb.core import AimError, Budget, numpy_rng
from aim_nb.pretrain import feature_bank, features_from_arrays, fill_array, pretrained_backbone
from aim_nb.tasks import draw_episodes

TOY = textwrap.dedent("""
    import numpy as np
    from aim_nb.bank_files import Bank
    from aim_nb.core import Budget, numpy_rng
    def toy_bank(classes=(6, 5, 5), n=20):
        rng, C = numpy_rng("toy"), sum(classes)
        means = rng.integers(0, 256, (C, 1, 28, 28, 1))
        images = np.clip(means + rng.normal(0, 60, (C, n, 28, 28, 1)), 0, 255).astype(np.uint8).reshape(-1, 28, 28, 1)
        at = np.cumsum((0, *classes)).tolist()
        parts = {s: list(range(at[i], at[i+1])) for i, s in enumerate(("train", "val", "test"))}
        return Bank("glyphs", images, np.repeat(np.arange(C), n), np.zeros(C*n, np.uint8), [str(c) for c in range(C)], parts, dict(sha256="toy"))
    BUDGET = Budget("smoke", "fewshot", 0, 0, val_episodes=20, pretrain_epochs=8)
""")
exec(TOY)

WORKER = TOY + textwrap.dedent("""
    import functools, os, signal, sys
    from aim_nb import pretrain
    death = sys.argv[1]
    pretrain.run_loop = functools.partial(pretrain.run_loop, save_every=2)
    pretrain.fill_array = functools.partial(pretrain.fill_array, every=0)
    pretrain.BLOCK = 16
    class Killer:
        def on_step(self, i, metrics):
            if death == f"step:{i}": os.kill(os.getpid(), signal.SIGKILL)
    bank = toy_bank()
    net, info = pretrain.pretrained_backbone(bank, "conv4", BUDGET, width=4, callbacks=[Killer()])
    blocks, plain = [0], pretrain.view_maker
    def maker(*args):
        make = plain(*args)
        def watched(a, b):
            blocks[0] += 1
            if death == f"block:{blocks[0]}": os.kill(os.getpid(), signal.SIGKILL)
            return make(a, b)
        return watched
    pretrain.view_maker = maker
    features = pretrain.feature_bank(net, bank, views=2)
    print("blocks", blocks[0])
""")


def work(runs, death=""):
    "Run the worker in a forked process: exit code and what it said."
    warm()

    def run():
        os.environ["AIM_RUNS"], sys.argv = str(runs), ["", death]
        exec(WORKER, {})

    child = Child(run, f"{runs}.txt")
    return child.wait(), child.text, child.text


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
    code, out, err = work(tmp_path / "whole")
    assert code == 0 and "blocks 22" in out, err
    assert work(tmp_path / "cut", "step:5")[0] == -signal.SIGKILL
    assert work(tmp_path / "cut", "block:4")[0] == -signal.SIGKILL
    code, out, err = work(tmp_path / "cut")
    assert code == 0 and "blocks 19" in out, (out, err)  # three of eight blocks were there already
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
    monkeypatch.setattr(pretrain, "files", lambda package: tmp_path / "package")
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
    assert info["sha"] == pretrain.module_sha(own) == pretrain.module_sha(net)
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


ones = lambda a, b: torch.ones(b - a, 1, 4)


def test_features_where_space_cannot_be_reserved(tmp_path, monkeypatch):
    "As on macOS."
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert (np.load(fill_array(tmp_path / "f", (300, 1, 4), ones)) == 1).all()


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
    path = fill_array(tmp_path / "f", (300, 1, 4), ones)
    assert (
        reserved == [path.stat().st_size]
        and (np.load(path) == 1).all()
        and sorted(p.name for p in path.parent.iterdir()) == [".lock", "features.npy"]
    )


def test_damaged_features_are_refused(bank, tmp_path):
    net, _ = pretrained_backbone(bank, torch.nn.Sequential(torch.nn.AvgPool2d(7), torch.nn.Flatten()))
    feature_bank(net, bank, views=2)
    for p in (tmp_path / "runs" / "features").glob("*/features.npy"):
        p.write_bytes(p.read_bytes()[:-100])
    with pytest.raises(AimError, match="damaged"):
        feature_bank(net, bank, views=2)


def test_arrays_must_be_float32_and_finite():
    X, y = np.ones((6, 3), np.float32), [0, 0, 1, 1, 2, 2]
    assert features_from_arrays(test=(X, y)).d == 3
    for bad in (X.astype(np.float16), X.astype(np.float64), X * np.nan, X[:4], X[0]):
        with pytest.raises(AimError):
            features_from_arrays(test=(bad, y))
