"""Writes docs/papers-stand.md, where the papers stand, from papers/stand.json; a test finds a page that is behind.

    python docs/stand.py                                write the page
    python docs/stand.py add fedprism-cpa-table-1       take over what a run of a recipe has measured, then write it

The verdicts are computed here from the numbers. A run replaces the numbers of the same rows and methods.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedprism.errors import BadInput

HERE = Path(__file__).parent
NUMBERS, PAGE = HERE.parent / "papers" / "stand.json", HERE / "papers-stand.md"
NEAR = 0.1
"""Relative difference up to which a number counts as the paper's."""
REPRODUCED, BETTER, WORSE = "reproduced", "better", "worse"

TOP = f"""# Where the papers stand

Every table and figure of the five papers, and what came out when its command was run here. A paper's own method, run
again, is *{REPRODUCED}* if its number is within {NEAR:.0%} of the paper's, *{BETTER}* if it recovers more than that, or
costs less, and *{WORSE}* otherwise. *Ours* is compared with the paper's number in the same way. This page is made from
`papers/stand.json` by `python docs/stand.py`, which computes the verdicts; `python docs/stand.py add FOLDER` takes over
the results of `fedprism reproduce`.

The numbers are from runs on an H200 and on CPUs; the linked pages say which, and what else differs from the papers.
"""


def stand() -> list[dict[str, Any]]:
    """Every table and figure with its numbers."""
    items: list[dict[str, Any]] = json.loads(NUMBERS.read_text())["items"]
    return items


def verdict(number: Mapping[str, Any], lower_is_closer: bool) -> str:
    """How a measured number compares with the paper's."""
    paper, measured = float(number["paper"]), float(number["measured"])
    if abs(measured - paper) <= NEAR * abs(paper):
        return REPRODUCED
    return BETTER if (measured < paper) == lower_is_closer else WORSE


def said(item: Mapping[str, Any], *, ours: bool) -> str:
    """The verdicts of an item in words: how many of how many."""
    chosen = [number for number in item["numbers"] if number["ours"] == ours]
    counts = Counter(verdict(number, item["lower is closer"]) for number in chosen)
    if len(counts) == 1:
        return f"{next(iter(counts))} ({len(chosen)} of {len(chosen)})"
    return ", ".join(f"{counts[word]} {word}" for word in (REPRODUCED, BETTER, WORSE) if counts[word]) or "–"


def page() -> str:
    """The page in Markdown: a summary of every paper, then its numbers."""
    items = stand()
    parts = [TOP]
    for paper in dict.fromkeys(item["paper"] for item in items):
        of_paper = [item for item in items if item["paper"] == paper]
        parts.append(f"## {paper}\n")
        parts.append("| item | what | the paper's methods, run again | ours |\n|---|---|---|---|")
        parts[-1] += "".join(f"\n{_line(item)}" for item in of_paper) + "\n"
        for item in of_paper:
            parts.append(_about(item))
    return "\n".join(part for part in parts if part)


def _line(item: Mapping[str, Any]) -> str:
    if item["command"] is None or not item.get("was run", True):
        again = ours = "not run"
    elif not item["numbers"]:
        again, ours = "run; no number to compare", "–"
    else:
        again, ours = said(item, ours=False), said(item, ours=True)
    name = item["item"] if item["page"] is None else f"[{item['item']}](../{item['page']})"
    return f"| {name} | {item['about']} | {again} | {ours} |"


def _about(item: Mapping[str, Any]) -> str:
    """An item's command, its caveat and its numbers."""
    command = "" if item["command"] is None else f"`{item['command']}`. "
    lines = [f"**{item['item']}.** {command}{item['caveat']}".rstrip(), ""]
    if item["numbers"]:
        lines += [f"| {item['measure']} | method | paper | here | |", "|---|---|---|---|---|"]
        lines += [
            f"| {number['cell']} | {number['method']} | {number['paper']:.10g} | {number['measured']:.10g} | "
            f"{verdict(number, item['lower is closer'])} |"
            for number in item["numbers"]
        ]
        lines += [""]
    return "\n".join(lines)


def add(folder: Path) -> int:
    """Take over the numbers of a finished run of a recipe, and say how many."""
    results = json.loads((folder / "results.json").read_text())
    items = stand()
    item = next((item for item in items if item.get("recipe") == results["recipe"]), None)
    if item is None or results["settings"]["quick"] or not results["complete"]:
        raise BadInput(
            f"the folder must hold a complete run, not a quick one, of a recipe with numbers in {NUMBERS.name}, not "
            f"{results['recipe']}, quick: {results['settings']['quick']}, complete: {results['complete']}."
        )
    found = list(_measured(results["rows"], item))
    places = {(number["cell"], number["method"]): place for place, number in enumerate(item["numbers"])}
    for number in found:
        place = places.get((number["cell"], number["method"]), len(item["numbers"]))
        item["numbers"][place : place + 1] = [number]
    NUMBERS.write_text(as_text(items))
    return len(found)


def _measured(rows: Iterable[Mapping[str, Any]], item: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """The paper's and the measured number of each row and method that has both."""
    for row in rows:
        cell = ", ".join(f"{row['cell'][key]} images" if key == "n" else str(row["cell"][key]) for key in item["cell"])
        for method, (paper, column, ours) in item["columns"].items():
            known, entry = row["entries"].get(paper), row["entries"].get(column)
            if isinstance(known, float) and isinstance(entry, dict) and item["measure"] in entry["mean"]:
                measured = round(entry["mean"][item["measure"]], 4)
                yield {"cell": cell, "method": method, "paper": known, "measured": measured, "ours": ours}


def as_text(items: Iterable[Mapping[str, Any]]) -> str:
    """The file's text: a number per line, so that a change of one is a change of one line."""
    blocks = []
    for item in items:
        fields = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in item.items()]
        listed = ",\n".join(f"   {json.dumps(number, ensure_ascii=False)}" for number in item["numbers"])
        fields[-1] = f'  "numbers": [\n{listed}\n  ]' if listed else '  "numbers": []'
        blocks.append(" {\n" + ",\n".join(fields) + "\n }")
    return '{"format": "fedprism-stand/1", "items": [\n' + ",\n".join(blocks) + "\n]}\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["add"]:
        for name in sys.argv[2:]:
            print(f"{name}: {add(Path(name))} numbers")
    PAGE.write_text(page())
