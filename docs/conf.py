"""How the documentation becomes a site: `make docs`, then open build/docs/index.html.

The pages are the Markdown files of this folder, which read as well where the code is hosted. The long studies of
research/ are built into build/docs/research. A notebook is a page, too, with the outputs that it keeps. The reference
comes from the docstrings: plain sentences with `names` in backticks, of which `as_markup` makes reStructuredText.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from fedprism import __version__

project = "fedprism"
author = "the fedprism authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
html_theme = "furo"
html_title = f"fedprism {__version__}"
html_show_copyright = False
html_copy_source = False
smartquotes = False  # two dashes begin an option

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["flwr", "nvflare"]  # the reference reads the same whether or not they are installed
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90

ROOT = Path(__file__).parent.parent

BULLET = re.compile(r"^(\s*)(- |\d+\. )")


def as_markup(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText: names become literals, indented blocks stay as they are written."""
    told: list[str] = []
    literal = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not literal:
            if told and told[-1].strip():
                told.append("")
            told += ["::", ""]
        if not indented and line.strip():
            if literal and told[-1].strip():
                told.append("")
            item = BULLET.match(line)
            if item and told and told[-1].strip() and not BULLET.match(told[-1]) and not told[-1].startswith("  "):
                told.append("")
            told.append(_escaped(line))
        else:
            told.append(line)
        literal = indented or (literal and not line.strip())
    return [*told, ""]


def _escaped(line: str) -> str:
    """Code in backticks as a literal; in the rest nothing is markup."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(f"`{p}`" if p.startswith("`") else re.sub(r"([*|_\\])", r"\\\1", p) for p in parts)


def in_its_place(app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object) -> bool | None:
    """Solvers that other modules hand on are described on their own page only."""
    solver = str(getattr(thing, "__module__", "")).startswith(("fedprism.solvers", "fedprism.runtime"))
    return True if solver and app.env.docname != "reference/api-solvers" else None


class NotebookParser(MystParser):
    """A notebook as a page: its Markdown, its code, and what the code showed when it was last run."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse("\n\n".join(as_markdown(json.loads(inputstring))), document)


def as_markdown(notebook: dict[str, Any]) -> Iterator[str]:
    """The parts of a notebook's page."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            shown = output.get("data", {"text/plain": output.get("text", ())})
            html, text = "".join(shown.get("text/html", ())), "".join(shown["text/plain"])
            yield f"````{{raw}} html\n{html}\n````" if html else f"```text\n{text}\n```"


class LinksBetweenFolders(SphinxPostTransform):
    """Links from docs/ to research/ and back, which are two builds: one is below the other as the folder `research`."""

    default_priority = 5

    def run(self, **_: object) -> None:
        here = address(Path(self.env.doc2path(self.env.docname)))
        for link in list(self.document.findall(pending_xref)):
            page = Path(link["reftarget"] + ".md")
            if page.is_absolute() and page.is_file():
                part = f"#{link['reftargetid']}" if link.get("reftargetid") else ""
                target = os.path.relpath(address(page), here.parent) + part
                link.replace_self(nodes.reference("", "", *link.children, refuri=target))


def address(page: Path) -> Path:
    """Where a Markdown file is found below the folder of the site."""
    place = page.resolve().relative_to(ROOT)
    return Path(*place.parts[place.parts[0] == "docs" :]).with_suffix(".html")


def setup(app: Sphinx) -> None:
    app.add_post_transform(LinksBetweenFolders)
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-docstring", _on_docstring)
    app.connect("autodoc-skip-member", in_its_place)


def _on_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    lines[:] = as_markup(lines)
