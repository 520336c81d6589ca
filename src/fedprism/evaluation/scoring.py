"""Compares a reconstruction with the truth. The only place, beside the simulator, where the two meet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedprism import metrics as metric_table
from fedprism.attacks.disaggregation import is_unnamed
from fedprism.checks import row
from fedprism.display import html
from fedprism.display.words import fields_in_words
from fedprism.errors import BadInput
from fedprism.evaluation.severity import HIGHER_IS_CLOSER, NOT_LEAKAGE, number
from fedprism.inputs import Inputs, shape_of, tensors_of
from fedprism.metrics import LpipsUnavailable, Metric, avd_floor, mse_matrix
from fedprism.metrics.tokens import in_place_matrix, overlap, tokens_anywhere, tokens_in_place
from fedprism.pixels import Normalization, stretched, to_pixels
from fedprism.truth import Truth, load_truth, save_truth
from fedprism.types import Ambiguity, Reconstruction, Update, is_soft

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "Match",
    "ParticipationScores",
    "Scores",
    "load_truth",
    "match",
    "save_truth",
    "score",
    "score_participation",
    "score_updates",
]

DEFAULT_METRICS = ("mse", "psnr", "ssim", "avd")
NO_ANSWER = 2.0
"""What it costs to give a sample an answer without a finite value: more than any error between pixels."""


class Match(NamedTuple):
    """Pixels in [0, 1] side by side; row i of each tensor belongs to the truth's i-th sample.

    Of inputs with several tensors of floating-point numbers, `recovered` and `truth` are (samples, all of them).
    """

    recovered: Tensor
    truth: Tensor
    rows: tuple[int | None, ...]
    """Which row of the reconstruction was taken for each sample; None: there was none left."""
    resolved: frozenset[Ambiguity]
    """The ambiguities that were resolved by looking at the truth, all of them declared by the attack."""
    tokens: tuple[Tensor, Tensor] | None = None
    """(samples, all of them): the whole numbers of inputs that have such, recovered and true."""

    def __repr__(self) -> str:
        return fields_in_words(self, self._asdict().items())


@dataclass(frozen=True, kw_only=True, repr=False)
class Scores:
    """One value for each private sample and metric; None where the attack returned nothing for the sample."""

    values: Mapping[str, tuple[float | None, ...]]
    rows: tuple[int | None, ...]
    resolved: frozenset[Ambiguity]
    labels_match: bool | None = None
    """Whether the recovered labels are the true ones, as a multiset; None where the attack gives none."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Why a metric has no value."""

    def mean(self, metric: str) -> float:
        """Mean over the samples that were given an answer; NaN where there are none."""
        present = [value for value in self.values[metric] if value is not None]
        return sum(present) / len(present) if present else math.nan

    def to_frame(self) -> DataFrame:
        """A pandas table: a line per private sample, a column per metric, and `row`, the answer taken for it."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise BadInput("pandas is not installed. Run: pip install fedprism[pandas]") from error
        columns: dict[str, list[float | int | None]] = {name: list(values) for name, values in self.values.items()}
        frame = DataFrame({**columns, "row": list(self.rows)})
        frame["row"] = frame["row"].astype("Int64")
        frame.index.name = "sample"
        return frame

    def __repr__(self) -> str:
        means = [f"{name} {number(name, self.mean(name))}" for name in self.values if name != NOT_LEAKAGE]
        return f"Scores({'; '.join([self._answered, *means])})"

    def __str__(self) -> str:
        lines = [self._answered]
        lines += [
            f"{name:>12}  {f'mean {number(name, self.mean(name))}':<14}  {reading(name)}".rstrip()
            for name in self.values
        ]
        lines += [f"{name:>12}  not available: {reason}" for name, reason in self.unavailable.items()]
        if self.labels_match is not None:
            lines.append(f"{'labels':>12}  {self._labels}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Means and the first samples as a table, for notebooks."""
        shown = range(min(len(self.rows), html.MOST_SAMPLES))
        head = ["metric", "mean", "scale", *(f"sample {place}" for place in shown)]
        lines = [
            [name, number(name, self.mean(name)), reading(name), *(number(name, values[place]) for place in shown)]
            for name, values in self.values.items()
        ]
        notes = list(self.notes)
        if len(self.rows) > len(shown):
            notes.append(f"The first {len(shown)} of {len(self.rows)} samples are shown; means are over all.")
        return html.lines([html.table(head, lines, self._answered), *map(html.paragraph, notes)])

    @property
    def notes(self) -> list[str]:
        """What is to be said beside the numbers, in sentences."""
        sentences = [f"{name} is not available: {reason}" for name, reason in self.unavailable.items()]
        return sentences if self.labels_match is None else [*sentences, f"Labels: {self._labels}."]

    @property
    def _answered(self) -> str:
        return f"{sum(row is not None for row in self.rows)} of {len(self.rows)} samples returned"

    @property
    def _labels(self) -> str:
        return "all correct" if self.labels_match else "not all correct"


UNITS = {
    "mse": "squared error of pixels from 0 to 1",
    "ssim": "from -1 to 1",
    "avd": "0 for the original",
    "tokens": "of the whole numbers, anywhere",
    "tokens-in-place": "of the whole numbers, in their places",
}
"""What a number counts or how far it goes; PSNR is printed in decibels."""


def reading(metric: str) -> str:
    """The unit of a metric, and which direction is closer to the original."""
    if metric == NOT_LEAKAGE:
        return "(AVD of a blank image)"
    if metric not in HIGHER_IS_CLOSER:
        return ""
    direction = "higher is closer" if HIGHER_IS_CLOSER[metric] else "lower is closer"
    return f"({', '.join(filter(None, [UNITS.get(metric), direction]))})"


def score(
    reconstruction: Reconstruction,
    truth: Truth,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    allow_download: bool = False,
    matched: Match | None = None,
) -> Scores:
    """Score each private sample. Ambiguities are resolved once, by mean squared error, for all metrics alike.

    Metrics for images are left out for other inputs. `allow_download` lets LPIPS fetch its network. `matched`: what
    `match` makes of the two, if that is known already.
    """
    matched = matched or match(reconstruction, truth)
    answered = torch.tensor([number is not None for number in matched.rows])
    values: dict[str, tuple[float | None, ...]] = {}
    unavailable: dict[str, str] = {}
    for name in metrics:
        metric = row(metric_table.METRICS, name, "metric")
        if matched.truth[0].numel() == 0:
            unavailable[name] = f"{name} is for floating-point numbers, these inputs are whole numbers"
            continue
        if metric.images_only and not _are_images(matched.truth):
            unavailable[name] = f"{name} is for images, these inputs have shape {tuple(matched.truth.shape[1:])}"
            continue
        try:
            values[name] = _values(metric, name, matched, answered, allow_download)
        except (LpipsUnavailable, ValueError) as reason:
            unavailable[name] = str(reason)
    if "avd" in values:  # a blank image scores low on AVD too: the value means nothing without this floor
        values["avd_floor"] = tuple(map(float, avd_floor(matched.truth)))
    if matched.tokens is not None:
        values.update(_of_tokens(matched.tokens, answered, matched.resolved))
    return Scores(
        values=values,
        rows=matched.rows,
        resolved=matched.resolved,
        labels_match=_labels_match(reconstruction.labels, truth.labels),
        unavailable=unavailable,
    )


@dataclass(frozen=True, kw_only=True)
class ParticipationScores:
    """How much of who took part was found. A column is one client, under its own name: no order is resolved."""

    entries: float
    """The part of the (round, client) entries that are right; guessing that nobody took part has most of them, too."""
    columns: tuple[bool, ...]
    """For each client, whether it is right in every round."""

    @property
    def exact(self) -> float:
        """The part of the clients that are right in every round."""
        return sum(self.columns) / len(self.columns)


def score_participation(matrix: Tensor, truth: Truth, *, order_known: bool = True) -> ParticipationScores:
    """Compare a participation matrix, (rounds, clients) of True and False, with the truth.

    If the order is not known, as without counts, columns are assigned to clients as fits best; there may be fewer of
    them.
    """
    if truth.participation is None:
        raise BadInput("this ground truth does not say who took part. Simulate the scenario again.")
    if not order_known and len(matrix) == len(truth.participation):
        matrix = _assigned_columns(matrix.cpu().bool(), truth.participation)
    if matrix.shape != truth.participation.shape:
        raise BadInput(
            f"participation has shape {tuple(matrix.shape)}, the ground truth "
            f"{tuple(truth.participation.shape)}. Score against the ground truth of the same scenario."
        )
    right = matrix.cpu() == truth.participation
    return ParticipationScores(entries=float(right.double().mean()), columns=tuple(right.all(0).tolist()))


def _assigned_columns(matrix: Tensor, truth: Tensor) -> Tensor:
    """The columns in the order of the truth's that they fit best; zeros where there are too few."""
    different = (matrix.T[:, None] != truth.T).sum(2)
    found, places = linear_sum_assignment(different.numpy())
    ordered = torch.zeros_like(truth)
    ordered[:, places] = matrix[:, found].to(truth.dtype)
    return ordered


def score_updates(reconstruction: Reconstruction, truth: Truth) -> dict[str, float | None]:
    """How far each client's update is off, |found - true| / |true|, by client and in the order of the truth.

    None where the attack has none for the client. Updates without a name are assigned as fits best. Clients who never
    took part, or sent zeros, are left out.
    """
    if truth.updates is None:
        raise BadInput(
            "this ground truth does not hold one update per client. Simulate a frozen scenario, or one "
            "round, with a threat model that sees aggregates."
        )
    if reconstruction.updates is None or reconstruction.owners is None:
        raise BadInput("this reconstruction has no updates with owners to score. Run a disaggregation.")
    by_owner = dict(zip(reconstruction.owners, reconstruction.updates, strict=True))
    if "order" in reconstruction.ambiguity:
        by_owner = _with_names(by_owner, truth.updates)
    errors: dict[str, float | None] = {}
    for place, update in enumerate(truth.updates):
        name = f"client-{place}"
        length = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in (update or {}).values()))
        if update is not None and length > 0:
            errors[name] = _distance(by_owner[name], update) / length if name in by_owner else None
    return errors


def _with_names(by_owner: dict[str, Update], true: tuple[Update | None, ...]) -> dict[str, Update]:
    """The same with every update of an unnamed owner under the name of the client that it fits best."""
    named = {name: update for name, update in by_owner.items() if not is_unnamed(name)}
    unnamed = [update for name, update in by_owner.items() if is_unnamed(name)]
    others = {
        f"client-{n}": update for n, update in enumerate(true) if update is not None and f"client-{n}" not in named
    }
    errors = torch.tensor([[_distance(found, update) for update in others.values()] for found in unnamed])
    rows, places = linear_sum_assignment(errors.reshape(len(unnamed), len(others)).numpy())
    names = list(others)
    return {**named, **{names[place]: unnamed[row] for row, place in zip(rows, places, strict=True)}}


def _distance(recovered: Update, truth: Update) -> float:
    if set(recovered) != set(truth) or any(recovered[name].shape != truth[name].shape for name in truth):
        raise BadInput(
            "the recovered update has other tensors than the clients sent. Score against the ground "
            "truth of the same scenario."
        )
    missed = (recovered[name].cpu().double() - tensor.double() for name, tensor in truth.items())
    return math.sqrt(sum(float(difference.square().sum()) for difference in missed))


def match(reconstruction: Reconstruction, truth: Truth) -> Match:
    """Put the reconstruction in the truth's order, in pixels, resolving only what the attack declares ambiguous."""
    if reconstruction.inputs is None:
        raise BadInput("this reconstruction has no inputs to score. Run an attack that returns inputs.")
    if shape_of(reconstruction.inputs) != shape_of(truth.inputs):
        raise BadInput(
            f"recovered inputs have shape {shape_of(reconstruction.inputs)}, the ground truth "
            f"{shape_of(truth.inputs)}. Score against the ground truth of the same scenario."
        )
    (numbers, tokens), (true_numbers, true_tokens) = map(_kinds, (reconstruction.inputs, truth.inputs))
    normalization = truth.normalization if true_numbers.dim() > 2 or isinstance(truth.inputs, Tensor) else None
    original = to_pixels(true_numbers, truth.bounds, normalization)
    # (versions, samples, ...): what the reconstruction looks like under each choice of an undetermined sign or scale
    versions = torch.stack(_versions(numbers, reconstruction.ambiguity, truth.bounds, normalization))
    errors = torch.stack([mse_matrix(version, original) for version in versions])
    cost, version_of = errors.min(dim=0)
    if true_tokens is not None and tokens is not None:
        wrong = 1 - (overlap(tokens, true_tokens) + in_place_matrix(tokens, true_tokens)) / 2
        cost = wrong if original[0].numel() == 0 else (cost + wrong) / 2
    # Squared errors are no distances: an answer that says nothing could take a sample from the one that is right.
    cost[~_say_something(reconstruction.inputs)] = NO_ANSWER
    pairs = _assign(cost, order_known="order" not in reconstruction.ambiguity)
    rows: list[int | None] = [None] * len(original)
    recovered, recovered_tokens = torch.zeros_like(original), None if true_tokens is None else -true_tokens.abs() - 1
    for found_row, truth_row in pairs:
        rows[truth_row] = found_row
        recovered[truth_row] = versions[version_of[found_row, truth_row], found_row]
        if recovered_tokens is not None and tokens is not None:
            recovered_tokens[truth_row] = tokens[found_row]
    both = None if recovered_tokens is None or true_tokens is None else (recovered_tokens, true_tokens)
    return Match(recovered, original, tuple(rows), reconstruction.ambiguity, both)


def _kinds(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The floating-point numbers of inputs, a single such tensor as it is, and their whole numbers, (samples, all)."""
    tensors = [tensor.detach().cpu() for tensor in tensors_of(inputs)]
    numbers = [tensor for tensor in tensors if tensor.is_floating_point()]
    whole = [tensor.unsqueeze(-1).flatten(1).long() for tensor in tensors if not tensor.is_floating_point()]
    if len(numbers) == 1:
        return numbers[0], torch.cat(whole, 1) if whole else None
    together = [tensor.double().unsqueeze(-1).flatten(1) for tensor in numbers] or [torch.zeros(len(tensors[0]), 0)]
    return torch.cat(together, 1), torch.cat(whole, 1) if whole else None


def _say_something(inputs: Inputs) -> Tensor:
    """Which samples of an answer hold any finite number."""
    finite = [torch.isfinite(tensor.detach()).unsqueeze(-1).flatten(1).any(1).cpu() for tensor in tensors_of(inputs)]
    return torch.stack(finite).any(0)


def _of_tokens(
    tokens: tuple[Tensor, Tensor], answered: Tensor, ambiguity: frozenset[Ambiguity]
) -> dict[str, tuple[float | None, ...]]:
    """The share of whole numbers that came back, wherever they stand and in their places.

    Where an attack cannot tell how often a number occurs, or in which sample, once and anywhere in the batch will do.
    """
    recovered, true = (each[answered] for each in tokens)
    if "samples" in ambiguity:
        anywhere = torch.isin(true, recovered.flatten()).double().mean(1)
    elif "counts" in ambiguity:
        anywhere = (true[:, :, None] == recovered[:, None]).any(2).double().mean(1)
    else:
        anywhere = tokens_anywhere(recovered, true)
    values = {}
    for name, shares in {"tokens": anywhere, "tokens-in-place": tokens_in_place(recovered, true)}.items():
        computed = iter(shares.tolist())
        values[name] = tuple(next(computed) if yes else None for yes in answered.tolist())
    return values


def _versions(
    inputs: Tensor,
    ambiguity: frozenset[Ambiguity],
    bounds: tuple[float, float],
    normalization: Normalization | None,
) -> list[Tensor]:
    """Everything the reconstruction may mean, given what it leaves open.

    An unknown sign is tried both ways. An unknown scale is set by stretching each sample to the full pixel range, after
    which a flipped sign is the negative image.
    """
    if inputs[:1].numel() == 0:
        return [inputs.double()]
    if "scale" in ambiguity:
        full = stretched(inputs)
        return [full, 1 - full] if "sign" in ambiguity else [full]
    signs = (1, -1) if "sign" in ambiguity else (1,)
    return [to_pixels(sign * inputs, bounds, normalization) for sign in signs]


def _assign(cost: Tensor, *, order_known: bool) -> list[tuple[int, int]]:
    if order_known:
        return [(number, number) for number in range(min(cost.shape))]
    recovered, truth = linear_sum_assignment(cost.numpy())
    return list(zip(recovered.tolist(), truth.tolist(), strict=True))


def _values(
    metric: Metric, name: str, matched: Match, answered: Tensor, allow_download: bool
) -> tuple[float | None, ...]:
    recovered, original = matched.recovered[answered], matched.truth[answered]
    if name.startswith("lpips-"):  # these networks work in single precision and may be allowed to download
        computed = iter(metric.function(recovered.float(), original.float(), allow_download=allow_download).tolist())
    else:
        computed = iter(metric.function(recovered, original).tolist())
    return tuple(float(next(computed)) if yes else None for yes in answered.tolist())


def _are_images(pixels: Tensor) -> bool:
    return pixels.dim() == 4 and pixels.shape[1] in (1, 3) and min(pixels.shape[2:]) >= 3


def _labels_match(recovered: Tensor | None, truth: Tensor) -> bool | None:
    """None where labels are no numbers of classes and no answers of yes or no, but weights or measurements."""
    if recovered is None or (truth.is_floating_point() and not bool(((truth == 0) | (truth == 1)).all())):
        return None
    if is_soft(truth) and recovered.shape[1:].numel() != truth.shape[1:].numel():
        return None
    first, second = (sorted(label.flatten().tolist() for label in labels.double()) for labels in (recovered, truth))
    return first == second
