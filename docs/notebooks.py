"""Runs the code cells of docs/tutorials/notebook.ipynb in their order and keeps what they show, without Jupyter.

    python docs/notebooks.py

A test finds a notebook whose outputs are not those of the code.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent / "tutorials" / "notebook.ipynb"
TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/fedprism-audit-\w+")
"""The folder of an audit that names none: another one every time, and nobody's business."""


def outputs(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What each code cell shows. All cells share one namespace and run in a folder of their own."""
    names: dict[str, Any] = {"__name__": "notebook"}
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
            return [_shown("".join(cell["source"]), names, number) for number, cell in enumerate(cells, 1)]
        finally:
            os.chdir(here)


def _shown(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run one cell: what it prints and, of a last line that is an expression, its value."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None  # type: ignore[attr-defined]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        value = eval(compile(last, f"cell {number}", "eval"), names) if last is not None else None
    shown: list[dict[str, Any]] = []
    if printed.getvalue():
        shown.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        shown.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return shown


def _lines(text: str) -> list[str]:
    return TEMPORARY.sub("fedprism-audit", text).splitlines(keepends=True)


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, shown) in enumerate(zip(cells, outputs(notebook), strict=True), 1):
        cell["outputs"], cell["execution_count"] = shown, number
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
