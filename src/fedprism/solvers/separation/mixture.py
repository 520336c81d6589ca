"""A dense layer's gradient as a mixture of its inputs, in as few coordinates as there are inputs.

For o = W x + b the gradient of a batch is [G | g] = A [X | 1]: G (h, d) of the weight, g (h,) of the bias, inputs X
(n, d), and column i of A (h, n) the signal dL/do of sample i. With L (h, n) an orthonormal basis of A's columns,
Y = L^T G (n, d) holds all there is to know about X. After this file nothing works on h x d numbers any more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

CLEAR_GAP = 10.0
"""Neighbouring singular values this far apart are signal and noise."""
NEARLY_FULL = 0.9
"""Some of a full layer's directions may be too weak to be counted."""
NEARLY_REACHED = 1e-6
"""Length of a unit's row of the basis, relative to the longest, below which no input reaches the unit."""
ROUNDING = 8
"""Singular values below this many rounding errors of the largest one are zero."""
MOST_SQUARE = 0.9
"""Ratio of a matrix' sides above which the spread of white noise's singular values is taken as at this one."""
LEAST_SINGULAR = 3e-8
"""Fraction of the largest singular value that is lost by squaring the gradient in double precision."""
EVEN_NOISE = 3.0
"""How many times wider than white noise's the spread of singular values may be that are taken for noise."""
MOST_OVERLAP = 0.1
"""Noise relative to the weakest input above which it drowns that one."""
SHORT_FLOATS = (torch.bfloat16, torch.float16)
"""Types that gradients are sent in to save bandwidth."""
ROWS_AT_ONCE = 256
"""Rows whose rounding errors are computed together, to bound memory."""
ABOVE_ROUNDING = 1.7
"""How far a singular value must stand out above rounding errors of known size; the largest measured was 1.6."""


class Mixture(NamedTuple):
    basis: Tensor
    """L (h, n), float64"""
    coordinates: Tensor
    """Y (n, d) = L^T G, float64"""
    bias: Tensor | None
    """L^T g (n,), float64; the unmixing row u of a source satisfies u @ bias = 1."""
    rank: int
    """How many independent inputs stand behind the gradient, whatever number was asked for."""
    overlap: float
    """The largest singular value left out, relative to the smallest one kept; 0 where all are kept."""
    noise: float
    """Standard deviation of an entry of what was left out."""

    @property
    def size(self) -> int:
        return self.basis.shape[1]

    @property
    def is_drowned(self) -> bool:
        """Whether noise is nearly as strong as the weakest input: then the space of the columns itself is uncertain."""
        return self.overlap > MOST_OVERLAP

    @property
    def live_units(self) -> int:
        """How many units any of the inputs reaches."""
        lengths = self.basis.norm(dim=1)
        return int((lengths > NEARLY_REACHED * lengths.max()).sum()) if self.size else 0

    def is_full(self, components: int | None) -> bool:
        """Whether there are as many inputs as can be told apart, so that there may be more."""
        most = min(self.live_units, self.coordinates.shape[1])
        return self.rank >= NEARLY_FULL * most and (self.rank if components is None else components) >= most


def reduce_mixture(weight_grad: Tensor, bias_grad: Tensor | None, components: int | None = None) -> Mixture:
    """The gradient in the directions that stand out most from rounding: `components` of them, or as its rank says."""
    gradient = weight_grad.double()
    # The Gram matrix instead of a singular value decomposition: one product touches the d columns. What squaring costs
    # in precision is far below the rounding of a float32 gradient.
    gram = gradient @ gradient.T
    bias = None if bias_grad is None else bias_grad.double()
    if bias is not None:
        gram = gram + torch.outer(bias, bias)
    short = sent_as(weight_grad)
    unit = torch.ones_like(gram[:, :1]) if short is None else rounding_errors(gradient, bias, short)
    values, vectors = torch.linalg.eigh(gram / (unit * unit.T))
    singular = values.flip(0).clamp(min=0).sqrt()
    live = int((gram.diagonal() > 0).sum())  # a unit that no input reaches has neither signal nor noise
    shape = weight_grad[:live].shape
    if short is None:
        rank, clear = effective_rank(singular[:live], shape, weight_grad.dtype)
    else:
        rank, clear = rank_above_rounding(singular[:live], shape)
    size = rank if components is None else min(components, rank if clear else live)
    basis = vectors.flip(1)[:, :size].contiguous()
    left = singular[size:].square().sum()
    if short is not None:
        basis = torch.linalg.qr(unit * basis).Q
        left = (gram.trace() - ((gram @ basis) * basis).sum()).clamp(min=0)
    overlap, noise = 0.0, 0.0
    if 0 < size < len(singular):
        overlap = float(singular[size] / singular[size - 1])
        noise = float((left / (len(singular) - size) / (weight_grad.shape[1] + 1)).sqrt())
    return Mixture(basis, basis.T @ gradient, None if bias is None else basis.T @ bias, rank, overlap, noise)


def effective_rank(singular: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[int, bool]:
    """How many singular values (descending) are more than rounding error or noise, and whether that is clear.

    It is clear where they fall by a wide gap to values as even as noise's, or to rounding error in `dtype`; else it is
    estimated by the threshold of Gavish and Donoho for unknown noise, "The Optimal Hard Threshold for Singular Values
    is 4/sqrt(3)", 2014.
    """
    if not len(singular) or not float(singular[0]) > 0:
        return 0, True
    floor = max(ROUNDING * torch.finfo(dtype).eps, LEAST_SINGULAR) * singular[0]
    values = singular.clamp(min=floor)
    ratio = min(shape) / max(shape)
    even = EVEN_NOISE * (1 + math.sqrt(ratio)) / (1 - math.sqrt(min(ratio, MOST_SQUARE)))
    gaps = values[:-1] / values[1:]
    # Of noise that is not the same in every unit, such as that of short floats, only the middle is a fair measure.
    middle = values[(torch.arange(1, len(values), device=values.device) + len(values)) // 2]
    clear = (gaps > CLEAR_GAP) & (values[1:] / middle < even)
    if bool(clear.any()):
        return int(torch.where(clear, gaps, 0).argmax()) + 1, True
    if float(values[-1]) <= float(floor):
        return int((values > floor).sum()), True
    threshold = (0.56 * ratio**3 - 0.95 * ratio**2 + 1.82 * ratio + 1.43) * values.median()
    noisy = int((values > threshold).sum())
    if 0 < noisy < len(values) // 2 and float(values[noisy] / values[-1]) < even:
        return noisy, False
    return len(values), False


def sent_as(weight_grad: Tensor) -> torch.dtype | None:
    """The short type that all entries survive being rounded to, as they were on their way; None where none was."""
    dtype = weight_grad.dtype
    return next((short for short in SHORT_FLOATS if torch.equal(weight_grad.to(short).to(dtype), weight_grad)), None)


def rounding_errors(gradient: Tensor, bias: Tensor | None, short: torch.dtype) -> Tensor:
    """Root mean square (h, 1) of the errors that rounding to a `short` type left in each row of [G | g]."""
    limits, means = torch.finfo(short), []
    for number, rows in enumerate(torch.split(gradient, ROWS_AT_ONCE)):
        if bias is not None:
            first = number * ROWS_AT_ONCE
            rows = torch.cat([rows, bias[first : first + len(rows)].unsqueeze(1)], dim=1)
        exponents = rows.abs().clamp(min=limits.smallest_normal).frexp().exponent
        spacing = torch.ldexp(torch.full_like(rows, limits.eps), exponents - 1)
        means.append((spacing.square() / 12).mean(1, keepdim=True))  # evenly spread over one step
    return torch.cat(means).sqrt()


def rank_above_rounding(singular: Tensor, shape: torch.Size) -> tuple[int, bool]:
    """How many singular values (descending), in units of the rounding errors, are inputs, and whether that is clear."""
    # White noise ends at the sum of the roots of both sides, and so do rounding errors in their own units.
    edge = ABOVE_ROUNDING * (math.sqrt(shape[0]) + math.sqrt(shape[1]))
    rank = int((singular > edge).sum())
    if not 0 < rank < len(singular):
        return rank, rank == 0
    return rank, bool(singular[rank - 1] > CLEAR_GAP * singular[rank])
