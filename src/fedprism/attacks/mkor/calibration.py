"""Pixels from features behind batch norm, which multiplies and shifts every channel by what only the clients know.

The paper says that the magnitude can be calibrated through the histogram. All channels of a colour hold the same thing
of the same images, on lattices some pixels apart, so that their histograms over all answers are one but for gain and
offset. That ties them together; the darkest and the brightest window of all of them are then taken to be black and
white.

A batch of twenty images has black and white in nearly every channel, and a channel's own ends are more exact than
anything fitted. So ends that the common histogram confirms are kept. Fitting the histogram to that of other, public
images was tried and is worse: batches differ more from each other than their ends do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 101
"""Quantiles by which two histograms are compared."""
NEAR = 0.08
"""An end this close to the common one, relative to the whole range, is black or white itself."""


def calibrated(maps: Tensor, phases: int) -> Tensor:
    """maps (n, polarities, colours, rows, columns), a channel every `phases` rows and columns, to between 0 and 1.

    Channels of one polarity and colour are calibrated together, each with a gain and an offset of its own.
    """
    shape = maps.shape
    down, across = (-(-size // phases) for size in shape[3:])
    padded = F.pad(maps, (0, phases * across - shape[4], 0, phases * down - shape[3]), value=torch.nan)
    split = padded.view(*shape[:3], down, phases, across, phases).movedim((4, 6), (3, 4))
    channels = split.movedim(0, 5)  # (polarities, colours, phases, phases, rows, n, columns)
    aligned = _aligned(channels.flatten(4)).view(channels.shape)
    back = aligned.movedim(5, 0).movedim((3, 4), (4, 6)).flatten(5, 6).flatten(3, 4)
    return back[..., : shape[3], : shape[4]]


def _aligned(values: Tensor) -> Tensor:
    """(polarities, colours, phases, phases, values), each channel with its own gain and offset, to between 0 and 1."""
    quantiles = _quantiles(values)
    middle, spread = quantiles.mean(-1, keepdim=True), quantiles.std(-1, keepdim=True)
    spread = spread.clamp(min=torch.finfo(values.dtype).tiny)
    values, quantiles = (values - middle) / spread, (quantiles - middle) / spread
    common = quantiles.mean((2, 3), keepdim=True)
    gain = (quantiles * common).sum(-1, keepdim=True) / quantiles.square().sum(-1, keepdim=True).clamp(min=1e-12)
    values, ends = gain * values, gain * quantiles[..., [0, -1]]
    black, white = ends[..., :1].amin((2, 3), keepdim=True), ends[..., 1:].amax((2, 3), keepdim=True)
    near = NEAR * (white - black)
    low = torch.where(ends[..., :1] < black + near, ends[..., :1], black)
    high = torch.where(ends[..., 1:] > white - near, ends[..., 1:], white)
    return (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)


def _quantiles(values: Tensor) -> Tensor:
    """LEVELS quantiles of each channel, the first and the last its ends; NaN, where no window is, does not count."""
    ordered = values.sort(-1).values  # NaN comes last
    counts = (~values.isnan()).sum(-1, keepdim=True)
    places = torch.linspace(0, 1, LEVELS, device=values.device) * (counts - 1).clamp(min=0)
    return ordered.gather(-1, places.round().long())
