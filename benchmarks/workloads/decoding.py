"""MKOR's decoder: images from the maxima and minima of overlapping windows, all pixels at once or one by one.

The other is the definition in plain Python: for every pixel, the smallest maximum and the largest minimum of the
windows that hold it, one window after the other. A sample of pixels is timed and multiplied up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedprism.solvers.windows import Lattice, extremes, midpoint
from workloads.base import Comparison, Conditions, bandwidth, best_of, pictures, timed

COUNTS = {"cpu": (1, 16, 100), "cuda": (1, 100, 1000)}
SAMPLE = 2000
"""Pixels of one image and one colour that the loop answers."""
VGG16 = Lattice(top=0, pitch=4, size=32, height=224, width=224)
SHAPE = (56, 56)
"""The windows of VGG-16 at 224 pixels."""


def decoding(conditions: Conditions) -> Iterator[Comparison]:
    shown, rate = pictures(16, 224, conditions.device), bandwidth(conditions.device)
    for count in COUNTS[conditions.device.type]:
        images = shown.repeat(-(-count // len(shown)), 1, 1, 1)[:count]
        maxima, minima = extremes(images, VGG16, SHAPE)
        midpoint(maxima[:1], minima[:1], VGG16)  # warm
        ours, found = best_of(3, conditions.device, lambda highs=maxima, lows=minima: midpoint(highs, lows, VGG16))
        places = torch.randint(224, (SAMPLE, 2), generator=torch.Generator().manual_seed(0))
        seconds, values = timed(
            torch.device("cpu"), lambda h=maxima, lo=minima, at=places: _pixels(h[0, 0], lo[0, 0], at)
        )
        rows, columns = places.unbind(1)
        off = (found.images[0, 0].cpu()[rows, columns] - Tensor(values)).abs().max()
        yield Comparison(
            workload="MKOR decode",
            size=f"{count} image{'s' if count > 1 else ''}, 224 px",
            ours=ours,
            quality=f"differs by at most {float(off):.0e}",
            other="plain Python, pixel by pixel",
            theirs=seconds / SAMPLE * images.numel(),
            # Windows are read and pixels written, once each.
            share_of_limit=sum(one.nbytes for one in (maxima, minima, images)) / ours / rate,
            extrapolated=True,
            note=f"{SAMPLE:,} pixels run",
        )


def _pixels(maxima: Tensor, minima: Tensor, places: Tensor) -> list[float]:
    highs, lows = maxima.tolist(), minima.tolist()
    return [_pixel(highs, lows, y, x) for y, x in places.tolist()]


def _pixel(maxima: list[list[float]], minima: list[list[float]], y: int, x: int) -> float:
    upper, lower = 1.0, 0.0
    for row in _holding(y, SHAPE[0]):
        for column in _holding(x, SHAPE[1]):
            upper = min(upper, maxima[row][column])
            lower = max(lower, minima[row][column])
    return (upper + lower) / 2


def _holding(place: int, count: int) -> range:
    """The windows that hold a pixel, along one axis."""
    first = max(0, -((VGG16.size - 1 - place) // VGG16.pitch))
    return range(first, min(count, place // VGG16.pitch + 1))
