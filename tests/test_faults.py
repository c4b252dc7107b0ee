"""Faults in the middle of whole experiments: each ends in one clear sentence, and once the fault is mended the same command ends as if nothing had happened."""

import os, random, resource, shutil, signal, subprocess, tempfile, time
from functools import partial
from pathlib import Path

import pytest

from accidents import left, out_of_space, run_child
from aim_nb.engine import loop
from aim_nb.data.files import load_bank, write_bank
from aim_nb.engine.checkpoints import load_tensors
from aim_nb.config import Protocol
from test_kills import lost

pytestmark = pytest.mark.both
each = pytest.mark.parametrize("method", ["oml+aim", pytest.param("sib+aim", marks=pytest.mark.stress)])


def sentence(child):
    "The one line that a user sees; empty when it is more or less than that."
    said = [l for l in child.text.splitlines() if l.startswith("AimError: ")]
    return said[0].removeprefix("AimError: ") if len(said) == 1 and "Traceback" not in child.text else ""


class Trials:
    "Run an experiment under a fault, mend it, run it again; count, and compare with the run that had none."

    def __init__(self, method, data, whole, tmp_path, tally, many, short=1, long=4):
        self.method, self.data, self.whole, self.tmp, self.tally, self.rng = (
            method,
            data,
            whole(method),
            tmp_path,
            tally,
            random.Random(method),
        )
        self.n = many(short, long)

    def __iter__(self):
        return ((self.rng, self.tmp / str(i)) for i in range(self.n))

    def start(self, folder, **kw):
        return run_child(self.method, folder, **{"data": self.data, **kw})

    def moment(self):
        return self.rng.uniform(0.02, 0.8 * self.whole[1])

    def ended(self, what, how, child, folder, codes=(0, 2), words=(), **kw):
        "The fault is over: was it said in one sentence, and does the same command now come to the same end?"
        hit, text, said = child.wait() != 0, child.text, sentence(child)
        told = child.code in codes and (child.code != 2 or bool(said) and all(w in said for w in words))
        again = self.start(folder, **kw)
        gone = [again.text] if again.wait() else lost(folder, self.whole[0])
        self.tally.add(what, how, gone or not told, 1)
        assert told, (child.code, text)
        assert not gone, gone
        return hit


# ---- the disk


def little_room(rng):
    "Limit the size of files: the kernel refuses the write half-way, as on a full disk."
    limit = rng.randint(8_000, 60_000)

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return limited


@each
def test_disk_full_in_a_write(method, data, whole, tmp_path, tally, many):
    t = Trials(method, data, whole, tmp_path, tally, many)
    hits = [
        t.ended(
            "disk full: the kernel refuses a write half-way",
            "one sentence; with room again, the same end",
            t.start(f, before=little_room(rng)),
            f,
        )
        for rng, f in t
    ]
    assert any(hits)


@each
def test_disk_full_at_any_sync_or_rename(method, data, whole, tmp_path, tally, many):
    t = Trials(method, data, whole, tmp_path, tally, many, 2, 6)
    for i, (rng, folder) in enumerate(t):
        where = ("sync", "rename")[i % 2]
        child = t.start(folder, where=where, at=rng.randint(1, t.whole[2][where]), act=out_of_space)
        assert t.ended(
            f"disk full: ENOSPC at a {where}",
            "one sentence; with room again, the same end",
            child,
            folder,
            codes=(2,),
            words=("No space left",),
        )


@pytest.mark.stress
def test_disk_full_on_a_small_disk(data, whole, tmp_path, tally, many):
    "A real file system without room, where one may be mounted."
    t = Trials("oml+aim", data, whole, tmp_path, tally, many)
    for rng, folder in t:
        (folder / "runs").mkdir(parents=True)
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={rng.randint(40, 400)}k", "tmpfs", folder / "runs"],
            capture_output=True,
        ).returncode:
            pytest.skip("a small disk: this user may not mount one")
        try:
            child = t.start(folder)
            child.wait()
            subprocess.run(["mount", "-o", "remount,size=50m", folder / "runs"], check=True)
            t.ended(
                "disk full: a small file system of its own",
                "one sentence; with room again, the same end",
                child,
                folder,
            )
        finally:
            subprocess.run(["umount", "-l", folder / "runs"], check=True)


@each
def test_read_only_folder(method, data, whole, tally, many):
    with tempfile.TemporaryDirectory() as d:  # where others may look in
        os.chmod(d, 0o755)
        shutil.copytree(data, f"{d}/data")
        [os.chmod(f"{d}/data{p}", 0o755) for p in ("", "/glyphs")]
        read_only(Trials(method, Path(d) / "data", whole, Path(d), tally, many, 1, 2))


def read_only(t):
    for rng, folder in t:
        t.start(folder, where="step", at=rng.randint(3, 7)).wait()
        before, places = left(folder), [folder / "runs", *(p for p in (folder / "runs").rglob("*") if p.is_dir())]
        for p in places:
            p.chmod(0o555)
        for p in (folder / "runs").rglob(".lock"):
            p.chmod(0o444)
        child = t.start(
            folder, before=lambda: os.seteuid(65534) if os.geteuid() == 0 else None
        )  # root may write anywhere
        child.wait()
        unchanged = left(folder) == before
        for p in places:
            p.chmod(0o755)
        for p in (folder / "runs").rglob(".lock"):
            p.chmod(0o644)
        assert (
            t.ended(
                "runs folder turned read-only",
                "one sentence, nothing changed; writable again, the same end",
                child,
                folder,
                codes=(2,),
                words=("written",),
            )
            and unchanged
        )


# ---- the data


@each
def test_data_vanishes(method, data, whole, tmp_path, tally, many):
    t = Trials(method, data, whole, tmp_path, tally, many)
    for rng, folder in t:
        own = folder / "data"
        shutil.copytree(data, own)
        child = t.start(folder, data=own)
        while child.wait(0.002) is None and not (folder / "draws.txt").exists():
            pass  # before that, glyphs would be made anew
        child.wait(t.moment())
        os.rename(own, folder / "elsewhere")
        child.wait()
        os.rename(folder / "elsewhere", own)
        t.ended(
            "data root gone in the middle of a run",
            "what was open stays readable, or one sentence; back again, the same end",
            child,
            folder,
            data=own,
        )


def test_data_emptied_under_the_run(data, whole, tmp_path, tally, many):
    "The worst case: the mapped file itself loses its bytes. The system ends the process; nothing it had saved is lost."
    t = Trials("oml+aim", data, whole, tmp_path, tally, many)
    for rng, folder in t:
        own = folder / "data"
        shutil.copytree(data, own)
        child = t.start(folder, data=own)
        child.wait(t.moment())
        os.truncate(own / "glyphs/images.npy", 0)
        child.wait()
        shutil.copy(data / "glyphs/images.npy", own / "glyphs/images.npy")
        t.ended(
            "data file emptied under the run",
            "the process ends (SIGBUS); mended, the same end",
            child,
            folder,
            codes=(0, 2, -signal.SIGBUS),
            data=own,
        )


# ---- two at once, Ctrl-C


@each
def test_two_processes_at_once(method, data, whole, tmp_path, tally, many):
    t = Trials(method, data, whole, tmp_path, tally, many, 1, 4)
    for rng, folder in t:
        first = t.start(folder, name="first")
        time.sleep(rng.choice([0, 0.01, rng.uniform(0, t.whole[1])]))
        second = t.start(folder, name="second")
        codes = {first.wait(), second.wait()}
        assert 0 in codes, (first.text, second.text)
        refused = second if second.code else first
        t.ended(
            "the same experiment twice at the same time",
            "one ran, the other refused or found the record; the same end",
            refused,
            folder,
            words=("is running this experiment already",),
        )


@each
def test_ctrl_c(method, data, whole, tmp_path, tally, many):
    "At any moment. What it saves, between a validation and the next step too, must be a state of the undisturbed run (`strange` looks at both kept checkpoints)."
    t, saved = Trials(method, data, whole, tmp_path, tally, many, 1, 6), 0
    for rng, folder in t:
        child = t.start(folder)
        if child.wait(max(0.3, t.moment())) is None:
            child.kill(signal.SIGINT)
        child.wait()
        saved += "saved; run the same command again to resume." in child.text
        assert "Traceback" not in child.text
        t.ended(
            "Ctrl-C at any moment", "saved, said how to go on, exit 130; the same end", child, folder, codes=(0, 130)
        )
    assert saved or many(1, 0)


def interrupt_after(n):
    "In a run's own process: Ctrl-C as step `n` ends."
    step, calls = loop.Run.step, []

    def watched(self):
        step(self)
        calls.append(1)
        if len(calls) == n:
            os.kill(os.getpid(), signal.SIGINT)

    loop.Run.step = watched


def test_ctrl_c_in_training_saves_and_says_how_to_go_on(data, whole, tmp_path, tally, many):
    t = Trials("sib+aim", data, whole, tmp_path, tally, many)
    for rng, folder in t:
        step = rng.randint(8, 28)  # 6 of pretraining, 24 of meta-training
        child = t.start(folder, before=partial(interrupt_after, step))
        assert (
            child.wait() == 130
            and f"stopped after step {step - 6} of 24, saved; run the same command again to resume." in child.text
        ), child.text
        t.ended(
            "Ctrl-C in a training step", "saved, said how to go on, exit 130; the same end", child, folder, codes=(130,)
        )


# ---- numbers that go wrong, files that are damaged


def spoil_loss(step, bad):
    "In a run's own process: the loss of one step becomes NaN or infinite."
    add = loop.Window.add

    def added(self, i, metrics):
        add(self, i, {**metrics, "loss": metrics["loss"] * 0 + bad} if i == step else metrics)

    loop.Window.add = added


@each
@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.stress)])
def test_a_bad_loss_stops_the_run(method, bad, data, whole, tmp_path, tally, many):
    t = Trials(method, data, whole, tmp_path, tally, many, 1, 2)
    for rng, folder in t:
        step = rng.randint(3, 7)
        child = t.start(folder, before=partial(spoil_loss, step, bad))
        child.wait()
        at = f"loss is {bad} at step {step}"
        kept = [p for p in (folder / "runs/checkpoints").glob("*/step-*")]
        for p in kept:
            load_tensors(p)  # whole
        assert t.ended(
            "a loss that is NaN or infinite",
            "stopped with the step, last good checkpoint kept; the same end without",
            child,
            folder,
            codes=(2,),
            words=(at, "last good checkpoint"),
        )
        assert kept and all(int(p.stem.partition("-")[2]) <= step for p in kept)


DAMAGE = {
    "cut": lambda d, rng: d[: rng.randrange(len(d))],
    "flipped": lambda d, rng: d[: (i := rng.randrange(len(d)))] + bytes([d[i] ^ 1 << rng.randrange(8)]) + d[i + 1 :],
    "emptied": lambda d, rng: b"",
    "overwritten": lambda d, rng: rng.randbytes(len(d)),
}


@each
def test_a_damaged_checkpoint_falls_back(method, data, whole, tmp_path, tally, many):
    t = Trials(method, data, whole, tmp_path, tally, many, 1, 4)
    for i, (rng, folder) in enumerate(t):
        t.start(folder, where="step", at=rng.randint(6, 7) + 6 * (method == "sib+aim")).wait()
        newest = sorted((folder / "runs/checkpoints").glob("*/step-*"))[-1]
        how = list(DAMAGE)[i % 4]
        newest.write_bytes(DAMAGE[how](newest.read_bytes(), rng))
        child = t.start(folder)
        assert child.wait() == 0 and ("Falling back to the checkpoint before it." in child.text or how == "flipped"), (
            child.text
        )  # a bit of padding may flip
        t.ended(f"newest checkpoint {how}", "named, the one before it taken; the same end", child, folder, codes=(0,))


OTHERS = {
    "architecture": (dict(M=8), "parameters.M is 6 there, 8 here"),
    "protocol": (dict(protocol=Protocol(norm="instance")), "protocol.norm is affine there, instance here"),
    "dataset": (dict(dataset="omniglot"), "dataset is glyphs there, omniglot here"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(what, data, whole, tmp_path, tally, many):
    "It is put where a run of another architecture, protocol or dataset looks for its own: refused with what differs, and left as it was; --fresh goes on without."
    root = tmp_path / "data"
    shutil.copytree(data, root)
    bank = load_bank(root / "glyphs")
    write_bank(
        root / "omniglot", "omniglot", bank.images, bank.labels, bank.split, bank.class_names, bank.splits, "noise"
    )
    (kw, said), runs = OTHERS[what], tmp_path / "runs/checkpoints"

    def start(**more):
        return run_child("oml+aim", tmp_path, root, **more)

    assert start(where="step", at=5, protocol=Protocol()).wait() == -signal.SIGKILL
    (own,) = runs.iterdir()
    assert start(where="step", at=1, **{"protocol": Protocol(), **kw}).wait() == -signal.SIGKILL
    (other,) = set(runs.iterdir()) - {own}
    for p in own.glob("step-*"):
        shutil.copy(p, other)
    before = {p.name: p.read_bytes() for p in other.glob("*.safetensors")}
    child = start(**{"protocol": Protocol(), **kw})
    ok = (
        child.wait() == 2
        and said in sentence(child)
        and "--fresh" in sentence(child)
        and before == {p.name: p.read_bytes() for p in other.glob("*.safetensors")}
    )
    fresh = start(fresh=True, **{"protocol": Protocol(), **kw})
    ok = fresh.wait() == 0 and ok
    tally.add(f"checkpoint of another {what}", "refused with the fields that differ, nothing loaded or changed", not ok)
    assert len(before) == 2 and ok, (child.text, fresh.text)


def test_a_damaged_best_state_is_refused(data, whole, tmp_path, tally, many):
    t = Trials("oml+aim", data, whole, tmp_path, tally, many)
    for rng, folder in t:
        assert (
            t.start(folder, where="trajectory", at=t.whole[2]["trajectory"]).wait() == -signal.SIGKILL
        )  # training is over
        (run,) = (folder / "runs/checkpoints").iterdir()
        history = loop.History(**load_tensors(sorted(run.glob("step-*"))[-1])[1]["meta"]["history"])
        assert history.best_step < history.last["step"], "the end has to be worse, or no file is read"
        best = run / f"weights-{history.best_step:09d}.safetensors"
        best.write_bytes(DAMAGE["cut"](best.read_bytes(), rng))
        child = t.start(folder)
        child.wait()
        assert "--fresh" in sentence(child) and "damaged" in sentence(child), child.text
        t.ended(
            "best state cut",
            "refused with what to do; --fresh comes to the same end",
            child,
            folder,
            codes=(2,),
            fresh=True,
        )
