"""Images from the maxima and minima, or from the means, of overlapping windows on a lattice.

The paper of MKOR (Wang, Velipasalar, Gursoy, 2024) knows the maximum and the minimum of every window. A pixel is at
most the smallest maximum of the windows that hold it, a grey-scale closing, and at least the largest minimum, an
opening; the paper answers with the middle of the two.

`smoothest` goes on from there: of all images between the two it looks for one whose windows have exactly those maxima
and minima, and which is smooth. Minimised, by Adam with a rate that falls along a cosine, for each image x:

    smoothness * (roughness of x + chroma * roughness of x less its grey image) + mean |extremes of x - the given|

where roughness is the mean squared horizontal plus the mean squared vertical difference. Where the extremes of the
blurred grey image are known too (`Blurred`), their distance is added. They say where between the bounds the image lies
on average, which neither sharp extremes nor smoothness do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprism.runtime.memory import together

MEANS_SMOOTHNESS = 5e-4
"""Factor for smoothness where means are known, which say far more about each pixel than extremes do."""
DISAGREES = 1e-3
"""Pixel value above which a window's minimum cannot belong to a maximum of 0."""
CROSSING = 1e-3
"""Pixel value by which a lower bound must be above an upper one to have crossed it."""
SCALES = (8, 4, 2, 1)
"""How many pixels are one, coarsest first; only divisors of the lattice's and the image's sizes are used."""
SOFTENING = 5
"""Side, in pixels, of the squares that the softened midpoint averages: in the paper's code."""
UNBENDING = 1e-6
"""How close to 0 and 1 means may come before a sigmoid is undone."""


class Lattice(NamedTuple):
    """Windows of `size` x `size` pixels that start at top + pitch * (0, 1, 2, ...), down and across alike.

    They may reach beyond the image, (height, width) pixels large, and have then the extremes of what is inside.
    """

    top: int
    pitch: int
    size: int
    height: int
    width: int

    def beyond(self, shape: tuple[int, int]) -> tuple[int, int, int, int]:
        """Padding (left, right, top, bottom) with which an image holds exactly (rows, columns) windows."""
        bottom, right = (
            self.pitch * (count - 1) + self.size + self.top - side
            for count, side in zip(shape, (self.height, self.width), strict=True)
        )
        return -self.top, right, -self.top, bottom

    @property
    def cell(self) -> int:
        """The side of the squares in which no window starts or ends."""
        return math.gcd(self.pitch, self.size)


class Blurred(NamedTuple):
    """The extremes of the grey image's windows after some blurring, (n, 1, rows, columns), for the same lattice.

    blurs: how many means of 3 x 3, black beyond the border, come before each halving by a maximum, and how many after
    the last one, where the lattice's pitch is reached. The minima are one less the maxima of the inverted image.
    """

    maxima: Tensor
    minima: Tensor
    blurs: tuple[int, ...]

    def distance(self, images: Tensor, lattice: Lattice) -> Tensor:
        """(n,) how far those of the images, on which the lattice has perhaps been shrunk, are from these."""
        blurs = self.blurs[len(self.blurs) - lattice.pitch.bit_length() :]  # pixels that are one have nothing to blur
        maxima, minima = blurred_extremes(images, blurs, lattice, (self.maxima.shape[2], self.maxima.shape[3]))
        return ((maxima - self.maxima).abs() + (minima - self.minima).abs()).flatten(1).mean(1)


def blurred_extremes(
    images: Tensor, blurs: Sequence[int], lattice: Lattice, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The maxima and minima that `Blurred` holds, (n, 1, *shape), of images (n, colours, height, width)."""
    grey = images.mean(1, keepdim=True)
    both = torch.cat([grey, 1 - grey], dim=1)
    for number, count in enumerate(blurs):
        both = F.max_pool2d(both, 2) if number else both
        for _ in range(count):
            both = F.avg_pool2d(both, 3, stride=1, padding=1)
    cells = Lattice(0, 1, lattice.size // lattice.pitch, both.shape[2], both.shape[3])
    highest = _highest(both, cells, shape)
    return highest[:, :1], 1 - highest[:, 1:]


class WindowStatus(StrEnum):
    MIDPOINT = "the middle of the tightest bounds"
    INTERPOLATED = "the middle of the tightest bounds in the lattice's squares, interpolated between them"
    MEANS = "each pixel has the mean of a window around it"
    FITTED = "the smoothest image with nearly the given windows; its misfit says how nearly"
    CROSSED = "some upper bounds are below lower ones; the middle is used"


class Decoded(NamedTuple):
    images: Tensor
    """(n, colours, height, width) in [0, 1]"""
    misfit: Tensor
    """(n,) mean distance of the windows' extremes, or means, from the given ones"""
    status: WindowStatus


def midpoint(maxima: Tensor, minima: Tensor, lattice: Lattice) -> Decoded:
    """The middle between the closing and the opening. maxima, minima (n, colours, rows, columns)."""
    lower, upper = bounds(maxima, minima, lattice)
    images = ((lower + upper) / 2).clamp(0, 1)
    return Decoded(images, _misfit(images, maxima, minima, lattice), _status(lower, upper, WindowStatus.MIDPOINT))


def softened_midpoint(maxima: Tensor, minima: Tensor, lattice: Lattice) -> Decoded:
    """The middle of the bounds, each pixel then the mean of 5 x 5: in the paper's code, not in its text."""
    sharp = midpoint(maxima, minima, lattice)
    images = F.avg_pool2d(F.pad(sharp.images, (SOFTENING // 2,) * 4, mode="replicate"), SOFTENING, stride=1)
    return Decoded(images, _misfit(images, maxima, minima, lattice), sharp.status)


def interpolated_midpoint(maxima: Tensor, minima: Tensor, lattice: Lattice) -> Decoded:
    """The middle of the bounds in the centre of each cell, between these cubic interpolation within the bounds."""
    lower, upper = bounds(maxima, minima, lattice)
    middle, cell = ((lower + upper) / 2).clamp(0, 1), lattice.cell
    first = lattice.top % cell and lattice.top % cell - cell  # where the first cell starts, perhaps beyond the image
    rows, columns = (
        torch.arange(first + cell // 2, side + cell // 2, cell, device=middle.device).clamp(0, side - 1)
        for side in (lattice.height, lattice.width)
    )
    smooth = F.interpolate(middle[:, :, rows][:, :, :, columns], scale_factor=cell, mode="bicubic")
    smooth = smooth[:, :, -first : lattice.height - first, -first : lattice.width - first]
    images = torch.minimum(torch.maximum(smooth, torch.minimum(lower, middle)), torch.maximum(upper, middle))
    return Decoded(images, _misfit(images, maxima, minima, lattice), _status(lower, upper, WindowStatus.INTERPOLATED))


def _status(lower: Tensor, upper: Tensor, status: WindowStatus) -> WindowStatus:
    return WindowStatus.CROSSED if bool((lower > upper + CROSSING).any()) else status


def without_removed(maxima: Tensor, minima: Tensor) -> tuple[Tensor, Tensor]:
    """Extremes with those of windows that were cut out of the answer, (n, colours, rows, columns), set to 1 and 0.

    They read 0 for the maximum, or 1 for the minimum, in every image, and the other extreme does not agree.
    """
    dark = (maxima == 0).all(0) & (minima > DISAGREES).any(0)
    bright = (minima == 1).all(0) & (maxima < 1 - DISAGREES).any(0)
    return maxima.masked_fill(dark, 1.0), minima.masked_fill(bright, 0.0)


def bounds(maxima: Tensor, minima: Tensor, lattice: Lattice) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value each pixel may have, (n, colours, height, width); 0 and 1 where no window is."""
    upper = -_spread(-maxima.clamp(0, 1), lattice, -1.0)
    lower = _spread(minima.clamp(0, 1), lattice, 0.0)
    return lower, upper


def _spread(values: Tensor, lattice: Lattice, outside: float) -> Tensor:
    """For every pixel the largest value of the windows that hold it, and `outside` where none does."""
    cell = lattice.cell
    reach, stride = lattice.size // cell, lattice.pitch // cell
    rows, columns = ((count - 1) * stride + 1 for count in values.shape[2:])
    placed = values
    if stride > 1:  # windows do not start in every cell
        placed = values.new_full((*values.shape[:2], rows, columns), outside)
        placed[:, :, ::stride, ::stride] = values
    margin = reach - 1
    placed = F.pad(placed, (margin,) * 4, value=outside)
    placed = F.max_pool2d(F.max_pool2d(placed, (reach, 1), stride=1), (1, reach), stride=1)
    pixels = placed.repeat_interleave(cell, 2).repeat_interleave(cell, 3)
    down, across = lattice.height - pixels.shape[2] - lattice.top, lattice.width - pixels.shape[3] - lattice.top
    return F.pad(pixels, (lattice.top, across, lattice.top, down), value=outside)


def extremes(images: Tensor, lattice: Lattice, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The maxima and the minima of the windows, (n, colours, *shape): what `bounds` starts from."""
    return _highest(images, lattice, shape), -_highest(-images, lattice, shape)


def _highest(images: Tensor, lattice: Lattice, shape: tuple[int, int]) -> Tensor:
    """Cell by cell first: far fewer comparisons than window by window."""
    cell = lattice.cell
    reach, stride = lattice.size // cell, lattice.pitch // cell
    padded = F.pad(images, lattice.beyond(shape), value=-torch.inf)
    cells = F.max_pool2d(padded, cell) if cell > 1 else padded
    return F.max_pool2d(F.max_pool2d(cells, (reach, 1), stride=(stride, 1)), (1, reach), stride=(1, stride))


def _misfit(images: Tensor, maxima: Tensor, minima: Tensor, lattice: Lattice) -> Tensor:
    high, low = extremes(images, lattice, (maxima.shape[2], maxima.shape[3]))
    return ((high - maxima).abs() + (low - minima).abs()).flatten(1).mean(1) / 2


@dataclass(frozen=True, kw_only=True)
class Smoothest:
    """How the smoothest image is looked for: `iterations` at each scale, from one pixel per cell to all."""

    iterations: int = 100
    lr: float = 0.03
    smoothness: float = 20.0
    chroma: float = 5.0
    """How much more the differences between colours weigh, which change less than brightness does."""
    middle: float = 0.0
    """How much of the answer is the middle of the bounds instead; 0.5 suits detail far smaller than the windows."""
    blurred: float = 3.0
    """How much the blurred image's extremes weigh, where they are known."""
    microbatch: int = 100
    """Most images worked on at a time."""

    def __call__(self, maxima: Tensor, minima: Tensor, lattice: Lattice, blurred: Blurred | None = None) -> Decoded:
        """The smoothest image between the bounds whose windows have these maxima and minima."""
        lower, upper = bounds(maxima, minima, lattice)
        step, chunks = together(min(len(maxima), self.microbatch)), list[Tensor]()
        for rows in (slice(first, first + step) for first in range(0, len(maxima), step)):
            edges = blurred and Blurred(blurred.maxima[rows], blurred.minima[rows], blurred.blurs)
            chunks.append(self._solve(maxima[rows], minima[rows], (lower[rows], upper[rows]), lattice, edges))
        images = torch.cat(chunks)
        return Decoded(images, _misfit(images, maxima, minima, lattice), _status(lower, upper, WindowStatus.FITTED))

    def _solve(
        self, maxima: Tensor, minima: Tensor, box: tuple[Tensor, Tensor], lattice: Lattice, blurred: Blurred | None
    ) -> Tensor:
        lower, upper = box
        middle = (lower + upper) / 2
        lower, upper = torch.minimum(lower, middle), torch.maximum(upper, middle)
        images: Tensor | None = None
        sizes = math.gcd(lattice.cell, lattice.top, lattice.height, lattice.width)
        for scale in (scale for scale in SCALES if sizes % scale == 0):
            small = Lattice(*(size // scale for size in lattice))
            low, high = (bound[:, :, ::scale, ::scale] for bound in (lower, upper))
            start = middle[:, :, ::scale, ::scale]
            if images is not None:
                start = F.interpolate(images, low.shape[2:], mode="bilinear", align_corners=False).clamp(low, high)

            def distance(candidates: Tensor, at: Lattice = small) -> Tensor:
                gap = 2 * _misfit(candidates, maxima, minima, at)
                return gap if blurred is None else gap + self.blurred * blurred.distance(candidates, at)

            # Neighbours are `scale` pixels apart: the same slope is the same roughness at every scale.
            images = self.fit(start, distance, (low, high), self.smoothness / scale**2)
        assert images is not None
        return (1 - self.middle) * images + self.middle * middle

    def fit(
        self, start: Tensor, distance: Callable[[Tensor], Tensor], box: tuple[Tensor, Tensor], smoothness: float
    ) -> Tensor:
        """The best iterate of each image, from `start`, by smoothness times roughness plus distance(images) (n,)."""
        images = start.clone().requires_grad_()
        adam = torch.optim.Adam([images], lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, self.iterations)
        best, least = start.clone(), start.new_full((len(start),), torch.inf)
        for _ in range(self.iterations + 1):
            colour = images - images.mean(1, keepdim=True)
            objective = smoothness * (roughness(images) + self.chroma * roughness(colour)) + distance(images)
            with torch.no_grad():
                better = objective < least
                least = torch.where(better, objective, least)
                best = torch.where(better.view(-1, 1, 1, 1), images, best)
            (images.grad,) = torch.autograd.grad(objective.sum(), [images])
            adam.step()
            schedule.step()
            with torch.no_grad():
                images.clamp_(*box)
        return best


def roughness(images: Tensor) -> Tensor:
    """(n,) mean squared difference of neighbours, down and across."""
    down, across = images.diff(dim=2), images.diff(dim=3)
    return down.square().flatten(1).mean(1) + across.square().flatten(1).mean(1)


class Bend(NamedTuple):
    """One layer on the way of a mean: a sigmoid or nothing, then means of `kernel` x `kernel` values `apart` pixels."""

    sigmoid: bool
    pools: tuple[tuple[int, int], ...]


def window_means(images: Tensor, lattice: Lattice, shape: tuple[int, int], bends: Sequence[Bend]) -> Tensor:
    """What average pools make of every window, (n, colours, *shape), still bent; outside of the image all is 0."""
    values = F.pad(images, lattice.beyond(shape))
    for bend in bends:
        values = torch.sigmoid(values) if bend.sigmoid else values
        for kernel, apart in bend.pools:
            reach = (kernel - 1) * apart
            rows, columns = values.shape[2] - reach, values.shape[3] - reach
            values = torch.stack([values[:, :, i * apart : i * apart + rows] for i in range(kernel)]).mean(0)
            values = torch.stack([values[:, :, :, i * apart : i * apart + columns] for i in range(kernel)]).mean(0)
    return values[:, :, :: lattice.pitch, :: lattice.pitch]


def straightened(means: Tensor, bends: Sequence[Bend]) -> Tensor:
    """Means with every sigmoid on their way undone, as if it had bent the mean and not its parts."""
    for bend in bends:
        means = torch.logit(means.clamp(UNBENDING, 1 - UNBENDING)) if bend.sigmoid else means
    return means


def spread_means(means: Tensor, lattice: Lattice, bends: Sequence[Bend]) -> Decoded:
    """Each pixel has the mean of the window around it, beyond the windows that of the nearest one."""
    images = _nearest(straightened(means, bends), lattice).clamp(0, 1)
    return Decoded(images, _means_misfit(images, means, lattice, bends), WindowStatus.MEANS)


def smoothest_means(means: Tensor, lattice: Lattice, bends: Sequence[Bend], settings: Smoothest) -> Decoded:
    """The smoothest image in [0, 1] whose windows have these means."""
    start = spread_means(means, lattice, bends).images

    def distance(images: Tensor) -> Tensor:
        return _means_misfit(images, means, lattice, bends)

    box = torch.zeros_like(start), torch.ones_like(start)
    images = settings.fit(start, distance, box, settings.smoothness * MEANS_SMOOTHNESS)
    return Decoded(images, _means_misfit(images, means, lattice, bends), WindowStatus.FITTED)


def _means_misfit(images: Tensor, means: Tensor, lattice: Lattice, bends: Sequence[Bend]) -> Tensor:
    answer = window_means(images, lattice, (means.shape[2], means.shape[3]), bends)
    return (straightened(answer, bends) - straightened(means, bends)).abs().flatten(1).mean(1)


def _nearest(means: Tensor, lattice: Lattice) -> Tensor:
    rows, columns = (
        ((torch.arange(side, device=means.device) - lattice.top - lattice.size // 2) / lattice.pitch)
        .round()
        .long()
        .clamp(0, count - 1)
        for side, count in ((lattice.height, means.shape[2]), (lattice.width, means.shape[3]))
    )
    return means[:, :, rows][:, :, :, columns]
