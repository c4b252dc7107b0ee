"""Shared by all tests: one torch thread, runs and data in temporary places, a way to call `aim-nb` as a user does."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
ROOT = Path(__file__).resolve().parent.parent
START, HERE = time.time(), Path.cwd()


class Tally:
    "Counts every fault that the tests inject: what, how often, how it ended, and how often something was lost."

    def __init__(self):
        self.rows, self.figures, self.failed, self.before, self.minutes, self.old, self.shown, self.skipped = (
            {},
            [],
            0,
            None,
            0.0,
            [],
            [],
            [],
        )

    def keep(self, path):
        "What an earlier session left in the file: a session of some of the tests writes its own rows over theirs."
        if self.before is None:
            self.before = json.loads(path.read_text()) if path.exists() else dict(rows=[], figures=[], minutes=0.0)
        mine, drawn = {what for what, _ in self.rows}, {f["what"].partition(":")[0] for f in self.figures}
        self.minutes = self.before["minutes"]
        self.old = [r for r in self.before["rows"] if r["tried"] not in mine]
        self.shown = self.figures + [f for f in self.before["figures"] if f["what"].partition(":")[0] not in drawn]

    def add(self, what, ended, lost=False, n=1):
        row = self.rows.setdefault((what, ended), [0, 0])
        row[0] += n
        row[1] += bool(lost)

    def asdict(self):
        rows = [dict(tried=what, times=n, ended=ended, lost=lost) for (what, ended), (n, lost) in self.rows.items()]
        return sorted(rows + self.old, key=lambda r: r["tried"])

    def table(self):
        rows = [("what was tried", "how often", "lost", "how it ended")] + [
            (r["tried"], f"{r['times']:,}", str(r["lost"]), r["ended"]) for r in self.asdict()
        ]
        rows.append(
            ("all", f"{sum(r['times'] for r in self.asdict()):,}", str(sum(r["lost"] for r in self.asdict())), "")
        )
        wide = [max(len(r[i]) for r in rows) for i in range(3)]
        return "\n".join(f"{a:{wide[0]}}  {n:>{wide[1]}}  {l:>{wide[2]}}  {e}".rstrip() for a, n, l, e in rows)


TALLY = Tally()


def pytest_addoption(parser):
    parser.addoption("--stress", action="store_true", help="run the long tests, and only these")
    parser.addoption("--faults", default="", help="where to write the table of injected faults as JSON")


def pytest_configure(config):
    config.addinivalue_line("markers", "stress: long; runs in `make stress` only")
    config.addinivalue_line("markers", "both: short in `make test`, long in `make stress`")
    hypothesis.settings.register_profile(
        "aim_nb",
        max_examples=500 if config.getoption("--stress") else 60,
        deadline=None,
        derandomize=True,
        database=None,
    )
    hypothesis.settings.load_profile("aim_nb")


def pytest_collection_modifyitems(config, items):
    "Long tests are not part of `make test`: left out, not skipped; `--stress` runs them, and the long form of those marked `both`."
    stress = config.getoption("--stress")

    def own(i):
        return stress if i.get_closest_marker("stress") else not stress or bool(i.get_closest_marker("both"))

    out = [i for i in items if not own(i)]
    config.hook.pytest_deselected(items=out)
    items[:] = [i for i in items if own(i)]


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    "The table of faults, in the terminal and where `--faults` says."
    if not (TALLY.rows or TALLY.figures) or not config.getoption("--stress"):
        return
    terminalreporter.write_sep("=", "faults injected")
    terminalreporter.write_line(TALLY.table())
    for f in TALLY.shown or TALLY.figures:
        terminalreporter.write_line(f"{f['what']}: {f['value']:.2f} {f['unit']}")
    for why in TALLY.skipped:
        terminalreporter.write_line(f"not tried here: {why}")


def pytest_runtest_logreport(report):
    TALLY.failed += report.failed
    if report.skipped:
        TALLY.skipped.append(report.longrepr[2].removeprefix("Skipped: "))


def pytest_runtest_teardown(item, nextitem):
    "After each test the table is written where `--faults` says, so that a session that is stopped keeps what it has."
    path = item.config.getoption("--faults")
    if not path or not (TALLY.rows or TALLY.figures):
        return
    import torch

    here = dict(python=".".join(map(str, sys.version_info[:3])), torch=torch.__version__, system=sys.platform)
    left = 0 if nextitem is None else len(item.session.items) - item.session.items.index(nextitem)
    TALLY.keep(HERE / path)
    (HERE / path).write_text(
        json.dumps(
            dict(
                left=left,
                failed=TALLY.failed,
                skipped=TALLY.skipped,
                minutes=round(TALLY.minutes + (time.time() - START) / 60, 1),
                versions=here,
                rows=TALLY.asdict(),
                figures=TALLY.shown,
            ),
            indent=1,
        )
        + "\n"
    )


@pytest.fixture(scope="session")
def tally():
    return TALLY


@pytest.fixture(scope="session")
def many(request):
    "many(short, long): how often to try, in `make test` and in `make stress`."
    stress = request.config.getoption("--stress")
    return lambda short, long: long if stress else short


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def places(tmp_path_factory):
    "Runs never write into the clone; data goes where $AIM_DATA says, else to a temporary place."
    given = os.environ.get("AIM_DATA")
    os.environ["AIM_RUNS"] = str(tmp_path_factory.mktemp("runs"))
    os.environ["AIM_DATA"] = given or str(tmp_path_factory.mktemp("data"))
    yield


@pytest.fixture
def aim_nb_cli():
    "Call `aim-nb` in a process of its own."

    def call(*args, cwd=ROOT, **env):
        return subprocess.run(
            [str(Path(sys.executable).parent / "aim-nb"), *map(str, args)],
            cwd=cwd,
            env={**os.environ, **env},
            text=True,
            capture_output=True,
        )

    return call


# small whole experiments, for test_kills and test_faults


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    "A small data set of its own."
    from accidents import tiny_bank

    return tiny_bank(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    "whole(method): folder, seconds and numbers of calls of an uninterrupted run, which notes every state it passes through."
    from accidents import note_states, run_child

    done = {}

    def get(method):
        if method not in done:
            folder, start = tmp_path_factory.mktemp("whole"), time.monotonic()
            child = run_child(method, folder, data, before=lambda: note_states(folder / "states.txt"))
            assert child.wait() == 0, child.text
            done[method] = folder, time.monotonic() - start, json.loads((folder / "calls.json").read_text())
        return done[method]

    return get
