"""What the row space of a layer's gradient leaves open of the samples that fed the layer.

The gradient of a matrix that is applied at several places is the sum over places of error times what was fed there.
With fewer places than rows and columns its row space is the span of what was fed; with the gradient of a bias beside
it, of what was fed with a one at its end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NOISE = 8 * torch.finfo(torch.float32).eps
"""Singular values of a gradient below this part of the largest are rounding, for each row or column's square root."""
INDEPENDENT = 1e-5
"""Singular values of the system below this part of the largest leave a direction open: rounding of the span."""
MOST_UNKNOWN = 1_500
"""Coordinates of all places of a sample up to which overlaps between places are solved for."""


class Fed(NamedTuple):
    """What a layer is fed at each of its places: slope * entries + offset, each (places, features)."""

    entries: Tensor
    """Numbers of the entries in a flattened sample."""
    slope: Tensor
    offset: Tensor


class OpenSpace(NamedTuple):
    """Every sample is origin + some combination of the directions."""

    origin: Tensor
    """(entries,)"""
    directions: Tensor
    """(open, entries)"""
    rank: int
    """Of the gradient."""


def open_space(gradient: Tensor, fed: Fed, size: int, *, with_bias: bool, most: int) -> OpenSpace | None:
    """The samples of `size` entries that a layer's gradient (units, features, with a bias one more) allows.

    `most`: how many places all samples have together, the largest rank without noise. None if the gradient spans
    nothing or everything, if it does not reach every entry, or if the places overlap in too many coordinates.

    What every place is fed is a combination of the rows; a one at its end, and equal values where places overlap, are
    linear equations for the coordinates.
    """
    gradient = gradient.double()
    _, sizes, rows = torch.linalg.svd(gradient, full_matrices=False)
    rank = min(most, int((sizes > sizes[0] * NOISE * max(gradient.shape) ** 0.5).sum()))
    places, features = fed.entries.shape
    if not 0 < rank < gradient.shape[1] or rank * places > MOST_UNKNOWN:
        return None
    rows = rows[:rank]
    live = fed.slope != 0
    values = (torch.arange(size)[:, None] == fed.entries[live]).any(1)
    if not bool(values.all()):
        return None
    # One row for every value that is fed: the entry as a function of the coordinates (places x rank) of its place.
    slopes = fed.slope[live].double()
    place, feature = live.nonzero().T
    reading = torch.zeros(len(place), places, rank, dtype=torch.float64)
    reading[torch.arange(len(place)), place] = rows[:, :features].T[feature] / slopes[:, None]
    reading = reading.flatten(1)
    shift = -fed.offset[live].double() / slopes
    first = _first_of_each(fed.entries[live], size)
    again = torch.ones(len(place), dtype=torch.bool)
    again[first] = False
    same = first[fed.entries[live][again]]
    equations, sides = [reading[again] - reading[same]], [shift[same] - shift[again]]
    constants = (~live).nonzero().T
    if len(constants[0]):
        system = torch.zeros(len(constants[0]), places, rank, dtype=torch.float64)
        system[torch.arange(len(constants[0])), constants[0]] = rows[:, :features].T[constants[1]]
        equations.append(system.flatten(1))
        sides.append(fed.offset[~live].double())
    if with_bias:
        equations.append(torch.kron(torch.eye(places, dtype=torch.float64), rows[:, -1:].T.contiguous()))
        sides.append(torch.ones(places, dtype=torch.float64))
    coordinates, open_directions = _solutions(torch.cat(equations), torch.cat(sides))
    reading, shift = reading[first], shift[first]
    return OpenSpace(reading @ coordinates + shift, (reading @ open_directions.T).T, rank)


def _first_of_each(entries: Tensor, size: int) -> Tensor:
    """Where each number occurs first."""
    first = torch.full((size,), len(entries))
    return first.scatter_reduce(0, entries, torch.arange(len(entries)), "amin")


def _solutions(system: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    """One solution of a linear system, and the directions (open, unknowns) in which there are others."""
    if not len(system):
        return torch.zeros(system.shape[1], dtype=torch.float64), torch.eye(system.shape[1], dtype=torch.float64)
    # Only products with the unknowns on both sides are needed, and there are few of these.
    _, sizes, right = torch.linalg.svd(torch.linalg.qr(system, mode="r").R, full_matrices=True)
    determined = int((sizes > INDEPENDENT * sizes[0]).sum())
    origin = torch.linalg.lstsq(system @ right[:determined].T, side[:, None]).solution[:, 0]
    return right[:determined].T @ origin, right[determined:]
