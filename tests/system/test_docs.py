"""What the documentation shows works: its Python and commands run and print what it says, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SITE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*SITE, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "research").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def loaded(name: str) -> ModuleType:
    """A program of the folder docs."""
    described = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


pages = loaded("pages")


def links(page: str) -> list[str]:
    """Targets inside the repository."""
    return [target for target in LINK.findall(pages.FENCE.sub("", page)) if not re.match(r"[a-z]+:", target)]


def anchors(page: str) -> set[str]:
    """What links can name behind a #: the headings, as GitHub and MyST write them."""
    plain = (
        re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(pages.FENCE.sub("", page))
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def short(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def broken(page: Path) -> list[str]:
    """Links of a page to files or headings that are not there."""
    missing = []
    for target in links(page.read_text()):
        path, _, part = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (part and file.suffix == ".md" and part not in anchors(file.read_text())):
            missing.append(target)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_a_page_shows_what_runs(page: Path, pytestconfig: pytest.Config) -> None:
    text = page.read_text()
    now = pages.run(text, page.stem)
    if not pytestconfig.getoption("--shift-seeds"):
        assert pages.without_numbers(now) == pages.without_numbers(text), f"run python docs/pages.py {short(page)}"


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_to_a_missing_page_or_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One\n\n## Two `of` these, [here](x.md)\n")
    page.write_text(
        "# Here\n[a](other.md#two-of-these-here) ![b](y.png) [c](https://example.org) [d](#here) [e](other.md#three)\n"
        "[f](#there)\n```text\n[not](a-link.md)\n```\n"
    )
    assert broken(page) == ["y.png", "other.md#three", "#there"]


def test_a_page_is_written_anew_from_what_it_runs() -> None:
    page = (
        "```python\n# of_the_page.py\nONE = 1\nprint(ONE)\n```\n<!-- printed -->\n```text\nold\n```\n"
        "<!-- not run -->\n```python\nraise ValueError\n```\n"
        "```python\nfrom of_the_page import ONE as again\nassert again == ONE\n```\n"
        "```console\n$ fedprism --version\nold\n$ fedprism list nonsense  # exit code 2\n```\n"
    )
    now = pages.run(page, "page")
    assert "<!-- printed -->\n```text\n1\n```" in now
    assert re.search(r"\$ fedprism --version\nfedprism [\d.]+\n\$ fedprism list nonsense  # exit code 2\n```", now)
    assert pages.run(now, "page") == now
    with pytest.raises(pages.Failed, match="ended with 2"):
        pages.run("```console\n$ fedprism list nonsense\n```\n", "page")


def test_numbers_and_spaces_are_no_difference_and_words_are() -> None:
    assert pages.without_numbers("leaks   12.5 dB") == pages.without_numbers("leaks 9 dB")
    assert pages.without_numbers("leaks 12.5 dB") != pages.without_numbers("protected 12.5 dB")
