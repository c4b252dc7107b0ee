"""`make docs`: the notebooks as a site in _docs/, through Quarto where it is installed and through Sphinx where it is not.

Both render the same pages (nbdev's processed notebooks) with the same navigation (`sections`)."""

import argparse, dataclasses, functools, importlib, inspect, pkgutil, re, shutil, subprocess, sys, tempfile
from configparser import ConfigParser
from itertools import groupby
from pathlib import Path
import aim_nb, nbformat, sphinx_api, yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the API of this tree, whatever is installed
config = ConfigParser()
config.read(ROOT / "settings.ini")
SETTINGS = config["DEFAULT"]
SITE = SETTINGS["doc_host"] + SETTINGS["doc_baseurl"]


def sections():
    "The site's pages, as _quarto.yml lists them: a title and its notebooks."
    contents = yaml.safe_load((ROOT / "_quarto.yml").read_text())["website"]["sidebar"]["contents"]
    return {part["section"]: part["contents"] for part in contents if "section" in part}


def url(name):
    "The name of a page: its notebook's without the number."
    return re.sub(r"^\d+_", "", Path(name).stem)


def process():
    "nbdev's own processing of every notebook, in _proc/."
    from nbdev.serve import proc_nbs

    return proc_nbs(n_workers=2, force=True)


def links(name):
    "The line under a page's title."
    source = f"{SETTINGS['git_url']}/blob/{SETTINGS['branch']}/nbs/{name}"
    colab = source.replace("https://github.com", "https://colab.research.google.com/github")
    button = "{.btn .btn-sm .btn-outline-primary}"  # a class of both renderers' themes
    return nbformat.v4.new_markdown_cell(f"[Open in Colab]({colab}){button} [Source]({source}){button}")


# Quarto


def by_quarto(out):
    "Render with Quarto, as nbdev_docs does, with a line of links on each page."
    from nbdev.quarto import refresh_quarto_yml

    refresh_quarto_yml()
    cache = process()
    for path in cache.glob("*.ipynb"):
        nb = nbformat.read(path, 4)
        nb.cells.insert(1, links(path.name))
        nbformat.write(nb, path)
    shutil.copytree(ROOT / "figures", cache / "figures", dirs_exist_ok=True)
    subprocess.run(["quarto", "render", "--no-cache"], cwd=cache, check=True)
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(cache / "_docs", out)


# Sphinx

CONF = """
project, author, copyright = "aim_nb", {author!r}, {copyright!r}
extensions = ["myst_nb", "sphinx-mathjax-offline", "sphinx_api"]
default_role, autodoc_preserve_defaults, python_maximum_signature_line_length = "code", True, 88
add_module_names, autodoc_member_order, toc_object_entries_show_parents = False, "bysource", "hide"
nb_execution_mode, nb_ipywidgets_js, nb_merge_streams = "off", {{}}, True
myst_enable_extensions = ["dollarmath", "amsmath", "attrs_inline", "deflist"]
myst_heading_anchors, myst_all_links_external = 3, True
suppress_warnings = ["myst.header", "myst.xref_missing", "mystnb.unknown_mime_type", "misc.highlighting_failure", "myst.strikethrough"]
html_theme, html_title, html_show_sourcelink, html_copy_source = "pydata_sphinx_theme", "aim_nb", False, False
html_theme_options = dict(globaltoc_maxdepth=1, navigation_with_keys=False, secondary_sidebar_items=["page-toc"], navbar_center=[], footer_start=["copyright"], footer_end=[],
    icon_links=[dict(name="Source", url={git!r}, icon="fa-brands fa-github")])
html_sidebars, html_context = {{"**": ["globaltoc"]}}, {{"default_mode": "auto"}}
html_static_path, html_css_files, html_favicon = ["static"], ["site.css"], "static/favicon.svg"
"""
CSS = """
.bd-sidebar-primary h3 {display: none} .bd-sidebar-primary ul {list-style: none; padding-left: .6rem} .bd-sidebar-primary a {text-decoration: none} .bd-sidebar-primary .caption {font-weight: 600; margin-top: 1rem}
.bd-page-width {max-width: 100rem} .bd-sidebar-primary {flex: 0 0 14rem; font-size: .9rem} .bd-sidebar-secondary {flex: 0 0 11rem; width: 11rem; font-size: .85rem; overflow-wrap: anywhere} .bd-main .bd-content .bd-article-container {max-width: 68rem}
html {--pst-font-size-h1: 2rem; --pst-font-size-h2: 1.6rem; --pst-font-size-h3: 1.25rem}
.bd-article pre {font-size: .75rem} .bd-article table {font-size: .8rem; line-height: 1.4; width: auto; margin-left: 0} .bd-article :is(h1, h2, h3) {overflow-wrap: anywhere} .bd-article table p {margin: 0} .bd-article table th, .bd-article table td {padding: .2rem .45rem !important}
.bd-article figure {text-align: left} .bd-article figure img {margin-left: 0} .bd-article figcaption {text-align: left} .bd-article figcaption p {color: var(--pst-color-text-base); font-weight: 400; font-size: .9rem; padding: 0}
html[data-theme="dark"] .text_html, html[data-theme="dark"] .bd-content img {background: none !important; color: inherit !important; filter: none !important; padding: 0 !important} .bd-article .text_html table {font-size: .8rem} .bd-article .text_html td {white-space: nowrap} .bd-article table caption {color: inherit}
.bd-article dl.py > dt {font-size: .85rem} .bd-article dl.py > dd {margin-bottom: 1.2rem} dl.field-list {font-size: .85rem}
@media (max-width: 600px) {
  .bd-article table {font-size: .75rem} .bd-article table th, .bd-article table td {padding: .15rem .3rem !important}
}
.bd-article :is(td, th).verdict {position: sticky; right: 0; min-width: 5.5rem; max-width: 9rem; white-space: normal !important; border-left: 1px solid var(--pst-color-border)}
.bd-article :is(td, th).verdict {background-color: var(--pst-color-background)}
.btn-outline-primary {--bs-btn-color: var(--pst-color-link); --bs-btn-border-color: var(--pst-color-link)}
"""
STATIC = {
    "site.css": CSS,
    "favicon.svg": '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect x="1" y="1" width="14" height="3" fill="#bbb"/><rect x="1" y="6.5" width="14" height="3" fill="#2a9d5c"/><rect x="1" y="12" width="14" height="3" fill="#bbb"/></svg>',
}


def directives(source):
    "The `#| name: value` lines of a code cell, and the code without them."
    lines = source.splitlines()
    found = dict(re.match(r"#\|\s*([\w-]+):?\s*(.*)", l).groups() for l in lines if re.match(r"#\|\s*[\w-]+", l))
    return {k: v.strip().strip("\"'") for k, v in found.items()}, "\n".join(
        l for l in lines if not l.startswith("#|")
    ).strip("\n")


PM = "\u00a0±\u00a0"  # a number and its interval stay on one line


@functools.cache
def public_names():
    "page#name of every name that a module exports; only these have an entry on their page."
    modules = [m.name for m in pkgutil.walk_packages(aim_nb.__path__, "aim_nb.") if not m.ispkg]
    exported = {m: getattr(importlib.import_module(m), "__all__", []) for m in modules}
    return {f"{m.rpartition('.')[2]}#{name}" for m, names in exported.items() for name in names}


def relink(text):
    "Links between pages as this renderer needs them: our own absolute and notebook addresses become pages of this site."

    def keep_public(m):
        return m[0] if f"{m[2]}#{m[3]}" in public_names() else m[1]

    text = text.replace(" ± ", PM)
    text = re.sub(r"\[([^\]]*)\]\(" + re.escape(SITE) + r"/([\w-]+)\.html#(\w+)[\w.]*\)", keep_public, text)
    text = re.sub(re.escape(SITE) + r"/([\w-]+)\.html#([\w.]+)", lambda m: f"{m[1]}.html#sym-{m[2].lower()}", text)
    text = re.sub(re.escape(SITE) + r"/([\w-]+)\.html", r"\1.html", text)
    text = re.sub(
        r"\]\((\d+_\w+|index)\.ipynb(#[\w-]*)?\)", lambda m: f"]({url(m[1])}.html{(m[2] or '').lower()})", text
    )
    return re.sub(r"\]\(\.\./([\w./+@-]+)\)", rf"]({SETTINGS['git_url']}/blob/{SETTINGS['branch']}/\1)", text)


def with_fields(text, name):
    "show_doc's text with the fields of a named tuple or a dataclass, where it says `*args, **kwargs`."
    module = re.search(r"/blob/[^/]+/(aim_nb/[\w/]+)\.py#", text)
    value = getattr(importlib.import_module(module[1].replace("/", ".")), name, None) if module else None
    if not (hasattr(value, "_fields") or dataclasses.is_dataclass(value)):
        return text
    parameters = [re.sub(r"ForwardRef\('(.+?)'\)", r"\1", str(p)) for p in inspect.signature(value).parameters.values()]
    fields = "\n".join(f"    {p}," for p in parameters).replace("'", "")
    return re.sub(r"def (\w+)\(\s*\*args, \*\*kwargs\s*\):", rf"class \1(\n{fields}\n)", text)


def api_cell(text):
    "What show_doc put out, as a section of its own with an anchor."
    name = re.search(r"^#+ (\S+)", text, re.M)
    if name and "*args, **kwargs" in text:
        text = with_fields(text, name[1])
    text = re.sub(r"^---\n", "", text.lstrip())
    text = re.sub(
        r"```.*?```", lambda m: re.sub(r"\[`([^`]+)`\]\([^)]*\)", r"`\1`", m[0]), text, flags=re.S
    )  # code holds no links
    text = re.sub(r"^(\[source\]\S+)\s+(#+ .*)$", r"\2\n\n\1", text, count=1, flags=re.M)
    anchor = f'<span id="sym-{name[1].lower()}"></span>\n\n' if name else ""
    return nbformat.v4.new_markdown_cell(anchor + relink(re.sub(r'\{target="[^}]*\}', "", text)))


def by_kind(outputs):
    "Outputs in order, Markdown one by one, pictures one by one, the rest together."

    def kind(o):
        return next((k for k in ("text/markdown", "image/png") if k in o.get("data", {})), "")

    groups = [(k, list(g)) for k, g in groupby(outputs, kind)]
    return [(k, part) for k, g in groups for part in ([[o] for o in g] if k else [g])]


def mark_verdicts(html):
    "Give the cells of a pandas table's column Verdict a class of their own, as sphinx_api does in Markdown tables."
    column = re.search(r'class="col_heading level0 (col\d+)" >Verdict<', html)
    return re.sub(rf'(class="[^"]*\b{column[1]}\b)', r"\1 verdict", html) if column else html


def convert_output(o):
    "An output without widgets (no kernel answers them here), its links as this site needs them, a number and its interval on one line."
    if "data" not in o:
        return o
    o = nbformat.from_dict(o)
    if any("widget" in kind for kind in o.data):
        o.data.pop("text/plain", None)  # what is left of a widget here is its repr
    clean = {"text/markdown": lambda t: relink(t), "text/html": lambda t: mark_verdicts(t.replace(" ± ", PM))}
    return nbformat.from_dict(
        {**o, "data": {k: clean.get(k, lambda t: t)(v) for k, v in o.data.items() if "widget" not in k}}
    )


def convert_code(cell):
    "A processed code cell for myst-nb: its code, then each output. Markdown becomes text of the page, a picture a figure; the caption stands under the cell's last one."
    marks, source = directives(cell.source)
    if marks.get("include") == "false":
        return []
    parts = by_kind([convert_output(o) for o in cell.outputs])
    if marks.get("output") == "asis" and parts:
        return [api_cell(o["data"]["text/markdown"]) for k, g in parts if k == "text/markdown" for o in g]

    def code(outputs, **meta):
        return nbformat.v4.new_code_cell(source, outputs=outputs, metadata=meta)

    hidden, caption = dict(tags=["remove-input"]), marks.get("fig-cap")
    cells = [] if marks.get("echo") == "false" else [code([], tags=["hide-input"] * ("code-fold" in marks))]
    pictures = [g for k, g in parts if k == "image/png"]
    for k, g in parts:
        named = (
            dict(image=dict(alt=caption), **(dict(figure=dict(caption=caption)) if g is pictures[-1] else {}))
            if caption and g in pictures
            else {}
        )
        cells.append(
            nbformat.v4.new_markdown_cell(g[0]["data"]["text/markdown"])
            if k == "text/markdown"
            else code(g, **hidden, **(dict(mystnb=named) if named else {}))
        )
    return cells


def convert(nb, name):
    "A processed notebook as a Sphinx page: front matter as title, code cells by their directives, links to pages."
    front = (
        yaml.safe_load(re.sub(r"^---|---\s*$", "", nb.cells[0].source.strip(), flags=re.M))
        if nb.cells[0].cell_type == "raw"
        else {}
    )
    cells = (
        [
            nbformat.v4.new_markdown_cell(f"# {page_title(front['title'])}\n\n> {front.get('description') or ''}"),
            links(name),
        ]
        if front.get("title")
        else []
    )
    for cell in nb.cells[bool(front) :]:
        if cell.cell_type == "code":
            cells += convert_code(cell)
        elif "WARNING: THIS FILE WAS AUTOGENERATED" not in cell.source:
            cell.source = relink(cell.source)
            cells.append(cell)
    nb.metadata.pop("widgets", None)
    nb.cells = cells
    return nb


def page_title(text):
    "A notebook's title without the labels of the paper's source (tab:few-shot), which say nothing to a reader."
    return re.sub(r"[:,]?\s+(?:tab|fig):.*$", "", text)


def short_title(name):
    "A page's title up to its colon."
    return nbformat.read(ROOT / "nbs" / name, 4).cells[0].source.splitlines()[0].lstrip("# ").split(":")[0]


def toctree():
    "The navigation, at the end of the home page."
    trees = [
        f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n"
        + "\n".join(f"{short_title(n)} <{url(n)}>" for n in names)
        + "\n```"
        for title, names in sections().items()
    ]
    api = "\n".join([*sphinx_api.ROOMS, "All names <genindex>"])
    trees.append(f"```{{toctree}}\n:hidden:\n:caption: API\n\n{api}\n```")
    return nbformat.v4.new_markdown_cell("\n\n".join(trees))


def by_sphinx(out):
    "Render the same pages with Sphinx; nothing in them is loaded from another host."
    from sphinx.cmd.build import build_main

    cache = process()
    with tempfile.TemporaryDirectory() as tmp:
        for path in cache.glob("*.ipynb"):
            nb = convert(nbformat.read(path, 4), path.name)
            if path.stem == "index":
                nb.cells.append(toctree())
            nbformat.write(nb, Path(tmp, f"{url(path.name)}.ipynb"))
        sphinx_api.write_pages(tmp)
        Path(tmp, "static").mkdir()
        for name, text in STATIC.items():
            Path(tmp, "static", name).write_text(text)
        Path(tmp, "conf.py").write_text(
            CONF.format(author=SETTINGS["author"], copyright=SETTINGS["copyright"], git=SETTINGS["git_url"])
        )
        code = build_main(["-q", "-b", "html", "-d", str(Path(tmp, ".doctrees")), tmp, str(Path(tmp, ".out"))])
        if code:
            sys.exit("docs: Sphinx failed")
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(Path(tmp, ".out"), out)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=ROOT / "_docs", type=Path, help="where the site goes")
    parser.add_argument("--renderer", choices=["auto", "quarto", "sphinx"], default="auto")
    args = parser.parse_args()
    quarto = args.renderer == "quarto" or (args.renderer == "auto" and shutil.which("quarto"))
    if args.renderer == "auto" and not quarto:
        print("docs: quarto is not on PATH, so the pages are rendered with Sphinx")
    (by_quarto if quarto else by_sphinx)(args.out)
    print(f"docs: {len(list(args.out.glob('*.html')))} pages, open {args.out / 'index.html'}")


if __name__ == "__main__":
    main()
