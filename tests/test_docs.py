"""The site: every page is made, navigation and links are whole, nothing is loaded from elsewhere, and a browser shows it without an error."""

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The site as Sphinx renders it, everywhere the same."
    out = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, ROOT / "tools/docs.py", "--renderer", "sphinx", "--out", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


class Page(HTMLParser):
    "Addresses, anchors and images of a page."

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.ids, self.no_alt = [], [], set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if "id" in a:
            self.ids.add(a["id"])
        if tag == "a" and a.get("href"):
            self.links.append(a["href"])
        if tag in ("script", "img", "iframe", "source") and a.get("src"):
            self.loads.append(a["src"])
        if tag == "link" and a.get("href") and a.get("rel") not in ("canonical", "next", "prev", "index", "search"):
            self.loads.append(a["href"])
        if tag == "img" and re.fullmatch(r"|\S+\.(png|svg)", a.get("alt") or ""):
            self.no_alt.append(a.get("src"))


@pytest.fixture(scope="module")
def pages(site):
    return {p.name: Page(p) for p in site.glob("*.html")}


# the list of pages


def test_the_sidebar_lists_every_notebook_the_paper_first():
    from docs import sections

    listed = [n for names in sections().values() for n in names]
    assert sorted(listed + ["index.ipynb"]) == [p.name for p in NOTEBOOKS], (
        "a new notebook needs a line in the sidebar of _quarto.yml"
    )
    titles = list(sections())
    assert titles[0] == "The paper" and titles.index("Explore") < titles.index("Foundations and data"), "reader's order"
    for names in sections().values():
        assert names == sorted(names)


# What Quarto's schema knows of the keys that are used here (it refuses others): kinds of their values. Quarto itself need not be installed for this check.
QUARTO = {
    "project": dict(type=str, **{"output-dir": str}, preview=dict(port=int, browser=bool)),
    "execute": dict(enabled=bool),
    "metadata-files": [str],
    "format": dict(html=dict(theme=dict(light=str, dark=str), toc=bool, **{"code-copy": bool})),
    "website": dict(
        title=str,
        search=bool,
        **{"repo-actions": [str], "page-navigation": bool},
        navbar=dict(background=str, search=bool),
        sidebar=dict(style=str, contents=[dict(text=str, href=str, section=str, contents=[str])]),
    ),
}


def fits(value, kind):
    "Whether a value has the keys and kinds of a description."
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(k in kind and fits(v, kind[k]) for k, v in value.items())
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(v, kind[0]) for v in value)
    return type(value) is kind


def test_quarto_settings_have_the_form_that_quarto_asks_for():
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text())
    assert fits(config, QUARTO) and not fits(config | {"sidebar": {}}, QUARTO)
    assert set(config["website"]["repo-actions"]) <= {"none", "edit", "source", "issue"} and config["website"][
        "sidebar"
    ]["style"] in ("docked", "floating")
    assert (
        config["format"]["html"]["theme"] == dict(light="cosmo", dark="darkly")
        and config["execute"]["enabled"] is False
    )
    made = {"nbdev.yml"}  # by nbdev, for every rendering
    assert all(f in made or (ROOT / "nbs" / f).exists() for f in config["metadata-files"])


def test_links_under_a_title_work_in_both_renderers():
    from docs import links

    text = links("10_aim.ipynb").source
    assert len(re.findall(r"\]\(https://\S+/nbs/10_aim\.ipynb\)\{\.btn ", text)) == 2


# the pages as Sphinx renders them


def test_every_notebook_has_a_page_in_the_navigation(site, pages):
    from docs import sections, url

    for name in (n for names in sections().values() for n in names):
        assert f"{url(name)}.html" in pages, name
        assert f"{url(name)}.html" in pages["index.html"].links, f"{name} is not in the sidebar"


def test_internal_links_resolve(pages, site):
    broken = []
    for name, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link) or name == "search.html":
                continue
            file, _, anchor = link.partition("#")
            target = file or name
            if not (site / target).exists():
                broken.append(f"{name}: {link}")
            elif anchor and target in pages and anchor not in pages[target].ids:
                broken.append(f"{name}: {link}")
    assert not broken


def test_nothing_is_loaded_from_another_host(pages):
    assert not [(n, u) for n, p in pages.items() for u in p.loads if re.match(r"(https?:)?//", u)]


def test_images_say_what_they_show(pages):
    "A picture without a caption would get its file's name."
    assert not {n: p.no_alt for n, p in pages.items() if p.no_alt}


def test_pages_offer_their_notebook_and_colab(pages):
    for path in NOTEBOOKS:
        page = pages[re.sub(r"^\d+_", "", path.stem) + ".html"]
        assert any(l.endswith(f"/nbs/{path.name}") and "colab" in l for l in page.links), path.name
        assert any(l.endswith(f"/nbs/{path.name}") and "colab" not in l for l in page.links), path.name


def test_api_shows_signatures_and_parameter_comments(site):
    text = re.sub(r"<[^>]+>", "", (site / "aim.html").read_text())
    assert "def AIM(" in text and "d_out, # features out" in text


def public_names():
    import importlib
    import pkgutil

    import aim_nb

    modules = [m.name for m in pkgutil.walk_packages(aim_nb.__path__, "aim_nb.") if not m.ispkg]
    return [f"{m}.{name}" for m in modules for name in getattr(importlib.import_module(m), "__all__", [])]


def test_every_public_name_has_an_entry_in_the_api(pages):
    entries = set().union(*(page.ids for name, page in pages.items() if name.startswith("api_")))
    assert len(entries) > 100 and not set(public_names()) - entries
    indexed = {link.partition("#")[2] for link in pages["genindex.html"].links}
    assert not set(public_names()) - indexed


def test_an_entry_shows_signature_docstring_and_parameters(site):
    text = re.sub(r"<[^>]+>", "", (site / "api_paper.html").read_text())
    assert re.search(r"class Attention\(score: Tensor, mask: Tensor\)", text)
    assert "features out" in text


def test_a_named_tuple_shows_its_fields_on_its_notebooks_page():
    from docs import api_cell

    shown = "[source](https://host/blob/main/aim_nb/aim.py#L1)\n\n### Attention\n\n```python\ndef Attention(\n    *args, **kwargs\n):\n```\n"
    assert "class Attention(\n    score: torch.Tensor,\n    mask: torch.Tensor,\n)" in api_cell(shown).source


def test_titles_hold_no_labels_and_no_widget_is_left_as_text(site):
    for path in site.glob("*.html"):
        text = path.read_text()
        assert not re.search(r"<(h1|title)>[^<]*\b(tab|fig):", text), path.name
        assert not re.search(r"^<[^\n]*>(interactive|VBox|HBox|Output)\(", text, re.M), path.name


def test_a_widget_leaves_nothing_on_a_page():
    import nbformat
    from docs import convert_output

    data = {"text/plain": "interactive(children=())", "application/vnd.jupyter.widget-view+json": {"model_id": "x"}}
    assert not convert_output(nbformat.v4.new_output("display_data", data)).data


def test_no_table_is_left_as_text(site):
    "Markdown that a cell puts out is part of the page, not a paragraph of bars."
    bars = re.compile(r"\| ?(—|-{3})+ ?\|")
    assert bars.search("| a | | --- | --- |") and not [
        p.name
        for p in site.glob("*.html")
        if bars.search(re.sub(r"<pre.*?</pre>|<[^>]+>", "", p.read_text(), flags=re.S))
    ]


def test_a_cells_caption_stands_under_its_last_picture_only():
    import nbformat
    from docs import convert_code

    def out(**data):
        return nbformat.v4.new_output("display_data", {k.replace("_", "/"): v for k, v in data.items()})

    cell = nbformat.v4.new_code_cell(
        '#| fig-cap: "two"\nf()',
        outputs=[
            out(text_markdown="| a |\n|---|\n| 1 ± 2 |"),
            out(image_png="x"),
            out(image_png="x"),
            out(text_plain="end"),
        ],
    )
    made = convert_code(cell)
    assert (
        [c.cell_type for c in made] == ["code", "markdown", "code", "code", "code"]
        and made[0].source == "f()"
        and not made[0].outputs
    )
    assert "1\u00a0±\u00a02" in made[1].source and [
        ("figure" in c.metadata.get("mystnb", {}), "image" in c.metadata.get("mystnb", {})) for c in made[2:]
    ] == [(False, True), (True, True), (False, False)]


def test_no_directive_or_error_is_left_in_a_page(site):
    for path in site.glob("*.html"):
        text = path.read_text()
        assert "Traceback (most recent call last)" not in re.sub(r"<[^>]+>", "", text), path.name
        assert not re.search(r">#\|\s*(echo|hide|export|fig-cap)", text), path.name


# a browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def browse(site):
    "Open a page in headless Chromium; returns the page and what went wrong in it."
    if not CHROMIUM:
        pytest.skip("no chromium on this machine: the site was not opened in a browser")
    from playwright.sync_api import sync_playwright

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_address[1]}"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def visit(path):
            page, wrong = browser.new_page(), []
            page.set_default_timeout(600_000)  # a busy machine only takes longer
            page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda e: wrong.append(str(e)))
            page.on(
                "request", lambda r: wrong.append(r.url) if not r.url.startswith((base, "data:", "blob:")) else None
            )
            page.goto(f"{base}/{path}", wait_until="load")
            return page, wrong

        yield visit
        browser.close()
    server.shutdown()
    server.server_close()


def test_pages_open_without_errors(browse):
    for path in ("index.html", "aim.html"):
        page, wrong = browse(path)
        page.wait_for_selector("h1")
        assert not wrong, (path, wrong)


def test_equations_are_set(browse):
    page, wrong = browse("aim.html")
    page.wait_for_selector("mjx-container")
    assert not wrong


def test_search_finds_aim(browse):
    page, wrong = browse("search.html?q=AIM")
    page.wait_for_selector("#search-results li a")
    assert "AIM" in page.inner_text("#search-results") and not wrong


def test_nothing_stands_out_of_the_text(browse):
    "No table, picture or equation is wider than the column that it stands in, unless it can be scrolled there."
    wide = """() => { const main = document.querySelector("article"), right = main.getBoundingClientRect().right;
        const scrolls = e => { for (; e && e !== main; e = e.parentElement) if (/auto|scroll/.test(getComputedStyle(e).overflowX)) return true };
        return [...main.querySelectorAll("table, img, pre, mjx-container")].filter(e => e.getBoundingClientRect().right > right + 2 && !scrolls(e)).map(e => e.outerHTML.slice(0, 80)) }"""
    for path in ("index.html", "aim.html", "fewshot.html", "report.html", "errata.html"):
        page, wrong = browse(path)
        page.wait_for_selector("h1")
        assert not page.evaluate(wide) and not wrong, path


@pytest.mark.parametrize("width", [1280, 390])
def test_a_verdict_is_in_sight_however_narrow_the_page(browse, width):
    hidden = """() => { const main = document.querySelector("article").getBoundingClientRect();
        return [...document.querySelectorAll("article th.verdict")].filter(e => { const r = e.getBoundingClientRect();
            return r.width && (r.left < main.left || r.right > Math.min(main.right, innerWidth) + 2) }).length }"""
    for path in ("report.html", "fewshot.html"):
        page, wrong = browse(path)
        page.set_viewport_size(dict(width=width, height=900))
        assert page.locator("article th.verdict").count() and not page.evaluate(hidden) and not wrong, path
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_the_report_shows_its_tables(browse):
    page, wrong = browse("report.html")
    heads = page.locator("article table thead").all_text_contents()  # folded ones, too
    assert sum("Verdict" in h for h in heads) > 10 and not wrong


def test_the_few_shot_page_shows_its_table_and_picture(browse):
    page, wrong = browse("fewshot.html")
    assert page.locator("table").count() and page.locator("article img, main img").count() and not wrong
