"""The report of an audit: one HTML file with everything inside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedprism.audit import Audit
from fedprism.audit.grid import configuration_key
from fedprism.audit.system import system
from fedprism.audit.writing_plans import as_toml
from fedprism.evaluation.baselines import BASELINES
from fedprism.evaluation.residuals import EXPLAINED_RESIDUAL
from fedprism.evaluation.severity import (
    FAITHFUL_PSNR,
    RECOGNISABLE_COLUMNS,
    RECOGNISABLE_SSIM,
    RECOGNISABLE_TOKENS,
    TRACES_SSIM,
    Leak,
    number,
)
from fedprism.evaluation.verdict import MEANING, PROTECTED_BELOW, Verdict, leak_of
from fedprism.evaluation.verdict import verdict as verdict_of
from fedprism.report import advice, gallery, pages, plot, verdict
from fedprism.report.configurations import (
    Configuration,
    accuracy_in_words,
    configurations,
    figure_in_words,
    interval,
    label,
    measured,
    settings,
    shared_setting,
)
from fedprism.report.gates import concluded
from fedprism.report.protocol import headline as protocol_headline
from fedprism.report.protocol import load_kept

MOST_DEFENSES = 8
"""Defenses in the first table and in the picture; the others are in the appendix."""
MOST_FIELDS = 8
"""Columns of a recovered row that are shown before the appendix."""
MOST_LEFT_OUT = 3
"""Reasons for what was not tested that are listed before the appendix."""
SHOWN_METRICS = 2
"""Columns of the table of configurations; the others are in its details."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A configuration as the page shows it."""

    anchor: str
    row: Configuration
    leak: Leak
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What the records say about how the audit ran."""

    seeds: tuple[int, ...]
    versions: tuple[str, ...]
    time_factors: Mapping[str, float]
    count: int


def render(audit: Audit, *, show_images: bool | None = None) -> str:
    """The page. Private samples are shown if the data set has a public name, else only on request."""
    page: str = template("report.html.j2").render(_content(audit, show_images))
    return page


def render_short(audit: Audit, *, show_images: bool | None = None) -> str:
    """The verdict, three samples and the defenses as a piece of HTML without scripts, for notebooks."""
    page: str = template("notebook.html.j2").render(_content(audit, show_images))
    return page


def _content(audit: Audit, show_images: bool | None) -> dict[str, Any]:
    """What the templates are filled with."""
    rows = configurations(audit)
    metrics = measured(rows, audit.plan)
    first = metrics[0] if metrics else ""
    ran = _ran(audit)
    choices = advice.options(rows, ran.time_factors)
    conclusion = concluded(audit)
    attacks = verdict.attacks_of(rows)
    top = verdict.leading(attacks, first) if attacks else None
    advised = advice.advise(choices, first, _delta(audit.plan), _tolerated(audit.plan), conclusion.weights)
    shown = gallery.shows_by_default(audit.plan) if show_images is None else show_images
    exhibits = gallery.exhibits(audit, gallery.chosen_rows(rows, first, top), first) if shown else ()
    lines = _lines(rows, first)
    recorded = load_kept(audit.root)
    serious = protocol_headline(recorded)
    leading = _leading(choices, advised.chosen)
    return dict(
        title=str(audit.plan.get("title") or "Privacy audit of federated learning"),
        system=system(audit.plan, conclusion.weights),
        verdict=conclusion.verdict,
        sentence=verdict.in_a_sentence(rows, first, conclusion.weights),
        notes=verdict.notes(rows),
        serious=serious,
        findings=verdict.findings(rows, first, conclusion.weights),
        checks=conclusion.gates,
        protocol=recorded,
        advice=advised,
        options=leading,
        further_options=[option for option in choices if option not in leading],
        pictures={kind: plot.picture(leading, width) for kind, width in (("wide", plot.WIDE), ("narrow", plot.NARROW))},
        pictured=plot.in_words(leading),
        lines=lines,
        metrics=metrics,
        settings=settings(verdict.attacks_of(rows)),
        shared_setting=shared_setting(rows),
        shown_metrics=metrics[:SHOWN_METRICS],
        exhibits=exhibits,
        samples_left_out=len(exhibits) < sum(line.leak.judged for line in lines),
        redacted=not shown,
        guesses=_guesses(rows, metrics),
        residuals=any(line.row.residual is not None for line in lines),
        skipped=[(str(each.get("what", "")), str(each.get("why", ""))) for each in audit.skipped],
        troubled=[row for row in rows if row.reasons],
        assessment=verdict.assessment(
            rows, advised, audit.plan, conclusion.weights, len(audit.skipped), ran.seeds, serious
        ),
        ran=ran,
        plan=as_toml(audit.plan),
        delta=_delta(audit.plan),
        most_fields=MOST_FIELDS,
        most_left_out=MOST_LEFT_OUT,
        **shared(),
    )


def _leading(choices: Sequence[advice.Option], chosen: advice.Option | None) -> list[advice.Option]:
    """The defenses that are shown first, in the order of the plan: the recommended one and none are among them."""
    order = sorted(choices, key=lambda option: (option is not chosen, not option.bare))
    first = order[:MOST_DEFENSES]
    return [option for option in choices if option in first]


def template(name: str) -> Any:
    return pages.environment().get_template(name)


def shared() -> dict[str, Any]:
    """What every template uses."""
    script = _script()
    return {
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "label": label,
        "number": number,
        "figure": figure_in_words,
        "interval": interval,
        "leak_of": leak_of,
        "verdict_of": lambda row: verdict_of([row]),
        "accuracy": accuracy_in_words,
        "meaning": MEANING,
        "Leak": Leak,
        "Verdict": Verdict,
        "faithful_psnr": FAITHFUL_PSNR,
        "recognisable_ssim": RECOGNISABLE_SSIM,
        "traces_ssim": TRACES_SSIM,
        "recognisable_columns": RECOGNISABLE_COLUMNS,
        "recognisable_tokens": RECOGNISABLE_TOKENS,
        "explained_residual": EXPLAINED_RESIDUAL,
        "protected_below": PROTECTED_BELOW,
    }


def _script() -> str:
    text: str = template("report.js.j2").render()
    return text


def _lines(rows: Sequence[Configuration], metric: str) -> tuple[Line, ...]:
    """Attacks, the worst first."""
    order = list(Leak).index
    attacks = [(leak_of(row), row) for row in verdict.attacks_of(rows)]
    attacks.sort(key=lambda pair: (order(pair[0]), -advice.closeness(pair[1], metric)))
    return tuple(
        Line(anchor=f"c{place}", row=row, leak=leak, verdict=verdict_of([row]))
        for place, (leak, row) in enumerate(attacks, 1)
    )


def _ran(audit: Audit) -> Ran:
    seeds, versions = dict[int, None](), dict[str, None]()
    factors: dict[str, float] = {}
    for outcome in audit:
        if isinstance(outcome.description.get("seed"), int):
            seeds[outcome.description["seed"]] = None
        if outcome.time_factor is not None:
            factors[configuration_key(dict(outcome.description))] = outcome.time_factor
        if outcome.record is not None and isinstance(outcome.record.versions, Mapping):
            versions[", ".join(f"{name} {version}" for name, version in outcome.record.versions.items())] = None
    return Ran(seeds=tuple(seeds), versions=tuple(versions), time_factors=factors, count=len(audit))


def _delta(plan: Mapping[str, Any]) -> float | None:
    """The delta of the epsilons, if the plan asks for the costs of defenses."""
    wanted = plan.get("utility")
    delta = wanted.get("delta") if isinstance(wanted, Mapping) else None
    return delta if isinstance(delta, float) else None


def _tolerated(plan: Mapping[str, Any]) -> float:
    """How many points of accuracy a recommended defense may cost."""
    wanted = plan.get("utility")
    points = wanted.get("tolerated_points") if isinstance(wanted, Mapping) else None
    return points if isinstance(points, float) else advice.TOLERATED_POINTS


def _guesses(rows: Sequence[Configuration], metrics: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """For each baseline the range of its mean scores over all configurations."""
    lines = []
    for name, meaning in BASELINES.items():
        ranges = []
        for metric in metrics:
            values = [row.baselines[metric][name] for row in rows if name in row.baselines.get(metric, {})]
            low, high = (number(metric, min(values)), number(metric, max(values))) if values else ("", "")
            ranges.append(low if low == high else f"{low} to {high}")
        if any(ranges):
            lines.append((name, meaning, ranges))
    return lines
