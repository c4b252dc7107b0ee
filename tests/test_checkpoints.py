"""Checkpoints and the training loop under real accidents: SIGKILL, Ctrl-C, a full disk, damaged files, two processes."""

import json, os, random, resource, signal, stat, struct, tempfile, time
from pathlib import Path
import pytest, torch
from accidents import Child, counted, die, warm
from aim_nb.engine import checkpoints
from aim_nb.engine.checkpoints import Checkpoints, load_tensors, run_lock, save_tensors
from aim_nb.core import AimError, torch_rng
from aim_nb.engine.loop import load_module, load_optimizer, module_tensors, optimizer_tensors, run_loop


class Net:
    "A trainee: a little network with batch norm under Adam. Where to die: step:N or write:N; the impure kind draws from a generator that is not part of its state."

    def __init__(self, death="", kind="net"):
        self.death, self.kind, self.hidden = death, kind, torch_rng("hidden")
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        )
        for k, p in self.net.named_parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.4, generator=torch_rng("init", k))
            elif k != "1.weight":
                torch.nn.init.zeros_(p)
        self.opt = torch.optim.Adam(self.net.parameters(), 1e-2)

    def step(self, i):
        if self.death == f"step:{i}":
            die()
        if self.kind == "slow":
            time.sleep(0.05)
            print("step", i, flush=True)
        g = self.hidden if self.kind == "impure" else torch_rng("data", i)
        x, y = torch.randn(16, 6, generator=g), torch.randint(3, (16,), generator=g)
        loss = torch.nn.functional.cross_entropy(self.net.train()(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return dict(loss=loss)

    def evaluate(self, n):
        with torch.no_grad():
            out = self.net.eval()(torch.randn(64, 6, generator=torch_rng("val")))
        return dict(accuracy=float(out.max(1).values.mean()))

    def state_dict(self):
        return module_tensors(self.net, "net.") | optimizer_tensors(self.opt)

    def load_state_dict(self, t):
        load_module(self.net, t, "net.")
        load_optimizer(self.opt, t)


def worker(folder, steps=40, death="", kind="net", name="said"):
    "Train it in a process of its own, which may die in a step or with a file half written."
    warm()

    def work():
        if death.startswith("write"):
            counted("write", int(death[6:]))
        trainee = Net(death, kind)
        history = run_loop(trainee, steps, val_every=7, checkpoints=Checkpoints(folder, dict(kind="net")), save_every=3)
        save_tensors(
            f"{folder}.end", trainee.state_dict(), dict(rows=list(history), best=history.best, resumed=history.resumed)
        )

    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    return Child(work, f"{folder}.{name}")


def finish(folder, **kw):
    child = worker(folder, **kw)
    return child.wait(), child.text


def wait_for(child, text):
    "Until the process has said something."
    while text not in child.text:
        assert child.wait(0.01) is None, child.text


def end(folder):
    return load_tensors(str(folder) + ".end")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    code, text = finish(folder)
    assert code == 0, text
    return end(folder)


@pytest.mark.both
def test_killed_and_resumed_is_bit_for_bit(tmp_path, straight, tally, many):
    "SIGKILL in steps and in the middle of writes; the end is the same in every bit."
    rng = random.Random(20)
    for trial in range(many(1, 80)):
        run = tmp_path / str(trial) / "run"
        for death in [
            f"step:{rng.randrange(4, 16)}",
            f"write:{rng.randrange(30, 150)}",
            f"step:{rng.randrange(22, 39)}",
        ]:
            code, text = finish(run, death=death)
            assert code == -signal.SIGKILL, (death, text)
            assert not Path(f"{run}.end").exists()
        code, text = finish(run)
        assert code == 0 and "resumed at step" in text, text
        (tensors, meta), (want, told) = end(run), straight
        ok = (
            same(tensors, want)
            and meta["rows"] == told["rows"]
            and meta["best"] == told["best"]
            and meta["resumed"] > 0 == told["resumed"]
        )
        tally.add(
            "SIGKILL, a bare training loop (steps, half-written files)",
            "the same command went on; every tensor, draw and metric as without",
            not ok,
            3,
        )
        assert ok and len(list(run.glob("step-*"))) == 2 and not list(run.glob(".*.part"))


def test_the_comparison_can_fail(tmp_path):
    "Negative control: a trainee whose draws depend on more than the step ends elsewhere after a kill."
    assert finish(tmp_path / "whole", kind="impure")[0] == 0
    assert finish(tmp_path / "cut", kind="impure", death="step:17")[0] == -signal.SIGKILL
    assert finish(tmp_path / "cut", kind="impure")[0] == 0
    assert not same(end(tmp_path / "cut")[0], end(tmp_path / "whole")[0])


def test_two_processes_and_ctrl_c(tmp_path):
    "The second process refuses; Ctrl-C saves and says how to go on; a dead process holds nothing."
    folder = tmp_path / "run"
    first = worker(folder, steps=2000, kind="slow", name="first")
    wait_for(first, "step 4")
    code, text = finish(folder, steps=2000)
    assert code == 2 and f"process {first.pid} is running this experiment already" in text.splitlines()[-1]
    first.kill(signal.SIGINT)
    assert first.wait() == 130  # the interrupt is handed on
    assert "saved; run the same command again to resume." in first.text
    done = Checkpoints(folder, dict(kind="net")).latest().step
    assert done >= 5
    second = worker(folder, steps=2000, kind="slow", name="second")
    wait_for(second, f"step {done + 1}")
    second.kill()
    second.wait()
    with run_lock(folder):
        pass
    assert (folder / ".lock").read_text().strip() == str(os.getpid())  # the dead process's lock was taken over


def small():
    return dict(
        W=torch.randn(5, 4, generator=torch_rng(1)),
        n=torch.arange(3),
        b=torch.tensor([True, False]),
        s=torch.tensor(2.5, dtype=torch.float64),
    )


def test_every_layout_comes_back(tmp_path):
    g = torch_rng(3)
    x = torch.randn(2, 3, 4, 4, generator=g)
    tensors = dict(
        plain=x,
        last=x.to(memory_format=torch.channels_last),
        turned=x[0, 0].T,
        view=x.view(-1)[3:9],
        tied=x,
        empty=torch.zeros(0, 3),
        half=x.half(),
        brain=x.bfloat16(),
        scalar=torch.tensor(7),
        grad=x.clone().requires_grad_(),
    )
    save_tensors(tmp_path / "t", tensors)
    back, meta = load_tensors(tmp_path / "t")
    assert same(back, {k: v.detach() for k, v in tensors.items()}) and meta == {}
    assert all(back[k].dtype == v.dtype for k, v in tensors.items())


def test_older_safetensors_will_do(tmp_path, monkeypatch):
    "Before 0.8 an open file has no `get_tensors`."

    class Old:
        def __init__(self, *args):
            self.f = checkpoints_open(*args)

        def __enter__(self):
            self.f.__enter__()
            return self

        def __exit__(self, *e):
            return self.f.__exit__(*e)

        def __getattr__(self, name):
            if name not in ("metadata", "keys", "get_tensor"):
                raise AttributeError(name)
            return getattr(self.f, name)

    checkpoints_open = checkpoints.safe_open
    monkeypatch.setattr(checkpoints, "safe_open", Old)
    assert same(load_tensors(save_tensors(tmp_path / "f", small()))[0], small())


def test_a_save_is_synced_before_and_after_its_rename(tmp_path, monkeypatch):
    "A temporary file in the same folder, on the disk before it takes its name; then the folder."
    seen, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (
            seen.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"{os.fstat(fd).st_size} bytes"),
            sync(fd),
        )[1],
    )
    monkeypatch.setattr(
        os,
        "replace",
        lambda a, b: (
            seen.append(Path(a).parent == Path(b).parent == tmp_path and Path(a).name.endswith(".part")),
            replace(a, b),
        )[1],
    )
    path = save_tensors(tmp_path / "f", small())
    assert seen == [f"{path.stat().st_size} bytes", True, "folder"]


def test_a_pickle_is_not_run(tmp_path):
    "A malicious file in every disguise: refused, and nothing is written or run."
    import pickle

    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/ran",))

    for name, data in dict(
        p=pickle.dumps(Evil()), z=struct.pack("<Q", 2**62) + b"{}", h=struct.pack("<Q", 2) + b"{}"
    ).items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(AimError):
            load_tensors(tmp_path / name)
    head = json.dumps({"W": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "bomb").write_bytes(struct.pack("<Q", len(head)) + head + b"1234")
    with pytest.raises(AimError):
        load_tensors(tmp_path / "bomb")
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    files = Checkpoints(tmp_path / "run", dict(a=1))
    files.save(1, small())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(AimError, match="could not be written"):
            files.save(2, dict(W=torch.zeros(10_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files.latest().step == 1 and same(files.latest().tensors, small())
    assert not list((tmp_path / "run").glob(".*.part"))


def test_a_read_only_folder_is_one_clear_error():
    with tempfile.TemporaryDirectory() as d:
        folder, me = Path(d) / "run", os.geteuid()
        Checkpoints(folder, {}).save(1, small())
        (folder / ".lock").touch(mode=0o444)
        os.chmod(d, 0o755)
        os.chmod(folder, 0o555)
        if me == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            with pytest.raises(AimError, match="could not be written"):
                Checkpoints(folder, {}).save(2, small())
            with pytest.raises(AimError, match="cannot be written"):
                run_lock(folder).__enter__()
            assert Checkpoints(folder, {}).latest().step == 1
        finally:
            os.seteuid(me)
            os.chmod(folder, 0o755)


def test_parts_of_other_machines_are_spared(tmp_path, monkeypatch):
    "On a shared disk a process number says nothing about another machine's process."
    monkeypatch.setenv("AIM_RUNS", str(tmp_path))
    records, writers = (
        tmp_path / "records",
        {
            f"{checkpoints.HOST}-{os.getpid()}": True,
            f"{checkpoints.HOST}-{2**30}": False,
            f"far_away-{2**30}": True,
            f"far_away-{os.getpid()}": True,
        },
    )
    records.mkdir()
    for w in writers:
        (records / f".r-1.json.{w}.part").touch()
    with Checkpoints(tmp_path / "checkpoints" / "run", {}).lock():
        assert {w: (records / f".r-1.json.{w}.part").exists() for w in writers} == writers


def test_a_write_on_another_machine_goes_on(tmp_path, monkeypatch):
    "A run that starts here does not take away what a process of another machine is writing."
    from aim_nb import core

    monkeypatch.setenv("AIM_RUNS", str(tmp_path))
    monkeypatch.setattr(core, "HOST", "far_away")
    monkeypatch.setattr(os, "getpid", lambda: 2**30)
    with core.atomic_file(tmp_path / "records" / "r-1.json") as f:
        f.write(b"half ")
        with Checkpoints(tmp_path / "checkpoints" / "run", {}).lock():
            pass
        f.write(b"whole")
    assert (tmp_path / "records" / "r-1.json").read_text() == "half whole"


def test_another_identity_is_never_half_loaded(tmp_path):
    class Line:
        w = torch.zeros(2)

        def step(self, i):
            self.w = self.w + 1
            return dict(loss=self.w.sum())

        def state_dict(self):
            return dict(w=self.w)

        def load_state_dict(self, t):
            self.w = t["w"]

    run_loop(Line(), 3, checkpoints=Checkpoints(tmp_path, dict(dataset="glyphs", aim=dict(M=32))))
    other = Line()
    with pytest.raises(AimError) as e:
        run_loop(other, 5, checkpoints=Checkpoints(tmp_path, dict(dataset="omniglot", aim=dict(M=64))))
    assert "aim.M is 32 there, 64 here" in str(e.value) and "dataset is glyphs there, omniglot here" in str(e.value)
    assert (
        other.w.tolist() == [0, 0] and Checkpoints(tmp_path, dict(dataset="glyphs", aim=dict(M=32))).latest().step == 3
    )

    class Wider(Line):
        w = torch.zeros(3)

    wider = Wider()
    with pytest.raises(AimError, match="w missing or of another shape"):
        run_loop(wider, 5, checkpoints=Checkpoints(tmp_path, dict(dataset="glyphs", aim=dict(M=32))))
    assert wider.w.tolist() == [0, 0, 0]


def test_a_longer_training_is_not_advised_away(tmp_path):
    "Fewer steps than are there: another folder comes first, and what --fresh would cost is said."

    class Count:
        def step(self, i):
            return dict(loss=1.0)

        def state_dict(self):
            return dict(n=torch.tensor(0.0))

        def load_state_dict(self, t):
            pass

    files = Checkpoints(tmp_path, {})
    run_loop(Count(), 5, checkpoints=files)
    with pytest.raises(
        AimError,
        match=r"is at step 5 already and has no weights of step 3 any more; ask for one of 5 or for more steps, or set \$AIM_RUNS to another folder .*\(--fresh would delete the longer training\)\.$",
    ):
        run_loop(Count(), 3, checkpoints=files)
    assert files.latest().step == 5


@pytest.mark.parametrize("kind, fused, where", [("Adam", True, "meta"), ("Adam", False, "cpu"), ("SGD", None, "meta")])
def test_an_optimiser_is_put_back_where_its_parameters_are(kind, fused, where):
    "The meta device stands in for a GPU: a fused Adam counts its steps there, a plain one on the CPU; a buffer of a single number moves, too."
    opt = getattr(torch.optim, kind)([torch.empty((), device="meta")], lr=0.1)
    if fused:
        opt.param_groups[0]["fused"] = True  # asked for at once it wants a real device
    load_optimizer(opt, {"opt.0.step" if kind == "Adam" else "opt.0.momentum_buffer": torch.tensor(3.0)})
    assert [v.device.type for v in opt.state[opt.param_groups[0]["params"][0]].values()] == [where]


def test_fresh_starts_over(tmp_path, monkeypatch):
    from aim_nb.engine import loop

    monkeypatch.setenv("AIM_FRESH", "1")
    monkeypatch.setattr(loop, "_begun", set())

    class Count:
        n = torch.tensor(0.0)

        def step(self, i):
            self.n = self.n + 1
            return dict(loss=self.n)

        def state_dict(self):
            return dict(n=self.n)

        def load_state_dict(self, t):
            self.n = t["n"]

    files = Checkpoints(tmp_path, {})
    files.save(2, dict(n=torch.tensor(50.0)), dict(history={}, window={}))
    a = Count()
    run_loop(a, 4, checkpoints=files)
    assert a.n == 4  # what was there is forgotten
    b = Count()
    assert run_loop(b, 4, checkpoints=files).resumed == 4 and b.n == 4  # once for each run in a process


def test_bad_numbers_never_reach_the_disk(tmp_path):
    class Bad:
        def __init__(self, where):
            self.w, self.where = torch.ones(2), where

        def step(self, i):
            if i == 13 and self.where == "state":
                self.w = self.w * float("inf")
            return dict(loss=torch.tensor(float("nan") if i == 13 and self.where == "loss" else 1.0))

        def state_dict(self):
            return dict(w=self.w)

        def load_state_dict(self, t):
            self.w = t["w"]

    for where, said in (("loss", "loss is nan at step 13"), ("state", "w is no longer finite after step 1[3-9]")):
        files = Checkpoints(tmp_path / where, {})
        with pytest.raises(AimError, match=said):
            run_loop(Bad(where), 100, checkpoints=files, save_every=5)
        assert files.latest().step == 10
