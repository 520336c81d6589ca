"""The documentation's site: it builds without a warning, lists every page and name, and its tables are the code's."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fedprism as fp
from fedprism.attacks import ATTACKS
from fedprism.defenses import DEFENSES

DOCS = Path(__file__).parents[2] / "docs"
RESEARCH = DOCS.parent / "research"
PAGES = sorted(
    page.relative_to(DOCS).with_suffix("").as_posix() for kind in ("md", "ipynb") for page in DOCS.rglob(f"*.{kind}")
)
MEASURED = ("bench-cpu", "bench-gpu", "growth-cpu", "growth-gpu", "memory-gpu")
"""Tables that are made from stored results."""
NEEDED = ("sphinx", "furo", "myst_parser")


def module(name: str) -> ModuleType:
    described = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert described is not None
    assert described.loader is not None
    found = importlib.util.module_from_spec(described)
    described.loader.exec_module(found)
    return found


TABLES = module("tables")


def listed() -> list[str]:
    """The pages of the site, as its first page orders them."""
    trees = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    lines = [line.strip() for tree in trees for line in tree.splitlines()]
    return [line for line in lines if line and not line.startswith(":")]


def test_every_page_is_on_the_site_once() -> None:
    assert sorted(listed()) == [page for page in PAGES if page != "index"]


@pytest.mark.parametrize("table", [name for name in TABLES.TABLES if name not in MEASURED])
def test_the_tables_of_the_reference_are_the_code_s(table: str) -> None:
    (page,) = [page for page in TABLES.PAGES if f"<!-- table: {table} -->" in page.read_text()]
    assert TABLES.TABLES[table]() in page.read_text(), "run make tables"


def test_the_tables_have_a_row_for_every_method() -> None:
    assert [line.split("`")[1] for line in TABLES.attacks().splitlines()[2:]] == list(ATTACKS)
    assert [line.split("`")[1] for line in TABLES.defenses().splitlines()[2:]] == list(DEFENSES)


def test_every_public_name_is_in_the_reference() -> None:
    pages = ("api", "api-methods", "api-solvers")
    reference = "\n".join((DOCS / "reference" / f"{page}.md").read_text() for page in pages)
    described = set(re.findall(r"^\.\. auto\w+:: (?:fedprism\.)?(\w+)", reference, re.MULTILINE))
    assert set(fp.__all__) - described == set()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("nvflare.py", "CaptureFilter"),
    ],
)
def test_signatures_that_are_written_by_hand_are_the_code_s(file: str, name: str) -> None:
    """Of classes whose bases are not there when the site is made, the arguments cannot be read off."""
    source = ast.parse((Path(fp.__file__).parent / "integrations" / file).read_text())
    (defined,) = (node for node in ast.walk(source) if isinstance(node, ast.ClassDef) and node.name == name)
    (init,) = (node for node in defined.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    wanted = [argument.arg for argument in (*init.args.args[1:], *init.args.kwonlyargs)]
    written = re.search(rf"autoclass:: {name}\((.*)\)", (DOCS / "reference" / "api-integrations.md").read_text())
    assert written is not None
    assert [part.partition("=")[0] for part in written[1].split(", ") if part != "*"] == wanted


@pytest.mark.parametrize(
    ("written", "markup"),
    [
        (["One (batch, *input_shape) and `name_`."], [r"One (batch, \*input\_shape) and ``name_``."]),
        (["As in:", "", "    a | b", "", "and on."], ["As in:", "", "::", "", "    a | b", "", "and on."]),
        (["Two kinds:", "- one", "- two"], ["Two kinds:", "", "- one", "- two"]),
    ],
    ids=["names", "formula", "list"],
)
def test_docstrings_become_markup(written: list[str], markup: list[str]) -> None:
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    assert module("conf").as_markup(written) == [*markup, ""]


def built(folder: Path, site: Path, trees: Path) -> None:
    """A folder of pages as pages of the site, without a warning."""
    first = "README" if folder == RESEARCH else "index"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", DOCS, "-D", f"root_doc={first}"]
    done = subprocess.run([*command, "-d", trees, folder, site], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_site_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    for needed in NEEDED:
        pytest.importorskip(needed, reason="the extra `docs` is not installed")
    site = tmp_path / "site"
    built(DOCS, site, tmp_path / "trees")
    built(RESEARCH, site / "research", tmp_path / "trees-of-research")
    assert all((site / f"{page}.html").exists() for page in PAGES)
    assert "fedprism.simulate" in (site / "reference" / "api.html").read_text()
    assert "data:image/png" in (site / "tutorials" / "notebook.html").read_text()
    attached = (site / "reference" / "api-integrations.html").read_text()
    assert all(name in attached for name in ("InspectionMod", "CaptureFilter", "RoundFacts", "stop_above"))
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    links = {(page, link) for page, text in pages.items() for link in re.findall(r'<a [^>]*href="([^":]+)"', text)}
    assert ("research/gradattack.html", "../how-to/extend.html") in {
        (p.relative_to(site).as_posix(), a) for p, a in links
    }
    for page, link in links:
        path, _, part = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.relative_to(site)} links to {link}"
        assert not part or target not in pages or f'id="{part}"' in pages[target], f"{page.relative_to(site)}: {link}"
