"Continual learning as a whole: orders of the meta-gradient, lock step, deferred Adam, protocols, resumption, a baseline that learns."

import itertools
import math
import os
import time
import warnings
from dataclasses import replace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accidents import left, run_child, tiny_bank, unlike
from aim_nb import backbones
from aim_nb.engine import activation
from aim_nb.engine import metatest as ec
from aim_nb.engine import loop
from aim_nb.engine import train_continual as tc
from aim_nb.engine import train_fewshot
from aim_nb.aim import AIM
from aim_nb.anml import ANML
from aim_nb.data.sources import find_source
from aim_nb.data.banks import bank_dir, open_bank
from aim_nb.engine.checkpoints import shipped_record, tensors_sha
from aim_nb.core import AimError, torch_rng
from aim_nb.config import CONTINUAL_METHODS, PRESETS, Budget, Protocol, parse_switches, preset
from aim_nb.kernels.fastweights import anml_loss, oml_loss
from aim_nb.kernels.idle_adam import AdamTail
from aim_nb.oml import OML, Tail
from aim_nb.engine.records import essence, read_record

AIM_SIZE = dict(M=6, K=2, l=1, d_h=5, d_k=4)


def network(kind, layer="", width=4, **kw):
    return (
        kind((1, 28, 28), 7, layer, width=width, generator=torch_rng(0), **(AIM_SIZE | kw if layer else {}))
        .double()
        .eval()
    )


def images(n=9, seed=3):
    return torch.randn(n, 1, 28, 28, dtype=torch.float64, generator=torch_rng(seed))


LABELS = torch.tensor([0, 1, 2, 3, 6, 5, 5, 5, 5])


class Blobs:
    "A bank of classes that are noise around a prototype."

    name, sha = "glyphs", "blobs"

    def __init__(self, n=30, each=12, noise=25):
        self.n, self.each, self.class_names = n, each, [f"class {c}" for c in range(n)]
        self.labels = np.repeat(np.arange(n), each)
        centre = 60 * torch.randn(n, 1, 7, 7, 1, generator=torch_rng("centre")).repeat_interleave(
            4, 2
        ).repeat_interleave(4, 3)
        self.images = (
            (128 + centre + noise * torch.randn(n, each, 28, 28, 1, generator=torch_rng("noise")))
            .clip(0, 255)
            .byte()
            .numpy()
            .reshape(-1, 28, 28, 1)
        )
        self.shape, self.splits = (
            (28, 28, 1),
            {"train": range(0, n // 2), "val": range(n // 2, n // 2 + n // 6), "test": range(n // 2 + n // 6, n)},
        )

    def classes(self, split):
        return np.array(self.splits[split])

    def class_rows(self, split, images="all"):
        part = {"all": slice(None), "train": slice(0, self.each - 4), "test": slice(self.each - 4, None)}[images]
        return [c * self.each + np.arange(self.each)[part] for c in self.splits[split]]


NORM = (torch.tensor([0.5]), torch.tensor([0.3]))

# --- the meta-gradient ---------------------------------------------------------------------------------------------------------------------


def adapted(net, names, x, y, lr):
    "A copy of the network after plain SGD steps with torch.optim.SGD."
    import copy

    net = copy.deepcopy(net)
    opt = torch.optim.SGD([p for n, p in net.named_parameters() if n.startswith(names)], lr=lr)
    for i in range(len(x)):
        net.zero_grad()
        F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
        opt.step()
    return net


@pytest.mark.parametrize(
    "kind,layer,fast_set",
    [
        (OML, "", ""),
        (OML, "linear", ""),
        (OML, "aim", ""),
        (ANML, "", "paper"),
        (ANML, "aim", "paper"),
        (ANML, "aim", "release"),
    ],
)
def test_first_order_is_the_gradient_at_the_final_fast_weights(kind, layer, fast_set):
    net, x = network(kind, layer), images()
    loss = (
        oml_loss(net, x, LABELS, 4, lr=0.02)[0]
        if kind is OML
        else anml_loss(net, x, LABELS, 4, lr=0.02, fast_set=fast_set)[0]
    )
    ours = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    end = adapted(net, net.fast_names(fast_set or "paper"), x[-4:], LABELS[-4:], 0.02)
    end.zero_grad()
    F.cross_entropy(end(x), LABELS).backward()
    for (name, p), g in zip(end.named_parameters(), ours):
        theirs = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(torch.zeros_like(p) if g is None else g, theirs, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    "kind,layer,name",
    [
        (OML, "", "tail.fc.weight"),
        (OML, "", "rln.blocks.0.conv.weight"),
        (OML, "aim", "tail.layer.W_K"),
        (ANML, "", "p.blocks.0.conv.weight"),
    ],
)
def test_second_order_is_the_derivative_of_the_whole(kind, layer, name):
    net, x = network(kind, layer), images()
    p = dict(net.named_parameters())[name]
    d = torch.randn(p.shape, dtype=p.dtype, generator=torch_rng(4))
    f = oml_loss if kind is OML else anml_loss
    g = torch.autograd.grad(f(net, x, LABELS, 4, lr=0.02, order="second")[0], p)[0]
    first = torch.autograd.grad(f(net, x, LABELS, 4, lr=0.02, order="first")[0], p)[0]

    def shifted(e):
        with torch.no_grad():
            p.add_(d, alpha=e)
            v = F.cross_entropy(adapted_logits(net, x), LABELS).item()
            p.sub_(d, alpha=e)
        return v

    def adapted_logits(net, x):
        with torch.enable_grad():
            end = adapted(net, net.fast_names("paper"), x[-4:], LABELS[-4:], 0.02)
        return end(x)

    slope = (shifted(1e-6) - shifted(-1e-6)) / 2e-6
    assert slope == pytest.approx((g * d).sum().item(), rel=1e-4, abs=1e-7)
    assert abs(slope - (first * d).sum().item()) > 1e-5  # first order is something else


# --- meta-test -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bank():
    return Blobs()


def mt(net, bank, update="head", **kw):
    return ec.MetaTest(net, bank, NORM, Protocol(**kw), update, seed=0)


def test_lock_step_equals_one_at_a_time(bank):
    net = OML((1, 28, 28), 20, width=4, generator=torch_rng(1))
    jobs = [(r, i) for r in (1e-2, 3e-3) for i in range(2)]
    together = mt(net, bank).outcomes("test", jobs, [3, 6])

    def images(r):
        return mt(net, bank).images(r)

    for rate, i in jobs:
        alone = mt(net, bank).outcomes("test", [(rate, i)], [3, 6])[rate, i]
        head = ec.fresh_head(net.tail.fc.in_features, 20, (0, "test", i))
        book, _ = ec.metatest_reference(net, images, mt(net, bank).trajectory("test", i, 6), rate, [3, 6], head)
        assert together[rate, i] == alone == book
    assert len({str(o) for o in together.values()}) > 1  # the comparison can fail


@pytest.mark.parametrize("layer", ["", "linear", "aim"])
def test_fast_meta_test_equals_the_reference(bank, layer):
    net = OML((1, 28, 28), 20, layer, width=4, generator=torch_rng(1), **(AIM_SIZE if layer else {}))
    m = mt(net, bank, "fast")
    ours = m.outcomes("test", [(3e-3, 0)], [3, 6])[3e-3, 0]
    head = ec.fresh_head(net.tail.fc.in_features, 20, (0, "test", 0))
    book, _ = ec.metatest_reference(net, m.images, m.trajectory("test", 0, 6), 3e-3, [3, 6], head, "fast")
    assert ours == book


@pytest.mark.parametrize("dtype,tol", [(torch.float32, 1e-5), (torch.float64, 1e-8)])
@pytest.mark.parametrize("gate", ["sigmoid", "raw"])
def test_deferred_adam_equals_torch(dtype, tol, gate):
    tail = (
        Tail(
            6,
            8,
            lambda d: AIM(d, d, M=12, K=2, l=1, d_h=4, d_k=4, gate=gate, generator=torch_rng(1)),
            d_reduce=5,
            generator=torch_rng(2),
        )
        .eval()
        .to(dtype)
    )
    x = torch.randn(120, 6, generator=torch_rng(3)).to(dtype)
    import copy

    book, head = copy.deepcopy(tail), ec.fresh_head(5, 8, (0,)).to(dtype)
    with torch.no_grad():
        book.fc.weight.copy_(head)
        book.fc.bias.zero_()
    opt, own = torch.optim.Adam(book.parameters(), lr=1e-3), AdamTail(tail, 1e-3, head)
    lazy = AdamTail(tail, 1e-3, head, "lazy")
    for i, f in enumerate(x):
        for p in book.parameters():
            p.grad = torch.zeros_like(p)
        F.cross_entropy(book(f[None]), torch.tensor([i // 15])).backward()
        opt.step()
        own.learn(f, i // 15)
        lazy.learn(f, i // 15)
    W = own.layer.mechanisms()
    assert 2 < len(own.layer.last_step) and W.isfinite().all()
    assert (W - book.layer.W_M).abs().max() < tol
    assert (own.fc.W - book.fc.weight).abs().max() < tol
    assert (own.tensors.values["aim.W_Q"] - book.layer.W_Q).abs().max() < tol
    assert (lazy.layer.mechanisms() - book.layer.W_M).abs().max() > 1e-4


def test_protocols_use_the_classes_and_images_they_say(bank):
    seen = {s: {int(r) for c in bank.class_rows(s) for r in c} for s in ("train", "val", "test")}
    m = mt(OML((1, 28, 28), 20, width=4, generator=torch_rng(1)), bank)
    for stream, split in (("val", "val"), ("test", "test"), ("test-5", "test")):
        t = m.trajectory(stream, 0, 5)
        learn, ask = set(t.train.ravel().tolist()), set(t.test.ravel().tolist())
        assert not learn & ask and learn | ask <= seen[split] and not (learn | ask) & seen["train"]
    assert not np.array_equal(m.trajectory("test", 0, 5).classes, m.trajectory("test-5", 0, 5).classes)
    release = Blobs()
    release.name = "omniglot"
    learn, ask = ec.metatest_rows(release, "release")
    assert (
        all(np.array_equal(a, b) for a, b in zip(learn, ask))
        and set(np.concatenate(learn)) <= seen["train"] | seen["val"]
    )


@pytest.fixture(scope="module")
def omniglot():
    if not os.environ.get("AIM_DATA"):
        pytest.skip("AIM_DATA is not set")
    if not (bank_dir("omniglot") / "bank.json").exists() and not find_source("omniglot"):
        pytest.skip("omniglot is not below $AIM_DATA")
    return open_bank("omniglot")


def sets_of(bank, protocol, stream, n):
    "Classes of a trajectory, images learnt from, images asked about, and how many of each a class has."
    t = ec.MetaTest(None, bank, NORM, Protocol(protocol=protocol)).trajectory(stream, 0, n)
    assert len(t.train) == len(t.test) == n
    for learn, ask in zip(t.train, t.test):
        assert len({*bank.labels[learn], *bank.labels[ask]}) == 1, "a row is one class"
    return (
        set(bank.labels[t.train[:, 0]].tolist()),
        set(t.train.ravel().tolist()),
        set(t.test.ravel().tolist()),
        t.train.shape[1],
        t.test.shape[1],
    )


@pytest.mark.parametrize("stream, n", [("val", 63), ("test", 600)])
def test_held_out_trajectories_on_real_omniglot(omniglot, stream, n):
    "Other classes than meta-training's, other alphabets at the test; 15 images to learn from, 5 others to be asked about."
    classes, learn, ask, many, few = sets_of(omniglot, "heldout", stream, n)
    trained = set(omniglot.classes("train").tolist())
    assert len(classes) == n and not classes & trained and classes <= set(omniglot.classes(stream).tolist())
    assert (many, few) == (15, 5) and len(learn) == 15 * n and len(ask) == 5 * n and not learn & ask
    from aim_nb.engine.train_continual import ContinualTrainee

    t = ContinualTrainee(omniglot, "oml", 0, Budget("smoke", "continual", 1, 0, width=4))
    assert not (learn | ask) & {int(r) for c in t.rows for r in c}, "an image of meta-training"
    if stream == "test":
        alphabets = [name.split("/")[0] for name in omniglot.class_names]
        assert not {alphabets[c] for c in classes} & {alphabets[c] for c in trained}


def test_release_trajectories_on_real_omniglot(omniglot):
    "The release's overlap, as its banner says: background classes, 20 images learnt from and the same 20 asked about."
    classes, learn, ask, many, few = sets_of(omniglot, "release", "test", 600)
    assert classes <= set(range(650)) <= set(omniglot.classes("train").tolist())
    assert (many, few) == (20, 20) and learn == ask and len(learn) == 20 * 600


def test_rates_are_chosen_without_test_images(bank):
    calls = set()

    def near(rate, best):
        return 50 - abs(math.log10(rate / best))

    class Spy(ec.MetaTest):
        "What is seen of test classes would choose another rate: on test images, and on any image where there are enough validation classes."

        def outcomes(self, stream, jobs, ns, desc=""):
            calls.update((stream, n) for n in ns)
            test = 2e-3 if stream == "val" else 2e-4
            return {
                (r, i): ec.Outcome([near(r, 2e-3 if n > 5 else test) for n in ns], [near(r, test)] * len(ns), [])
                for r, i in jobs
            }

    def chosen(ns, **switches):
        spy = Spy(None, bank, NORM, Protocol(**switches))
        return spy.choose_rates(spy.rate_scores(ns, (6e-3, 2e-3, 6e-4), 2))

    assert chosen((3, 5, 8)) == {3: 2e-3, 5: 2e-3, 8: 2e-3}
    assert calls == {("val", 3), ("val", 5), ("test", 8)}
    assert chosen((3, 8), metatest_rate="test") == {3: 2e-4, 8: 2e-4}  # the authors look at the test images


@pytest.mark.parametrize("said, switch", [(0, dict(protocol="release")), (1, dict(metatest_rate="test")), (0, {})])
def test_a_rate_chosen_on_test_images_is_said_aloud(bank, capsys, said, switch):
    b = Budget("smoke", "continual", 0, 0, runs=1, rates=1, rate_runs=1, classes=4)
    ec.metatest(OML((1, 28, 28), 20, width=4, generator=torch_rng(1)), bank, NORM, Protocol(**switch), b)
    assert capsys.readouterr().out.count(ec.RATE_BANNER) == said


@pytest.mark.parametrize("trajectories", ["prefix", "independent"])
def test_metrics_of_a_meta_test(bank, trajectories, tmp_path):
    net = OML((1, 28, 28), 20, "aim", width=4, generator=torch_rng(1), **AIM_SIZE)
    b = Budget("smoke", "continual", 0, 0, runs=2, rates=2, rate_runs=1, classes=10)
    kw = dict(protocol=Protocol(trajectories=trajectories), budget=b)

    def stored():
        return ec.Store(tmp_path / "store.json", net)

    m = ec.metatest(net, bank, NORM, **kw, store=stored())
    spent = stored().seconds
    assert (
        np.shape(m["test"]) == np.shape(m["train"]) == (2, len(m["n_classes"]))
        and len(m["by_age"]) == m["n_classes"][-1] == 10
    )
    assert m["accuracy"] == pytest.approx(np.mean(m["test"], 0)[-1], abs=1e-3) and m == ec.metatest(
        net, bank, NORM, **kw, store=stored()
    ) == ec.metatest(net, bank, NORM, **kw)
    assert spent == stored().seconds > 0  # nothing was run again, and what it took the first time is still known


def test_the_runs_use_the_trajectories_of_the_search_for_rates(bank, monkeypatch):
    "Each trajectory that goes to the end is run once, and an outcome that is used again is the one of a run of its own."
    monkeypatch.setattr(ec, "next_rate", lambda best, tried: None)
    ran, run = [], ec.MetaTest.run
    monkeypatch.setattr(
        ec.MetaTest,
        "run",
        lambda self, stream, jobs, ns, desc: (
            ran.extend((stream, j, max(ns)) for j in jobs) or run(self, stream, jobs, ns, desc)
        ),
    )
    net, b = (
        OML((1, 28, 28), 20, width=4, generator=torch_rng(1)),
        Budget("smoke", "continual", 0, 0, runs=3, rates=2, rate_runs=2, classes=10),
    )
    m = ec.metatest(net, bank, NORM, Protocol(), b, seed=3)
    assert (
        len(ran) == len(set(ran)) and sum(s == "test" and end == 10 for s, _, end in ran) == 5
    )  # two rates x two trajectories, and the third run
    last = ec.MetaTest(net, bank, NORM, Protocol(), seed=3).outcomes(
        "test", [(m["rates"][-1], i) for i in range(3)], [10]
    )
    assert [row[-1] for row in m["test"]] == [round(o.test[0], 3) for o in last.values()]


# --- meta-training -------------------------------------------------------------------------------------------------------------------------


def test_a_collapse_is_in_the_history(bank):
    "Killed runs are in `test_kills`; here: one fixed set of K mechanisms for every image is no attention any more."
    from aim_nb.engine.train_continual import ContinualTrainee

    t = ContinualTrainee(
        bank, "oml+aim", 0, Budget("smoke", "continual", 4, 0, width=4, classes=4), M=6, K=2, l=1, n_out=30
    )
    with torch.no_grad():
        t.net.tail.layer.h.zero_()
        t.net.tail.layer.W_Q.zero_()  # all scores one half: everybody takes the same K
    assert t.evaluate(0)["used"] == 2


@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("method", CONTINUAL_METHODS)
def test_every_method_steps_in_either_order(bank, method, order):
    from aim_nb.engine.train_continual import ContinualTrainee

    b = Budget("smoke", "continual", 1, 0, width=4, classes=4)
    for how in ("same", "redrawn"):
        t = ContinualTrainee(
            bank,
            method,
            0,
            b,
            Protocol(order=order, norm="instance", meta_images=how),
            M=6,
            K=2,
            l=1,
            inner=3,
            random=8,
            n_out=30,
        )
        before = {k: v.clone() for k, v in t.net.state_dict().items()}
        scores = t.step(0)
        assert all(np.isfinite(float(v)) for v in scores.values()) and 0 <= scores["acc"] <= 1
        assert any(not torch.equal(v, before[k]) for k, v in t.net.state_dict().items() if k.startswith(t.net.slow))


def test_the_baseline_learns(bank):
    "The paper's Baseline stands at chance; ours must not: after a little meta-training it keeps new classes apart."
    from aim_nb.engine.train_continual import ContinualTrainee

    b = Budget("smoke", "continual", 40, 0, width=8, classes=5)
    t = ContinualTrainee(bank, "oml+linear", 0, b, M=4, K=2, l=0, inner=5, random=16, n_out=30)
    losses = [float(t.step(i)["loss"]) for i in range(40)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert ec.validate_continual(t.net, bank, NORM, b)["accuracy"] > 2 * 100 / 5


def test_which_weights_are_meta_tested(tmp_path, monkeypatch):
    "Validations that only get worse: the best weights are those of the first one, and the last ones are others, from the same training."
    seen, falling = [], itertools.count(100, -1)
    monkeypatch.setenv("AIM_RUNS", str(tmp_path))
    monkeypatch.setattr(tc, "validate_continual", lambda *a, **k: dict(accuracy=float(next(falling))))
    monkeypatch.setattr(
        tc,
        "metatest",
        lambda net, *a, metatest=tc.metatest, **k: (seen.append(tensors_sha(net.state_dict())), metatest(net, *a, **k))[
            1
        ],
    )
    b = Budget("tiny", "continual", steps=3, val_every=1, width=4, runs=1, rates=1, rate_runs=1, classes=4)
    best, last = (
        tc.run_continual("glyphs", "oml", 0, b, preset("ours", "glyphs", weights=which)) for which in ("best", "last")
    )
    assert (
        best["metrics"]["best_step"] == last["metrics"]["best_step"] == 1
        and best["history"] == last["history"]
        and len(set(seen)) == 2
    )
    assert [tensors_sha(tc.load_continual(r)[0].state_dict()) for r in (best, last)] == seen
    assert (best["preset"], best["changed"]) == ("ours", dict(weights="best")) and not last["changed"]


# --- trainings of all lengths share a folder -----------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path, monkeypatch):
    "shared(steps): a tiny run whose validations get better step by step, or fall with the number of classes."
    rising = itertools.count(1)
    monkeypatch.setenv("AIM_RUNS", str(tmp_path))
    monkeypatch.setattr(
        tc, "validate_continual", lambda net, bank, norm, budget, *a: dict(accuracy=next(rising) / 100 - budget.classes)
    )
    monkeypatch.setattr(tc, "metatest", lambda *a, **k: dict(accuracy=1.0, ci95=0.0))

    def run(steps, method="oml", classes=4, call=tc.run_continual, **kw):
        b = Budget(
            "tiny", "continual", steps=steps, val_every=1, width=4, runs=1, rates=1, rate_runs=1, classes=classes
        )
        return call(dataset="glyphs", method=method, budget=b, M=6, K=2, l=1, inner=3, random=8, **kw)

    return run


def test_an_easier_validation_chooses_nothing_here(shared):
    "Few classes are easily told apart: their score is not in the history of a run over more."
    easy, hard = shared(1, classes=2), shared(2, classes=4)
    assert (
        [round(r["accuracy"]) for r in easy["history"]] == [-2]
        and [round(r["accuracy"]) for r in hard["history"]] == [-4, -4]
        and hard["metrics"]["best_step"] == 2
    )

    def folder(classes):
        return tc.training_checkpoints(hard | dict(budget=hard["budget"] | dict(classes=classes))).dir.name

    assert folder(0) == folder(50) == folder(100) and len({folder(n) for n in (0, 2, 49)}) == 3
    known = shipped_record("continual")
    assert (
        tc.training_checkpoints(known).shipped().step == known["metrics"]["best_step"] == 2200
    )  # found by the name that its folder always had


@pytest.mark.parametrize("which", ["best", "last"])
def test_weights_are_those_of_the_record_or_refused(shared, which):
    protocol = preset("ours", "glyphs", weights=which)
    short = shared(1, protocol=protocol)
    mine = tensors_sha(tc.load_continual(short)[0].state_dict())
    long = shared(2, protocol=protocol)
    assert tensors_sha(tc.load_continual(long)[0].state_dict()) != mine
    assert tensors_sha(tc.load_continual(short)[0].state_dict()) == mine, "a longer training keeps them"
    again = shared(1, protocol=protocol, fresh=True)
    assert tensors_sha(tc.load_continual(again)[0].state_dict()) == mine
    with pytest.raises(AimError, match=f"the weights of step 2 of run {long['key']} are not in .*; run it again"):
        tc.load_continual(long)


def test_a_shipped_model_stands_in_for_a_folder_of_another_training(monkeypatch, tmp_path):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path))
    rec = shipped_record("continual")
    tc.training_checkpoints(rec).save_weights(400, {"net.x": torch.ones(1)})
    assert tc.saved_weights(tc.training_checkpoints(rec), rec, "best").step == rec["metrics"]["best_step"]


def test_a_lost_log_costs_no_training(shared):
    "It is kept with the weights of its step, also under a longer training; without them that is spared."
    short, long = shared(1, "oml+aim"), shared(2, "oml+aim")
    ck, logs = tc.training_checkpoints(long), {}
    for r in (short, long):
        logs[r["key"]] = tc.read_log(r)
        tc.log_path(r).unlink()
    for steps, r in ((1, short), (2, long)):
        assert shared(steps, "oml+aim", call=activation.run_continual_with_log) == r
        (tensors, told), (before, as_told) = tc.read_log(r), logs[r["key"]]
        assert told == as_told and tensors_sha(tensors) == tensors_sha(before)
    assert ck.latest().step == 2
    tc.log_path(short).unlink()
    (ck.dir / "weights-000000001.safetensors").unlink()
    with pytest.raises(
        AimError,
        match=f"run {short['key']} has no log here, .* delete the longer training .* set .AIM_RUNS to another folder to train it again",
    ):
        shared(1, "oml+aim", call=activation.run_continual_with_log)
    assert ck.latest().step == 2 and ck.weights(2).step == 2


def test_fresh_looks_at_the_mechanisms_again(shared, monkeypatch):
    "Once for each record in a process, as the runs do."
    rec, written = shared(1, "oml+aim"), []
    save = activation.save_record
    monkeypatch.setattr(activation, "save_record", lambda r: (written.append(r["key"]), save(r))[1])
    first = activation.continual_activation(rec)
    assert activation.continual_activation(rec)["created"] == first["created"] and len(written) == 1
    monkeypatch.setenv("AIM_FRESH", "1")
    monkeypatch.setattr(loop, "_begun", set())
    for _ in range(2):
        activation.continual_activation(rec)
    assert written == [first["key"]] * 2
    activation.continual_activation(rec, fresh=True)
    assert len(written) == 3


def test_the_key_of_a_training_and_its_tensors_stay(bank):
    "Long trainings are taken up by later versions of the code: by the folder's name, then by the names of the tensors."
    b = Budget("smoke", "continual", 20, 0, width=8, runs=2, rates=2, rate_runs=1, classes=8)
    identity = tc.continual_identity("glyphs", "oml+aim", 0, b, preset("ours", "glyphs"), "x")
    assert tc.training_checkpoints(identity).dir.name == "continual-6bf528a6dfa7"
    paper = Budget("paper", "continual", 20_000, 500, runs=10, rates=14, rate_runs=10)
    names = {}
    for method in ("oml+aim", "anml+aim"):
        release = tc.continual_identity("omniglot", method, 0, paper, preset("release"), "x")
        names[method] = tc.training_checkpoints(release).dir.name
    assert names == {"oml+aim": "continual-6b6086dbe22b", "anml+aim": "continual-85647dea9b1a"}

    protocol = tc.relevant("oml+aim", preset("ours", "glyphs"))
    t = tc.ContinualTrainee(bank, "oml+aim", 0, b, protocol, M=8, K=3, l=1, inner=4, random=8, n_out=30)
    t.step(0)
    blocks = {f"rln.blocks.{i}.{p}" for i in range(6) for p in ("conv.weight", "conv.bias", "norm.weight", "norm.bias")}
    layer = {f"tail.layer.{p}" for p in ("h", "W_Q", "W_K", "W_M", "b_K")}
    net = blocks | layer | {f"tail.{part}.{p}" for part in ("reduce", "fc") for p in ("weight", "bias")}
    state = {f"opt.{i}.{p}" for i in range(len(net)) for p in ("step", "exp_avg", "exp_avg_sq")}
    assert set(t.state_dict()) == {f"net.{n}" for n in net} | state | {"log.0000000.score", "log.0000000.mask"}
    assert set(t.weights()) == set(t.state_dict()) - state


# --- a record is its question's answer alone -----------------------------------------------------------------------------------------------


TINY = Budget("tiny", "continual", steps=8, val_every=3, width=4, runs=1, rates=1, rate_runs=1, classes=4)
SMALL = dict(M=6, K=2, l=1, inner=3, random=8, n_out=20)


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory):
    return tiny_bank(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run_in(tiny_data, tmp_path, monkeypatch):
    "run_in(folder, steps): a run whose validations depend on the weights alone, but have their best anywhere."

    def by_weights(net, *args, **kw):
        return dict(accuracy=int(tensors_sha(net.state_dict())[:6], 16) / 2**24 * 100)

    monkeypatch.setattr(tc, "validate_continual", by_weights)

    def run(folder, steps, seed=0, which="best", **kw):
        monkeypatch.setenv("AIM_RUNS", str(tmp_path / folder))
        protocol = preset("ours", "glyphs", weights=which)
        return tc.run_continual(
            "glyphs", "oml+aim", seed, replace(TINY, steps=steps), protocol, data_root=str(tiny_data), **SMALL | kw
        )

    run.data = str(tiny_data)
    return run


def told(record):
    "All that a run leaves for others: the record, and its log."
    tensors, meta = tc.read_log(record)
    return essence(record), record["preset"], record["changed"], tensors_sha(tensors), meta


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_record_does_not_depend_on_what_ran_before_it(run_in, which):
    bests = set()
    for seed in itertools.takewhile(lambda seed: bests != {3, 6}, range(12)):  # until both have been seen
        for steps in (1, 2, 4, 5):
            run_in("shared", steps, seed, which)
        after = told(run_in("shared", 6, seed, which))
        alone = run_in("alone", 6, seed, which)
        assert after == told(alone) and [row["step"] for row in alone["history"]] == [3, 6]
        bests.add(alone["metrics"]["best_step"])
    assert bests == {3, 6}, "the best is now the end, now an earlier validation"


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_milestone_gives_the_record_of_a_short_training(run_in, which, monkeypatch):
    "At a milestone of every training, and at the end of a shorter one that another went on from."
    monkeypatch.setattr(tc, "MILESTONES", (4,))
    for seed in range(3):
        alone = {steps: told(run_in("alone" + str(steps), steps, seed, which)) for steps in (4, 5)}
        run_in("shared", 5, seed, which)
        run_in("shared", 8, seed, which)
        for path in (tc.runs_dir() / "records").iterdir():
            path.unlink()
        with monkeypatch.context() as m:
            m.setattr(tc.ContinualTrainee, "step", None)  # nothing is trained
            assert {steps: told(run_in("shared", steps, seed, which)) for steps in (4, 5)} == alone


# --- real processes: the weights that a history names, and the lock ------------------------------------------------------------------------


def first_is_best():
    "In a child: validations only get worse, so that the best weights are read from a file."
    loop.Run.score = lambda self, row: -row["step"]


@pytest.mark.parametrize("method", ["oml+aim", "sib+aim"])
def test_best_weights_are_those_of_the_step_that_the_history_names(method, tiny_data, tmp_path):
    "Weights of another step in the file's place, or none: one sentence, and no record."
    child = run_child(method, tmp_path, tiny_data, before=first_is_best)
    assert child.wait() == 0, child.text
    runs = tmp_path / "runs"
    (record,) = map(read_record, (runs / "records").iterdir())
    (folder,) = (runs / "checkpoints").glob(f"{record['task']}-*")
    best, last = (
        folder / f"weights-{row['step']:09d}.safetensors" for row in (record["history"][0], record["history"][-1])
    )
    assert record["metrics"]["best_step"] == record["history"][0]["step"]
    right = best.read_bytes()
    for path in (runs / "records").iterdir():
        path.unlink()

    def refused(words):
        child = run_child(method, tmp_path, tiny_data, before=first_is_best)
        said = [line for line in child.text.splitlines() if line.startswith("AimError: ")] if child.wait() == 2 else []
        assert len(said) == 1 and words in said[0] and "--fresh" in said[0], child.text
        assert not list((runs / "records").iterdir())

    best.write_bytes(last.read_bytes())
    refused(f"holds the weights of step {record['history'][-1]['step']}")
    best.unlink()
    refused(f"the weights of step {record['metrics']['best_step']}, the best validation, are not in")
    best.write_bytes(right)
    assert run_child(method, tmp_path, tiny_data, before=first_is_best).wait() == 0
    assert [essence(read_record(path)) for path in (runs / "records").iterdir()] == [essence(record)]


@pytest.mark.parametrize("method", ["oml+aim", "sib+aim"])
def test_a_run_is_held_until_its_record_is_written(method, tiny_data, tmp_path):
    "A second process that wants to start over, while the first is in its test, is refused; the first's record is right."

    def slow_test():
        module, name = (tc, "metatest") if method == "oml+aim" else (train_fewshot, "score_last_and_best")
        test = getattr(module, name)

        def waiting(*args, **kw):
            (tmp_path / "testing").touch()
            while not (tmp_path / "go on").exists():
                time.sleep(0.01)
            return test(*args, **kw)

        setattr(module, name, waiting)

    first = run_child(method, tmp_path / "both", tiny_data, before=slow_test, name="first")
    while not (tmp_path / "testing").exists():
        assert first.wait(0.01) is None, first.text
    second = run_child(method, tmp_path / "both", tiny_data, name="second", fresh=True)
    code = second.wait()
    (tmp_path / "go on").touch()
    assert code == 2 and f"process {first.pid} is running this experiment already" in second.text, second.text
    assert first.wait() == 0, first.text
    assert run_child(method, tmp_path / "alone", tiny_data).wait() == 0
    assert not unlike(left(tmp_path / "both"), left(tmp_path / "alone"))


# --- presets -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CONTINUAL_METHODS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_every_method(name, method):
    b = Budget("smoke", "continual", 20, 0, width=8, classes=4)
    sizes = dict(M=8, K=3, l=1, inner=4, random=12, n_out=700)
    t = tc.ContinualTrainee(open_bank("glyphs"), method, 0, b, tc.relevant(method, preset(name, "glyphs")), **sizes)
    before = {k: v.clone() for k, v in t.net.state_dict().items()}
    losses = [float(t.step(i)["loss"]) for i in range(20)]
    assert np.isfinite(losses).all() and all(p.isfinite().all() for p in t.net.parameters())
    assert any(not torch.equal(v, before[k]) for k, v in t.net.state_dict().items() if k.startswith(t.net.slow))


PRESET_TABLE = """
gate raw raw sigmoid
aim_scale 1 1 1/K
select shared shared sample
norm instance|affine affine affine
inputs standardised release standardised
row_reset matched normal kaiming
reduce True True False|True
slow_set all all paper
fast_set release release paper
meta_images same|redrawn same|redrawn others
order first first first
train_classes split all split
weights last last last
trajectories prefix independent independent
protocol heldout release heldout
metatest_update head fast fast
metatest_rate validation test validation
precision float32 float32 float32
mask attended attended attended
"""  # ours, release, paper; drawings|photographs


def test_presets_are_their_table():
    for line in PRESET_TABLE.split("\n")[1:-1]:
        switch, *values = line.split()
        for name, value in zip(("ours", "release", "paper"), values):
            for dataset, wanted in zip(("omniglot", "cifar100"), value.split("|") * 2):
                assert str(getattr(preset(name, dataset), switch)) == wanted, (switch, name, dataset)
    assert tc.MILESTONES == (1000, 2000, 5000, 10_000, 20_000)


@pytest.mark.parametrize("layer, rate", [("", 1e-3), ("unit", 1e-2)])
def test_a_validation_uses_rates_that_fit_the_output(bank, monkeypatch, layer, rate):
    rates = []
    run = ec.MetaTest.run

    def spy(self, stream, jobs, ns, desc):
        rates.extend(r for r, _ in jobs)
        return run(self, stream, jobs, ns, desc)

    monkeypatch.setattr(ec.MetaTest, "run", spy)
    ec.validate_continual(OML((1, 28, 28), 30, layer, width=4, generator=torch_rng(1)), bank, NORM)
    assert rate in rates and max(rates) < 4 * rate and min(rates) > rate / 4


def test_the_linear_controls_have_as_many_parameters_as_aim():
    with torch.device("meta"):
        tails = {layer: OML((1, 28, 28), 1000, layer).tail for layer in ("aim", "linear", "linear-unit", "unit")}
    size = {layer: sum(p.numel() for p in tail.parameters()) for layer, tail in tails.items()}
    assert (
        size["linear"] == size["linear-unit"] == pytest.approx(size["aim"], rel=1e-3)
        and size["unit"] < size["aim"] / 10
    )
    assert tails["unit"].unit_length and tails["linear-unit"].unit_length and not tails["linear"].unit_length


# --- dead networks -------------------------------------------------------------------------------------------------------------------------


def last_norm(net):
    "Scale and shift after the last convolution."
    parameters = dict(net.rln.named_parameters())
    scale, shift = [p for name, p in parameters.items() if "conv" not in name][-2:]
    return scale, shift


def dying(make, scale, shift):
    def made(*args, **kw):
        net = make(*args, **kw)
        with torch.no_grad():
            last_norm(net)[0].mul_(scale)
            last_norm(net)[1].fill_(shift)
        return net

    return made


@pytest.mark.parametrize("method", ["oml", "oml+aim"])
def test_a_dead_network_is_named(method, run_in, tmp_path, monkeypatch):
    "Every ReLU of the last layer is shut: one warning, rows and record say so, and the accuracy is one class of n."
    monkeypatch.setattr(tc, "make_continual", dying(tc.make_continual, 1.0, -1e4))
    budget = replace(TINY, steps=8, val_every=2)
    protocol = preset("release", "glyphs")
    for stop, last in ((False, 8), (True, 4)):
        monkeypatch.setenv("AIM_RUNS", str(tmp_path / str(stop)))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            rec = tc.run_continual(
                "glyphs", method, 0, budget, protocol, data_root=run_in.data, stop_if_dead=stop, **SMALL
            )
        assert [str(w.message) for w in said if "dead" in str(w.message)] == [
            f"glyphs {method} seed 0: dead since step 4 or before: every image gets the same logits, "
            "and no gradient reaches the first convolution."
        ]
        assert [row["constant"] for row in rec["history"]] == [True] * (last // 2)
        assert (rec["metrics"]["died_at"], rec["metrics"]["last_step"]) == (4, last)
        assert np.allclose(rec["metrics"]["test"], [100 / n for n in rec["metrics"]["n_classes"]], atol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_a_network_on_a_plateau_is_not_dead(run_in, scale, monkeypatch):
    "Logits that agree to the last bit are not enough: here a gradient still arrives."
    monkeypatch.setattr(tc, "make_continual", dying(tc.make_continual, scale, 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rec = run_in("plateau", 6, stop_if_dead=True)
    assert [row["constant"] for row in rec["history"]] == [False, False]
    assert (rec["metrics"]["died_at"], rec["metrics"]["last_step"]) == (0, 6)


def test_one_constant_validation_is_no_death():
    rows = [dict(step=s, constant=c) for s, c in ((1, True), (2, False), (3, True), (4, True), (5, True))]
    assert tc.died_at(rows) == 4 and tc.died_at(rows[:3]) == 0 and tc.died_at([]) == 0


# --- bad input -----------------------------------------------------------------------------------------------------------------------------


BAD = {
    "contradiction": (lambda: Protocol(gate="raw", decision="soft"), "needs gate='sigmoid'"),
    "twice": (lambda: parse_switches("norm=affine,norm=instance"), "sets norm twice"),
    "of few-shot runs": (lambda: preset("paper", **parse_switches("decision=soft")), "belongs to few-shot runs"),
    "unknown mask": (lambda: preset("ours", mask="none"), "choose one of attended, fixed, random"),
    "unknown preset": (lambda: preset("theirs"), "choose one of ours, release, paper"),
    "unknown switch": (lambda: parse_switches("gait=raw"), "did you mean gate?"),
    "unknown value": (lambda: parse_switches("weights=first"), "choose one of last, best"),
    "no rates": (lambda: ec.pick_rates(0), "at least 1"),
    "negative rates": (lambda: tc.run_continual(rates=-1), "at least 1"),
    "many rates": (lambda: tc.run_continual(rates=9), "choose 1 to 7, or 14"),
    "unknown method": (lambda: tc.run_continual(method="oml+aims"), "choose one of oml"),
    "bf16": (lambda: tc.run_continual(protocol=preset("ours", precision="bf16")), "use precision='float32'"),
    "random masks that move": (
        lambda: tc.run_continual(protocol=preset("ours", mask="random", metatest_update="fast")),
        "use metatest_update=head",
    ),
    "K above M": (lambda: tc.run_continual(M=4, K=5, budget="smoke"), "K"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence_before_anything_runs(what, tmp_path, monkeypatch):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(backbones, "has_bf16", lambda device="cpu": False)
    monkeypatch.setattr(tc.ContinualTrainee, "step", None)
    act, words = BAD[what]
    with pytest.raises(AimError) as error:
        act()
    assert words in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "runs").exists()


# --- controls of attention -----------------------------------------------------------------------------------------------------------------


def masked(bank, mask, **kw):
    "A trainee with that mask, after some steps."
    b = Budget("smoke", "continual", 6, 0, width=4, runs=2, rates=1, rate_runs=1, classes=4)
    protocol = tc.relevant("oml+aim", preset("ours", "glyphs", mask=mask, **kw))
    t = tc.ContinualTrainee(bank, "oml+aim", 0, b, protocol, M=8, K=3, l=0, inner=4, random=12, n_out=30)
    for i in range(6):
        assert math.isfinite(float(t.step(i)["loss"]))
    return t


@pytest.mark.parametrize("update", ["head", "fast", "means"])
def test_a_fixed_mask_uses_the_same_k_mechanisms(bank, update):
    t = masked(bank, "fixed")
    layer = t.net.tail.layer
    first = tc.make_continual("oml+aim", (1, 28, 28), 30, t.protocol, 4, 8, 3, 0).tail.layer.W_M
    used = (layer.W_M != first).flatten(1).any(1)
    assert used.sum() == 3, "the others have never moved"
    assert t.evaluate(6)["used"] == 3
    for split in ("val", "test"):
        use = ec.mechanism_use(t.net, bank, t.norm, split)["mask"]
        assert torch.equal(use, used.float().expand_as(use))

    def metrics():
        return ec.metatest(t.net, bank, t.norm, t.protocol, t.budget, update=update)

    before = metrics()
    with torch.no_grad():
        layer.W_M[~used] = 100.0
    assert metrics() == before, "nor are they used at meta-test"
    with torch.no_grad():
        layer.W_M[used.nonzero()[0]] *= -3
    assert metrics() != before


def test_a_random_mask_is_a_function_of_the_image(bank):
    t = masked(bank, "random")
    masks = t.net.row_masks
    assert masks.shape == (len(bank.labels), 8) and (masks.sum(1) == 3).all()
    assert len(masks.unique(dim=0)) > 20 and masks.float().mean(0).sub(3 / 8).abs().max() < 0.15
    assert torch.equal(masks, masked(bank, "random").net.row_masks)

    m = ec.MetaTest(t.net, bank, t.norm, t.protocol)
    rows = np.concatenate(bank.class_rows("test"))[:12]
    with ec.evaluating(t.net), torch.no_grad():
        z = t.net.tail.reduced(t.net.features(m.images(rows)))
        layer = t.net.tail.layer
        scores = layer.attention(z, masks[rows]).score
        by_hand = torch.stack(
            [sum(scores[i, k] * (z[i] @ layer.W_M[k]) for k in np.flatnonzero(masks[r])) for i, r in enumerate(rows)]
        )
        got = m.embed(m.images(rows), rows)
        turned = m.embed(m.images(rows[::-1]), rows[::-1].copy()).flip(0)
    torch.testing.assert_close(got, F.normalize(by_hand, dim=-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(turned, got)  # in any company
    for update in ("head", "means"):
        metrics = ec.metatest(t.net, bank, t.norm, t.protocol, t.budget, update=update)
        assert metrics == ec.metatest(t.net, bank, t.norm, t.protocol, t.budget, update=update)
        t.net.row_masks = masks.roll(1, 0)
        assert metrics != ec.metatest(t.net, bank, t.norm, t.protocol, t.budget, update=update)
        t.net.row_masks = masks


# --- rates, class means, leak --------------------------------------------------------------------------------------------------------------


def test_the_list_of_rates_grows_at_its_edge(bank):
    net = OML((1, 28, 28), 30, width=4, generator=torch_rng(1))
    b = Budget("smoke", "continual", 0, 0, runs=1, rates=2, rate_runs=2, classes=10)
    m = ec.metatest(net, bank, NORM, Protocol(), b)
    first = ec.pick_rates(2, "head", False)
    assert m["rates_added"] and set(m["rates_added"]) == set(m["rates_tried"]) - set(first)
    assert set(m["rates_tried"]) <= set(ec.LADDER) and m["rates_tried"] == sorted(m["rates_tried"], reverse=True)
    for n, rate, scores in zip(m["n_classes"], m["rates"], m["rate_scores"]):
        tried = [r for r, score in zip(m["rates_tried"], scores) if score is not None]
        assert rate in tried and (min(tried) < rate < max(tried) or rate in (ec.LADDER[0], ec.LADDER[-1]))

    def peaked(best):
        class Spy(ec.MetaTest):
            def outcomes(self, stream, jobs, ns, desc=""):
                return {(r, i): ec.Outcome([0.0] * len(ns), [-abs(math.log(r / best))] * len(ns), []) for r, i in jobs}

        return Spy(None, bank, NORM).search("val", [5], (2e-3, 1e-3, 6e-4), 1)[5]

    assert list(peaked(1e-3)) == [2e-3, 1e-3, 6e-4]
    assert list(peaked(3e-3)) == [6e-3, 3e-3, 2e-3, 1e-3, 6e-4]
    assert min(peaked(1e-9)) == ec.LADDER[-1] and max(peaked(9.0)) == ec.LADDER[0]


@pytest.mark.parametrize("layer", ["", "unit", "aim"])
def test_class_means_by_numpy(bank, layer):
    net = OML((1, 28, 28), 30, layer, width=4, generator=torch_rng(1), **(AIM_SIZE if layer == "aim" else {})).eval()
    b = Budget("smoke", "continual", 0, 0, runs=2, classes=10)
    m = ec.metatest(net, bank, NORM, Protocol(metatest_update="means"), b)
    test = ec.MetaTest(net, bank, NORM, Protocol())
    parts = {"": lambda x: net.tail.embed(net.features(x)), "_features": net.features}
    for name, embed in parts.items():
        if not layer and name:
            continue  # the same
        for run in range(2):
            tr = test.trajectory("test", run, 10)
            with torch.no_grad():
                learnt, asked = (
                    embed(test.images(rows.ravel())).numpy().reshape(*rows.shape, -1) for rows in (tr.train, tr.test)
                )
            for k, n in enumerate(m["n_classes"]):
                means = learnt[:n].mean(1)
                for got, images in (("train", learnt[:n]), ("test", asked[:n])):
                    distance = ((images[:, :, None] - means) ** 2).sum(-1)
                    right = distance.argmin(-1) == np.arange(n)[:, None]
                    assert m[got + name][run][k] == pytest.approx(100 * right.mean(), abs=1e-3)
    assert ("test_features" in m) == bool(layer) and m["rates_tried"] == [] and m["update"] == "means"


@pytest.mark.parametrize("update", ["head", "means"])
def test_leak_compares_seen_classes_with_new_ones(bank, update):
    "Images learnt from and held out, of new classes and of those of meta-training: as many of each, and the same rate."
    net = OML((1, 28, 28), 30, width=4, generator=torch_rng(1))
    b = Budget("smoke", "continual", 0, 0, runs=2, rates=2, rate_runs=1, classes=10)
    m = ec.metatest(net, bank, NORM, Protocol(protocol="leak"), b, update=update)
    plain = ec.metatest(net, bank, NORM, Protocol(), b, update=update)
    assert {k: m[k] for k in plain} == plain, "nothing else changes"
    assert set(m) - set(plain) == {"seen_n_classes", "seen_train", "seen_test"}
    assert m["seen_n_classes"] == m["n_classes"] and np.shape(m["seen_test"]) == np.shape(m["test"])
    test = ec.MetaTest(net, bank, NORM, Protocol(protocol="leak"))
    trained = {int(r) for c in bank.class_rows("train") for r in c}
    seen, new = (test.trajectory(stream, 0, 10) for stream in ("seen", "test"))
    assert seen.train.shape == new.train.shape and seen.test.shape == new.test.shape
    assert {*seen.train.ravel(), *seen.test.ravel()} <= trained and not {
        *new.train.ravel(),
        *new.test.ravel(),
    } & trained
    assert not {*seen.train.ravel()} & {*seen.test.ravel()}
    if update == "head":
        for k, n in enumerate(m["n_classes"]):
            longest = max(n for n, rate in zip(m["n_classes"], m["rates"]) if rate == m["rates"][k])
            for run in range(2):
                outcome = test.outcomes("seen", [(m["rates"][k], run)], [n, longest] if n < longest else [n])
                (o,) = outcome.values()
                assert m["seen_test"][run][k] == pytest.approx(o.test[0], abs=1e-3)
                assert m["seen_train"][run][k] == pytest.approx(o.train[0], abs=1e-3)


@pytest.mark.parametrize("name", ["glyphs", "omniglot"])
def test_leak_learns_from_fifteen_images(name, request):
    bank = open_bank("glyphs") if name == "glyphs" else request.getfixturevalue("omniglot")
    test = ec.MetaTest(None, bank, NORM, Protocol(protocol="leak"))
    for stream in ("seen", "test"):
        tr = test.trajectory(stream, 0, 10)
        assert tr.train.shape == (10, 15) and tr.test.shape == (10, 5)
