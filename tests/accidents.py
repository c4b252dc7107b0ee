"""Runs small enough to be killed hundreds of times: tiny banks, whole experiments in forked processes, and a comparison of everything they leave."""

import contextlib, errno, faulthandler, functools, hashlib, io, json, os, re, signal, sys, threading, time, traceback
from pathlib import Path

import numpy as np
import torch
from tqdm import auto, std

from aim_nb.data import files as bank_files

from aim_nb.engine import checkpoints

from aim_nb.engine import loop

from aim_nb.engine import pretrain

from aim_nb.engine import records

from aim_nb.engine import train_continual

from aim_nb.engine import train_fewshot
from aim_nb.engine.checkpoints import _raw as raw, load_tensors
from aim_nb.engine.metatest import MetaTest
from aim_nb.core import AimError, numpy_rng, progress
from aim_nb.config import Budget, preset

METHODS = ("sib+aim", "oml+aim", "anml+aim")
FEWSHOT = Budget("tiny", "fewshot", steps=24, val_every=8, val_episodes=6, test_episodes=8, pretrain_epochs=3, views=2)
CONTINUAL = Budget("tiny", "continual", steps=8, val_every=3, width=4, runs=2, rates=2, rate_runs=1, classes=4)


@functools.cache
def warm():
    "Pay once, in the parent, for what every child would load anew."
    torch.set_num_threads(1)
    std.tqdm.monitor_interval = 0
    p = torch.nn.Parameter(torch.ones(2))
    for kind in (torch.optim.Adam, torch.optim.SGD):
        p.grad = torch.ones(2)
        kind([p], lr=0.1).step()
    for _ in progress(range(1)):
        pass
    records.code_commit()


def tiny_bank(root):
    "A bank called glyphs with 19 classes that are noise around a prototype, below `root`."
    rng, parts = numpy_rng("tiny bank"), dict(train=range(8), val=range(8, 13), test=range(13, 19))
    means = rng.integers(40, 216, (19, 1, 7, 7, 1)).repeat(4, 2).repeat(4, 3)
    images = np.clip(means + rng.normal(0, 30, (19, 22, 28, 28, 1)), 0, 255).astype(np.uint8).reshape(-1, 28, 28, 1)
    bank_files.write_bank(
        Path(root) / "glyphs",
        "glyphs",
        images,
        np.repeat(np.arange(19), 22),
        np.tile(np.arange(22) >= 6, 19),
        [f"class {c}" for c in range(19)],
        parts,
        "noise",
    )
    return Path(root)


def experiment(method, root, **kw):
    "One experiment as a notebook calls it, from data to record, at a size that takes a second."
    kw = dict(dataset="glyphs", method=method, M=6, K=2, l=1, data_root=str(root)) | kw
    if method == "sib+aim":
        return train_fewshot.run_fewshot(backbone="conv4", budget=FEWSHOT, d_out=12, n_query=5, **kw)
    switches = dict(metatest_update="fast") if method == "anml+aim" else dict(weights="best")
    kw.setdefault("protocol", preset("ours", "glyphs", **switches))
    return train_continual.run_continual(budget=CONTINUAL, inner=3, random=8, n_out=20, **kw)


# ---- what a child process does differently: it saves often, notes what it draws, and dies where it is told


def save_often(every=2):
    "A checkpoint each `every` steps, features noted after each block: more places to die in."
    begin, fill = loop.Run.__post_init__, pretrain.FeatureCache.fill

    def begin_saving_often(self):
        begin(self)
        self.save_every = self.save_every or every

    loop.Run.__post_init__ = begin_saving_often
    pretrain.FeatureCache.fill, pretrain.BLOCK = functools.partialmethod(fill, every=0), 32
    small = pretrain.make_backbone
    pretrain.make_backbone = lambda name, shape, generator=None, width=None: small(
        name, shape, generator=generator, width=width or 4
    )


def note_draws(path):
    "Write a line for each training step: what is trained, the step, a hash of the indices that it drew."

    def note(kind, i, *arrays):
        h = hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()[:16]
        with contextlib.suppress(OSError), open(path, "a") as f:
            f.write(f"{kind} {i} {h}\n")

    batches, meta, episodes = pretrain.Batches.__call__, train_continual.draw_meta_batch, train_fewshot.draw_episodes

    def pretrain_batch(self, i):
        out = batches(self, i)
        note("pretrain", i, out[0])
        return out

    def meta_batch(rows, seed, i, *args):
        out = meta(rows, seed, i, *args)
        note("continual", i, *out[:4])
        return out

    def train_episodes(rows, seed, indices, **kw):
        out = episodes(rows, seed, indices, **kw)
        if kw["stream"] == "train":
            [note("fewshot", i, out.support[k], out.query[k]) for k, i in enumerate(indices)]
        return out

    pretrain.Batches.__call__, train_continual.draw_meta_batch, train_fewshot.draw_episodes = (
        pretrain_batch,
        meta_batch,
        train_episodes,
    )


def fingerprint(tensors, meta):
    "Of all that a checkpoint holds but the seconds."
    h = hashlib.sha256(json.dumps(plain(meta), sort_keys=True).encode())
    for k in sorted(tensors):
        h.update(f"{k} {tensors[k].dtype} {tuple(tensors[k].shape)}".encode())
        h.update(raw(tensors[k]))
    return h.hexdigest()


def note_states(path):
    "Write a line for each state that a run passes through, before and after each validation and milestone: the run's folder, the step, a fingerprint."

    def noted(act):
        def wrapped(self):
            act(self)
            self.read()
            meta = dict(history=self.history.asdict(), window=dict(sums=self.window.sums, count=self.window.count))
            with open(path, "a") as f:
                f.write(
                    f"{self.checkpoints.dir.name}/step-{self.n:09d} {fingerprint(self.trainee.state_dict(), meta)}\n"
                )

        return wrapped

    for name in ("step", "validate", "reach_milestone"):
        setattr(loop.Run, name, noted(getattr(loop.Run, name)))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


PLACES = {
    "step": (loop.Run, "step"),
    "write": (checkpoints, "safetensors_bytes"),
    "sync": (os, "fsync"),
    "rename": (os, "replace"),
    "trajectory": (MetaTest, "run"),
}


def counted(where, at=0, act=die):
    "Count the calls of a place to die in; at call number `at` act instead."
    owner, name = PLACES[where]
    function, calls = getattr(owner, name), [0]

    def watched(*args, **kw):
        calls[0] += 1
        if calls[0] == at:
            return act()
        return function(*args, **kw)

    setattr(owner, name, watched)
    return calls


def out_of_space():
    raise OSError(errno.ENOSPC, "No space left on device")


# ---- processes


def own_locks():
    "Forked processes share tqdm's lock, and one that is killed while it holds it would stop all others: each gets its own, and no thread that watches bars."
    for kind in (std.tqdm, auto.tqdm):
        kind.monitor_interval, kind.monitor = 0, None
        kind.set_lock(threading.RLock())


class Child:
    "A forked process that runs `work`; what it says is in a file, its exit code in `code` after `wait`."

    def __init__(self, work, said):
        self.said = Path(said)
        self.said.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid, self.code = os.fork(), None
        if not self.pid:
            self.live(work)

    def live(self, work):
        "In the child: never returns."
        code = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            out = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
            os.environ["AIM_LIVE"] = "0"
            faulthandler.disable()  # pytest's would tell of every death
            own_locks()
            work()
            code = 0
        except AimError as e:
            print(f"AimError: {e}")
            code = 2
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def kill(self, sig=signal.SIGKILL):
        while not self.said.exists() and self.wait(0.002) is None:
            pass  # until then it is a copy of pytest
        if self.code is None:
            os.kill(self.pid, sig)

    def wait(self, seconds=None):
        "The exit code, negative for a signal; None if it is not over after `seconds`. Without these it may take long, not for ever."
        end = time.monotonic() + (600 if seconds is None else seconds)
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() < end:
                time.sleep(0.002)
            elif seconds is not None:
                return None
            else:
                self.kill()
                raise TimeoutError(f"the process hangs after: {self.text}")
        return self.code

    @property
    def text(self):
        return self.said.read_text(errors="replace") if self.said.exists() else ""


def run_child(method, folder, data, where="", at=0, act=die, before=lambda: None, name="said", **kw):
    "Start the experiment in a process of its own, its runs in `folder`; at call number `at` of a place it dies or acts."
    warm()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    def work():
        os.environ["AIM_RUNS"] = str(folder / "runs")
        save_often()
        note_draws(folder / "draws.txt")
        calls = {p: counted(p, at if p == where else 0, act) for p in PLACES}
        before()
        experiment(method, data, **kw)
        (folder / "calls.json").write_text(json.dumps({k: v[0] for k, v in calls.items()}))

    return Child(work, folder / f"{name}.txt")


# ---- what a run leaves


def plain(meta):
    "A file's JSON without the seconds that things took."
    drop = {"seconds", "save_seconds"}
    if isinstance(meta, dict):
        return {k: plain(v) for k, v in meta.items() if k not in drop}
    return [plain(v) for v in meta] if isinstance(meta, list) else meta


def before_newest(folder):
    "States of a run before its newest, and the weights that only these need. Ctrl-C saves where no other run does, so their names differ; `strange` judges what the states hold."
    states = sorted(folder.glob("step-*"))
    if not states:
        return []
    history = load_tensors(states[-1])[1]["meta"]["history"]
    needed = loop.History(**history).needed_weights()
    return [*states[:-1], *(p for p in folder.glob("weights-*") if int(p.stem.rpartition("-")[2]) not in needed)]


def left(folder):
    "Everything in the runs of `folder` that matters, by name: tensors, arrays, records without their circumstances. The way to a finished backbone does not; a run that stops between the two leaves it behind."
    runs, out = Path(folder) / "runs", {}
    older = [p for d in runs.glob("checkpoints/*") for p in before_newest(d)]
    for p in sorted(
        p
        for p in runs.rglob("*")
        if p.is_file() and p.name != ".lock" and p not in older and not re.match("metatest|pretrain-", p.parent.name)
    ):
        name = str(p.relative_to(runs))
        if p.suffix == ".safetensors":
            tensors, meta = load_tensors(p)
            out[name] = {
                **{k: (str(t.dtype), tuple(t.shape), raw(t).tobytes()) for k, t in tensors.items()},
                "json": plain(meta),
            }
        elif p.parent.name == "records" and p.suffix == ".json":
            out[name] = records.essence(records.read_record(p))
        else:
            out[name] = p.read_bytes()
    return out


def strange(folder, reference):
    "Checkpoints of any age, those of the pretraining too, that are no state which the reference run passed through."
    passed = set((Path(reference) / "states.txt").read_text().splitlines())
    saved = [(p, load_tensors(p)) for p in sorted((Path(folder) / "runs/checkpoints").glob("*/step-*"))]
    return [
        f"state {p.parent.name}/{p.stem}"
        for p, (tensors, top) in saved
        if f"{p.parent.name}/{p.stem} {fingerprint(tensors, top['meta'])}" not in passed
    ]


def unlike(a, b):
    "Where two such results differ: names, with the tensors or fields below them."
    out = [n for n in sorted(a.keys() ^ b.keys())]
    for n in sorted(a.keys() & b.keys()):
        if a[n] == b[n]:
            continue
        out += (
            [f"{n}: {k}" for k in sorted(a[n].keys() | b[n].keys()) if a[n].get(k) != b[n].get(k)]
            if isinstance(a[n], dict) and isinstance(b[n], dict)
            else [n]
        )
    return out


def draws(folder):
    "What each step drew: (kind, step) -> the set of hashes seen for it, over all attempts."
    out = {}
    for line in (Path(folder) / "draws.txt").read_text().splitlines():
        kind, i, h = line.split()
        out.setdefault((kind, int(i)), set()).add(h)
    return out
