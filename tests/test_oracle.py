"""This project against the authors' code: three outer steps and a meta-test of OML+AIM and ANML+AIM in float64, number by number.

The numbers in tests/data were computed by the authors' modules. Each comparison is also made with one switch changed,
and then it has to fail: what passes here cannot pass by being blind.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from aim_nb.engine import metatest as ec
from aim_nb.anml import ANML
from aim_nb.kernels.fastweights import anml_loss, oml_loss
from aim_nb.oml import OML, meta_loss
from aim_nb.data.tasks import Trajectory

DATA = Path(__file__).resolve().parent / "data"
KINDS = ("oml", "anml")
SAME, OTHER = 1e-10, 1e-6  # the largest difference that rounding may make, the smallest that a switch has to make
both = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def oracle():
    "What is stored, by network and key; floats as float64."
    files = {kind: load_file(DATA / f"oracle-{kind}.safetensors") for kind in KINDS}
    return {kind: {k: v.double() if v.is_floating_point() else v for k, v in f.items()} for kind, f in files.items()}


# networks


def stored_name(name):
    "The stored name of a parameter of this project."
    name = name.replace("tail.layer.", "aim.").replace("tail.", "").replace("rln.", "")
    name = re.sub(r"blocks\.(\d+)\.(conv|norm)", lambda m: f"{m[2]}{int(m[1]) + 1}", name)
    name = re.sub(r"(norm\d)\.(\w+)", lambda m: f"{m[1]}.{dict(weight='gamma', bias='beta')[m[2]]}", name)
    return name.replace("aim.W_K", "aim.W_K_transposed")


def as_stored(name, tensor):
    return tensor.detach().t() if name.endswith("W_K") else tensor.detach()


def parameters(net):
    "Copies of all parameters, named and laid out as they are stored."
    return {stored_name(n): as_stored(n, p).clone() for n, p in net.named_parameters()}


def at(stored, *stages):
    "The stored parameters of a stage; a later one has only what it moved."
    return {k.removeprefix(s): v for s in stages for k, v in stored.items() if k.startswith(s)}


def network(kind, values, **switches):
    "A network with stored parameters."
    sizes = dict(layer="aim", M=16, K=10, l=2, d_h=16, d_k=16) | {"gate": "raw", "norm": "affine"} | switches
    net = {"oml": OML, "anml": ANML}[kind]((3, 28, 28), 40, width={"oml": 8, "anml": 7}[kind], **sizes).double()
    with torch.no_grad():
        for n, p in net.named_parameters():
            as_stored(n, p).copy_(values[stored_name(n)])
    return net


def three_channels(images):
    return images.expand(-1, 3, -1, -1)


def furthest(got, want):
    "The largest difference of all numbers, and whose it is; nothing may be missing."
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    assert all(v.isfinite().all() and v.shape == want[n].shape for n, v in got.items())
    return max((float((got[n] - w).abs().max()), n) for n, w in want.items())


def shared(got, want):
    "The same for what both have: a changed switch may do away with a parameter."
    return furthest({n: got[n] for n in want if n in got}, {n: want[n] for n in want if n in got})


@both
def test_every_stored_parameter_has_its_place(kind, oracle):
    start = at(oracle[kind], "start/")
    assert furthest(parameters(network(kind, start)), start)[0] == 0
    assert at(oracle[kind], "step2/after/").keys() == start.keys()
    assert sum(f.stat().st_size for f in DATA.iterdir()) < 4_000_000


# meta-training


def three_steps(
    kind, stored, plain=False, slow_set="all", order="first", fast_set="release", ranks_off=0, same_row=True, **switches
):
    "Three outer steps on the stored images and draws, plain or fast: losses, accuracies and the parameters after them."
    net = network(kind, at(stored, "start/"), **switches)
    slow = [p for n, p in net.named_parameters() if slow_set == "all" or n.startswith(net.slow)]
    opt, losses, hits = torch.optim.Adam(slow, lr=1e-3), [], []
    for s in range(3):
        part = {k.split("/")[1]: v for k, v in stored.items() if k.startswith(f"step{s}/")}
        if same_row:
            with torch.no_grad():
                net.tail.fc.weight[part["class"]] = part["fc_row"]
        ranks = iter((part["ranks"] + ranks_off) % 12)
        net.tail.layer.draw_ranks = lambda generator=None, rows=None, ranks=ranks: next(ranks)
        x = three_channels(torch.cat([part["random_images"], part["trajectory_images"]]))
        y = torch.cat([part["random_labels"], part["class"].expand(5)])
        if plain:
            loss, logits = meta_loss(net, x, y, 5, order=order, fast_set=fast_set)
        elif kind == "oml":
            loss, logits = oml_loss(net, x, y, 5, order=order)
        else:
            loss, logits = anml_loss(net, x, y, 5, order=order, fast_set=fast_set)
        assert next(ranks, None) is None, "five inner steps and the meta-batch use up the stored ranks"
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
        hits.append((logits.argmax(-1) == y).double().mean())
    return dict(loss=torch.stack(losses), accuracy=torch.stack(hits)), parameters(net)


def stored_steps(stored):
    return {k: torch.stack([stored[f"step{s}/{k}"] for s in range(3)]) for k in ("loss", "accuracy")}


@both
@pytest.mark.parametrize("plain", (True, False), ids=("plain", "fast"))
def test_three_outer_steps_are_the_authors(kind, plain, oracle):
    measured, weights = three_steps(kind, oracle[kind], plain)
    far = furthest(measured, stored_steps(oracle[kind])), furthest(weights, at(oracle[kind], "step2/after/"))
    print(f"{kind}: measured {far[0]}, parameters {far[1]}")
    assert max(far)[0] < SAME, far


STEP_SWITCHES = [
    *((k, s) for k in KINDS for s in (dict(gate="sigmoid"), dict(norm="instance"), dict(order="second"))),
    *((k, s) for k in KINDS for s in (dict(slow_set="paper"), dict(ranks_off=1), dict(same_row=False))),
    ("anml", dict(fast_set="paper")),
]


def switch_name(v):
    return v if isinstance(v, str) else "-".join(f"{k}={x}" for k, x in v.items())


@pytest.mark.parametrize("kind,switch", STEP_SWITCHES, ids=switch_name)
def test_outer_steps_with_one_switch_changed_are_not_the_authors(kind, switch, oracle):
    measured, weights = three_steps(kind, oracle[kind], **switch)
    assert shared({"loss": measured["loss"]}, stored_steps(oracle[kind]))[0] > OTHER
    assert shared(weights, at(oracle[kind], "step2/after/"))[0] > OTHER


# meta-test


class Exam:
    "The stored meta-test of one network: what it starts from and what it came to."

    def __init__(self, kind, stored, **switches):
        self.kind, self.images, self.lr = kind, three_channels(stored["test/images"]), float(stored["test/lr"])
        self.net = network(kind, at(stored, "step2/after/"), **switches).eval()
        rows = np.arange(20).reshape(4, 5)
        self.trajectory = Trajectory(stored["test/labels"].numpy()[::5], rows, rows)
        self.labels, self.head = stored["test/labels"], stored["test/head"]
        self.logits, self.after = stored["test/logits"], at(stored, "step2/after/", "test/after/")

    def take(self, rows):
        return self.images[torch.as_tensor(np.asarray(rows))]

    def cache(self, vectors):
        return ec.FeatureCache(20, vectors.detach().__getitem__)

    def plain(self, kept=("tail.reduce",), stochastic=False):
        "Adam on what is fast, written out with nothing of `metatest`; ANML keeps `kept` as it is."
        net, fast = self.net, self.net.fast_names("release")
        with torch.no_grad():
            net.tail.fc.weight.copy_(self.head)
            net.tail.fc.bias.zero_()
        still = kept if self.kind == "anml" else ()
        moves = [p for n, p in net.named_parameters() if n.startswith(fast) and not n.startswith(still)]
        opt = torch.optim.Adam(moves, lr=self.lr)
        ranks = torch.arange(2, 12) if stochastic else None
        for x, y in zip(self.images, self.labels):
            opt.zero_grad()
            F.cross_entropy(net(x[None], ranks), y[None]).backward()
            opt.step()
        return net(self.images).detach(), parameters(net)

    def reference(self, update="fast", fast_set="release"):
        "`metatest_reference`."
        _, net = ec.metatest_reference(self.net, self.take, self.trajectory, self.lr, [4], self.head, update, fast_set)
        return net(self.images).detach(), parameters(net)

    def quick(self, adam="exact", fast_set="release"):
        "The learners that a run's meta-test uses."
        net = self.net
        if self.kind == "oml":
            learner = ec.TailLearner(net.tail, self.cache(net.features(self.images)), self.lr, self.head, adam)
        else:
            gates = self.cache(net.modulation(self.images))
            learner = ec.ANMLLearner(net, self.take, gates, self.lr, self.head, fast_set, adam)
        ec.follow(learner, self.trajectory, [4])
        return learner.logits(np.arange(20)), parameters(net) | self.moved(learner)

    def moved(self, learner):
        "What the learner moved, as it is at the end."
        tail = learner.tail
        values = tail.tensors.values
        values = {stored_name(n): as_stored(n, v) for n, v in values.items() if not n.startswith("W_M.")}
        values["aim.W_M"] = tail.layer.mechanisms()
        if self.kind == "anml":
            p = learner.p
            prefix = "p.blocks." if p.whole else f"p.blocks.{len(self.net.p.blocks) - 1}.norm."
            values |= {stored_name(prefix + n): v.detach() for n, v in p.fast.items()}
        return values

    def far(self, logits, after):
        "The largest difference of logits and of parameters."
        return furthest({"logits": logits}, {"logits": self.logits}), shared(after, self.after)


def agree(exam, logits, after):
    "Logits, and every parameter, are the stored ones."
    if exam.kind == "anml":
        moved = float((after["reduce.weight"] - exam.after["reduce.weight"]).abs().max())
        assert not moved, (
            f"the authors freeze ANML's reduce layer at meta-test, but it moved by up to {moved:.1e}: with "
            "fast_set='release' PlainLearner has to leave tail.reduce out of its Adam, and ANMLLearner has to "
            "make its AdamTail with freeze_reduce=True"
        )
    assert after.keys() == exam.after.keys()
    far = exam.far(logits, after)
    print(f"{exam.kind}: logits {far[0]}, parameters {far[1]}")
    assert max(far)[0] < SAME, far


@both
@pytest.mark.parametrize("way", ("plain", "reference", "quick"))
def test_the_meta_test_is_the_authors(kind, way, oracle):
    exam = Exam(kind, oracle[kind])
    agree(exam, *getattr(exam, way)())


@both
@pytest.mark.parametrize("way", ("plain", "reference", "quick"))
@pytest.mark.parametrize("switch", (dict(gate="sigmoid"), dict(norm="instance")), ids=switch_name)
def test_a_meta_test_with_another_network_is_not_the_authors(kind, way, switch, oracle):
    exam = Exam(kind, oracle[kind], **switch)
    logits, weights = exam.far(*getattr(exam, way)())
    assert logits[0] > OTHER and weights[0] > OTHER


@pytest.mark.parametrize(
    "kind,way,switch",
    [
        ("oml", "plain", dict(stochastic=True)),
        ("oml", "reference", dict(update="head")),
        ("oml", "quick", dict(adam="lazy")),
        ("anml", "plain", dict(stochastic=True)),
        ("anml", "plain", dict(kept=())),
        ("anml", "reference", dict(update="head")),
        ("anml", "reference", dict(fast_set="paper")),
        ("anml", "quick", dict(adam="lazy")),
        ("anml", "quick", dict(fast_set="paper")),
    ],
    ids=switch_name,
)
def test_a_meta_test_with_one_switch_changed_is_not_the_authors(kind, way, switch, oracle):
    exam = Exam(kind, oracle[kind])
    logits, weights = exam.far(*getattr(exam, way)(**switch))
    assert logits[0] > OTHER and weights[0] > OTHER


@both
@pytest.mark.parametrize("way", ("plain", "reference", "quick"))
def test_a_meta_test_at_another_rate_or_order_is_not_the_authors(kind, way, oracle):
    slower, swapped = (Exam(kind, oracle[kind]) for _ in range(2))
    slower.lr *= 0.999
    assert min(slower.far(*getattr(slower, way)()))[0] > OTHER
    swapped.images = swapped.images[[1, 0, *range(2, 20)]]
    logits, after = getattr(swapped, way)()
    assert min(swapped.far(logits[[1, 0, *range(2, 20)]], after))[0] > OTHER
