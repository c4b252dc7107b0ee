"""A Sphinx extension for tools/docs.py: one page a room of the package with each public name, its signature and docstring; a table's verdict stays in sight on a phone."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

from docutils import nodes
from fastcore.docments import docments

ROOMS = {  # page: its title and the modules (or folders of modules) that it lists
    "api_paper": ("The paper", "aim backbones sib oml anml classifiers"),
    "api_foundations": ("Foundations", "core config paper cli reference"),
    "api_data": ("Data", "data"),
    "api_engine": ("Engine", "engine"),
    "api_kernels": ("Kernels", "kernels"),
    "api_report": ("Report", "report"),
}


def module_names(room):
    "The modules of a room, by their full names."
    import aim_nb

    names = [m.name for m in pkgutil.walk_packages(aim_nb.__path__, "aim_nb.") if not m.ispkg]
    wanted = [f"aim_nb.{name}" for name in ROOMS[room][1].split()]
    return [n for w in wanted for n in names if n == w or n.startswith(f"{w}.")]


def heading(text, line):
    return f"{text}\n{line * len(text)}\n"


def entry(module, name):
    "The directive that documents a public name; a constant shows its type alone."
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        return f".. autoclass:: {name}\n   :members:\n   :show-inheritance:\n"
    if callable(value):
        return f".. autofunction:: {name}\n"
    return f".. py:data:: {name}\n   :type: {type(value).__name__}\n"


def api_page(room, notebook_of):
    "A room's page; `notebook_of` gives the page of a module's notebook."
    parts = [heading(ROOMS[room][0] + ": API", "=")]
    for module in module_names(room):
        parts += [heading(module, "-"), f".. automodule:: {module}\n   :no-members:\n"]
        parts.append(f"With its reasons, examples and tests: `{module} <{notebook_of(module)}>`__\n")
        parts += [entry(module, name) for name in importlib.import_module(module).__all__]
    return "\n".join(parts)


def write_pages(folder):
    "Write every page of the API into the sources of the site."
    for room in ROOMS:
        Path(folder, f"{room}.rst").write_text(api_page(room, lambda module: f"{module.rpartition('.')[2]}.html"))


def as_rst(text):
    "A docstring, which is plain text with `code` in it, with nothing left that reStructuredText would read as markup."
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(f"`{p}`" if p.startswith("`") else re.sub(r"([\\*|_`])", r"\\\1", p) for p in parts)


def described_parameters(value):
    "The comments behind a function's parameters, as fields."
    function = value.__init__ if inspect.isclass(value) else value
    if not inspect.isfunction(function):
        return []
    try:
        comments = docments(function)
    except OSError:  # made by dataclass or NamedTuple, without a source
        return []
    fields = {name: f":param {name}: " for name in comments if name != "return"} | {"return": ":returns: "}
    return [fields[name] + as_rst(" ".join(text.split())) for name, text in comments.items() if isinstance(text, str)]


def on_docstring(app, what, name, value, options, lines):
    "Docstrings are text, not reStructuredText; examples in ``` fences are code."
    text, is_code, out = "\n".join(lines), False, []
    for line in text.splitlines():
        if line.strip().startswith("```"):
            is_code = not is_code
            out += ["", ".. code-block:: python", ""] if is_code else [""]
        else:
            out.append(f"   {line}" if is_code else as_rst(line))
    if what in ("class", "function", "method"):
        out += ["", *described_parameters(value)]
    lines[:] = out


def skip_fields(app, what, name, value, skip, options):
    "The fields of a named tuple are in its signature."
    return True if type(value).__name__ == "_tuplegetter" else skip


def mark_verdicts(app, doctree):
    "Give the cells of a table's column Verdict a class, so that the site's style can keep them in sight."
    for table in doctree.findall(nodes.table):
        head = next(table.findall(nodes.thead), None)
        names = [entry.astext().strip().lower() for entry in head.findall(nodes.entry)] if head else []
        for row in table.findall(nodes.row) if "verdict" in names else []:
            cells = [cell for cell in row.children if isinstance(cell, nodes.entry)]
            if len(cells) == len(names):
                cells[names.index("verdict")]["classes"].append("verdict")


def setup(app):
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("doctree-read", mark_verdicts)
    return {"parallel_read_safe": True}
