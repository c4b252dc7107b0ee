"""`aim-nb` as a user meets it: what it prints, what it refuses, what it leaves behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from aim_nb import cli, config, core
from aim_nb.cli import app
from aim_nb.engine import notebook_runs

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = sorted(p for p in (ROOT / "nbs").glob("[23][0-9]_*.ipynb") if "budget" in notebook_runs.parameters_of(p))
KERNEL = {"name": "python3", "display_name": "python3", "language": "python"}
PARAMETERS = 'dataset = "glyphs"  # what to learn\nsteps = 3  # of training\nwait = 0.0  # seconds'


@pytest.fixture
def toy(tmp_path):
    "A little experiment in a folder of its own."
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL})
    work = "import sys, time\nfor i in range(int(wait * 10)):\n    time.sleep(.1)\n    print('tick', file=sys.stderr, flush=True)\nif steps == 0: raise ValueError('no steps\\nat all')"
    nb.cells = [
        nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(work),
        nbformat.v4.new_code_cell(
            "import os\nprint('steps', steps, 'fresh', os.environ.get('AIM_FRESH'))", metadata={"tags": ["summary"]}
        ),
        nbformat.v4.new_code_cell("print('not in the summary')"),
    ]
    nbformat.write(nb, tmp_path / "toy.ipynb")
    return tmp_path


def call(*args):
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="aim-nb")


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def one_line(done, status=2):
    "The error as a user sees it: one line, no traceback."
    text = done.output if hasattr(done, "output") else done.stderr
    code = done.exit_code if hasattr(done, "exit_code") else done.returncode
    assert code == status, text
    assert re.fullmatch(r"aim-nb: [^\n]+\n", text), text
    return text


# running


def test_run_prints_summary_and_paths(toy, monkeypatch, aim_nb_cli):
    done = aim_nb_cli("run", "toy.ipynb", "-p", "steps", 7, "--fresh", cwd=toy, AIM_RUNS=str(toy / "runs"))
    assert done.returncode == 0, done.stderr
    assert "steps 7 fresh 1" in done.stdout and "not in the summary" not in done.stdout
    (out,) = (toy / "runs/notebooks").glob("toy-*.ipynb")
    assert f"notebook  runs/notebooks/{out.name}" in done.stdout


def test_what_a_killed_run_left_in_the_temporary_folder_goes_at_the_next_start(toy):
    tmp = Path(tempfile.mkdtemp())  # a short path, since that of a socket is limited
    env = {**os.environ, "AIM_RUNS": str(toy / "runs"), "TMPDIR": str(tmp)}
    line = [Path(sys.executable).parent / "aim-nb", "run", "toy.ipynb", "-p"]
    killed = subprocess.Popen([*line, "wait", "600"], cwd=toy, env=env, stderr=subprocess.PIPE, text=True)
    while "tick" not in killed.stderr.readline():
        assert killed.poll() is None
    (left,) = [p for p in tmp.iterdir() if p.name.startswith("aim-nb-")]
    killed.kill()
    killed.communicate()
    assert any(p.is_socket() for p in left.iterdir()) and (left / "kernel.json").exists()
    assert not [p for p in tmp.iterdir() if p.suffix == ".json"]
    subprocess.run([*line, "steps", "3"], cwd=toy, env=env, check=True, capture_output=True)
    assert not [p for p in tmp.iterdir() if "aim-nb" in p.name]
    shutil.rmtree(tmp)


def test_two_runs_that_start_at_once(toy):
    def start(steps):
        return subprocess.Popen(
            [Path(sys.executable).parent / "aim-nb", "run", "toy.ipynb", "-p", "steps", str(steps)],
            cwd=toy,
            env={**os.environ, "AIM_RUNS": str(toy / "runs")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    both = [start(steps) for steps in (5, 6)]
    try:
        told = [p.communicate(timeout=120) for p in both]
    finally:
        [p.kill() for p in both]
    assert [p.returncode for p in both] == [0, 0], told
    assert "steps 5" in told[0][0] and "steps 6" in told[1][0] and not any("Invalid" in err for _, err in told)
    assert not list(toy.glob("kernel*"))  # nor does a kernel leave its sockets where the user works


def test_progress_comes_while_the_notebook_runs(toy):
    p = subprocess.Popen(
        [Path(sys.executable).parent / "aim-nb", "run", "toy.ipynb", "-p", "wait", "600"],
        cwd=toy,
        env={**os.environ, "AIM_RUNS": str(toy / "runs")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # a job in the background of a script ignores Ctrl-C
    try:
        seen = ""
        while "tick\ntick" not in seen and p.poll() is None:
            seen += p.stderr.readline()
        assert p.poll() is None, seen
        p.send_signal(signal.SIGINT)
        _, err = p.communicate(timeout=120)
    finally:
        if p.poll() is None:
            p.kill()
    assert p.returncode == 130 and "aim-nb: stopped" in err and "Traceback" not in err
    (out,) = (toy / "runs/notebooks").glob("toy-*.ipynb")
    assert "tick" in out.read_text(), "the notebook is kept as far as it came"


def test_a_failing_cell_is_one_line_and_the_notebook_is_kept(toy, aim_nb_cli):
    done = aim_nb_cli("run", "toy.ipynb", "-p", "steps", 0, "-o", "out.ipynb", cwd=toy)
    assert (
        done.returncode == 1
        and "aim-nb: ValueError in cell [3]: no steps\n" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert "no steps" in (toy / "out.ipynb").read_text()


def test_another_set_of_parameters_is_another_file(toy):
    plans = [call("run", toy / "toy.ipynb", "--dry-run", "-p", "steps", n).output for n in (3, 4, 3)]
    paths = [re.search(r"would write (\S+)", p)[1] for p in plans]
    assert paths[0] == paths[2] != paths[1]


# mistakes


@pytest.mark.parametrize(
    "pair, says",
    [
        (("step", "4"), "no parameter 'step'; this notebook has dataset, steps, wait"),
        (("steps", "four"), "steps should be a whole number"),
        (("steps", "3.5"), "steps should be a whole number"),
        (("wait", "long"), "wait should be a number"),
        (("dataset", "tigers"), "choose one of omniglot, cifar-fs, cifar100, mini-imagenet, glyphs"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_written(toy, pair, says, monkeypatch):
    monkeypatch.setenv("AIM_RUNS", str(toy / "runs"))
    before = files(toy)
    assert says in one_line(call("run", toy / "toy.ipynb", "-p", *pair))
    assert files(toy) == before


def test_missing_and_broken_notebooks(toy):
    (toy / "broken.ipynb").write_text("{")
    before = files(toy)
    assert "there is no notebook" in one_line(call("run", toy / "missing.ipynb"))
    assert "cannot be read as a notebook" in one_line(call("run", toy / "broken.ipynb"))
    assert "needs a value" in one_line(call("run", toy / "toy.ipynb", "-p", "steps"))
    assert files(toy) == before


def test_a_default_that_is_no_literal_is_named(toy):
    nb = nbformat.read(toy / "toy.ipynb", 4)
    nb.cells[0].source += "\nrate = 10**-3"
    nbformat.write(nb, toy / "own.ipynb")
    before = files(toy)
    assert "rate = 10**-3 is no plain value" in one_line(call("run", toy / "own.ipynb"))
    assert files(toy) == before


def test_a_place_that_cannot_be_written_is_named(toy, monkeypatch):
    (toy / "file").write_text("")
    monkeypatch.setenv("AIM_RUNS", str(toy / "file/runs"))
    done = call("run", toy / "toy.ipynb")
    assert done.exit_code == 2 and "cannot be written" in done.output.splitlines()[-1]


def test_the_whole_program_says_one_line(toy, aim_nb_cli):
    done = aim_nb_cli("run", "toy.ipynb", "-p", "dataset", "tigers", cwd=toy)
    assert done.stdout == ""
    one_line(done)


# the project's own experiments


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_experiment_can_be_planned(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = call("run", path.stem, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "would write" in done.output
    assert done.output == call("run", path.stem.partition("_")[2], "--dry-run").output
    assert "this notebook has" in one_line(call("run", path.stem, "-p", "no_such", "1"))


REFUSED = [
    ("20_fewshot", ("backbone", "resnet"), "choose one of conv4, wrn-28-10"),
    ("20_fewshot", ("methods", ""), "methods is empty; give at least one value"),
    ("20_fewshot", ("shots", ","), "shots is empty"),
    ("20_fewshot", ("K", "40"), "K=40 mechanisms cannot be chosen out of M=32"),
    ("20_fewshot", ("steps", "-5"), "at least 1, or 0 for the budget's own"),
    ("20_fewshot", ("budget", "paper@0"), "at least 1"),
    ("20_fewshot", ("budget", "paper@"), "at least 1"),
    ("20_fewshot", ("dataset", "folder:"), "folder:PATH"),
    ("20_fewshot", ("dataset", "glyphs,omniglot"), "choose one of"),
    ("20_fewshot", ("methods", "folder:x"), "choose one of sib"),
    ("20_fewshot", ("shots", "0"), "n_shot=0"),
    ("20_fewshot", ("seeds", "first"), "separated by commas"),
    ("20_fewshot", ("decision", ""), "choose one of hard"),
    ("20_fewshot", ("data_root",), "data_root needs a value"),
    ("21_fewshot_ablation", ("K_values", "8,40"), "K=40"),
    ("21_fewshot_ablation", ("decisions", "hard,firm"), "choose one of hard"),
    ("22_fewshot_activation", ("masks_of", "none"), "choose one of adapted, slow"),
    ("30_continual", ("metatest_update", ""), "metatest_update is empty"),
    ("30_continual", ("steps", "-5"), "at least 1"),
    ("30_continual", ("rates", "9"), "1 to 7"),
    ("20_fewshot", ("seeds", "0,1,1"), "none twice"),
    ("20_fewshot", ("switches", "mask=none"), "choose one of attended, fixed, random"),
    ("30_continual", ("seeds", "0,0"), "none twice"),
    ("30_continual", ("rates", ""), "rates should be a whole number"),
    ("30_continual", ("preset", "mine"), "choose one of ours, release, paper"),
    ("30_continual", ("switches", "gate"), "did you mean gate?"),
    ("30_continual", ("switches", "norm=batch"), "choose one of affine, instance"),
    ("30_continual", ("switches", "metatest_update=fast"), "a parameter of its own"),
    ("30_continual", ("stop_if_dead", "maybe"), "should be true or false"),
    ("31_continual_activation", ("methods", "oml"), "choose one of oml+aim, anml+aim"),
]


@pytest.mark.parametrize("flags", [("--dry-run",), ()], ids=["planned", "started"])
@pytest.mark.parametrize("stem, pair, says", REFUSED, ids=[f"{s[:2]}-{'='.join(p)}" for s, p, _ in REFUSED])
def test_what_could_not_run_is_refused_before_it_starts(stem, pair, says, flags, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(cli, "start", lambda *args: pytest.fail("it was started"))
    assert says in one_line(call("run", stem, "-p", *pair, *flags))
    assert files(tmp_path) == []


def test_a_switch_of_yes_or_no(monkeypatch):
    monkeypatch.chdir(ROOT)
    done = call("run", "30_continual", "-p", "stop_if_dead", "True", "--dry-run")
    assert done.exit_code == 0 and re.search(r"^ \* stop_if_dead +True ", done.output, re.M), done.output


def test_zero_steps_are_the_budgets_own(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert call("run", "20_fewshot", "-p", "steps", 0, "--dry-run").exit_code == 0
    assert config.budget("quick", steps=0) == config.budget("quick")


def test_a_notebook_that_only_has_the_name_of_an_experiment(toy):
    (toy / "toy.ipynb").rename(toy / "20_fewshot.ipynb")
    assert "another name" in one_line(call("run", toy / "20_fewshot.ipynb"))


# without the extras


def bare(*args, cwd):
    "Call `aim-nb` where only the package's own requirements are installed."
    code = (
        "import sys\nclass Absent:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('matplotlib', 'seaborn', 'pandas', 'papermill', 'distributed', 'IPython'): raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\nfrom aim_nb.cli import main\nmain()"
    )
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], cwd=cwd, text=True, capture_output=True)


@pytest.mark.parametrize(
    "line", ["report", "report --runs", "data prepare glyphs --root data", f"run {ROOT / 'nbs/20_fewshot.ipynb'}"]
)
def test_without_the_extras_one_line_names_what_to_install(line, tmp_path):
    assert "[notebooks]'" in one_line(bare(*line.split(), cwd=tmp_path))
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and not p.name.endswith(".lock")]


# data and results


def test_unknown_dataset(tmp_path):
    for command in ("prepare", "check"):
        assert "tigers" in one_line(call("data", command, "tigers", "--root", tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_a_folder_without_a_path(tmp_path):
    for command in ("prepare", "check"):
        assert "write folder:PATH" in one_line(call("data", command, "folder:", "--root", tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_missing_dataset_says_what_to_do(tmp_path):
    text = one_line(call("data", "prepare", "mini-imagenet", "--no-download", "--root", tmp_path / "data"))
    assert "glyphs" in text and "mini-imagenet" in text
    assert not list(tmp_path.rglob("*.npy"))


def test_data_list(tmp_path):
    done = call("data", "list", "--root", tmp_path)
    assert done.exit_code == 0 and all(
        n in done.output for n in ("omniglot", "cifar-fs", "cifar100", "mini-imagenet", "glyphs")
    )


def test_keep_needs_records_and_filters(tmp_path, monkeypatch):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path))
    assert "no record" in one_line(call("keep"))
    assert "field=value" in one_line(call("keep", "glyphs"))
    assert "seed=--5" in one_line(call("keep", "seed=--5"))


def test_keep_alone_lists_and_an_unknown_field_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    kept = sorted((ROOT / "results").rglob("fewshot-glyphs-sib-quick-*.json"))[:2]
    (tmp_path / "runs/records").mkdir(parents=True)
    for path in kept:
        shutil.copy(path, tmp_path / "runs/records")
    done = call("keep")
    assert done.exit_code == 2 and done.output.count("there is ") == 2
    assert "say which of the 2 records to keep" in done.output.splitlines()[-1]
    assert "no record has a field 'sead' (did you mean seed?)" in one_line(call("keep", "sead=0"))
    done = call("keep", "n_shot=1", "--dry-run")
    assert done.exit_code == 0 and done.output.count("would keep ") == 1


# where numbers come from


def test_a_run_that_is_recorded_says_so_before_its_numbers(tmp_path, monkeypatch):
    from aim_nb.engine.plans import where_from
    from aim_nb.engine.train_continual import run_continual
    from aim_nb.engine.train_fewshot import run_fewshot

    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    kept = dict(dataset="glyphs", budget="quick")
    said = where_from(run_fewshot, [dict(kept, method=m, n_shot=n) for m in ("sib", "sib+aim") for n in (1, 5)])
    assert re.fullmatch(
        r"4 of 4 runs read from results/, made on \d+ \w+ 20\d\d( to .*)? by (commit \w+|\d+ commits); --fresh .* computes them here",
        said,
    )
    said = where_from(run_fewshot, [dict(kept, method="sib", seed=s, n_shot=1) for s in (0, 99)]).splitlines()
    assert said[0].startswith("1 of 2 runs read from results/") and said[1].startswith(
        "1 of 2 runs computed here; about"
    )
    monkeypatch.setenv("AIM_FRESH", "1")
    assert where_from(run_continual, [dict(kept, method="oml")]) == "1 run, computed here (--fresh)"


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_experiment_says_where_its_numbers_come_from(path):
    cells = [c for c in nbformat.read(path, 4).cells if "summary" in c.metadata.get("tags", [])]
    assert any("print(where_from(" in c.source for c in cells)


def test_a_dry_run_leaves_out_what_is_recorded(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    known = call("run", "20_fewshot", "--dry-run").output
    assert "6 runs: 6 done\n" in known and "on one core" not in known
    more = call("run", "20_fewshot", "-p", "seeds", "0,77", "--dry-run").output
    assert "12 runs: 6 done, 6 to do\n" in more and "on one core" in more


# checked before anything starts


@pytest.mark.parametrize("flags", [("--dry-run",), ()], ids=["planned", "started"])
def test_missing_data_is_said_without_waiting_for_torch(flags, tmp_path):
    code = "import sys\nfrom aim_nb.cli import app\ntry: app(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "20_fewshot", "-p", "dataset", "mini-imagenet", *flags],
        cwd=tmp_path,
        env={**os.environ, "AIM_DATA": str(tmp_path / "data"), "AIM_RUNS": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Looked for" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "False\n" and files(tmp_path) == []


@pytest.mark.parametrize(
    "pair, says",
    [
        (("dataset", "folder:/no/such/folder"), "/no/such/folder has no folder 'train'"),
        (("device", "cuda:77"), "device='cuda:77' is not available here"),
        (("device", "gpu"), "choose one of auto, cpu, cuda, cuda:1, mps"),
        (("shots", "6"), "the train split of glyphs: class "),
        (("dataset", "omiglot"), "did you mean omniglot?"),
        (("shot", "1"), "did you mean shots?"),
        (("data_root", "~nosuchuser"), "~nosuchuser is not a user of this machine"),
        (("data_root", "x" * 300), "too long for a file name"),
    ],
)
def test_what_can_be_checked_is_checked_in_a_dry_run_too(pair, says, monkeypatch, tmp_path):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    for flags in (("--dry-run",), ()):
        assert says in one_line(call("run", "20_fewshot", "-p", *pair, *flags))
    assert files(tmp_path) == []


def test_a_device_is_a_parameter(monkeypatch):
    assert re.search(r"^ \* device +cpu ", call("run", "20_fewshot", "--device", "cpu", "--dry-run").output, re.M)


STRANGE = [
    (("run", "x" * 300), "there is no notebook"),
    (("run", "x" * 300 + ".ipynb"), "there is no notebook"),
    (("sweep", "x" * 300), "there is no plan"),
    (("sweep", "few-shot-cifar-fs-con4"), "did you mean few-shot-cifar-fs-conv4?"),
    (("data", "prepare", "glyphs", "--root", "~nosuchuser/data"), "~nosuchuser is not a user"),
    (("data", "list", "--root", "x" * 300), "too long for a file name"),
    (("run", "no\udcffname"), "is not UTF-8 text"),
]


@pytest.mark.parametrize("line, says", STRANGE, ids=[f"{line[0]}-{says[:20]}" for line, says in STRANGE])
def test_strange_names_are_one_sentence(line, says, tmp_path, monkeypatch):
    monkeypatch.setenv("AIM_RUNS", str(tmp_path / "runs"))
    text = one_line(call(*line))
    assert says in text and len(text) < 600
    assert files(tmp_path) == []


def test_a_dangling_link_as_the_place_of_runs_is_one_sentence(toy, monkeypatch):
    (toy / "link").symlink_to(toy / "nowhere/far")
    monkeypatch.setenv("AIM_RUNS", str(toy / "link"))
    done = call("run", toy / "toy.ipynb")
    assert done.exit_code == 2 and "cannot be written" in done.output.splitlines()[-1]


def test_the_death_of_a_kernel_says_what_to_look_at(toy, monkeypatch):
    nb = nbformat.read(toy / "toy.ipynb", 4)
    nb.cells[1].source = "import os\nos.kill(os.getpid(), 9)"
    nbformat.write(nb, toy / "dies.ipynb")
    monkeypatch.setenv("AIM_RUNS", str(toy / "runs"))
    done = call("run", toy / "dies.ipynb")
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert re.search("^aim-nb: the kernel died.*free -h.*resume", done.output, re.M), done.output


# other places and installations


def test_from_any_directory_of_an_editable_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AIM_RUNS", raising=False)
    done = call("run", "20_fewshot", "--dry-run")
    assert done.exit_code == 0 and f"would write {ROOT}/runs/notebooks/20_fewshot-" in done.output
    assert "runs: " in call("sweep", "few-shot-cifar-fs-conv4", "--dry-run").output
    assert files(tmp_path) == []


def test_a_wheel_says_how_to_get_notebooks_and_kept_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (core, cli, notebook_runs):
        monkeypatch.setattr(module, "find_clone", lambda: None)
    text = one_line(call("run", "20_fewshot"))
    assert "a wheel brings none" in text and "pip install -e '.[notebooks]'" in text
    with pytest.raises(core.AimError, match=re.escape("pip install 'aim_nb[sweep]'.")):
        core.require("no_such_module", "sweep")
    assert "results/ comes with a clone" in one_line(call("report"))


def test_version_and_a_near_command():
    assert re.fullmatch(r"aim-nb \d+\.\d+\.\d+\n", call("--version").output)
    done = call("rum")
    assert done.exit_code == 2 and "run" in done.output.splitlines()[-1].replace("rum", "")


def test_plain_papermill_shows_progress(tmp_path):
    "Its terminal gets the bar that a kernel would otherwise only store in the notebook."
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL})
    nb.cells = [
        nbformat.v4.new_code_cell("from aim_nb.core import progress\nfor i in progress(range(3), desc='adding'): pass")
    ]
    nbformat.write(nb, tmp_path / "bar.ipynb")
    env = {k: v for k, v in os.environ.items() if k not in ("AIM_LIVE", "IN_TEST", "PYTEST_CURRENT_TEST")}
    done = subprocess.run(
        [Path(sys.executable).parent / "papermill", "bar.ipynb", "out.ipynb", "--no-progress-bar"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and re.search(r"adding: 100%.*3/3", done.stderr), done.stderr[-2000:]
