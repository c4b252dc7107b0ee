"""The same command twice, in processes and folders of their own, gives the same records."""

import json, os, random, signal, subprocess, sys, time
from pathlib import Path

import pytest

from aim_nb.engine.records import essence, read_record

ROOT = Path(__file__).resolve().parent.parent
FEW = {
    "20_fewshot": ("-p", "methods", "sib+aim", "-p", "shots", "1"),
    "30_continual": ("-p", "methods", "oml+aim"),
}  # of its rows, in `make test`
OTHERS = [
    pytest.param(n, marks=pytest.mark.stress)
    for n in ("21_fewshot_ablation", "22_fewshot_activation", "31_continual_activation")
]


def command(name, runs, *more):
    "A notebook at the smoke budget as a user runs it, its runs in a folder of its own; IN_TEST makes the sizes those of the notebook's own test."
    env = {**os.environ, "AIM_RUNS": str(runs), "OMP_NUM_THREADS": "1", "AIM_LIVE": "0", "IN_TEST": "1"}
    return subprocess.Popen(
        [Path(sys.executable).parent / "aim-nb", "run", f"nbs/{name}.ipynb", *more],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # a job in the background of a script ignores Ctrl-C


def found(runs):
    return {p.name: essence(read_record(p)) for p in sorted(Path(runs).glob("records/*.json"))}


@pytest.fixture(scope="module")
def first(tmp_path_factory, many):
    "first(name): the records of a first run; those that `make test` has just made with the notebooks, where it tells their place."
    done = {}

    def get(name):
        if name not in done:
            runs = os.environ.get("AIM_FIRST_RUNS") or tmp_path_factory.mktemp("first")
            if not os.environ.get("AIM_FIRST_RUNS"):
                p = command(name, runs, *many(FEW.get(name, ()), ()))
                out = p.communicate()
                assert p.returncode == 0, out
            done[name] = found(runs)
        return done[name]

    return get


@pytest.mark.both
@pytest.mark.parametrize("name", ["20_fewshot", "30_continual", *OTHERS])
def test_same_seed_same_records(name, first, tmp_path, tally, many):
    p = command(name, tmp_path, *many(FEW.get(name, ()), ()))
    out = p.communicate()
    assert p.returncode == 0, out
    own, before = found(tmp_path), first(name)
    same = bool(own) and all(before.get(k) == v for k, v in own.items())
    tally.add(f"the same notebook again ({name})", "every record the same but for its clock", not same)
    assert same, [k for k, v in own.items() if before.get(k) != v]
    assert all({**v, "seed": v["seed"] + 1} != before[k] for k, v in own.items())  # the comparison can fail


@pytest.mark.stress
@pytest.mark.parametrize("name, sig", [("20_fewshot", signal.SIGKILL), ("30_continual", signal.SIGINT)])
def test_the_command_is_stopped_and_given_again(name, sig, first, tmp_path, tally):
    "`aim-nb run` with its kernel, killed or interrupted at a random moment of its training: the same command goes on and ends with the same records."
    first(name)
    p = command(name, tmp_path)
    while p.poll() is None and not any(tmp_path.glob("checkpoints/*-*/.lock")):
        time.sleep(0.05)  # training has begun
    time.sleep(random.Random(f"{name} {sig}").uniform(0, 5))
    assert p.poll() is None, p.communicate()
    os.killpg(p.pid, sig) if sig == signal.SIGKILL else p.send_signal(sig)
    out, err = p.communicate()
    assert p.returncode == (130 if sig == signal.SIGINT else -sig), err
    if p.returncode == 130:
        assert "stopped" in err and "Traceback" not in err
    again = command(name, tmp_path)
    out = again.communicate()
    own, before = found(tmp_path), first(name)
    same = again.returncode == 0 and bool(own) and all(before.get(k) == v for k, v in own.items())
    tally.add(
        f"`aim-nb run` {'killed' if sig == signal.SIGKILL else 'stopped by Ctrl-C (exit 130)'} and given again",
        "went on; the same records",
        not same,
    )
    assert same, out


@pytest.mark.stress
def test_a_failing_cell_keeps_the_notebook(tmp_path, tally):
    "papermill stops in a cell: the notebook as far as it came and the error in it are kept, the terminal gets one line."
    for i, more in enumerate((("-p", "dataset", f"folder:{tmp_path}/none"), ("-p", "K", "99"), ("-p", "shots", "500"))):
        p = command("20_fewshot", tmp_path / str(i), *more, "-o", str(tmp_path / f"{i}.ipynb"))
        out, err = p.communicate()
        cells = json.loads((tmp_path / f"{i}.ipynb").read_text())["cells"]
        errors = [
            o["evalue"] for c in cells if c["cell_type"] == "code" for o in c["outputs"] if o["output_type"] == "error"
        ]
        ok = (
            p.returncode in (1, 2)
            and len(errors) == 1
            and "Traceback" not in err
            and errors[0].splitlines()[0][:60] in err
        )
        tally.add("a cell fails under papermill", "partial notebook and its error kept, one line said", not ok)
        assert ok, (err, errors)
