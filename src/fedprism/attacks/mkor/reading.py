"""Reading MKOR's dense layers: from the gradient of the first one to each class's features. See `mkor_head`."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.mkor.head import Gate, Head
from fedprism.solvers.closed_form.labels import MOST_OFF, sample_unit

HALF_SAMPLE = 0.5
"""In samples: a class with a larger count is in the batch, as counts are whole numbers but for noise."""
FAINT = 0.1
"""In samples: how much of one has to be left where dropout cuts paths."""
LOUD = 0.1
"""In samples: noise on the counts from which on whole rows tell which classes are there."""
TELLING = 0.3
"""In samples: how far from a whole number a count may be before it is not believed."""
WHOLE = 0.02
"""In samples: how far from a whole number rounding usually leaves a count."""
EVEN = 0.02
"""Biases below this share of the weights' spread are zero but for a disguise: classes are there equally often."""
MOST_OUTSIDE = 0.05
"""Share of features that noise may carry farther from 0 to 1 than that range is wide."""
ROUNDS = 5
"""How often the highest rows are looked for again, with what one sample adds as the rows found last say."""


class ReadingStatus(StrEnum):
    READ = "every class in the batch could be read"
    DUMP_LOST = "every class in the batch could be read but the dump class"
    UNSURE = (
        "every class that is clearly in the batch was read; counts of samples are not whole numbers "
        "that add up to the batch, so classes may be missing or wrong"
    )
    WITHIN_RANGE = (
        "every class is in the batch and was read; what all rows have in common was not, and is where it keeps the "
        "images between 0 and 1"
    )
    NO_REFERENCE = (
        "no row clearly belongs to an absent class, so there is nothing to compare the rows with; "
        "use a dump class or several nodes per class"
    )
    NOTHING = "no class differs from the others"


class Reading(NamedTuple):
    """What the gradient of the first dense layer says.

    features (answers, tracked features), the mean over the samples behind each answer; classes (answers,); counts
    (answers,) how many samples that are; unread: classes in the batch that are known to have no answer.
    """

    features: Tensor
    classes: Tensor
    counts: Tensor
    unread: tuple[int, ...]
    noise: float
    """Spread of the counts of classes that are not in the batch, in samples; 0 where too few are absent to tell."""
    status: ReadingStatus
    unique: bool = True
    """Whether no other counts fit as well."""

    def without_reference(self, classes: int) -> Reading:
        """No answers, where what was read shows that no class was absent."""
        none = (self.features[:0], self.classes[:0], self.counts[:0])
        return Reading(*none, tuple(range(classes)), self.noise, ReadingStatus.NO_REFERENCE)


def read_head(
    head: Head,
    weight_grad: Callable[[Tensor], Tensor],
    bias_grad: Tensor,
    batch: int,
    *,
    exact: bool,
    dropped: bool = False,
    ranged: bool = True,
    whole: bool = True,
) -> Reading:
    """Read each class's mean features off the gradient: weight_grad(rows) is (rows, tracked features) of it.

    `exact`: slopes are the same for all samples, so that a count of samples is a whole number. `dropped`: dropout cut
    some samples' paths, so that counts do not tell whether all were found. `ranged`: features have a known range, which
    can stand in for a reference. `whole`: the scale makes whole numbers of the counts.
    """
    gates: list[_Gate] = []
    higher: tuple[Tensor, Tensor] | None = None
    summed = head.gate is Gate.SIDES and head.dump is None  # which samples are where differs from class to class
    for gate in reversed(range(head.rows.shape[1])):
        gradient = gate_gradient(head, gate, weight_grad, bias_grad)
        weights, biases = gradient
        if higher is not None and head.gate is Gate.NESTED:  # what is active at the lower threshold alone
            weights, biases = weights - higher[0], biases - higher[1]
        elif higher is not None and summed:
            weights, biases = weights + higher[0], biases + higher[1]
        higher = gradient
        if gate == 0 or not summed:
            alone = summed or head.rows.shape[1] == 1
            rows = _Rows(weights, biases, batch, exact, alone)
            gates.insert(0, _read_gate(head, rows, ranged=ranged and whole))
    return _joined(head, gates, batch, dropped=dropped or not whole)


def gate_gradient(
    head: Head, gate: int, weight_grad: Callable[[Tensor], Tensor], bias_grad: Tensor
) -> tuple[Tensor, Tensor]:
    """(classes, tracked features) and (classes,): the rows of all paths through a gate, as if the slope was 1."""
    rows = head.rows[:, gate].to(bias_grad.device)
    slopes = head.slopes[:, gate].to(bias_grad).sum(1)
    weights = weight_grad(rows[:, 0])
    for path in range(1, rows.shape[1]):
        weights = weights + weight_grad(rows[:, path])
    return weights / slopes.unsqueeze(1), bias_grad[rows].sum(1) / slopes


class Scale(NamedTuple):
    factor: float
    """What an update has to be multiplied by to be the gradient of the mean loss of a batch."""
    whole: bool
    """Whether all counts of samples are then whole numbers to rounding error."""
    unique: bool = True
    """Whether no other scale makes whole numbers of them."""
    misfit: float = 0.0
    """In samples: how far counts are from whole numbers, those of absent classes from each other."""


def batch_scale(
    head: Head, bias_grad: Tensor, batch: int, *, exact: bool, spread: Callable[[], float] | None = None
) -> Scale | None:
    """The scale of an update, which nobody needs to know: it makes whole numbers of samples of the rows' biases.

    spread: the largest difference between classes in any feature of weight_grad, for features between 0 and 1. It
    stands in where every class is there equally often, and biases say nothing.
    """
    bands = _bands(head, bias_grad)
    if head.dump is not None:
        others = torch.arange(bands.shape[1], device=bands.device) != head.dump
        gaps, noise, step = -bands[:, others], 0.0, 1
    else:
        gaps, noise = _gaps(bands, batch)
        step = bands.shape[1]
    alone = len(bands) == 1 and head.dump is None
    if spread is not None and alone and float(bands.abs().max()) < EVEN * (widest := spread()):
        return Scale(1 / (step * widest), True) if batch % step == 0 else None
    if not exact:
        total = float(gaps.sum())
        return Scale(1 / total, True) if total > 0 else None
    lacking = torch.full((gaps.numel(),), head.dump is None)
    unit = sample_unit(gaps.flatten(), batch, step=step, lacking=lacking, error=math.hypot(WHOLE, noise))
    if unit is None:
        return None
    whole = unit.misfit < max(MOST_OFF, 3 * noise)
    return Scale(1 / (unit.size * batch), whole, unit.unique, math.hypot(unit.misfit, noise))


def _bands(head: Head, values: Tensor) -> Tensor:
    """(bands, classes): what each gate lets through that the next one does not, or all of them together."""
    gates = torch.stack(
        [
            values[rows.to(values.device)].sum(1) / slopes.to(values).sum(1)
            for rows, slopes in zip(head.rows.unbind(1), head.slopes.unbind(1), strict=True)
        ]
    )
    if head.gate is Gate.NESTED:
        return gates - torch.cat([gates[1:], torch.zeros_like(gates[:1])])
    return gates.sum(0, keepdim=True) if head.gate is Gate.SIDES and head.dump is None else gates


def _gaps(bands: Tensor, batch: int) -> tuple[Tensor, float]:
    """By how much classes lie below the highest rows of their band, and the noise of these rows in samples."""
    levels = bands.amax(1, keepdim=True)
    for _ in range(ROUNDS):
        sample = float((levels - bands).sum()) / batch
        highest = bands >= levels - HALF_SAMPLE * sample
        levels = torch.where(highest, bands, 0).sum(1, keepdim=True) / highest.sum(1, keepdim=True)
    errors = (bands - levels)[highest]
    noise = float(errors.std()) / sample if len(errors) > 2 and sample > 0 else 0.0
    return torch.where(highest, 0, levels - bands), noise


class _Rows(NamedTuple):
    """One gate's gradients, (classes, tracked features) and (classes,); `alone`: no other gate reads the samples."""

    weights: Tensor
    biases: Tensor
    batch: int
    exact: bool
    alone: bool


class _Gate(NamedTuple):
    features: Tensor
    classes: Tensor
    counts: Tensor
    noise: float
    readable: bool = True
    compared: bool = True
    """Whether there was a row to compare the others with; without one features lack a part, the same for every sum."""


def _read_gate(head: Head, rows: _Rows, *, ranged: bool) -> _Gate:
    """One gate's rows, one a class: which classes are there, and what each row is but for the common part."""
    if head.dump is not None:
        return _beside_dump(rows, head.dump)
    level, absent = _absent(rows.biases, rows.batch)
    noise = float((rows.batch * rows.biases[absent]).std()) if int(absent.sum()) > 2 else 0.0
    gaps = rows.batch * (level - rows.biases)
    # Gaps are samples: were the reference's class in the batch, each of its samples would be missing in all N.
    readable = not rows.alone or bool((gaps.sum() - rows.batch).abs() < HALF_SAMPLE * len(gaps))
    if not readable and rows.exact and ranged:
        return _without_reference(rows, noise)
    pull = rows.weights[absent].mean(0) - rows.weights
    return _answers(rows, pull, gaps, HALF_SAMPLE, noise)._replace(readable=readable)


def _beside_dump(rows: _Rows, dump: int) -> _Gate:
    """Where one class takes all the probability, which leaves the other rows nothing in common."""
    pull, gaps = 0 - rows.weights, rows.batch * (0 - rows.biases)
    pull[dump], gaps[dump] = 0, torch.nan  # it cannot be read
    others = gaps[gaps.abs() < HALF_SAMPLE]
    noise = float(others.std()) if len(others) > 2 else 0.0
    # Without a common part to subtract, what is there stands out by itself, however much of it dropout cut.
    return _answers(rows, pull, gaps, HALF_SAMPLE if rows.exact else FAINT, noise)


def _answers(rows: _Rows, pull: Tensor, gaps: Tensor, least: float, noise: float) -> _Gate:
    """The mean features of every class with at least that gap, from how its samples pull at its row."""
    loud = rows.alone and rows.exact and noise > LOUD
    if loud:  # rows say the same as biases, in thousands of entries
        total = pull.sum(0)
        gaps = rows.batch * (pull @ total) / total.square().sum()
    classes = (gaps > least).nonzero().flatten()
    whole = gaps[classes].round().clamp(min=1)
    trusted = rows.exact & (((gaps[classes] - whole).abs() < TELLING) | loud)
    divisors = torch.where(trusted, whole, gaps[classes]) / rows.batch
    return _Gate(pull[classes] / divisors.unsqueeze(1), classes, whole.long(), noise)


def _without_reference(rows: _Rows, noise: float) -> _Gate:
    """Where every class is there: that counts add up to the batch tells each of them."""
    batch, biases = rows.batch, rows.biases
    counts = (batch * ((1 + biases.sum()) / len(biases) - biases)).round()
    readable = bool(counts.min() >= 1) and int(counts.sum()) == batch
    features = -rows.weights * (batch / counts.clamp(min=1)).unsqueeze(1)
    classes = torch.arange(len(counts), device=counts.device)
    return _Gate(features, classes, counts.long(), noise, readable, compared=False)


def unlike_pixels(features: Tensor) -> bool:
    """Whether features that should be between 0 and 1 are not: what they were compared with is no reference."""
    return features.numel() > 0 and bool(((features - 0.5).abs() > 1).double().mean() > MOST_OUTSIDE)


def within_range(features: Tensor, counts: Tensor, *, extremes: bool) -> Tensor:
    """Features between 0 and 1 that were read without a reference, with what they lack.

    Their sums over a class's samples lack the same, which the range leaves little room for among many classes: the
    middle of it. Of `extremes` over windows the largest is nearly always 1, and it is the upper end.
    """
    sums = counts.to(features).view(-1, *[1] * (features.dim() - 1))
    lowest, highest = (-sums * features).amax(0), (sums * (1 - features)).amin(0)
    return features + (highest if extremes else (lowest + highest) / 2) / sums


def _absent(biases: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """The bias gradient of classes that no sample has, and which these are: all within half a sample of the highest."""
    level = biases.max()
    for _ in range(3):
        absent = biases > level - HALF_SAMPLE / batch
        level = biases[absent].mean()
    return level, absent


def _joined(head: Head, gates: list[_Gate], batch: int, *, dropped: bool) -> Reading:
    readable = [gate for gate in gates if gate.readable]
    features, classes, counts = (
        torch.cat([getattr(gate, field) for gate in readable]) if readable else getattr(gates[0], field)[:0]
        for field in ("features", "classes", "counts")
    )
    order = classes.argsort(stable=True)
    status, unread = ReadingStatus.READ, tuple[int, ...]()
    if not readable:
        status = ReadingStatus.NO_REFERENCE
        unread = tuple(range(head.rows.shape[0]))
    elif not all(gate.compared for gate in readable):
        status = ReadingStatus.WITHIN_RANGE
    elif not len(classes):
        status = ReadingStatus.NOTHING
    elif dropped or int(counts.sum()) > batch or (head.dump is None and int(counts.sum()) < batch):
        status, unread = ReadingStatus.UNSURE, () if head.dump is None else (head.dump,)
    elif int(counts.sum()) < batch:
        assert head.dump is not None
        status, unread = ReadingStatus.DUMP_LOST, (head.dump,)
    return Reading(features[order], classes[order], counts[order], unread, max(gate.noise for gate in gates), status)
