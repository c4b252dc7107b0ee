"""Checkpoints and the training loop under real accidents: SIGKILL, Ctrl-C, a full disk, damaged files, two processes."""

import fcntl, json, os, random, resource, shutil, signal, stat, struct, tempfile, time
from pathlib import Path
import pytest, torch
from accidents import Child, counted, die, warm
from aim_nb.engine import checkpoints
from aim_nb.engine.checkpoints import Checkpoints, load_tensors, run_lock, save_tensors
from aim_nb.core import AimError, atomic_file, torch_rng
from aim_nb.engine.loop import Trainee, load_module, load_optimizer, module_tensors, optimizer_tensors, run_loop


class Net(Trainee):
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
            f"write:{rng.randrange(1, 4)}",
            f"step:{rng.randrange(27, 39)}",
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


def test_what_a_living_process_writes_is_spared(tmp_path, monkeypatch):
    "Wherever it runs, in a container with process numbers of its own too; what a killed one wrote is removed."
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    warm()

    def write():
        with atomic_file(tmp_path / "runs/records/r-1.json") as f:
            f.write(b"half")
            f.flush()
            print("writing", flush=True)
            time.sleep(600)

    def parts():
        return [p.read_text() for p in (tmp_path / "runs/records").glob(".*.part")]

    child = Child(write, tmp_path / "said")
    wait_for(child, "writing")
    monkeypatch.setattr(os, "getpid", lambda: 2**30)
    checkpoints.remove_stale_parts(tmp_path / "mine")
    assert parts() == ["half"]
    child.kill()
    child.wait()
    checkpoints.remove_stale_parts(tmp_path / "mine")
    assert parts() == []


def test_a_part_of_version_0_1_may_be_in_use(tmp_path, monkeypatch):
    "It locked none; what is left of it goes with the run's own folder alone."
    monkeypatch.setenv("AIM_RUNS", str(tmp_path))
    theirs, own = tmp_path / "records/.r-1.json.host-12.part", tmp_path / "checkpoints/run/.step-1.host-12.part"
    for part in (theirs, own):
        part.parent.mkdir(parents=True)
        part.touch()
    with Checkpoints(own.parent, {}).lock():
        assert theirs.exists() and not own.exists()


def test_a_part_that_was_removed_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    lock, taken = fcntl.flock, []

    def late(f, how):
        if not taken:
            taken.append(f.name)
            os.unlink(f.name)
        lock(f, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with atomic_file(tmp_path / "a") as f:
        f.write(b"whole")
    assert taken and (tmp_path / "a").read_text() == "whole"


FORMAT_1 = Path(__file__).parent / "data" / "checkpoint_format_1"


def test_a_run_of_version_0_1_goes_on(tmp_path):
    "Its checkpoints, killed at step 23 of 40, were written by that version; the end is that of its uninterrupted run."
    folder = tmp_path / "run"
    shutil.copytree(FORMAT_1, folder)
    want, told = load_tensors(folder / "end.safetensors")
    files, net = Checkpoints(folder, dict(kind="net")), Net()
    history = run_loop(net, 40, val_every=7, checkpoints=files)
    assert history.resumed == 21 and list(history) == told["rows"] and history.best == told["best"]
    assert same(net.state_dict(), want) and files.weight_steps() == [7, 40]


@pytest.mark.parametrize(
    "step, meta, said",
    [
        (9, {}, "holds no history of a run"),
        (9, dict(history=dict(rows=[1])), "holds no history of a run"),
        (9, dict(history=dict(rows=[dict(step="1")])), "holds no history of a run"),
        (9, dict(history=dict(years=3)), "holds no history of a run"),
        (9, [], "no checkpoint in .* can be read"),
        ("9", {}, "no checkpoint in .* can be read"),
        (8, {}, "no checkpoint in .* can be read"),
    ],
)
def test_a_sealed_checkpoint_that_makes_no_sense_is_refused(tmp_path, step, meta, said):
    "Its checksum fits, what it says does not."
    net = Net()
    save_tensors(tmp_path / "step-000000009.safetensors", net.state_dict(), dict(step=step, identity={}, meta=meta))
    with pytest.raises(AimError, match=said):
        run_loop(net, 10, checkpoints=Checkpoints(tmp_path, {}))


@pytest.mark.parametrize("name", ["step-last.safetensors", "step-9.safetensors", "weights-none.safetensors"])
def test_files_of_other_names_are_not_looked_at(tmp_path, name):
    save_tensors(tmp_path / name, Net().state_dict())
    assert run_loop(Net(), 2, checkpoints=Checkpoints(tmp_path, {})).resumed == 0


@pytest.mark.parametrize("meta", [3, [1], "text"])
def test_a_sealed_file_must_say_what_it_holds(tmp_path, meta):
    save_tensors(tmp_path / "f", small(), meta)
    with pytest.raises(AimError, match="is damaged"):
        load_tensors(tmp_path / "f", {})


def test_another_identity_is_never_half_loaded(tmp_path):
    class Line(Trainee):
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

    class Count(Trainee):
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

    class Count(Trainee):
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
    class Bad(Trainee):
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
        with pytest.raises(AimError, match=rf"{said}.*; stopped, the last good checkpoint \(step 10\) is kept in"):
            run_loop(Bad(where), 100, checkpoints=files, save_every=5)
        assert files.latest().step == 10
        with pytest.raises(AimError, match="stopped, nothing was saved"):
            run_loop(Bad(where), 100, checkpoints=Checkpoints(tmp_path / "none", {}), save_every=50)
