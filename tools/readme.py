"""README.md from nbs/index.ipynb, by nbconvert: `python tools/readme.py` writes it, `--check` only compares."""

import re, sys
from pathlib import Path
import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent


def directives(cell):
    "The `#| name: value` lines at the head of a code cell."
    found = {}
    for line in cell.source.splitlines():
        if not line.startswith("#|"):
            break
        name, _, value = line[2:].strip().partition(":")
        found[name.strip()] = value.strip().strip('"')
    return found


def output_text(output, cell):
    "One stored output as Markdown; a picture becomes a link to the file in figures/ that the cell shows."
    if output.output_type == "error":
        raise SystemExit("readme: index.ipynb holds an error; run it again")
    data = output.get("data", {})
    if "text/markdown" in data:
        return data["text/markdown"]
    if "image/png" in data:
        file = re.search(r"figures/[\w-]+\.(?:png|svg)", cell.source)
        if not file:
            raise SystemExit("readme: a cell that shows a picture has to name its file in figures/")
        return f"![{directives(cell).get('fig-cap', '')}]({file[0]})"
    text = output.get("text", data.get("text/plain", ""))
    return f"```\n{text.rstrip()}\n```" if text.strip() else ""


def as_markdown(cell):
    "The cells that stand for `cell` in the README."
    if cell.cell_type != "code":
        return [cell]
    marks = directives(cell)
    if "hide" in marks or marks.get("include") == "false":
        return []
    source = "\n".join(l for l in cell.source.splitlines() if not l.startswith("#|")).strip()
    parts = [] if marks.get("echo") == "false" else [f"```python\n{source}\n```"]
    parts += [output_text(o, cell) for o in cell.outputs]
    return [nbformat.v4.new_markdown_cell("\n\n".join(p for p in parts if p))]


def render(path=ROOT / "nbs/index.ipynb"):
    "The README's text."
    nb = nbformat.read(path, 4)
    nb.cells = [new for cell in nb.cells for new in as_markdown(cell)]
    text, _ = MarkdownExporter().from_notebook_node(nb)
    text = re.sub(r"\]\((\w+\.ipynb)", r"](nbs/\1", text).replace("](../", "](")
    text = "<!-- Made from nbs/index.ipynb by `make readme`: edit the notebook. -->\n\n" + text.strip() + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


def main():
    readme, text = ROOT / "README.md", render()
    if "--check" in sys.argv:
        sys.exit(
            0
            if readme.exists() and readme.read_text() == text
            else "README.md differs from nbs/index.ipynb: run `make readme`"
        )
    readme.write_text(text)
    print(f"README.md: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
