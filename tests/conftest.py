"""Shared by all tests: one torch thread, runs and data in temporary places, a way to call `aim-nb` as a user does."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"): os.environ[name] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser): parser.addoption("--stress", action="store_true", help="run the long tests, and only these")


def pytest_configure(config): config.addinivalue_line("markers", "stress: long; runs in `make stress` only")


def pytest_collection_modifyitems(config, items):
    "Long tests are not part of `make test`: left out, not skipped; `--stress` runs them alone."
    stress = config.getoption("--stress")
    out = [i for i in items if bool(i.get_closest_marker("stress")) != stress]
    config.hook.pytest_deselected(items=out)
    items[:] = [i for i in items if i not in out]


@pytest.fixture(scope="session")
def root(): return ROOT


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
        return subprocess.run([str(Path(sys.executable).parent / "aim-nb"), *map(str, args)], cwd=cwd, env={**os.environ, **env}, text=True, capture_output=True)
    return call
