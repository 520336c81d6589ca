"""Labels out of the gradient of the last dense layer.

With softmax cross-entropy the bias gradient of class j is the mean over the batch of p_j - [label = j]: absent classes
are positive, present ones negative as long as the batch is small against the number of classes.

Zhao, Mopuri, Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020 (the sign rule, one sample);
Yin et al., "See through Gradients", CVPR 2021 (unique labels of a batch);
Geiping et al., the `breaching` framework (repeated labels by subtracting the mean impact of one sample).
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

CROWDED_RATIO = 4
"""With fewer classes than this many times the batch, single samples no longer stand out and the rules may fail."""

ROUNDING = 1e-4
"""What of the largest entry of a gradient may be rounding, in the difference of two models too."""
ONE_MORE = 1e-3
"""Samples above a whole number that count as one more: more than rounding."""
SCALES = 2000
"""How many scales of a gradient are compared."""
SMALLEST_SCALE = 1e-3
"""The smallest scale that is tried, relative to the largest at which no count is negative."""
COUNT_ERROR = 0.2
"""In samples: how far rounding, noise and small errors typically move the count of a class."""
PREDICTION_ERROR = 0.04
"""Relative error of an estimated mean prediction, of random networks on photographs and digits."""
LABEL_SPREADS = (1.0, 30.0, 1e5)
"""Dirichlet concentrations of the labels that are held possible, from a few classes to all classes alike."""
MOST_OFF = 0.05
"""In samples: how far from a whole number rounding leaves a count at most, in half precision too."""


class LabelStatus(StrEnum):
    TRUSTED = "the labels follow from the signs and sizes of the gradient"
    ESTIMATED = "the labels are counted with estimates of the mean prediction and the scale; single counts may be off"
    CROWDED = "the batch is comparable to the number of classes, so labels may be missed or invented"
    INCONSISTENT = "none or more of the classes are negative than there are samples: the labels are a guess"
    PRESENCE_ONLY = "the batch size is unknown, so only which classes are present is known, not how often"
    UNKNOWN_LOSS = "the sign rule holds for softmax cross-entropy only; no labels are given for another loss"


class LabelRecovery(NamedTuple):
    labels: Tensor
    """(samples,) class numbers in ascending order, repeated as often as they occur; empty where no rule applies."""
    counts: Tensor
    """(classes,) how often each class occurs."""
    status: LabelStatus


def unique_labels(class_grad: Tensor) -> LabelRecovery:
    """The classes present, by the sign rule.

    class_grad (classes,): the last layer's bias gradient, or the row sums of its weight gradient behind a ReLU.
    """
    counts = (class_grad < 0).long()
    return LabelRecovery(counts.nonzero().flatten(), counts, LabelStatus.PRESENCE_ONLY)


def label_counts(
    class_grad: Tensor,
    batch_size: int | None = None,
    *,
    probabilities: Tensor | None = None,
    scale: float | None = None,
    loss: str = "cross_entropy",
) -> LabelRecovery:
    """How often each class occurs in the batch.

    class_grad as in `unique_labels`, in any scale. With `probabilities` (classes,), an estimate of the mean prediction,
    the counts are batch_size * (probabilities - scale * class_grad), and at least -batch_size * scale * class_grad;
    class_grad must then be the bias gradient, and the scale is the likeliest unless it is given. Without
    `probabilities`, every negative class holds a sample, and those left over go, one by one, to the class that stays
    most negative after each sample's mean impact is taken off.
    """
    if loss != "cross_entropy":
        nothing = torch.zeros(len(class_grad), dtype=torch.long)
        return LabelRecovery(nothing[:0], nothing, LabelStatus.UNKNOWN_LOSS)
    if batch_size is None:
        return unique_labels(class_grad)
    if probabilities is not None:
        class_grad, probabilities = class_grad.detach().double().cpu(), probabilities.detach().double().cpu()
        scale = likeliest_scale(class_grad, batch_size, probabilities) if scale is None else scale
        present = -batch_size * scale * class_grad
        counts = _round_to_sum(present + batch_size * probabilities, present, batch_size)
        status = LabelStatus.ESTIMATED
    else:
        counts, consistent = _bias_corrected(class_grad, batch_size)
        crowded = len(class_grad) < CROWDED_RATIO * batch_size
        status = LabelStatus.CROWDED if crowded else LabelStatus.TRUSTED
        status = status if consistent else LabelStatus.INCONSISTENT
    return LabelRecovery(torch.repeat_interleave(torch.arange(len(counts)), counts), counts, status)


def likeliest_scale(class_grad: Tensor, batch_size: int, probabilities: Tensor) -> float:
    """What a bias gradient was divided by, if the mean prediction is about `probabilities`; both (classes,).

    Counts of samples are not negative, close to whole numbers, and some counts are likelier than others: the answer is
    the mean over all scales by how well they agree with that.
    """
    positive = class_grad > 0
    if batch_size < 1 or not bool(positive.any()):
        return 1.0
    if len(class_grad) >= CROWDED_RATIO * batch_size:  # most classes are absent, and each of them tells the scale
        return float((probabilities / class_grad)[positive].median())
    errors = (COUNT_ERROR**2 + (PREDICTION_ERROR * batch_size * probabilities).square()).sqrt()
    largest = ((probabilities + errors / batch_size) / class_grad)[positive].min()
    scales = largest * torch.logspace(math.log10(SMALLEST_SCALE), 0, SCALES, dtype=class_grad.dtype)
    counts = batch_size * (probabilities - scales.unsqueeze(1) * class_grad)
    whole = counts.round().clamp(min=0)
    misfits = ((counts - whole) / errors).square().sum(1) / 2
    spreads = [
        _log_chance(whole, torch.full_like(probabilities, spread / len(probabilities))) for spread in LABEL_SPREADS
    ]
    score = torch.stack(spreads).logsumexp(0) - misfits + (len(class_grad) - 2) * scales.log()
    return float((score.softmax(0) * scales).sum())


class SampleUnit(NamedTuple):
    size: float
    """What one sample adds, in the unit of the gaps."""
    misfit: float
    """The largest distance of a gap from a whole number of samples."""
    unique: bool
    """Whether no other size makes whole numbers of the gaps."""


def sample_unit(gaps: Tensor, batch_size: int, *, step: int, lacking: Tensor, error: float) -> SampleUnit | None:
    """What one sample adds to gaps (n,), each of which is a whole number of samples; None where all are zero.

    All together they are the batch less a multiple of `step` samples: as many are missing from every gap that is
    `lacking` (n,), or have a class without a gap where none is. Of the sizes that make whole numbers of the gaps which
    add up, with this standard error in samples, the one with the likeliest counts is chosen.
    """
    gaps, lacking = gaps.detach().double().cpu(), lacking.cpu()
    total = float(gaps.sum())
    if not total > 0:
        return None
    units, scores = [], []
    for hidden in range(0, batch_size, step):
        multiples = gaps * ((batch_size - hidden) / total)
        whole = _round_to_sum(multiples, torch.zeros_like(multiples), batch_size - hidden)
        misfits = (multiples - whole).abs()
        counts = whole + lacking * (hidden // step)
        # Of the multinomial probability what depends on the counts.
        ways = -torch.lgamma(counts + 1).sum() - (0 if bool(lacking.any()) else math.lgamma(hidden + 1))
        scores.append(float(ways - (misfits / error).square().sum() / 2))
        units.append(SampleUnit(total / (batch_size - hidden), float(misfits.max()), True))
    best = units[max(range(len(units)), key=scores.__getitem__)]
    return best._replace(unique=sum(unit.misfit <= max(best.misfit, MOST_OFF) for unit in units) == 1)


def _log_chance(counts: Tensor, concentration: Tensor) -> Tensor:
    """The logarithm of the Dirichlet-multinomial probability of counts (n, classes)."""
    total, pseudo = counts.sum(1), concentration.sum()
    ways = torch.lgamma(total + 1) + torch.lgamma(pseudo) - torch.lgamma(total + pseudo)
    each = torch.lgamma(counts + concentration) - torch.lgamma(concentration) - torch.lgamma(counts + 1)
    return ways + each.sum(1)


def sole_label(weight_grad: Tensor) -> int | None:
    """The class of all samples, where the last layer's weight gradient (classes, features) says that they share one.

    Where features are not negative, only a sample of a class brings negative entries into the class's row.
    """
    negative = (weight_grad < -ROUNDING * weight_grad.abs().max()).any(1).nonzero().flatten()
    return int(negative) if len(negative) == 1 else None


def _bias_corrected(class_grad: Tensor, batch_size: int) -> tuple[Tensor, bool]:
    left = class_grad.detach().double().cpu().clone()
    impact = left[left < 0].sum() / batch_size
    counts = torch.zeros(len(left), dtype=torch.long)
    present = (left < 0).nonzero().flatten()
    consistent = 0 < len(present) <= batch_size
    present = present[left[present].argsort()][:batch_size]
    counts[present] = 1
    left[present] -= impact
    for _ in range(batch_size - len(present)):
        strongest = left.argmin()
        counts[strongest] += 1
        left[strongest] -= impact
    return counts, consistent


def _round_to_sum(values: Tensor, least: Tensor, total: int) -> Tensor:
    """Whole numbers close to `values`, none below `least` where that can be, that add up to `total`."""
    certain = (least - ONE_MORE).ceil().clamp(min=0)
    if certain.sum() > total:  # noise
        certain = torch.zeros_like(certain)
    left = total - int(certain.sum())
    beyond = (values - certain).clamp(min=0)
    beyond = beyond * left / beyond.sum() if beyond.sum() > 0 else torch.full_like(beyond, left / len(beyond))
    counts = (certain + beyond.floor()).long()
    largest = (beyond - beyond.floor()).argsort(descending=True)[: total - int(counts.sum())]
    counts[largest] += 1
    return counts
