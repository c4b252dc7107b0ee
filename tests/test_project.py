"""The project as a whole: notebooks in order, made files in step with their sources, nothing that should not be in a repository."""

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from aim_nb.engine.notebook_runs import parameters_of

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").glob("*.ipynb"))
EXPERIMENTS = [p for p in NOTEBOOKS if re.match(r"[23]\d_", p.name) and "budget" in parameters_of(p)]
KERNEL = {"name": "python3", "display_name": "python3", "language": "python"}
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
each_experiment = pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)


def read(path):
    return nbformat.read(path, 4)


def code(nb):
    return [c for c in nb.cells if c.cell_type == "code"]


def tagged(nb, tag):
    return [c for c in code(nb) if tag in c.metadata.get("tags", [])]


def tracked():
    "Files that git has or would take."
    out = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if out.returncode:
        pytest.skip("not a git clone")
    return [ROOT / n for n in out.stdout.split("\0") if n and (ROOT / n).is_file()]


# notebooks


@each_notebook
def test_notebook_form(path):
    raw, nb = json.loads(path.read_text()), read(path)
    assert (raw["nbformat"], raw["nbformat_minor"]) == (4, 5)
    ids = [c.get("id") for c in raw["cells"]]
    assert all(ids) and len(set(ids)) == len(ids), (
        "cell ids have to be stored and unique, else export headers change each time"
    )
    assert raw["metadata"] == {"kernelspec": KERNEL}, "nothing else is kept, the state of widgets neither"
    assert re.match(r"# .+\n+> .+", nb.cells[0].source), "a notebook opens with a title and one line"
    assert not [o for c in code(nb) for o in c.outputs if o.output_type == "error"], "a stored output is an error"


@each_notebook
def test_pictures_have_captions(path):
    shown = [c for c in code(read(path)) if any("image/png" in o.get("data", {}) for o in c.outputs)]
    assert not [c.source.split("\n")[0] for c in shown if not re.search(r'^#\|\s*fig-cap: "\S.*"', c.source, re.M)]


ROOMS = {"0": {"", "data"}, "5": {"kernels"}, "6": {"engine"}, "7": {"report", ""}}  # where a decade exports to


@each_notebook
def test_exports_one_module_named_as_the_notebook(path):
    source = "\n".join(c.source for c in code(read(path)))
    exports = bool(re.search(r"^#\|\s*export", source, re.M))
    named = re.findall(r"^#\|\s*default_exp (\S+)", source, re.M)
    assert len(named) == exports
    for name in named:
        room, _, module = name.rpartition(".")
        assert module == path.stem.partition("_")[2] and room in ROOMS.get(path.stem[0], {""})


def test_stems_are_unique_without_their_numbers():
    stems = [re.sub(r"^\d+_", "", p.stem) for p in NOTEBOOKS]
    assert len(set(stems)) == len(stems)


@each_notebook
def test_imports_stand_alone(path):
    "nbdev runs every cell that imports, and only those, to make the pages of notebooks that export."
    nb = read(path)
    if not any(re.search(r"^#\|\s*export", c.source, re.M) for c in code(nb)):
        return
    for c in code(nb):
        if c.source.lstrip().startswith(("%", "!")):
            continue
        tree = ast.parse(c.source)
        imports = any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.walk(tree))
        other = [n for n in tree.body if not isinstance(n, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))]
        assert not (imports and other) or "#| export" in c.source, (
            f"imports share a cell with other code: {c.source[:60]!r}"
        )
        assert "import *" not in c.source or "#| export" not in c.source


@each_experiment
def test_parameters_are_plain_literals_with_a_comment_each(path):
    cells = tagged(read(path), "parameters")
    assert len(cells) == 1
    names = []
    for line in filter(str.strip, cells[0].source.splitlines()):
        if line.startswith("#"):
            continue
        (node,) = ast.parse(line).body
        assert isinstance(node, ast.Assign) and len(node.targets) == 1, f"one literal a line: {line}"
        assert isinstance(ast.literal_eval(node.value), (str, int, float, bool)), f"plain literals only: {line}"
        assert re.search(r"\s#\s*\S+", line), f"a trailing comment each: {line}"
        names.append(node.targets[0].id)
    assert list(parameters_of(path)) == names, (
        "papermill cannot read a line, such as one with a second = in its comment"
    )


@each_experiment
def test_experiments_export_nothing_and_print_a_summary(path):
    nb = read(path)
    assert not any("nbdev_export(" in c.source for c in code(nb)), "it would rewrite the package in the middle of a run"
    outputs = [o for c in tagged(nb, "summary") for o in c.outputs]
    assert any(o.get("text") or o.get("data", {}).get("text/plain") for o in outputs), (
        "a cell tagged summary prints what `aim-nb run` shows"
    )


# nbdev and papermill


def small_project(folder, keep_tags=True):
    "A project of one notebook with this project's settings."
    text = (ROOT / "settings.ini").read_text()
    if not keep_tags:
        text = re.sub(r"allowed_cell_metadata_keys.*", "allowed_cell_metadata_keys =", text)
    (folder / "settings.ini").write_text(text)
    (folder / "nbs").mkdir()
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL, "dirty": 1})
    nb.cells = [
        nbformat.v4.new_code_cell("n = 1  # how many", metadata={"tags": ["parameters"], "junk": 1}, execution_count=7),
        nbformat.v4.new_code_cell("print('n is', n)"),
    ]
    nbformat.write(nb, folder / "nbs/20_toy.ipynb")
    return folder / "nbs/20_toy.ipynb"


def tool(name, *args, cwd):
    done = subprocess.run(
        [Path(sys.executable).parent / name, *map(str, args)], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_parameters_tag_survives_cleaning_and_papermill_uses_it(tmp_path):
    path = small_project(tmp_path)
    tool("nbdev_clean", cwd=tmp_path)
    nb = read(path)
    assert tagged(nb, "parameters") and "junk" not in nb.cells[0].metadata and "dirty" not in nb.metadata, (
        "cleaning did its work and left the tag"
    )
    tool("papermill", path, tmp_path / "out.ipynb", "-p", "n", 5, cwd=tmp_path)
    assert "n is 5" in (tmp_path / "out.ipynb").read_text()


def test_without_the_setting_the_tag_would_be_lost(tmp_path):
    path = small_project(tmp_path, keep_tags=False)
    tool("nbdev_clean", cwd=tmp_path)
    assert not tagged(read(path), "parameters")


@each_experiment
def test_every_experiment_keeps_its_tag_when_cleaned(path, tmp_path):
    shutil.copy(ROOT / "settings.ini", tmp_path)
    (tmp_path / "nbs").mkdir()
    copy = Path(shutil.copy(path, tmp_path / "nbs"))
    tool("nbdev_clean", cwd=tmp_path)
    assert tagged(read(copy), "parameters") and copy.read_bytes() == path.read_bytes()


def test_settings_are_those_that_were_tried():
    config = configparser.ConfigParser()
    config.read(ROOT / "settings.ini")
    got = config["DEFAULT"]
    want = dict(
        tst_flags="notest slow cuda",
        allowed_metadata_keys="",
        allowed_cell_metadata_keys="tags",
        clear_all="False",
        jupyter_hooks="True",
        clean_ids="True",
        update_pyproject="False",
        recursive="True",
        readme_nb="index.ipynb",
        min_python="3.11",
    )
    assert {k: got.get(k) for k in want} == want


# layout and made files


def test_layout():
    for name in "nbs aim_nb figures results tests settings.ini setup.py _quarto.yml README.md constraints.txt Makefile LICENSE CITATION.cff CONTRIBUTING.md CHANGELOG.md .ci/run .gitignore .gitattributes ruff.toml tools/hooks/pre-commit".split():
        assert (ROOT / name).exists(), name
    assert (ROOT / "nbs/_quarto.yml").is_symlink() and (ROOT / "nbs/_quarto.yml").resolve() == ROOT / "_quarto.yml"
    assert list((ROOT / ".github/workflows").glob("*.yml"))
    assert (ROOT / ".ci/run").stat().st_mode & 0o111, ".ci/run has to be executable"
    assert {"/runs/", "/data/", "/.venv", "/_docs/", "/_proc/"} <= set((ROOT / ".gitignore").read_text().split())


def test_ci_runs_the_same_tests():
    assert re.search(r"^(exec )?make test$", (ROOT / ".ci/run").read_text(), re.M)
    assert any(".ci/run" in f.read_text() for f in (ROOT / ".github/workflows").glob("*.yml"))


def test_readme_is_made_from_the_index():
    done = subprocess.run([sys.executable, ROOT / "tools/readme.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_readme_says_what_a_newcomer_needs():
    text = (ROOT / "README.md").read_text()
    first_screen = "\n".join(text.splitlines()[:45])
    assert "make demo" in first_screen and "make test" in first_screen
    for needed in (
        "pip install -c constraints.txt -e '.[dev]'",
        "from aim_nb import AIM",
        "papermill nbs/20_fewshot.ipynb out.ipynb -p dataset cifar-fs",
        "aim-nb run",
        "](figures/AIM.",
    ):
        assert needed in text, needed


def test_readme_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_makefile_targets_are_real():
    text = (ROOT / "Makefile").read_text()
    for script in re.findall(r"(?:python|\$\(PY\)) ((?:tools|tests|benchmarks)/\S+\.py)", text):
        assert (ROOT / script).exists(), script
    for nb in re.findall(r"nbs/\S+\.ipynb", text):
        assert (ROOT / nb).exists(), nb
    phony = set(" ".join(re.findall(r"^\.PHONY:(.*)$", text, re.M)).split())
    assert phony == {t for t in re.findall(r"^([a-z-]+):", text, re.M)}


# hygiene

BAD_TEXT = [
    re.compile(p)
    for p in (
        r"/ro" r"ot/",
        r"/wo" r"rk/",
        r"/ho" r"me/[a-z]",
        r"\bTO" r"DO\b",
        r"\bFIX" r"ME\b",
        r"NotImplemented" r"Error",
    )
]


def test_no_machine_paths_or_stubs_in_text_files():
    found = []
    for path in tracked():
        if path.suffix not in (
            ".py",
            ".ipynb",
            ".md",
            ".toml",
            ".json",
            ".csv",
            ".ini",
            ".yml",
            ".cff",
            ".txt",
        ) and path.name not in ("Makefile", "run"):
            continue
        text = re.sub(r'"image/png": "[^"]*"', "", path.read_text(errors="ignore"))
        found += [f"{path.relative_to(ROOT)}: {m[0]}" for p in BAD_TEXT for m in p.finditer(text)]
    assert not found


def test_no_file_is_too_large_or_is_data():
    files = tracked()
    assert not [f.name for f in files if f.stat().st_size > 10_000_000]
    assert not [
        f for f in files if f.suffix in (".npy", ".npz", ".pkl", ".pickle", ".pt", ".pth", ".zip", ".gz", ".jpg")
    ]


def test_one_name_everywhere():
    config = configparser.ConfigParser()
    config.read(ROOT / "settings.ini")
    got = config["DEFAULT"]
    assert {got["lib_name"], got["repo"], got["lib_path"]} == {"aim_nb"}
    assert got["console_scripts"] == "aim-nb=aim_nb.cli:main", "not `aim`: an experiment tracker owns that name"
    assert (
        f"version: {got['version']}" in (ROOT / "CITATION.cff").read_text()
        and f"## {got['version']}" in (ROOT / "CHANGELOG.md").read_text()
    )
    assert got["version"] in (ROOT / "aim_nb/__init__.py").read_text()


# git hooks


@pytest.fixture
def clone(tmp_path):
    "A clone of one notebook and one script, with this project's settings and hook."
    small_project(tmp_path)
    for name in ("ruff.toml", "tools/hooks/pre-commit"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for args in (["init", "-q"], ["config", "core.hooksPath", "tools/hooks"], ["add", "."]):
        subprocess.run(["git", *args], cwd=tmp_path, check=True)
    return tmp_path


def commit(folder):
    name = ["-c", "user.name=x", "-c", "user.email=x@x"]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    return subprocess.run(["git", *name, "commit", "-m", "x"], cwd=folder, capture_output=True, text=True, env=env)


def test_a_commit_cleans_and_formats_what_is_staged(clone):
    first = commit(clone)
    assert first.returncode and "stage the files again" in first.stderr
    nb = read(clone / "nbs/20_toy.ipynb")
    assert "junk" not in nb.cells[0].metadata and nb.cells[1].source == 'print("n is", n)'
    assert commit(clone).returncode == 0


def test_a_commit_with_an_unused_import_is_refused(clone):
    commit(clone)
    assert commit(clone).returncode == 0
    (clone / "script.py").write_text("import os\n")
    done = commit(clone)
    assert done.returncode and "F401" in done.stderr and "ruff found the above" in done.stderr
