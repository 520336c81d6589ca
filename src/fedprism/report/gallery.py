"""Private samples beside their reconstructions: only those that the audit kept, and only if it is wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedprism.audit import Audit
from fedprism.audit.grid import configuration_key
from fedprism.data.tabular import Column, TableSet
from fedprism.display.html import address
from fedprism.evaluation.severity import HIGHER_IS_CLOSER, Leak, number
from fedprism.evaluation.verdict import leak_of
from fedprism.experiments import Outcome
from fedprism.report.advice import closeness
from fedprism.report.configurations import Configuration, label
from fedprism.report.sentences import sentence

MOST_SHOWN = 24
"""Configurations with samples: a page stays small however large the audit is."""
SHOWN_SCORES = ("psnr", "ssim", "columns", "tokens", "tokens-in-place")
"""Scores under a sample."""
PLACES = ("closest match", "median", "weakest match")


@dataclass(frozen=True, kw_only=True)
class Field:
    """A column of a recovered row."""

    name: str
    original: str
    recovered: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One private sample and its reconstruction: pictures as data addresses, the fields of a row, or a text."""

    place: str
    seed: str
    scores: str
    answered: bool
    original: str | None = None
    recovered: str | None = None
    fields: tuple[Field, ...] = ()
    original_text: str = ""
    recovered_text: str = ""

    @property
    def known(self) -> bool:
        """Whether the private sample is shown, too."""
        return bool(self.original or self.original_text or any(field.original for field in self.fields))


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """The samples of one configuration."""

    row: Configuration
    leak: Leak
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A sample that the audit kept: its place and its scores."""

    cell: str
    number: int
    seed: str
    closeness: float
    scores: Mapping[str, float]


def shows_by_default(plan: Mapping[str, Any]) -> bool:
    """Data sets that have a name are public or made up. Captures and a user's own files are shown only on purpose."""
    data = plan.get("data")
    return plan.get("captures") is None and isinstance(data, Mapping) and bool(data.get("name"))


def keeps_pictures(plan: Mapping[str, Any]) -> bool:
    """Whether runs kept samples: unless the plan says so, those of captures keep none."""
    scores = plan.get("scores")
    wanted = scores.get("pictures") if isinstance(scores, Mapping) else None
    return wanted > 0 if isinstance(wanted, int) else plan.get("captures") is None


def chosen_rows(rows: Sequence[Configuration], metric: str, first: Configuration | None) -> list[Configuration]:
    """Those that leak most: `first`, then the worst of each defense, then of each defense against each attacker."""
    order = list(Leak).index
    ranked = sorted(
        (row for row in rows if row.cell.kind != "utility" and row.done),
        key=lambda row: (order(leak_of(row)), -closeness(row, metric)),
    )
    leading = {row.defense: row.key for row in reversed(ranked)}
    against = {(row.defense, row.attacker): row.key for row in reversed(ranked)}
    return sorted(
        ranked,
        key=lambda row: (
            row is not first,
            (row.key != leading[row.defense]) + (row.key != against[row.defense, row.attacker]),
        ),
    )[:MOST_SHOWN]


def exhibits(audit: Audit, rows: Sequence[Configuration], metric: str) -> tuple[Exhibit, ...]:
    """The samples of these configurations. Records are read one at a time, pictures of those shown alone."""
    kept: dict[str, list[Kept]] = {row.key: [] for row in rows}
    for outcome in audit:
        key = configuration_key(dict(outcome.description))
        if key in kept and outcome.state == "done":
            kept[key] += _kept(audit, outcome, metric)
    return tuple(
        Exhibit(
            row=row,
            leak=leak_of(row),
            samples=tuple(_sample(audit, each, place) for place, each in _picked(kept[row.key])),
        )
        for row in rows
        if kept[row.key]
    )


def _kept(audit: Audit, outcome: Outcome, metric: str) -> list[Kept]:
    """The kept samples of one run with the scores that its record holds."""
    tensors = audit.samples(outcome.key)
    if tensors is None or not _can_be_shown(tensors, audit.columns):
        return []
    values = (outcome.record.scores if outcome.record is not None else None) or {}
    places = tensors["indices"].tolist() if "indices" in tensors else [None] * len(tensors["recovered"])
    sign = 1 if HIGHER_IS_CLOSER.get(metric, False) else -1
    kept = []
    for k, place in enumerate(places):
        scores = _scores(values.get("values"), place)
        close = sign * scores[metric] if metric in scores else -math.inf
        seed = str(outcome.description.get("seed", ""))
        kept.append(Kept(cell=outcome.key, number=k, seed=seed, closeness=close, scores=scores))
    return kept


def _scores(values: Any, place: int | None) -> dict[str, float]:
    """The scores of one sample, as far as it has any."""
    if not isinstance(values, Mapping) or place is None:
        return {}
    lists = {str(name): each for name, each in values.items() if isinstance(each, list | tuple)}
    values = {name: each[place] for name, each in lists.items() if 0 <= place < len(each)}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _can_be_shown(tensors: Mapping[str, Tensor], columns: Sequence[Column] | None) -> bool:
    """Whether these are images, texts or rows of the table, and fit together: the file may come from anywhere."""
    recovered = tensors.get("recovered")
    if recovered is None:
        return False
    if columns is not None:
        fits = recovered.dim() == 2 and recovered.shape[1] == sum(column.width for column in columns)
    else:
        picture = recovered.dim() == 4 and recovered.shape[1] in (1, 3) and recovered.dtype == torch.uint8
        fits = picture or _are_tokens(recovered)
    flat = [tensors[name] for name in ("answered", "indices") if name in tensors]
    return (
        fits
        and recovered.numel() > 0
        and tensors.get("originals", recovered).shape == recovered.shape
        and tensors.get("originals", recovered).dtype == recovered.dtype
        and all(tensor.shape == recovered.shape[:1] and not tensor.is_floating_point() for tensor in flat)
    )


def _are_tokens(tensor: Tensor) -> bool:
    """Whether these are texts, one whole number per token."""
    return tensor.dim() == 2 and tensor.dtype == torch.int64


def _picked(kept: Sequence[Kept]) -> list[tuple[str, Kept]]:
    """The closest, the median and the weakest match; fewer if fewer were kept, and the first ones without scores."""
    if not any(each.scores for each in kept):
        return [(f"sample {number}", each) for number, each in enumerate(kept[: len(PLACES)], 1)]
    ranked = sorted(kept, key=lambda each: -each.closeness)
    if len(ranked) >= 3:
        return list(zip(PLACES, (ranked[0], ranked[len(ranked) // 2], ranked[-1]), strict=True))
    if len(ranked) == 2:
        return list(zip(PLACES[::2], ranked, strict=True))
    return [("the only one", each) for each in ranked]


def _sample(audit: Audit, kept: Kept, place: str) -> Sample:
    tensors = audit.samples(kept.cell)
    assert tensors is not None
    recovered = tensors["recovered"][kept.number]
    original = tensors["originals"][kept.number] if "originals" in tensors else None
    answered = bool(tensors["answered"][kept.number]) if "answered" in tensors else True
    shown = [f"{label(name)} {number(name, value)}" for name, value in kept.scores.items() if name in SHOWN_SCORES]
    common = {"place": place, "seed": kept.seed, "scores": ", ".join(shown), "answered": answered}
    if audit.columns is not None:
        return Sample(**common, fields=_fields(audit.columns, original, recovered))  # type: ignore[arg-type]
    if recovered.dtype == torch.int64:
        texts = {"recovered_text": sentence(recovered, original, audit.words) if answered else ""}
        original_text = "" if original is None else sentence(original, None, audit.words)
        return Sample(**common, **texts, original_text=original_text)  # type: ignore[arg-type]
    return Sample(
        **common,  # type: ignore[arg-type]
        original=None if original is None else address(original / 255),
        recovered=address(recovered / 255) if answered else None,
    )


def _fields(columns: tuple[Column, ...], original: Tensor | None, recovered: Tensor) -> tuple[Field, ...]:
    table = TableSet("", torch.empty(0), torch.empty(0), columns, ())
    decoded = table.decoded(recovered)
    true = table.decoded(original) if original is not None else {}
    return tuple(
        Field(name=name, original=_value(true.get(name, "")), recovered=_value(decoded[name])) for name in decoded
    )


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
