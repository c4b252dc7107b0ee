"""JupyterLab as a person uses it: open a notebook, save it, run all its cells, move a slider, see picture and numbers change, and no error in the page."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 600  # seconds a page may take to run all its cells: it is no measurement, a slow machine only takes longer

SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # every cell is in the page, not only those that can be seen
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}  # ask nothing, load nothing


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def small_project(folder, *stems):
    "A copy of some notebooks with what they read, so that what JupyterLab saves stays out of the clone."
    (folder / "nbs").mkdir(parents=True)
    shutil.copy(ROOT / "settings.ini", folder)
    shutil.copytree(ROOT / "results", folder / "results")
    for stem in stems:
        shutil.copy(ROOT / "nbs" / f"{stem}.ipynb", folder / "nbs")
    return folder / "nbs"


SAVED = ("index", "10_aim", "22_fewshot_activation", "40_explore", "90_report")  # text, pictures, tables, widgets


def git(folder, *args):
    name = ["-c", "user.name=x", "-c", "user.email=x@x"]
    return subprocess.run(["git", *name, *args], cwd=folder, check=True, capture_output=True, text=True).stdout


def small_clone(folder):
    "A folder of committed notebooks, which only `test_opening_and_saving_changes_nothing` opens."
    folder.mkdir()
    for stem in SAVED:
        shutil.copy(ROOT / "nbs" / f"{stem}.ipynb", folder)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "notebooks")
    return folder


def broken_notebook():
    "A notebook whose first cell fails."
    nb = nbformat.read(ROOT / "nbs/10_aim.ipynb", 4)
    nb.cells = [nbformat.v4.new_code_cell(source) for source in ("1/0", "print('after')")]
    return nb


def get(url, timeout=10):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return json.load(answer)


class Lab(str):
    "The address of a server, with the folder that it shows."


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "JupyterLab on 127.0.0.1, with settings of its own; its address."
    if not CHROMIUM:
        pytest.skip("no chromium on this machine: JupyterLab was not opened in a browser")
    tmp = tmp_path_factory.mktemp("lab")
    folder, port = small_project(tmp / "project", "10_aim", "40_explore"), free_port()
    nbformat.write(broken_notebook(), folder / "broken.ipynb")
    small_clone(folder / "clone")
    own = {f"JUPYTER_{k}_DIR": str(tmp / k.lower()) for k in ("CONFIG", "DATA", "RUNTIME")} | {
        f"JUPYTERLAB_{k}_DIR": str(tmp / k.lower()) for k in ("SETTINGS", "WORKSPACES")
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        f"--config={ROOT / 'tools/jupyter_config.py'}",  # as `make lab` does
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder}",
    ]
    for name, text in SETTINGS.items():
        path = tmp / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    env = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}  # pictures belong into the page
    with open(tmp / "server.log", "w") as log:
        server = subprocess.Popen(command, cwd=folder, env=env | own, stdout=log, stderr=log)
    base = Lab(f"http://127.0.0.1:{port}")
    base.folder = folder
    try:
        for _ in range(240):
            assert server.poll() is None, (tmp / "server.log").read_text()[-2000:]
            try:
                get(f"{base}/api/status")
                break
            except OSError:
                time.sleep(0.5)
        yield base
    finally:
        server.terminate()  # it ends its kernels, too
        server.wait(60)


@pytest.fixture(scope="module")
def browser(lab):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_notebook(browser, lab, name):
    "The notebook's page, and a list that will hold what goes wrong in it."
    page, wrong = browser.new_page(viewport=dict(width=1400, height=1600)), []
    page.set_default_timeout(1000 * PATIENCE)
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.goto(
        f"{lab}/lab/workspaces/{name.removesuffix('.ipynb').replace('/', '-')}/tree/{name}"
    )  # a workspace of its own: no other notebook in the page
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    return page, wrong


def kernel_state(lab, name):
    return next((s["kernel"]["execution_state"] for s in get(f"{lab}/api/sessions") if s["path"] == name), "")


def wait_until(page, done, seconds, what):
    "Look once a second until `done()` holds twice running."
    end, held = time.time() + seconds, 0
    while held < 2:
        assert time.time() < end, f"{what}: not within {seconds} s"
        page.wait_for_timeout(1000)
        held = held + 1 if done() else 0


def run_all(page, lab, name):
    "Run all cells through the Run menu and wait until the kernel has nothing more to do."
    wait_until(page, lambda: kernel_state(lab, name) == "idle", PATIENCE, "the kernel's start")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    busy = page.locator(".jp-InputPrompt", has_text="[*]")
    wait_until(page, lambda: kernel_state(lab, name) == "idle" and not busy.count(), PATIENCE, f"all cells of {name}")


def checked(page, wrong):
    "Every code cell has run, and neither a cell nor the page shows an error."
    prompts = [p.strip() for p in page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()]
    assert prompts and not [p for p in prompts if not p.strip("[]:").isdigit()], f"cells that did not run: {prompts}"
    assert "Traceback (most recent call last)" not in page.locator(".jp-Notebook").inner_text()
    assert not wrong


def see(page):
    "Numbers and picture of the cell with the controls."
    cell = page.locator(".jp-CodeCell", has=page.locator(".noUi-handle"))
    return cell.locator(".jp-OutputArea").first.inner_text(), cell.locator("img").last.get_attribute("src")


def wait_for_change(page, before):
    "What the cell with the controls shows once its numbers and its picture differ from `before`."
    images = page.locator(".jp-CodeCell", has=page.locator(".noUi-handle")).locator("img")
    wait_until(
        page,
        lambda: images.count() and all(a != b for a, b in zip(before, see(page))),
        PATIENCE,
        "a change after a control was used",
    )
    return see(page)


def move(page, slider):
    "Press the arrow key on a slider; numbers and picture of its cell before and after."
    handle = page.locator(".jp-CodeCell .noUi-handle").nth(slider)
    handle.scroll_into_view_if_needed()
    before = see(page)
    handle.focus()
    page.keyboard.press("ArrowRight")
    return before, wait_for_change(page, before)


def choose(page, label, option):
    "Choose from the list called `label`; numbers and picture of its cell before and after."
    choices = page.locator(".jp-CodeCell .widget-dropdown", has_text=label).locator("select")
    before = see(page)
    choices.select_option(index=option)
    return before, wait_for_change(page, before)


def save(page, path):
    "Press Ctrl-S; wait until the file is written."
    before = path.stat().st_mtime_ns
    page.locator(".jp-Notebook .jp-Cell").first.click()
    page.keyboard.press("Control+s")
    wait_until(page, lambda: path.stat().st_mtime_ns != before, 60, f"{path.name} to be saved")


@pytest.mark.parametrize("stem", SAVED)
def test_opening_and_saving_changes_nothing(browser, lab, stem):
    clone = lab.folder / "clone"
    page, wrong = open_notebook(browser, lab, f"clone/{stem}.ipynb")
    save(page, clone / f"{stem}.ipynb")
    page.close()
    assert git(clone, "diff", "--stat", "--", f"{stem}.ipynb") == ""


def test_aim_page_runs_and_its_slider_moves_the_picture(browser, lab):
    page, wrong = open_notebook(browser, lab, "10_aim.ipynb")
    run_all(page, lab, "10_aim.ipynb")
    checked(page, wrong)
    (numbers, _), (after, _) = move(page, 0)
    assert numbers.split() != after.split() and "4" in after.split(), "K goes from 3 to 4"
    checked(page, wrong)
    page.close()


def test_explorer_answers_its_controls(browser, lab):
    page, wrong = open_notebook(browser, lab, "40_explore.ipynb")
    run_all(page, lab, "40_explore.ipynb")
    checked(page, wrong)
    (one, _), (two, _) = choose(page, "class", 1)
    assert "probability of its class" in one and "without mechanism" not in two
    move(page, 0)  # another image
    (_, _), (three, _) = choose(page, "silence", 1)
    assert "without mechanism" in three
    (_, _), (four, _) = move(page, 0)
    assert "without mechanism" not in four, "another image has other active mechanisms to choose from"
    checked(page, wrong)
    page.close()


def test_an_error_in_a_cell_would_be_seen(browser, lab):
    "The checks above can fail."
    page, wrong = open_notebook(browser, lab, "broken.ipynb")
    run_all(page, lab, "broken.ipynb")
    with pytest.raises(AssertionError):
        checked(page, wrong)
    page.close()
