"""`make docs`: the notebooks as a site in _docs/, through Quarto where it is installed and through Sphinx where it is not.

Both render the same pages (nbdev's processed notebooks) with the same navigation (`sections`)."""
import argparse, re, shutil, subprocess, sys, tempfile
from configparser import ConfigParser
from pathlib import Path
import nbformat, yaml

ROOT = Path(__file__).resolve().parent.parent
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
    button = "{.btn .btn-sm .btn-outline-primary}" # a class of both renderers' themes
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
extensions = ["myst_nb", "sphinx-mathjax-offline"]
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
STATIC = {
    "site.css": ".bd-sidebar-primary h3 {display: none} .bd-sidebar-primary ul {list-style: none; padding-left: .6rem} .bd-sidebar-primary a {text-decoration: none} .bd-sidebar-primary .caption {font-weight: 600; margin-top: 1rem}",
    "favicon.svg": '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect x="1" y="1" width="14" height="3" fill="#bbb"/><rect x="1" y="6.5" width="14" height="3" fill="#2a9d5c"/><rect x="1" y="12" width="14" height="3" fill="#bbb"/></svg>',
}


def directives(source):
    "The `#| name: value` lines of a code cell, and the code without them."
    lines = source.splitlines()
    found = dict(re.match(r"#\|\s*([\w-]+):?\s*(.*)", l).groups() for l in lines if re.match(r"#\|\s*[\w-]+", l))
    return {k: v.strip().strip("\"'") for k, v in found.items()}, "\n".join(l for l in lines if not l.startswith("#|")).strip("\n")


def relink(text):
    "Links between pages as this renderer needs them: our own absolute and notebook addresses become pages of this site."
    text = re.sub(re.escape(SITE) + r"/([\w-]+)\.html#([\w.]+)", lambda m: f"{m[1]}.html#sym-{m[2].lower()}", text)
    text = re.sub(re.escape(SITE) + r"/([\w-]+)\.html", r"\1.html", text)
    text = re.sub(r"\]\((\d+_\w+|index)\.ipynb(#[\w-]*)?\)", lambda m: f"]({url(m[1])}.html{(m[2] or '').lower()})", text)
    return re.sub(r"\]\(\.\./([\w./+@-]+)\)", rf"]({SETTINGS['git_url']}/blob/{SETTINGS['branch']}/\1)", text)


def api_cell(text):
    "What show_doc put out, as a section of its own with an anchor."
    name = re.search(r"^#+ (\S+)", text, re.M)
    text = re.sub(r"^---\n", "", text.lstrip())
    anchor = f'<span id="sym-{name[1].lower()}"></span>\n\n' if name else ""
    return nbformat.v4.new_markdown_cell(anchor + relink(re.sub(r'\{target="[^}]*\}', "", text)))


def convert_code(cell):
    "A processed code cell for myst-nb."
    marks, source = directives(cell.source)
    if marks.get("include") == "false": return []
    shown = [o.data["text/markdown"] for o in cell.outputs if "text/markdown" in o.get("data", {})]
    if marks.get("output") == "asis" and shown: return [api_cell(t) for t in shown]
    if marks.get("echo") == "false" and shown: return [nbformat.v4.new_markdown_cell(relink(t)) for t in shown]
    for o in cell.outputs:
        if "data" in o: o["data"] = {k: relink(v) if k == "text/markdown" else v for k, v in o.data.items() if "widget" not in k}
    tags = ["remove-input"] * (marks.get("echo") == "false") + ["hide-input"] * ("code-fold" in marks)
    has_image = any("image/png" in o.get("data", {}) for o in cell.outputs)
    cell.metadata = {"tags": tags, **({"mystnb": {"figure": {"caption": marks["fig-cap"]}, "image": {"alt": marks["fig-cap"]}}} if "fig-cap" in marks and has_image else {})}
    cell.source = source
    return [cell]


def convert(nb, name):
    "A processed notebook as a Sphinx page: front matter as title, code cells by their directives, links to pages."
    front = yaml.safe_load(re.sub(r"^---|---\s*$", "", nb.cells[0].source.strip(), flags=re.M)) if nb.cells[0].cell_type == "raw" else {}
    cells = [nbformat.v4.new_markdown_cell(f"# {front['title']}\n\n> {front.get('description') or ''}"), links(name)] if front.get("title") else []
    for cell in nb.cells[bool(front):]:
        if cell.cell_type == "code": cells += convert_code(cell)
        elif "WARNING: THIS FILE WAS AUTOGENERATED" not in cell.source:
            cell.source = relink(cell.source)
            cells.append(cell)
    nb.metadata.pop("widgets", None)
    nb.cells = cells
    return nb


def toctree():
    "The navigation, at the end of the home page."
    trees = [f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(map(url, names)) + "\n```" for title, names in sections().items()]
    return nbformat.v4.new_markdown_cell("\n\n".join(trees))


def by_sphinx(out):
    "Render the same pages with Sphinx; nothing in them is loaded from another host."
    from sphinx.cmd.build import build_main
    cache = process()
    with tempfile.TemporaryDirectory() as tmp:
        for path in cache.glob("*.ipynb"):
            nb = convert(nbformat.read(path, 4), path.name)
            if path.stem == "index": nb.cells.append(toctree())
            nbformat.write(nb, Path(tmp, f"{url(path.name)}.ipynb"))
        Path(tmp, "static").mkdir()
        for name, text in STATIC.items(): Path(tmp, "static", name).write_text(text)
        Path(tmp, "conf.py").write_text(CONF.format(author=SETTINGS["author"], copyright=SETTINGS["copyright"], git=SETTINGS["git_url"]))
        code = build_main(["-q", "-b", "html", "-d", str(Path(tmp, ".doctrees")), tmp, str(Path(tmp, ".out"))])
        if code: sys.exit("docs: Sphinx failed")
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(Path(tmp, ".out"), out)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=ROOT / "_docs", type=Path, help="where the site goes")
    parser.add_argument("--renderer", choices=["auto", "quarto", "sphinx"], default="auto")
    args = parser.parse_args()
    quarto = args.renderer == "quarto" or (args.renderer == "auto" and shutil.which("quarto"))
    if args.renderer == "auto" and not quarto: print("docs: quarto is not on PATH, so the pages are rendered with Sphinx")
    (by_quarto if quarto else by_sphinx)(args.out)
    print(f"docs: {len(list(args.out.glob('*.html')))} pages, open {args.out / 'index.html'}")


if __name__ == "__main__": main()
