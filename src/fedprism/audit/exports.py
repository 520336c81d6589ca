"""The summary of an audit for terminals, pull requests, spreadsheets and pipelines."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree

from rich import box
from rich.table import Table

from fedprism.audit import by_defense
from fedprism.audit.choosing import Skipped
from fedprism.audit.gates import Conclusion, Judgement
from fedprism.audit.plan import Plan
from fedprism.audit.summary import Summary, situation_title, title
from fedprism.audit.system import system
from fedprism.evaluation.severity import TOKENS, Figure, number
from fedprism.evaluation.verdict import because, situations, verdict

SETTING = (
    "kind",
    "capture",
    "attack",
    "settings",
    "threat",
    "defense",
    "defense_settings",
    "clients",
    "batch_size",
    "protocol",
    "loss",
)

LEGEND = (
    "Means over the samples that an attack returned and over seeds, with the 95% interval for "
    "five seeds or more and with the values of the seeds for fewer. In brackets: the best of the "
    "baselines (blank, mean, noise, another sample), which know nothing of the update; an attack "
    "that scores no better recovered nothing that the metric sees. Ceiling: the most that any "
    "attacker can reach on average, under the assumptions stated in the report."
)
NARROW = 10
"""Letters of a line for a number: its interval and what a guess scores stand below."""
SHORT = ("kind", "capture", "attack", "threat", "defense", "clients", "batch_size", "protocol", "loss")


def table(rows: Sequence[Summary], metrics: Sequence[str]) -> Table:
    """One line a configuration, for the terminal: what differs between them, and the first two metrics.

    What it is stands in one column that breaks between words, as a narrow terminal has no room for one a setting.
    """
    bounded = any(row.ceiling is not None for row in rows)
    names = _measured(rows, metrics)[: 1 if bounded else 2]
    differing = [key for key in SHORT if len({str(row.cell[key]) for row in rows if key in row.cell}) > 1]
    shared = {key: rows[0].cell[key] for key in SHORT if key not in differing and key in rows[0].cell} if rows else {}
    caption = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shared.items())
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption or None)
    costed = any(row.accuracy is not None for row in rows)
    blind = not names and any(row.residuals for row in rows)
    shown.add_column("configuration", overflow="fold")
    extra = [*(["residual"] if blind else []), *(["accuracy"] if costed else [])]
    for column in (*names, *(["ceiling"] if bounded else []), "returned", "labels", *extra, "outcome"):
        shown.add_column(column, justify="right" if column in names else "left", overflow="fold", max_width=NARROW)
    for row in rows:
        shown.add_row(
            _differing(row, differing) or title(row.cell),
            *(_figure(row.figure(name)) for name in names),
            *([_ceiling(row)] if bounded else []),
            _answered(row),
            _labels(row),
            *([_number(row.residual)] if blind else []),
            *([_accuracy(row)] if costed else []),
            _outcome(row),
        )
    return shown


def _differing(row: Summary, keys: Sequence[str]) -> str:
    """A configuration by what sets it apart."""
    words = {"clients": "clients {}", "batch_size": "batches of {}", "defense": "defense {}"}
    values = {key: row.cell[key] for key in keys if key in row.cell}
    return ", ".join(words.get(key, "{}").format(value) for key, value in values.items())


def markdown(plan: Plan, rows: Sequence[Summary], skipped: Sequence[Skipped], conclusion: Conclusion) -> str:
    """For a pull request: the verdict and the checks first, then the numbers, then what was not tested."""
    names = _measured(rows, plan.scores.metrics)
    said, *failures = conclusion.sentences
    about = filter(None, (plan.title, system(plan.as_json(), conclusion.weights)))
    lines = [f"# {_cell(said)}", "", _cell(" · ".join(about)), ""]
    if conclusion.gates:
        lines += [*_judgements(conclusion.gates), *(f"- {_cell(sentence)}" for sentence in failures)]
        lines += [""] if failures else []
    attacks = [row for row in rows if row.cell["kind"] != "utility"]
    lines += [*_by_defense(rows), *_settings(attacks)]
    lines += [
        LEGEND,
        "",
        f"| configuration | {' | '.join([*names, 'ceiling', 'returned', 'labels', 'outcome'])} |",
        f"|---|{'---|' * (len(names) + 4)}",
    ]
    for row in attacks:
        figures = [_figure(row.figure(metric)) for metric in names]
        shown = " | ".join([*figures, _ceiling(row), _answered(row), _labels(row), _outcome(row)])
        lines.append(f"| {_cell(title(row.cell))} | {shown} |")
    lines += [*_by_column(attacks), *_of_recordings(attacks)]
    if skipped:
        lines += ["", "## Not tested", "", *(f"- {_cell(each.what)}: {_cell(each.why)}" for each in skipped)]
    return "\n".join([*lines, ""])


def as_csv(rows: Sequence[Summary]) -> bytes:
    """One line a configuration, every number of it."""
    lines = [_flat(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=_columns(lines), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _safe(value) for key, value in line.items()} for line in lines)
    return text.getvalue().encode()


def junit(rows: Sequence[Summary], conclusion: Conclusion) -> bytes:
    """One test case a configuration: a tripped gate is a failure, a failed cell an error."""
    counts = {"tests": len(rows), "failures": 0, "errors": 0, "skipped": 0}
    suite = ElementTree.Element("testsuite", name="fedprism audit")
    for row in rows:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_clean(row.cell["kind"]), name=_clean(title(row.cell))
        )
        gates = [judgement.gate for judgement in conclusion.gates]
        tripped = [(gate, value) for gate in gates if (value := gate.tripped(row)) is not None]
        reasons = _clean("; ".join(row.reasons))
        if tripped:
            said = "; ".join(f"{value:.4g} fails {gate.flag}" for gate, value in tripped)
            ElementTree.SubElement(case, "failure", message=said)
            counts["failures"] += 1
        elif row.outcomes.get("failed"):
            ElementTree.SubElement(case, "error", message=reasons)
            counts["errors"] += 1
        elif not row.outcomes.get("done"):
            ElementTree.SubElement(case, "skipped", message=reasons)
            counts["skipped"] += 1
    suite.attrib.update({key: str(value) for key, value in counts.items()})
    text: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def export(plan: Plan, rows: Sequence[Summary], skipped: Sequence[Skipped], conclusion: Conclusion) -> dict[str, bytes]:
    """The files beside results.json."""
    return {
        "summary.md": markdown(plan, rows, skipped, conclusion).encode(),
        "results.csv": as_csv(rows),
        "junit.xml": junit(rows, conclusion),
    }


def _judgements(judgements: Iterable[Judgement]) -> list[str]:
    lines = ["| check | result | worst value | configuration |", "|---|---|---|---|"]
    for each in judgements:
        result = "passed" if each.passed else "failed"
        worst = "" if each.worst is None else _cell(each.worst)
        lines.append(f"| {_cell(each.gate.flag)} | {result} | {_number(each.value)} | {worst} |")
    return [*lines, ""]


def _settings(rows: Sequence[Summary]) -> list[str]:
    """One line per setting: its verdict over all attacks, and why."""
    lines = ["| setting | verdict | evidence |", "|---|---|---|"]
    for members in situations(rows):
        setting = situation_title(members[0].cell)
        lines.append(f"| {_cell(setting)} | {verdict(members)} | {_cell(because(members))} |")
    return [*lines, ""]


def _flat(row: Summary) -> dict[str, Any]:
    line = {key: row.cell[key] for key in SETTING if key in row.cell}
    line |= {outcome: row.outcomes.get(outcome, 0) for outcome in ("done", "skipped", "failed")}
    line |= {"samples": row.samples, "returned": row.answered}
    for name in row.means:
        figure = row.figure(name)
        assert figure is not None
        line |= {name: figure.mean, f"{name}_low": figure.low, f"{name}_high": figure.high}
        line |= {f"{name}_closest": figure.closest, f"{name}_baseline": figure.baseline}
    line |= {f"column {name}": _mean(values) for name, values in row.by_column.items()}
    line |= {"labels_leaked": _mean(list(map(float, row.labels))), "residual": row.residual}
    line |= {"ceiling": None if row.ceiling is None else row.ceiling.value}
    line |= {"accuracy": row.accuracy, "epsilon": row.epsilon, "time_factor": row.time_factor}
    return {**line, "status": "; ".join(row.statuses), "reason": "; ".join(row.reasons)}


def _columns(lines: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for line in lines for key in line))


def _safe(value: Any) -> Any:
    """A spreadsheet takes a word that starts like this for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _measured(rows: Sequence[Summary], metrics: Sequence[str]) -> list[str]:
    wanted = ["columns", *TOKENS, *metrics, "update-error"]
    return [name for name in wanted if any(name in row.means for row in rows)]


def _by_column(rows: Sequence[Summary]) -> list[str]:
    tables = [row for row in rows if row.by_column]
    if not tables:
        return []
    names = list(tables[0].by_column)
    lines = ["", "## Columns recovered", "", f"| configuration | {' | '.join(map(_cell, names))} |"]
    lines.append(f"|---|{'---|' * len(names)}")
    for row in tables:
        shares = " | ".join(f"{_mean(row.by_column.get(name, [])) or 0:.0%}" for name in names)
        lines.append(f"| {_cell(title(row.cell))} | {shares} |")
    return lines


def _of_recordings(rows: Sequence[Summary]) -> list[str]:
    """What attacks say of themselves where nothing can be compared."""
    unknown = [row for row in rows if row.cell["kind"] == "capture" and not row.means and row.outcomes.get("done")]
    if not unknown:
        return []
    lines = ["", "## Captures without ground truth", "", "| configuration | unexplained | what the attack says |"]
    lines.append("|---|---|---|")
    for row in unknown:
        said = _cell("; ".join(row.statuses))
        lines.append(f"| {_cell(title(row.cell))} | {_number(row.residual)} | {said} |")
    return lines


def _by_defense(rows: Sequence[Summary]) -> list[str]:
    lines = [f"| {' | '.join(by_defense.COLUMNS)} |", f"|{'---|' * len(by_defense.COLUMNS)}"]
    lines += [f"| {' | '.join(map(_cell, line.cells))} |" for line in by_defense.by_defense(rows)]
    return [*lines, ""]


def _figure(figure: Figure | None) -> str:
    if figure is None:
        return ""
    shown = _number(figure.mean)
    if figure.low is not None and figure.high is not None:
        shown += f" [{_number(figure.low)} to {_number(figure.high)}]"
    elif len(set(seeds := [_number(value) for value in figure.by_seed])) > 1:
        shown += f" [{', '.join(seeds)}]"
    return shown if figure.baseline is None else f"{shown} ({_number(figure.baseline)})"


def _ceiling(row: Summary) -> str:
    if row.ceiling is None or not row.ceiling.known:
        return "" if row.cell["kind"] == "utility" else "unknown"
    return number(row.ceiling.metric, row.ceiling.value)


def _answered(row: Summary) -> str:
    return f"{row.answered}/{row.samples}" if row.samples else ""


def _labels(row: Summary) -> str:
    return "" if not row.labels else f"{sum(row.labels)}/{len(row.labels)} leaked"


def _accuracy(row: Summary) -> str:
    return "" if row.accuracy is None else f"{row.accuracy:.1%}"


def _outcome(row: Summary) -> str:
    counts = [f"{count} {outcome}" for outcome, count in row.outcomes.items()]
    return ", ".join(counts) if len(counts) > 1 else next(iter(row.outcomes), "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _cell(text: str) -> str:
    """Text of a plan or a file name inside a Markdown table: no markup, one line."""
    escaped = "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c if c.isprintable() else " " for c in text)
    return escaped.replace("&", "&amp;")


def _clean(text: str) -> str:
    """Without the control characters that XML cannot hold at all."""
    return "".join(c if c.isprintable() else " " for c in text)
