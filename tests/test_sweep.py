"""`aim-nb sweep`: a plan becomes the notebooks' own runs; each is recorded once, whatever dies; a bad plan starts nothing."""

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
from PIL import Image
from test_cli import call, files, one_line

from aim_nb import backbones, config, paper

from aim_nb.engine import activation

from aim_nb.engine import plans, sweep

from aim_nb.engine import pretrain

from aim_nb.engine import train_continual

from aim_nb.engine import train_fewshot
from aim_nb.engine.records import read_records, record_key
from aim_nb.engine.train_fewshot import run_fewshot

ROOT = Path(__file__).resolve().parent.parent
PLANS = sorted((ROOT / "plans").glob("*.toml"))
BIN = Path(sys.executable).parent


@pytest.fixture
def here(monkeypatch, tmp_path):
    "A place for plans and runs; the command is called in the clone."
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    return tmp_path


def write(folder, **values):
    "A plan."
    path = folder / "plan.toml"
    path.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items()))
    return path


# a sweep asks the notebooks' questions


def keys_asked_by(stem, changes, monkeypatch):
    "The keys of the records that a notebook's own cells look for, up to the moment where they would be made."
    asked = []

    def found(identity, fresh=None):
        asked.append(record_key(identity))
        return {**identity, "key": asked[-1], "metrics": {}}

    for module in (train_fewshot, train_continual):
        monkeypatch.setattr(module, "find_record", found)
    monkeypatch.setattr(activation, "find_record", lambda identity: identity)
    space = {}
    for cell in nbformat.read(ROOT / f"nbs/{stem}.ipynb", 4).cells:
        if cell.cell_type != "code" or "summary" in cell.metadata.get("tags", []):
            continue
        statements = ast.parse(cell.source).body
        compute = [n for n in statements if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "records"]
        exec(compile(ast.Module(compute or statements, []), stem, "exec"), space)
        if compute:
            return asked
        if "parameters" in cell.metadata.get("tags", []):
            space |= changes


SETS = [
    ("20_fewshot", dict(seeds="0,1", budget="paper@700", switches="aim_update=episode")),
    ("20_fewshot", dict(backbone="wrn-28-10", K=4, l=0, shots="5", steps=77, decision="soft-test")),
    ("21_fewshot_ablation", dict(shots="1,5", K_values="1,8", budget="paper")),
    ("20_fewshot", dict(methods="sib+linear,sib+aim", switches="mask=fixed,sib_steps=5", budget="smoke")),
    ("21_fewshot_ablation", dict(switches="mask=random", decisions="hard", l_values="0,2", budget="smoke")),
    ("30_continual", dict(seeds="0,1", runs=4, switches="order=second", budget="paper@50")),
    (
        "30_continual",
        dict(
            metatest_update="fast,means",
            preset="release",
            switches="gate=sigmoid,weights=best",
            methods="oml,oml+linear-unit,anml+aim",
            budget="smoke",
            rates=1,
            rate_runs=3,
            classes=4,
            stop_if_dead=True,
        ),
    ),
    ("22_fewshot_activation", dict(K=4, seed=3)),
    ("31_continual_activation", dict(seed=2, preset="paper", switches="norm=instance")),
]


@pytest.mark.parametrize("stem, changes", SETS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_a_sweep_asks_what_the_notebook_asks(stem, changes, here, monkeypatch):
    monkeypatch.delenv("IN_TEST", raising=False)
    plan = write(here, notebook=stem, **{k: v.split(",") if k in plans.LISTS else v for k, v in changes.items()})
    ours = [i.key for i in plans.survey(plans.expand(plan), build=True)]
    assert ours and sorted(ours) == sorted(set(keys_asked_by(stem, changes, monkeypatch)))


class Asked(Exception):
    "Ends a run where it looks for its record."


def identity_of(run, monkeypatch):
    "The identity of the record that `run_continual` looks for, without images."
    asked = []

    def stop(identity, fresh=None):
        asked.append(identity)
        raise Asked

    bank = SimpleNamespace(name=run.settings["dataset"], sha="of-the-images")
    monkeypatch.setattr(train_continual, "open_bank", lambda name, root: bank)
    monkeypatch.setattr(train_continual, "find_record", stop)
    with pytest.raises(Asked):
        sweep.make_record(run)
    return asked[0]


@pytest.mark.parametrize("dataset", ["omniglot", "cifar100", "mini-imagenet", "folder:own"])
@pytest.mark.parametrize("name", config.PRESETS)
def test_a_sweep_foretells_the_record_of_run_continual(dataset, name, monkeypatch):
    "For every method and meta-test, with switches, with M left to the preset and given."
    common = dict(
        dataset=dataset, seeds="3", methods=",".join(config.CONTINUAL_METHODS), preset=name, budget="quick", K=4, l=1
    )
    runs = []
    for switches in ("", "gate=sigmoid,norm=affine", "mask=fixed,row_reset=matched,reduce=False", "weights=best"):
        for more in (dict(M=0), dict(M=16, stop_if_dead=True)):
            runs += plans.continual_runs(common | more | dict(switches=switches, metatest_update="head,fast,means"))
    assert len(runs) == 4 * 2 * 3 * len(config.CONTINUAL_METHODS)
    for run in runs:
        run = plans.Run(**json.loads(json.dumps(plans.check_run(run)._asdict())))  # as a worker gets it
        assert run.identity("of-the-images") == identity_of(run, monkeypatch), run.name()


def test_a_run_says_what_differs_from_its_preset():
    asked = dict(dataset="omniglot", methods="oml+aim", seeds="0", preset="release", switches="gate=sigmoid")
    asked |= dict(metatest_update="fast,head", budget="paper", stop_if_dead=True, M=0)
    names = [run.name() for run in plans.continual_runs(asked)]
    start = "omniglot oml+aim seed 0 paper stop_if_dead=True preset=release gate=sigmoid"
    assert names == [start, f"{start} metatest_update=head"]


# bad plans

BAD = [
    ('notebook = "20_fewshot', "is not TOML"),
    ('dataset = "glyphs"', "should name its notebook"),
    ('notebook = "nothing"', "no notebook 'nothing'"),
    ('notebook = "40_explore"', "makes no records of runs"),
    ("notebook = 20", "should name its notebook"),
    ("a = " + "[" * 3000, "is not TOML"),
    ('part = 1\nnotebook = "20_fewshot"', "a part starts with"),
    ('notebook = "20_fewshot"\nmethod = "sib"', "no parameter 'method'"),
    ('notebook = "20_fewshot"\nsteps = "many"', "should be a whole number"),
    ('notebook = "20_fewshot"\nsteps = true', "should be a whole number"),
    ('notebook = "20_fewshot"\ndataset = ["glyphs", 3]', "should be a text"),
    ('notebook = "20_fewshot"\nseeds = []', "asks for nothing"),
    ('notebook = "20_fewshot"\nseeds = ["x"]', "separated by commas"),
    ('notebook = "20_fewshot"\nseeds = 1.5', "whole numbers"),
    ('notebook = "20_fewshot"\nmethods = "oml"', "choose one of sib"),
    ('notebook = "20_fewshot"\nbudget = "huge"', "choose one of"),
    ('notebook = "20_fewshot"\nbackbone = "vgg"', "choose one of"),
    ('notebook = "20_fewshot"\nK = 40', "K=40"),
    ('notebook = "20_fewshot"\nshots = 0', "at least 1"),
    ('notebook = "30_continual"\nsteps = -5', "at least 1"),
    ('notebook = "30_continual"\nclasses = 1', "at least 2"),
    ('notebook = "30_continual"\nrates = 9', "1 to 7"),
    ('notebook = "30_continual"\nmetatest_update = ["head", "all"]', "choose one of head"),
    ('notebook = "20_fewshot"\nsteps = [1, [2]]', "should be a whole number"),
    ('notebook = "20_fewshot"\nmethods = ""', "methods is empty"),
    ('notebook = "20_fewshot"\nshots = ["", ","]', "shots is empty"),
    ('notebook = "20_fewshot"\nmethods = "sib+linear"\nK = 40', "out of M=32"),
    ('notebook = "20_fewshot"\nsteps = -5', "0 for the budget's own"),
    ('notebook = "30_continual"\nbudget = "paper@0"', "a number of steps of at least 1"),
    ('notebook = "20_fewshot"\ndataset = "folder:"', "folder:PATH"),
    ('notebook = "31_continual_activation"\nmethods = "oml"', "choose one of oml+aim"),
    ('notebook = "20_fewshot"\nseeds = [0, 1, 0]', "none twice"),
    ('notebook = "20_fewshot"\nswitches = "mask=none"', "choose one of attended, fixed, random"),
    ('notebook = "20_fewshot"\nswitches = "norm=affine"', "choose one of aim_update"),
    ('notebook = "20_fewshot"\nswitches = "decision=soft"', "a parameter of its own"),
    ('notebook = "20_fewshot"\nswitches = "mask=fixed"\ndecision = "soft"', "mask='attended'"),
    ('notebook = "21_fewshot_ablation"\nswitches = "mask=random"', "mask='attended'"),
    ('notebook = "21_fewshot_ablation"\nswitches = "decision=soft"', "decisions"),
    ('notebook = "30_continual"\nseeds = "1,1"', "none twice"),
    ('notebook = "30_continual"\npreset = "mine"', "choose one of ours, release, paper"),
    ('notebook = "30_continual"\nswitches = ["", "gates=raw"]', "did you mean gate?"),
    ('notebook = "30_continual"\nswitches = "mask=none"', "choose one of attended, fixed, random"),
    ('notebook = "30_continual"\nswitches = "gate=raw,gate=sigmoid"', "sets gate twice"),
    ('notebook = "30_continual"\nswitches = "decision=soft"', "needs gate='sigmoid'"),
    ('notebook = "30_continual"\nswitches = "metatest_update=fast"', "a parameter of its own"),
    ('notebook = "30_continual"\nswitches = "mask=random"\nmetatest_update = "fast"', "draws by image"),
    ('notebook = "30_continual"\nmethods = "oml+aim"\nM = 8', "K=10 mechanisms cannot be chosen out of M=8"),
    ('notebook = "30_continual"\nM = -1', "M=-1"),
    ('notebook = "30_continual"\nrates = []', "asks for nothing"),
    ('notebook = "30_continual"\nrates = -1', "at least 1"),
    ('notebook = "30_continual"\nstop_if_dead = "yes"', "true or false"),
]


@pytest.mark.parametrize("text, says", BAD, ids=[s for _, s in BAD])
def test_bad_plans_are_refused_before_anything_starts(text, says, here):
    (here / "plan.toml").write_text(text)
    assert says in one_line(call("sweep", here / "plan.toml"))
    assert files(here) == ["plan.toml"]


def test_bfloat16_is_refused_on_a_cpu_that_has_none(here, monkeypatch):
    monkeypatch.setattr(backbones, "has_bf16", lambda device="cpu": False)
    plan = write(here, notebook="30_continual", switches="precision=bf16", device="cpu")
    assert "needs a cpu with bfloat16" in one_line(call("sweep", plan))
    assert "needs a cpu with bfloat16" in one_line(
        call("run", "30_continual", "-p", "device", "cpu", "-p", "switches", "precision=bf16")
    )
    assert files(here) == ["plan.toml"]


def test_missing_plan_missing_dask_missing_scheduler(here, monkeypatch):
    plan = write(here, notebook="20_fewshot", dataset="glyphs", methods="sib", shots=1, budget="smoke")
    assert "there is no plan" in one_line(call("sweep", here / "none.toml"))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # nobody listens here
        done = call("sweep", plan, "--scheduler", f"tcp://127.0.0.1:{s.getsockname()[1]}")
    assert done.exit_code == 2 and "no scheduler answers" in done.output.splitlines()[-1]
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "[sweep]'" in one_line(call("sweep", plan))


# the plans that come with the project


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_every_plan_is_valid_and_says_what_it_costs(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = plans.expand(path)
    assert runs and runs == plans.expand(path.stem), "a plan is found by its name, too"
    times = [plans.expected_seconds(r) for r in runs]
    assert all(t is None for t, r in zip(times, runs) if "wrn" in r.settings.get("backbone", "")), "nobody has run one"
    assert all(t > 0 for t, r in zip(times, runs) if "wrn" not in r.settings.get("backbone", ""))
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("# ") for line in head.splitlines()) and re.search(
        r"(about|some) [\d.,]+ (minutes|hours|days|weeks|years)", head
    ), "the first lines say what it makes and what that costs"


def test_the_time_left_is_that_of_kept_records_less_what_is_done(here):
    plan = write(here, notebook="20_fewshot", dataset="glyphs", methods="sib", shots=1, budget="smoke", steps=12)
    (item,) = plans.survey(plans.expand(plan), build=True)
    whole = item.seconds_left()
    assert whole == plans.expected_seconds(item.run) > 0
    assert item._replace(step=6, state="partly").seconds_left() == pytest.approx(whole / 2)
    assert item._replace(state="done").seconds_left() == 0
    kept = [r for r in read_records(ROOT / "results") if (r["dataset"], r["method"]) == ("glyphs", "sib")]
    rates = [r["seconds"] / r["budget"]["steps"] for r in kept if r["task"] == "fewshot"]
    assert min(rates) <= whole / 12 <= max(rates)


def cell_of(run):
    "What decides in which cells of the paper's tables a run can stand."
    q = run.identity()
    p = q["parameters"]
    return dict(
        dataset=q["dataset"],
        method=q["method"],
        decision=q["protocol"]["decision"],
        **{k: p.get(k) for k in ("backbone", "n_shot", "K", "l")},
    )


def test_plans_cover_every_cell_of_the_papers_tables(monkeypatch):
    monkeypatch.chdir(ROOT)
    made = [
        cell_of(r)
        for p in PLANS
        for r in plans.expand(p)
        if r.settings["budget"] == "paper" and not r.settings["steps"]
    ]
    wanted = {
        "few-shot": dict(K=8, l=2),
        "sto_count": dict(method="sib+aim", decision="hard"),
        "active_mech": dict(method="sib+aim", decision="hard"),
        "soft_hard": dict(method="sib+aim", K=8, l=0),
        "continualz": {},
    }
    for cell in paper.paper_cells():
        where = {
            k: v for k, v in cell.items() if k in ("dataset", "method", "backbone", "n_shot", "K", "l", "decision")
        } | {
            k: v
            for k, v in wanted[cell["table"]].items()
            if cell.get("method", "sib+aim") == "sib+aim" or k == "method"
        }
        assert any(all(m[k] == v for k, v in where.items()) for m in made), f"no plan makes {cell}"
    assert len(paper.paper_cells()) == 319


# running


class Stop:
    "Ctrl-C after some steps."

    def __init__(self, n):
        self.n = n

    def on_step(self, i, metrics):
        if i + 1 == self.n:
            os.kill(os.getpid(), signal.SIGINT)


def begin(steps, stop, **kw):
    "A run that was stopped half-way and left its checkpoint."
    with pytest.raises(KeyboardInterrupt):
        run_fewshot(dataset="glyphs", n_shot=1, budget="smoke", steps=steps, callbacks=[Stop(stop)], **kw)


def test_dry_run_says_how_far_each_run_is(here):
    plan = write(
        here,
        notebook="20_fewshot",
        dataset="glyphs",
        methods=["sib", "sib+linear"],
        shots=1,
        budget="smoke",
        steps=12,
        seeds=[0, 1],
    )
    begin(12, 5, method="sib", seed=1)
    run_fewshot(dataset="glyphs", n_shot=1, budget="smoke", steps=12, method="sib", seed=0)
    before = files(here)
    done = call("sweep", plan, "--dry-run")
    assert done.exit_code == 0 and files(here) == before
    states = [
        (line.split("glyphs")[0].strip(), *re.findall(r"\((.*)\)", line)) for line in done.output.splitlines()[:4]
    ]
    assert states == [("done",), ("to do",), ("partly", "5 of 12 steps"), ("to do",)], "seeds change last"
    assert "4 runs: 1 done, 1 partly, 2 to do" in done.output and "on one core" in done.output


def test_runs_are_made_in_the_order_of_the_plan(here):
    plan = write(
        here,
        notebook="20_fewshot",
        dataset="glyphs",
        methods=["sib"],
        shots=[5, 1],
        budget="smoke",
        steps=3,
        seeds=[3, 0, 2],
    )
    done = call("sweep", plan, "--workers", 1)
    assert done.exit_code == 0, done.output
    made = [line for line in done.output.splitlines() if line.startswith("made ")]
    assert [re.findall(r"(\d)-shot seed (\d)", line) for line in made] == [
        [],
        *([(n, s)] for s in "302" for n in "51"),
    ], "the features, then run by run"


def draw(folder, n):
    "A folder of `n` images of noise a class, five classes a split."
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for c in "abcde":
            (folder / split / f"{split}-{c}").mkdir(parents=True)
            for i in range(n):
                Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
                    folder / split / f"{split}-{c}" / f"{i}.png"
                )
    return f"folder:{folder}"


def test_failures_are_retried_reported_and_end_with_status_1(here, monkeypatch):
    monkeypatch.setenv("AIM_DATA", str(here / "data"))
    first, second = draw(here / "first", 16), draw(here / "second", 16)
    plan = write(here, notebook="20_fewshot", dataset=[first, second], methods="sib", shots=1, budget="smoke", steps=6)
    damaged = pretrain.backbone_file(plans.expand(plan)[0].backbone_identity())
    damaged.parent.mkdir(parents=True)
    damaged.write_text("no backbone")
    done = call("sweep", plan, "--workers", 1, "--retries", 1)
    assert done.exit_code == 1, done.output
    (failed,) = [p.read_text() for p in (here / "runs/sweep").glob("features-*.log") if "Traceback" in p.read_text()]
    assert failed.count("process ") == 2, "tried twice"
    assert failed.count("Traceback (") >= 2, "with all of the error in the log"
    assert re.search(r"failed: features of folder:\S+first .*is damaged .*log: .*features-", done.output)
    assert re.search(r"failed: folder:\S+first conv4 sib .*waits for features", done.output)
    assert "Compute Failed" not in done.output
    assert [r["dataset"] for r in read_records(here / "runs/records")] == [second], "the others are made"


def test_too_few_images_are_said_before_anything_starts(here, monkeypatch):
    monkeypatch.setenv("AIM_DATA", str(here / "data"))
    few = draw(here / "few", 16)
    (here / "few/test/test-c/3.png").unlink()
    plan = write(here, notebook="20_fewshot", dataset=few, methods="sib", shots=1, budget="smoke", steps=6)
    for line in (
        ("sweep", plan),
        ("sweep", plan, "--dry-run"),
        ("run", "20_fewshot", "-p", "dataset", few, "-p", "shots", 1),
    ):
        text = one_line(call(*line))
        assert "the test split of" in text and "class test-c has 15 images, but 16 are needed" in text
    assert not (here / "runs").exists() and not (here / "data").exists()


def test_a_device_for_all_runs(here):
    plan = write(here, notebook="20_fewshot", dataset="glyphs", methods="sib", shots=1, budget="smoke", steps=3)
    assert "is not available here" in one_line(call("sweep", plan, "--device", "cuda:77"))
    assert "choose one of auto, cpu" in one_line(call("sweep", plan, "--device", "gpu", "--dry-run"))
    assert call("sweep", plan, "--device", "cuda:1", "--dry-run").exit_code == 0, "it may be another machine's"
    done = call("sweep", plan, "--device", "cpu", "--workers", 1)
    assert done.exit_code == 0 and [r["device"] for r in read_records(here / "runs/records")] == ["cpu"]


def test_a_sweep_waits_for_an_identical_run_and_finds_its_record(here):
    run = plans.Run(
        "fewshot", dict(dataset="glyphs", budget="smoke", steps=3, method="sib", n_shot=1, seed=0, protocol={})
    )
    (item,) = plans.survey([run], build=True)
    sweep.make_features(run)
    done = []
    waiting = threading.Thread(target=lambda: done.append(sweep.wait_while_busy(sweep.make_record, run, pause=0.1)))

    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import fcntl, pathlib, sys
folder = pathlib.Path({str(item.folder)!r}); folder.mkdir(parents=True, exist_ok=True)
with open(folder / ".lock", "a") as f:
    fcntl.flock(f, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.readline()
""",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        waiting.start()
        time.sleep(1)
        assert waiting.is_alive() and not done
        holder.communicate("\n")
        waiting.join(60)
    finally:
        holder.kill()
    assert len(done) == 1 and [r["key"] for r in read_records(here / "runs/records")] == [item.key]


def test_two_views_of_one_backbone_do_not_stand_in_each_others_way(here, monkeypatch):
    monkeypatch.setenv("AIM_DATA", str(here / "data"))
    plan = write(
        here,
        notebook="20_fewshot",
        dataset=draw(here / "own", 16) + "@32",
        methods="sib",
        shots=1,
        budget=["quick", "paper-onecycle"],
        steps=2,
    )
    first, second = [j for j in sweep.missing_jobs(plans.survey(plans.expand(plan), build=True)) if j.is_features]
    assert first.run.backbone_identity() == second.run.backbone_identity() and first.key != second.key
    assert (first.needs, second.needs) == ((), (first.key,)), "the second finds it trained"
    done = call("sweep", plan, "--workers", 2, "--retries", 0)
    assert done.exit_code == 0, done.output
    assert len(read_records(here / "runs/records")) == 2


def test_another_sweep_waits_for_the_backbone(here, monkeypatch):
    "Two sweeps know nothing of each other's jobs; the lock on the disk keeps them apart."
    run, inside, most = (
        plans.Run("fewshot", dict(dataset="glyphs", budget="smoke", method="sib", n_shot=1, seed=0, protocol={})),
        [],
        [],
    )

    def busy(*args, **kw):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.3)
        inside.pop()
        return None, {}

    monkeypatch.setattr(sweep, "pretrained_backbone", busy)
    monkeypatch.setattr(sweep, "feature_bank", busy)
    both = [
        threading.Thread(target=sweep.make_features, args=[r])
        for r in (run, run._replace(settings=run.settings | dict(seed=1)))
    ]
    for t in both:
        t.start()
    for t in both:
        t.join()
    assert most == [1, 1, 1, 1]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    "A scheduler and two workers, processes of this test."

    def __init__(self, folder):
        self.address, self.folder, self.started = f"tcp://127.0.0.1:{free_port()}", folder, []
        self.start(
            "scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            self.address.rpartition(":")[2],
            "--dashboard-address",
            "127.0.0.1:0",
        )
        self.workers = [
            self.start(
                "worker",
                self.address,
                "--nthreads",
                "1",
                "--no-nanny",
                "--no-dashboard",
                "--local-directory",
                folder / f"w{i}",
            )
            for i in range(2)
        ]

    def start(self, *args):
        env = {
            **os.environ,
            "AIM_RUNS": "/nowhere",
            "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
        }  # the sweep says where runs go
        log = open(self.folder / f"{args[0]}{len(self.started)}.txt", "w")
        self.started.append(
            subprocess.Popen([BIN / "dask", *map(str, args)], cwd=ROOT, env=env, stdout=log, stderr=log)
        )
        return self.started[-1]

    def stop(self):
        for p in self.started:
            p.kill()
            p.wait()


@pytest.fixture
def cluster(here):
    made = Cluster(here)
    yield made
    made.stop()


def pids(log):
    return [int(n) for n in re.findall(r"process (\d+) on", log.read_text())] if log.exists() else []


def sweep_and_kill(cluster, plan, key, runs, when):
    "Run `aim-nb sweep` on the cluster and kill, when `when()`, the worker that has the run `key`; what the command printed."
    p = subprocess.Popen(
        [BIN / "aim-nb", "sweep", plan, "--scheduler", cluster.address],
        cwd=ROOT,
        env={**os.environ, "AIM_RUNS": str(runs)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        log = runs / f"sweep/{key}.log"
        while not (pids(log) and when()) and p.poll() is None:
            time.sleep(0.1)
        assert p.poll() is None, p.stderr.read()
        os.kill(pids(log)[0], signal.SIGKILL)
        assert pids(log)[0] in [w.pid for w in cluster.workers]
        _, said = p.communicate()
    finally:
        if p.poll() is None:
            p.kill()
    assert p.returncode == 0, said
    return said


def test_a_killed_worker_loses_nothing_and_the_notebook_finds_every_record(here, cluster, aim_nb_cli):
    values = dict(dataset="glyphs", methods=["sib+aim", "sib"], shots=1, budget="smoke", steps=60, seeds=0)
    plan, runs = write(here, notebook="20_fewshot", **values), here / "runs"
    begin(60, 10, method="sib+aim", seed=0)
    items = plans.survey(plans.expand(plan))
    assert [i.state for i in items] == ["partly", "to do"]
    log = runs / f"sweep/{items[0].key}.log"
    said = sweep_and_kill(cluster, plan, items[0].key, runs, lambda: "resumed at step" in log.read_text())
    assert "2 of 2 runs made" in said
    records = read_records(runs / "records")
    assert (
        sorted(r["key"] for r in records) == sorted(i.key for i in items)
        and len(list((runs / "records").iterdir())) == 2
    ), "every run is recorded once"
    first, second = pids(log)
    assert first != second and log.read_text().count("resumed at step") == 2, (
        "another worker went on from the checkpoint"
    )
    assert all(len(pids(runs / f"sweep/{i.key}.log")) == 1 for i in items[1:]), "nothing else was made twice"

    before = {p.name: p.read_bytes() for p in (runs / "records").iterdir()}
    pairs = [w for k, v in values.items() for w in ("-p", k, ",".join(map(str, v)) if isinstance(v, list) else str(v))]
    done = aim_nb_cli("run", "20_fewshot", *pairs, "-o", here / "out.ipynb", AIM_RUNS=str(runs))
    assert done.returncode == 0, done.stderr
    assert {p.name: p.read_bytes() for p in (runs / "records").iterdir() if p.name.startswith("fewshot")} == before, (
        "the notebook made nothing, it found all"
    )


@pytest.mark.stress
def test_a_killed_worker_goes_on_from_a_checkpoint_of_its_own(here, cluster):
    plan, runs = (
        write(here, notebook="20_fewshot", dataset="glyphs", methods="sib+aim", shots=1, budget="smoke", steps=3000),
        here / "runs",
    )
    (item,) = plans.survey(plans.expand(plan), build=True)
    sweep_and_kill(cluster, plan, item.key, runs, lambda: plans.steps_in(item.folder, 3000) > 0)
    (step,) = re.findall(r"resumed at step ([\d,]+) of 3,000", (runs / f"sweep/{item.key}.log").read_text())
    assert 0 < int(step.replace(",", "")) < 3000 and [r["key"] for r in read_records(runs / "records")] == [item.key]
