"""A trial: who sees what, one attack on it, and what the answer is compared with."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import save
from torch import Tensor

from fedprism import runner
from fedprism.attacks import Attack
from fedprism.data.tabular import Column
from fedprism.evaluation.columns import score_columns
from fedprism.evaluation.residuals import UpdateResidual, least, residuals
from fedprism.evaluation.scoring import Match, match, score, score_updates
from fedprism.experiments.outcome import Outcome
from fedprism.files import json_text, pictures
from fedprism.inputs import Inputs
from fedprism.truth import Truth
from fedprism.types import Ambiguity, Observation, Reconstruction, Record

LEFT_OPEN = frozenset[Ambiguity]({"order", "counts", "samples"})
"""What an answer leaves open is not held against a guess, either: else guessing would look worse than it is."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What an attacker sees and, if it is known, the truth."""

    observation: Observation
    truth: Truth | None = None
    guesses: Callable[[int], Mapping[str, Inputs]] | None = None
    """The answers of baselines for so many samples."""


class Judgement(NamedTuple):
    """What a scorer says of an answer."""

    scores: dict[str, Any] | None
    baselines: Mapping[str, Mapping[str, float | None]] = {}
    """Mean score of each baseline."""
    updates: tuple[UpdateResidual, ...] = ()
    """What each update says about its own answer."""
    tensors: bytes | None = None
    """A safetensors file of what is kept of the answer."""
    seconds: float = 0.0
    """What the attack went on doing while it was judged, beside its own time."""


class Scorer(Protocol):
    """Compares an answer with the truth, if that is known."""

    def judge(self, setting: Setting, answer: Reconstruction) -> Judgement: ...


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The scorer of audits and rehearsals: every sample by some metrics, baselines, and the residual."""

    metrics: Sequence[str]
    columns: tuple[Column, ...] | None = None
    """Of a table: its columns are judged one by one."""
    tolerance: float = 0.05
    """By how much of its range a number of a table may be off."""
    allow_download: bool = False
    """Whether LPIPS may fetch its network."""
    kept: int = 0
    """How many samples are kept beside what came back."""

    def judge(self, setting: Setting, answer: Reconstruction) -> Judgement:
        truth = setting.truth
        matched = match(answer, truth) if truth is not None and answer.inputs is not None else None
        scores: dict[str, Any] | None = None
        baselines: dict[str, dict[str, float | None]] = {}
        if truth is not None and matched is not None:
            scores = _scores(answer, truth, self, matched)
            for name, inputs in (setting.guesses(len(truth.owners)) if setting.guesses else {}).items():
                guess = Reconstruction(inputs=inputs, ambiguity=answer.ambiguity & LEFT_OPEN)
                baselines[name] = _scores(guess, truth, self, match(guess, truth))["means"]
        elif truth is not None and answer.updates is not None and truth.updates is not None:
            scores = summarised({"update-error": tuple(score_updates(answer, truth).values())})
        kept = _kept(setting.observation, answer, matched, self.kept)
        return Judgement(scores, baselines, residuals(setting.observation, answer), kept)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One attack in one setting. Everything random in it comes from its seed."""

    key: str
    description: Mapping[str, Any] = field(default_factory=dict)
    setting: Callable[[str | None], Setting]
    """Simulates or loads, on a device."""
    attack: Attack
    seed: int
    scoring: Callable[[], Scorer]

    def run(self, device: str | None) -> Outcome:
        setting, scorer = self.setting(device), self.scoring()
        start = time.perf_counter()
        answer = runner.run(self.attack, setting.observation, seed=self.seed, device=device)
        seconds = time.perf_counter() - start  # the result is on the CPU: a GPU has been waited for
        judged = scorer.judge(setting, answer)
        record = Record(
            kind="attack",
            run=self.description,
            knowledge_used=tuple(sorted(answer.knowledge_used)),
            scores=judged.scores,
            residual=least(judged.updates),
            updates=tuple(map(dataclasses.asdict, judged.updates)),
            status=str(answer.status),
            seed=self.seed,
            versions=json_text.versions(),
        )
        return Outcome(
            key=self.key,
            description=self.description,
            state="done",
            record=record,
            baselines=judged.baselines,
            tensors=judged.tensors,
            attack_seconds=seconds + judged.seconds,
        )


def _scores(answer: Reconstruction, truth: Truth, scoring: Scoring, matched: Match) -> dict[str, Any]:
    """Every sample's scores and their means; tables are judged by column as well."""
    scored = score(answer, truth, metrics=scoring.metrics, allow_download=scoring.allow_download, matched=matched)
    values = dict(scored.values)
    extra: dict[str, Any] = {}
    if scoring.columns is not None:
        table = score_columns(matched, scoring.columns, scoring.tolerance)
        values["columns"] = table.by_row
        extra = {"by_column": table.by_column, "tolerance": scoring.tolerance}
    return {
        **summarised(values),
        "labels_match": scored.labels_match if _labels_comparable(answer, truth) else None,
        "resolved": sorted(scored.resolved),
        "unavailable": dict(scored.unavailable),
        **extra,
    }


def _labels_comparable(answer: Reconstruction, truth: Truth) -> bool:
    """Of a model that stays as it is, every round gives the same samples again: then labels are not counted."""
    return answer.labels is not None and len(answer.labels) <= len(truth.labels)


def summarised(values: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """The scores of a record: the values of each metric, their means, and of how many samples they are."""
    answered = [sum(value is not None for value in each) for each in values.values()]
    samples = [len(each) for each in values.values()]
    return {
        "values": {name: tuple(each) for name, each in values.items()},
        "means": {name: _mean(each) for name, each in values.items()},
        "samples": max(samples, default=0),
        "answered": min(answered, default=0),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Of the samples that were answered; None if none was. Identical samples make it infinite."""
    present = [value for value in values if value is not None]
    return math.fsum(present) / len(present) if present and math.inf not in present else (math.inf if present else None)


def _kept(observation: Observation, answer: Reconstruction, matched: Match | None, count: int) -> bytes | None:
    """Some samples beside what came back, in pixels: from the closest to the farthest, evenly.

    `indices` says which samples of the batch they are. Images are kept as bytes, other inputs as they are.
    """
    if count == 0 or not isinstance(answer.inputs, Tensor) or len(answer.inputs) == 0:
        return None
    if not answer.inputs.is_floating_point():
        return _kept_tokens(answer.inputs, matched, count)
    if matched is None:
        return save({"recovered": _stored(pictures.as_pixels(observation, answer)[:count])})
    answered = torch.tensor([row is not None for row in matched.rows])
    errors = (matched.recovered - matched.truth).flatten(1).square().mean(1).masked_fill(~answered, math.inf)
    places = torch.linspace(0, len(errors) - 1, min(count, len(errors))).round().long()
    chosen = errors.argsort(stable=True)[places]
    return save(
        {
            "originals": _stored(matched.truth[chosen]),
            "recovered": _stored(matched.recovered[chosen]),
            "answered": answered[chosen],
            "indices": chosen,
        }
    )


def _kept_tokens(inputs: Tensor, matched: Match | None, count: int) -> bytes | None:
    """Some texts beside what came back, from the closest to the farthest, evenly."""
    if inputs.dim() != 2:
        return None
    if matched is None or matched.tokens is None:
        return save({"recovered": inputs[:count].long().contiguous()})
    recovered, private = matched.tokens
    answered = torch.tensor([row is not None for row in matched.rows])
    wrong = (recovered != private).double().mean(1).masked_fill(~answered, math.inf)
    places = torch.linspace(0, len(wrong) - 1, min(count, len(wrong))).round().long()
    chosen = wrong.argsort(stable=True)[places]
    return save(
        {
            "originals": private[chosen].contiguous(),
            "recovered": recovered[chosen].contiguous(),
            "answered": answered[chosen],
            "indices": chosen,
        }
    )


def _stored(pixels: Tensor) -> Tensor:
    if pixels.dim() != 4:
        return pixels.float().contiguous()
    return (pixels.double().clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
