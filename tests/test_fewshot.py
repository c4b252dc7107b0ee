"Few-shot: killed runs resume to the same bits, batched evaluation equals the copies, and both comparisons can fail."

import copy, json, os, signal, subprocess, sys, textwrap
from dataclasses import dataclass
import numpy as np
import pytest
import torch
from aim_nb.aim import AIM, Identity, linear_twin, random_masks
from aim_nb.engine.checkpoints import Checkpoints
from aim_nb.core import AimError, key_seed, numpy_rng, torch_rng
from aim_nb.config import Budget, FEWSHOT_METHODS, Protocol, SWITCHES
from aim_nb.engine.evaluate import Score, evaluate, with_decision
from aim_nb.engine.pretrain import features_from_arrays
from aim_nb.kernels.episodes import ProductTable
from aim_nb.sib import SIBHead, adapted_logits, class_labels, training_step
from aim_nb.data.tasks import draw_episodes
from aim_nb.engine.train_fewshot import FewshotTrainee, Rates, fewshot_identity, make_layer, train_fewshot

SMALL = dict(M=6, K=2, l=2, d_out=12)
MASKS = ("attended", "fixed", "random")


@dataclass(frozen=True)
class WithMask(Protocol):
    "The protocol with its switch `mask`, also where `Protocol` does not have it yet."

    mask: str = "attended"


def with_mask(mask, **kw):
    return Protocol(mask=mask, **kw) if "mask" in SWITCHES else WithMask(mask=mask, **kw)


def world(seed=0, d=10, n_classes=8, n_images=20, views=2):
    "A small feature bank: three splits of noisy class centres."
    rng = numpy_rng(seed, "test world")

    def split(v):
        x = rng.normal(size=(n_classes, 1, d)) + rng.normal(size=(n_classes, n_images, d))
        x = x.reshape(-1, 1, d) + 0.2 * rng.normal(size=(n_classes * n_images, v, d))
        return x.astype(np.float32), np.repeat(np.arange(n_classes), n_images)

    return features_from_arrays(train=split(views), val=split(1), test=split(1))


def models(dtype=torch.float64, d=10, **kw):
    aim = AIM(d, 14, **{**dict(M=8, K=3, l=1, d_h=6, d_k=5), **kw}, generator=torch_rng(1))
    layers = {"sib": Identity(d), "sib+linear": linear_twin(aim, generator=torch_rng(2)), "sib+aim": aim}
    return {
        k: (m.to(dtype).eval(), SIBHead(m.d_out, eps=0.02, generator=torch_rng(3)).to(dtype)) for k, m in layers.items()
    }


def evaluate_reference(layer, head, x, episodes, adapt=True, lr=3e-3, decision=None, masks=None):
    "Episode by episode, by the plain definition: copy the layer, one SGD step on the support loss, infer."
    layer = with_decision(layer, decision, masks, len(x))
    logits = []
    for support, query in zip(episodes.support, episodes.query):
        rows = torch.as_tensor(np.concatenate([support.ravel(), query.ravel()]))
        n = support.size
        ranks = (None, None) if masks is None else (masks[rows[:n]], masks[rows])
        logits.append(adapted_logits(layer, head, x[rows], n, lr if adapt else 0.0, ranks))
    logits = torch.stack(logits)
    right = logits.argmax(-1) == class_labels(head.n_way, logits.shape[1])
    return Score(right.double().mean(-1).mul(100).numpy(), logits)


# ---------------------------------------------------------------- evaluation
@pytest.mark.parametrize("n_shot", [1, 3])
@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("method", FEWSHOT_METHODS)
def test_evaluate_equals_the_copies(method, adapt, n_shot):
    x = world().tensor("val").double()
    episodes = draw_episodes(world().class_rows("val"), 0, range(6), n_shot=n_shot, n_query=5, stream="val")
    layer, head = models()[method]
    before = [p.clone() for p in layer.parameters()]
    fast = evaluate(layer, head, x, episodes, adapt=adapt, lr=0.1, keep_logits=True, chunk=4)
    slow = evaluate_reference(layer, head, x, episodes, adapt=adapt, lr=0.1)
    assert (fast.logits - slow.logits).abs().max() < 1e-10
    assert np.array_equal(fast.accuracy, slow.accuracy) and fast.ci95 == slow.ci95
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters()))  # the slow weights stay
    if method != "sib" and adapt:  # negative control: another rate is seen
        other = evaluate(layer, head, x, episodes, lr=0.1001, keep_logits=True)
        assert (other.logits - slow.logits).abs().max() > 1e-6


@pytest.mark.parametrize("kw", [dict(decision="soft"), dict(gate="raw"), dict(K=1), dict(K=8, l=0)])
def test_evaluate_variants_of_aim(kw):
    x = world().tensor("val").double()
    episodes = draw_episodes(world().class_rows("val"), 1, range(4), n_query=5, stream="val")
    layer, head = models(**kw)["sib+aim"]
    fast, slow = (
        evaluate(layer, head, x, episodes, lr=0.03, keep_logits=True),
        evaluate_reference(layer, head, x, episodes, lr=0.03),
    )
    assert (fast.logits - slow.logits).abs().max() < 1e-10


def test_product_table_under_any_memory_limit():
    x, g = world().tensor("val"), torch_rng(0)
    W = torch.randn(5, 10, 3, generator=g)
    kept = torch.rand(len(x), 5, generator=g) > 0.5
    for limit in (0, 12 * 70, 2**20):
        table = ProductTable(x, W, kept, limit)
        for _ in range(6):
            rows = torch.randint(len(x), (9,), generator=g)
            mask = torch.rand(9, 5, generator=g) > 0.5
            mask[0] = False  # a row that uses nothing
            a, gy = torch.rand(9, 5, generator=g), torch.rand(9, 3, generator=g)
            products = torch.einsum("rd,mdv->rmv", x[rows], W)
            assert torch.allclose(table.sum(rows, a, mask), torch.einsum("rm,rmv->rv", a * mask, products), atol=1e-5)
            slopes = torch.einsum("rv,rmv->rm", gy, products) * mask
            assert torch.allclose(table.slopes(rows, gy, mask), slopes, atol=1e-5)


def test_evaluate_refuses_unknown_layers_and_decisions():
    x, episodes = world().tensor("val"), draw_episodes(world().class_rows("val"), 0, range(2), n_query=5)
    with pytest.raises(AimError, match="Linear"):
        evaluate(torch.nn.Linear(10, 4), SIBHead(4), x, episodes)
    with pytest.raises(AimError, match="decision"):
        evaluate(*models(torch.float32)["sib+aim"], x, episodes, decision="firm")
    with pytest.raises(AimError, match="sigmoid"):
        evaluate(*models(torch.float32, gate="raw")["sib+aim"], x, episodes, decision="soft")


# ---------------------------------------------------------------- training: killed and resumed
SCRIPT = textwrap.dedent("""
    import json, os, signal, sys, torch
    torch.set_num_threads(1)
    sys.path.insert(0, sys.argv[1])
    from test_fewshot import run
    folder, method, update, kill, mask = sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6]
    class Kill:
        def on_step(self, i, metrics):
            if i == kill: os.kill(os.getpid(), signal.SIGKILL)
    r = run(folder, method, update, [Kill()], mask=mask)
    print(json.dumps(dict(metrics=r.metrics, history=list(r.history), resumed=r.history.resumed)))
""")
BUDGET = Budget("test", "fewshot", steps=24, val_every=8, val_episodes=6, test_episodes=8)


def run(folder, method="sib+aim", update="inplace", callbacks=(), seed=0, mask="attended"):
    return train_fewshot(
        world(),
        method,
        seed=seed,
        budget=BUDGET,
        protocol=with_mask(mask, aim_update=update),
        **SMALL,
        rates=Rates(0.02, 0.05, 0.01, 0.9, 5e-4),
        n_query=5,
        callbacks=callbacks,
        checkpoints=Checkpoints(folder, {"method": method, "update": update}),
        save_every=5,
    )


def in_process(folder, method, update, kill, mask="attended"):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "AIM_LIVE": "0"}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, os.path.dirname(__file__), str(folder), method, update, str(kill), mask],
        env=env,
        capture_output=True,
        text=True,
    )


def last_tensors(folder, method, update):
    return Checkpoints(folder, {"method": method, "update": update}).latest().tensors


@pytest.mark.parametrize(
    "method, update, kill, mask",
    [
        ("sib+aim", "inplace", 13, "attended"),
        ("sib+aim", "episode", 7, "attended"),
        ("sib+linear", "inplace", 18, "attended"),
        ("sib+aim", "inplace", 13, "fixed"),
        ("sib+aim", "inplace", 18, "random"),
    ],
)
def test_killed_run_resumes_to_the_same_bits(tmp_path, method, update, kill, mask):
    torch.set_num_threads(1)
    whole = run(tmp_path / "whole", method, update, mask=mask)
    assert in_process(tmp_path / "cut", method, update, kill, mask).returncode == -signal.SIGKILL
    done = in_process(tmp_path / "cut", method, update, -1, mask)
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["resumed"] == 5 * (kill // 5) > 0
    assert told["metrics"] == whole.metrics and told["history"] == list(whole.history)
    a, b = last_tensors(tmp_path / "whole", method, update), last_tensors(tmp_path / "cut", method, update)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_masks_train_different_models(tmp_path):
    weights = {}
    for mask in MASKS:
        run(tmp_path / mask, mask=mask)
        weights[mask] = last_tensors(tmp_path / mask, "sib+aim", "inplace")["layer.W_M"]
    for a, b in (("attended", "fixed"), ("attended", "random"), ("fixed", "random")):
        assert not torch.equal(weights[a], weights[b])


def test_the_comparison_can_fail(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", seed=1)
    ta, tb = (last_tensors(tmp_path / k, "sib+aim", "inplace") for k in "ab")
    assert a.metrics != b.metrics and any(not torch.equal(ta[k], tb[k]) for k in ta)


def fresh_trainee(world_=None, layer=None, **kw):
    return FewshotTrainee(
        layer or make_layer("sib+aim", 10, **SMALL),
        SIBHead(12, generator=torch_rng(0)),
        world_ or world(),
        **{**dict(rates=Rates(0.02, 0.05, 0.01, 0.9, 5e-4), n_query=5, val_episodes=3), **kw},
    )


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.weights().values(), b.weights().values()))


@pytest.mark.parametrize("lost", ["momentum", "layer.h", "layer.W_Q", "head.w", "head.dni.W1"])
def test_every_part_of_the_state_matters(lost):
    "A state taken in the middle of a run leads on to the same bits; one with other momentum or weights leads elsewhere."
    one, same, other = fresh_trainee(), fresh_trainee(), fresh_trainee()
    for i in range(12):
        one.step(i)
    state = {k: v.clone() for k, v in one.state_dict().items()}
    same.load_state_dict(state)
    other.load_state_dict({**state, lost: state[lost] + 0.1})
    for t in (one, same, other):
        for i in range(12, 18):
            t.step(i)
    assert same_weights(one, same) and not same_weights(one, other)
    assert torch.equal(one.used, same.used)


def test_a_checkpoint_of_version_0_1_goes_on():
    "It held h and W_Q as coordinates in the basis of W_Q's columns and h, and the state at the start of a block with the episodes to play again."
    one, other = fresh_trainee(), fresh_trainee()
    for i in range(8):
        one.step(i)
    state = {k: v.clone() for k, v in one.state_dict().items()}
    M, _, d_k = state["layer.W_Q"].shape
    width = 1 + d_k + -(1 + d_k) % 8
    turn = torch.eye(width).repeat(M, 1, 1) + 0.01 * torch.randn(M, width, width, generator=torch_rng(1))
    turn[:, 1 + d_k :] = 0
    turn[:, :, 1 + d_k :] = 0
    basis = torch.cat([state["layer.W_Q"], state["layer.h"][:, :, None]], 2).double()
    old = torch.linalg.solve(turn[:, : 1 + d_k, : 1 + d_k].double().mT, basis.mT).mT.float()  # old @ turn = basis
    state |= {"layer.W_Q": old[:, :, :d_k].clone(), "layer.h": old[:, :, d_k].clone()}
    state |= {"frame.0": turn[:, :, d_k].clone(), "frame.1": turn[:, :, :d_k].mT.clone()}
    state |= {"again": torch.tensor([8, 3]), "queries.q": torch.zeros(M, d_k)}
    other.load_state_dict(state)
    for i in range(8, 11):
        one.step(i)
    gaps = [(a - b).abs().max().item() for a, b in zip(one.weights().values(), other.weights().values())]
    assert max(gaps) < 1e-3
    state["frame.0"] = state["frame.0"] * 1.1
    other.load_state_dict(state)
    assert (one.layer.h - other.layer.h).abs().max() > 1e-2


# ---------------------------------------------------------------- masks: who chooses the mechanisms
RATES = Rates(0.05, 0.1, 0.02, 0.9, 5e-4)


def double(mask, **kw):
    "A trainee in double precision."
    layer = make_layer("sib+aim", 10, protocol=with_mask(mask), **SMALL).double()
    head = SIBHead(12, eps=0.02, generator=torch_rng(0)).double()
    data = world()
    data.arrays = {split: a.astype(np.float64) for split, a in data.arrays.items()}
    return FewshotTrainee(layer, head, data, protocol=with_mask(mask), rates=RATES, n_query=5, val_episodes=3, **kw)


def plain_step(trainee, i, masks):
    "Weights of AIM after one training step on episode i by the plain definition, from those of `trainee`."
    layer, head = copy.deepcopy(trainee.layer), copy.deepcopy(trainee.head)
    z, images = trainee.feed.episode(i)
    n = trainee.feed.n_support
    g = torch_rng(trainee.seed, "ranks", i)
    ranks = [layer.draw_ranks(g, rows) for rows in (n, len(z))]
    if masks is not None:
        ranks = masks[images[:n]], masks[images]
    optimizer = torch.optim.SGD(head.parameters(), RATES.nu_sib)
    training_step(layer, head, z, n, optimizer, RATES.nu_in, RATES.nu_out, ranks)
    return {k: v.detach() for k, v in layer.named_parameters()}


def masks_of(layer, mask, split, seed=0):
    "Every image's mechanisms by their definition: (160, M) bool, None where the layer chooses."
    table = dict(
        attended=lambda: None,
        fixed=lambda: layer.fixed.repeat(160, 1),
        random=lambda: random_masks(160, layer.M, layer.K, key_seed("mask", seed, split)),
    )
    return table[mask]()


@pytest.mark.parametrize("mask", MASKS)
def test_a_training_step_is_the_definition(mask):
    gaps = []
    for wrong in (False, True):
        one = double(mask)
        masks = masks_of(one.layer, mask, "train")
        if wrong:
            masks = random_masks(160, 6, 2, 99)  # somebody else's
        want = plain_step(one, 0, masks)
        one.step(0)
        got = one.weights()
        gaps.append(max((got[f"layer.{k}"] - v).abs().max().item() for k, v in want.items()))
    assert gaps[0] < 1e-12 and gaps[1] > 1e-4, gaps


@pytest.mark.parametrize("mask", MASKS)
def test_a_test_episode_is_the_definition(mask):
    one = double(mask, seed=3)
    x = torch.from_numpy(one.features.arrays["test"][:, 0])
    episodes = draw_episodes(one.features.class_rows("test"), 0, range(5), n_query=5, stream="test")
    given = masks_of(one.layer, mask, "test", seed=3)
    reference = evaluate_reference(one.layer.eval(), one.head, x, episodes, lr=RATES.nu_in, masks=given)
    score = one.score("test", episodes)
    fast = evaluate(one.layer, one.head, x, episodes, lr=RATES.nu_in, keep_logits=True, masks=one.masks["test"])
    assert (fast.logits - reference.logits).abs().max() < 1e-10
    assert np.array_equal(score.accuracy, reference.accuracy)
    wrong = evaluate_reference(one.layer, one.head, x, episodes, lr=RATES.nu_in, masks=random_masks(160, 6, 2, 99))
    assert (fast.logits - wrong.logits).abs().max() > 1e-4


def test_only_the_fixed_mechanisms_move():
    "Over blocks, a validation and the steps after it; all of them move where each image has its own."
    for mask in ("fixed", "random"):
        layer = make_layer("sib+aim", 10, protocol=with_mask(mask), **SMALL)
        t = FewshotTrainee(layer, SIBHead(12, generator=torch_rng(0)), world(), rates=RATES, n_query=5, val_episodes=3)
        before = {k: v.clone() for k, v in t.weights().items()}
        [t.step(i) for i in range(20)]
        t.evaluate(20)
        [t.step(i) for i in range(20, 30)]
        after = t.weights()
        same = [
            all(torch.equal(after[k][m], before[k][m]) for k in ("layer.h", "layer.W_Q", "layer.W_M")) for m in range(6)
        ]
        assert [not s for s in same] == (layer.fixed.tolist() if mask == "fixed" else [True] * 6)
        assert (t.used > 0).tolist() == [not s for s in same]


def test_views_of_an_image_share_its_mechanisms():
    "What an image meets depends on its row alone: not on the view, the episode, or how many images there are."
    t = double("random")
    seen = {}
    for i in range(30):
        images = t.feed.episode(i)[1]
        _, mask = t.choices(i, images)
        for image, m in zip(images.tolist(), mask.tolist()):
            assert seen.setdefault(image, m) == m
    assert len(seen) > 100 and len({tuple(m) for m in seen.values()}) > 10


def test_masks_are_told_apart_and_refused():
    def ask(method="sib+aim", **kw):
        protocol = with_mask(**kw)
        return fewshot_identity("glyphs", method, 0, BUDGET, protocol, "x", "conv4", 32, 8, 2, n_shot=1)

    identities = [ask(mask=mask) for mask in MASKS]
    assert len({json.dumps(i, sort_keys=True) for i in identities}) == 3
    assert [i["parameters"]["l"] for i in identities] == [2, 0, 0]
    for method in ("sib", "sib+linear"):
        assert ask(method, mask="fixed") == ask(method, mask="attended")
    plain, fixed = (make_layer("sib+aim", 10, protocol=with_mask(m), **SMALL) for m in ("attended", "fixed"))
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), fixed.parameters())) and fixed.fixed.sum() == 2
    for decision in ("soft", "soft-test"):
        with pytest.raises(AimError, match="mask='attended'"):
            make_layer("sib+aim", 10, protocol=with_mask("random", decision=decision), **SMALL)


# ---------------------------------------------------------------- training: what it does, what it refuses
def test_only_the_layer_of_the_method_is_trained():
    for method in FEWSHOT_METHODS:
        layer = make_layer(method, 10, **SMALL)
        head = SIBHead(layer.d_out, generator=torch_rng(0))
        t = FewshotTrainee(layer, head, world(), n_query=5, val_episodes=3)
        before = {k: v.clone() for k, v in t.weights().items()}
        [t.step(i) for i in range(3)]
        moved = {k for k, v in t.weights().items() if not torch.equal(v, before[k])}
        assert any(k.startswith("head.") for k in moved) and any(k.startswith("layer.") for k in moved) == (
            method != "sib"
        )


def test_algorithm1_moves_the_layer_by_the_support_alone():
    def after(update, nu_out):
        t = FewshotTrainee(
            make_layer("sib+aim", 10, **SMALL),
            SIBHead(12, generator=torch_rng(0)),
            world(),
            protocol=Protocol(aim_update=update),
            rates=Rates(0.02, nu_out, 0.01, 0.9, 5e-4),
            n_query=5,
            val_episodes=3,
        )
        t.step(0)
        return t.weights()["layer.W_M"].clone()

    assert torch.equal(after("algorithm1", 0.05), after("algorithm1", 0.5)) and torch.equal(
        after("algorithm1", 0.05), after("inplace", 0.0)
    )
    assert not torch.equal(after("inplace", 0.05), after("inplace", 0.0))


def test_collapse_is_said():
    layer = make_layer("sib+aim", 10, **SMALL)
    with torch.no_grad():
        layer.h.zero_()
        layer.W_Q.zero_()  # all scores one half: everybody takes the same K
    t = FewshotTrainee(layer, SIBHead(12), world(), n_query=5, val_episodes=3, rates=Rates(0.0, 0.0, 0.01, 0.9, 5e-4))
    with pytest.warns(UserWarning, match="collapsed"):
        t.evaluate(1)


def test_clear_errors():
    with pytest.raises(AimError, match="method"):
        train_fewshot(world(), "sib+magic", budget=BUDGET)
    with pytest.raises(AimError, match="algorithm1"):
        train_fewshot(
            world(), "sib+aim", budget=BUDGET, protocol=Protocol(aim_update="algorithm1", adapt=False), **SMALL
        )
    with pytest.raises(AimError, match="n_shot"):
        train_fewshot(world(), "sib", n_shot=0, budget=BUDGET)
    with pytest.raises(AimError, match="images"):
        train_fewshot(world(), "sib", n_shot=10, budget=BUDGET)
    with pytest.raises(AimError, match="budget"):
        train_fewshot(world(), "sib", budget="endless")


def test_fresh_looks_at_the_mechanisms_again(tmp_path, monkeypatch):
    "Once for each record in a process, as the runs do."
    from aim_nb.engine import activation
    from aim_nb.engine import loop
    from aim_nb.engine.records import new_record

    monkeypatch.setenv("AIM_RUNS", str(tmp_path))
    run = new_record(
        "fewshot",
        "glyphs",
        "sib+aim",
        0,
        BUDGET,
        Protocol(),
        dict(backbone="conv4", n_shot=1, M=6, K=2, l=0),
        "0",
        dict(accuracy=50.0, ci95=1.0),
    )
    log, looks = dict(step=np.arange(3), mask=np.full((3, 2, 6), 0.5), score=np.full((3, 2, 6), 0.5)), []
    monkeypatch.setattr(activation, "validation_features", lambda *a: looks.append(1) or (None, None))
    monkeypatch.setattr(activation, "slow_attention", lambda *a: (np.full((4, 6), 0.5), None))
    monkeypatch.setattr(activation, "read_log", lambda r: (log, dict(classes=["a", "b"])))
    for _ in range(2):
        activation.fewshot_activation(run)
    assert len(looks) == 1  # found
    monkeypatch.setenv("AIM_FRESH", "1")
    monkeypatch.setattr(loop, "_begun", set())
    for _ in range(2):
        activation.fewshot_activation(run)
    assert len(looks) == 2
    activation.fewshot_activation(run, fresh=True)
    assert len(looks) == 3


def test_own_arrays_plug_in():
    rng = numpy_rng(0, "own")
    own = {
        s: (rng.normal(size=(6 * 25, 9)).astype(np.float32), np.repeat(np.arange(6), 25))
        for s in ("train", "val", "test")
    }
    r = train_fewshot(own, "sib", budget=Budget("test", "fewshot", 4, 2, 3, 4))
    assert r.metrics["d_in"] == 9 and 0 <= r.metrics["accuracy"] <= 100 and r.history[-1]["step"] == 4
