"""The package: what it needs, what it imports, what it must never do, and that it works outside of the clone."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(p for p in (ROOT / "aim_nb").rglob("*.py") if p.name != "_modidx.py")
PROGRAMS = [*MODULES, *sorted(p for d in ("tools", "benchmarks") for p in (ROOT / d).glob("*.py"))]
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT).with_suffix("")))


def settings():
    config = configparser.ConfigParser()
    config.read(ROOT / "settings.ini")
    return config["DEFAULT"]


def plain(requirement):
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


# requirements


def test_the_package_itself_needs_little():
    assert (
        settings()["requirements"].split()
        == "torch>=2.10 torchvision numpy pillow safetensors tqdm platformdirs typer".split()
    )
    assert {"papermill", "jupyterlab", "matplotlib", "seaborn", "pandas", "ipywidgets"} == set(
        settings()["notebooks_requirements"].split()
    )
    assert {"nbdev>=2.4,<3", "execnb<0.2", "fastcore<2", "ghapi<2"} <= set(settings()["dev_requirements"].split())


def closure(names):
    "The installed packages that `names` lead to, by their metadata."
    from packaging.requirements import Requirement

    seen, todo = set(), [plain(n) for n in names]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        seen.add(name)
        todo += [plain(r.name) for r in map(Requirement, needs) if not r.marker or r.marker.evaluate({"extra": ""})]
    return seen


def test_constraints_pin_the_whole_environment():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    lines = [l for l in (ROOT / "constraints.txt").read_text().splitlines() if l.strip() and not l.startswith("#")]
    assert len(pins) == len(lines), "exact pins only"
    wanted = " ".join(settings()[k] for k in ("requirements", "notebooks_requirements", "dev_requirements")).split()
    assert not closure(wanted) - {plain(p) for p in pins} - {"aim-nb", "pip"}


# imports


def loaded_by(statement):
    "Names of the modules that a statement brings in, in a new process."
    out = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert out.returncode == 0, out.stderr
    return set(out.stdout.split())


@pytest.mark.skipif(not (ROOT / "aim_nb/aim.py").exists(), reason="aim is not there yet")
def test_aim_needs_no_plotting_or_notebooks():
    assert not loaded_by("from aim_nb.aim import AIM") & {
        "matplotlib",
        "pandas",
        "seaborn",
        "papermill",
        "IPython",
        "ipywidgets",
        "torchvision",
    }


def test_help_does_not_wait_for_torch():
    assert not loaded_by("import aim_nb.cli") & {"torch", "numpy", "papermill", "matplotlib"}


@each_module
def test_no_module_imports_what_only_development_needs(path):
    tree = ast.parse(path.read_text())
    names = {
        (a.name if isinstance(n, ast.Import) else n.module or "").partition(".")[0]
        for n in ast.walk(tree)
        if isinstance(n, (ast.Import, ast.ImportFrom))
        for a in n.names
    }
    assert not names & {"nbdev", "fastcore", "execnb", "pytest", "hypothesis", "playwright"}


# which module may know which: a room imports from its own and from those before it

ROOMS = [
    {"core"},
    {"config"},
    {"paper"},
    {"data"},
    {"aim", "backbones", "sib", "oml", "anml"},
    {"kernels"},
    {"engine"},
    {"report", "classifiers"},
    {"cli"},
]


def rank(module):
    "The place of a module's room, by its name below `aim_nb`."
    return next(i for i, names in enumerate(ROOMS) if module.partition(".")[0] in names)


def module_name(path):
    return ".".join(path.relative_to(ROOT / "aim_nb").with_suffix("").parts)


def imports(path, known):
    "The package's own modules that a module imports, at its top or inside a function."
    package = ["aim_nb", *path.relative_to(ROOT / "aim_nb").parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{a.name}" for a in node.names)}
    return {f.removeprefix("aim_nb.") for f in found} & known


def import_graph():
    paths = {module_name(p): p for p in MODULES if p.name != "__init__.py"}
    return {name: imports(path, set(paths)) - {name} for name, path in paths.items()}


def test_the_import_graph_sees_lazy_imports():
    graph = import_graph()
    assert "core" in graph["aim"] and "data.files" in graph["data.banks"] and len(graph) == len(MODULES) - 5


def test_imports_go_one_way():
    assert not [f"{a} -> {b}" for a, used in import_graph().items() for b in used if rank(b) > rank(a)]


def test_imports_have_no_cycle():
    from graphlib import TopologicalSorter

    assert len([*TopologicalSorter(import_graph()).static_order()]) == len(import_graph())


def test_aim_is_at_the_top_and_only_loaded_when_asked_for():
    assert "torch" not in loaded_by("import aim_nb")
    assert "aim_nb.aim" in loaded_by("from aim_nb import AIM")


# what no module may do

DRAWS = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
    "rand_like",
    "randn_like",
    "randint_like",
    "poisson",
    "random_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "dropout",
    "Dropout",
    "dropout2d",
    "Dropout2d",
    "alpha_dropout",
    "DataLoader",
    "RandomSampler",
    "random_split",
    "shuffle",
    "permutation",
    "choice",
    "kaiming_normal_",
    "kaiming_uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "trunc_normal_",
    "orthogonal_",
}
SEEDED = {"Generator", "PCG64", "SeedSequence", "Philox", "BitGenerator"}
READS_CODE = {
    (m, f)
    for m in ("pickle", "torch", "joblib", "marshal", "dill", "cloudpickle", "shelve", "yaml", "jit")
    for f in ("load", "loads", "open", "unsafe_load", "Unpickler")
}
CODE_READERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch", "yaml"}


def dotted(node):
    "a.b.c as text, or ''."
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def offence(call):
    "What is wrong with a call, or ''."
    name = dotted(call.func)
    parts, last = name.split("."), call.func.attr if isinstance(call.func, ast.Attribute) else name
    given = {k.arg for k in call.keywords}
    if name in ("eval", "exec", "compile", "__import__"):
        return "runs text as code"
    true = {k.arg for k in call.keywords if isinstance(k.value, ast.Constant) and k.value.value is True}
    if tuple(parts[-2:]) in READS_CODE and "weights_only" not in true:
        return "reads code from data"
    if "allow_pickle" in given and "allow_pickle" in true:
        return "reads code from data"
    if name in (
        "torch.manual_seed",
        "torch.seed",
        "torch.cuda.manual_seed",
        "torch.random.manual_seed",
        "torch.set_rng_state",
    ):
        return "touches torch's global generator"
    if (
        parts[0] in ("np", "numpy")
        and parts[1:2] == ["random"]
        and last not in SEEDED
        and not (last == "default_rng" and call.args)
    ):
        return "uses numpy's global or an unseeded generator"
    if last == "default_rng" and not call.args and not call.keywords:
        return "is unseeded"
    if parts[0] == "random" and len(parts) == 2:
        return "uses Python's global generator"
    numpy_generator = isinstance(call.func, ast.Attribute) and (
        re.search(r"rng|gen", dotted(call.func.value)) or "numpy_rng" in ast.dump(call.func.value)
    )
    if last in DRAWS and "generator" not in given and not numpy_generator:
        return "draws without generator="
    return ""


def renamed(node):
    "A reader of code, or a generator that nobody seeded, imported under a name of its own; or ''."
    if isinstance(node, ast.Import):
        return ", ".join(
            a.name
            for a in node.names
            if a.name in ("numpy.random", "secrets") or a.asname and a.name in (CODE_READERS | {"random"})
        )
    if isinstance(node, ast.ImportFrom) and node.module in ("random", "secrets", "numpy.random", "torch.random"):
        return node.module
    if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in CODE_READERS:
        return ""
    return ", ".join(a.name for a in node.names if a.name in ("load", "loads", "Unpickler", "unsafe_load"))


def offences(source):
    nodes = list(ast.walk(ast.parse(source)))
    return [
        f"line {c.lineno}: {ast.unparse(c.func)} {o}" for c in nodes if isinstance(c, ast.Call) and (o := offence(c))
    ] + [f"line {n.lineno}: imports {r} under another name" for n in nodes if (r := renamed(n))]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: str(p.relative_to(ROOT).with_suffix("")))
def test_no_unseeded_randomness_and_no_code_from_data(path):
    assert not offences(path.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "torch.randn(3)",
        "x.normal_()",
        "np.random.rand(3)",
        "np.random.default_rng()",
        "default_rng()",
        "random.shuffle(x)",
        "torch.manual_seed(0)",
        "nn.init.kaiming_normal_(w)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=w)",
        "torch.jit.load(f)",
        "np.load(f, allow_pickle=True)",
        "from pickle import loads",
        "import pickle as p",
        "import torch as t",
        "from random import shuffle",
        "import random as r",
        "from numpy.random import rand",
        "import numpy.random as npr",
        "F.dropout(x)",
        "nn.Dropout(.1)",
        "DataLoader(d, shuffle=True)",
        "pick" + "le.load(f)",
        "pickle.Unpickler(f).load()",
        "eval(s)",
        "exec(s)",
    ],
)
def test_the_scan_finds_offenders(line):
    assert offences(line)


@pytest.mark.parametrize(
    "line",
    [
        "torch.randn(3, generator=g)",
        "x.normal_(generator=generator)",
        "np.random.Generator(np.random.PCG64(7))",
        "np.random.default_rng(7)",
        "rng.normal(0, 1)",
        "numpy_rng(0, 'a').normal()",
        "torch.load(f, weights_only=True)",
        "model.eval()",
        "torch.Generator().manual_seed(3)",
    ],
)
def test_the_scan_leaves_the_rest_alone(line):
    assert not offences(line)


@each_module
def test_functions_are_documented_and_short(path):
    long = [
        f"{n.name}: {n.end_lineno - n.body[0].lineno} lines"
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.FunctionDef) and n.end_lineno - n.body[0].lineno > 50
    ]
    assert not long


# outside of the clone


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The wheel, installed in a folder of its own over this environment's dependencies."
    tmp = tmp_path_factory.mktemp("wheel")
    for name in (
        "setup.py",
        "settings.ini",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
        "CHANGELOG.md",
        "CITATION.cff",
        "constraints.txt",
    ):
        shutil.copy(ROOT / name, tmp)
    shutil.copytree(ROOT / "aim_nb", tmp / "aim_nb", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist", "."],
        cwd=tmp,
        check=True,
        capture_output=True,
    )
    (wheel,) = (tmp / "dist").glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", tmp / "site", wheel],
        cwd=tmp,
        check=True,
        capture_output=True,
    )
    return tmp / "site"


def outside(site, tmp_path, *command):
    done = subprocess.run(
        list(map(str, command)),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_imports_outside_of_the_clone(site, tmp_path):
    out = outside(
        site,
        tmp_path,
        sys.executable,
        "-c",
        "import aim_nb, aim_nb.core, aim_nb.cli; print(aim_nb.__file__, aim_nb.core.project_root())",
    )
    assert out.split() == [str(site / "aim_nb/__init__.py"), str(tmp_path)]


def test_wheel_brings_the_console_script(site, tmp_path):
    assert "Usage: aim-nb" in outside(site, tmp_path, sys.executable, site / "bin/aim-nb", "--help")


def test_wheel_holds_every_data_file(site):
    files = {p.relative_to(ROOT) for p in (ROOT / "aim_nb").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert files and not [
        str(f) for f in files if not (site / f).exists() or (site / f).read_bytes() != (ROOT / f).read_bytes()
    ]


def test_wheel_reads_its_paper_data(site, tmp_path):
    out = outside(
        site,
        tmp_path,
        sys.executable,
        "-c",
        "from aim_nb.paper import paper_table; print(len(paper_table('few-shot')))",
    )
    assert int(out) > 10


def test_wheel_metadata(site):
    (info,) = site.glob("aim_nb-*.dist-info")
    text = (info / "METADATA").read_text()
    assert (
        "Provides-Extra: notebooks" in text
        and "Provides-Extra: dev" in text
        and "Requires-Dist: torch>=2.10" in text
        and "Requires-Python: >=3.11" in text
    )
