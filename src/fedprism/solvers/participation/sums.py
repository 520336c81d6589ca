"""Reading the sums (rounds, parameters) in blocks: they may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 24
"""Numbers that are held in double precision at a time: 128 MiB."""
LONG = 1500
"""Rounds from which on no matrix of all pairs of rounds is made: its spectrum, 18 times, would take over ten
seconds."""
SILENCE = 1e-6
"""Length of a sum, relative to the longest, up to which nothing may be in it but what masks leave when they cancel."""


class Sums:
    """The sums, read once: a sketch (rounds, width) that keeps their column space, and each round's length.

    A column of the sketch is a random combination of every width-th parameter; where there are no more parameters than
    columns, they are its columns. `gram` and `doubled` average over all parameters instead. That is worth its price
    under noise only; where the sums can be read but once, the Gram matrix comes along with the sketch, or, of more than
    `LONG` rounds, the sketch stands in for the sums.
    """

    def __init__(self, aggregates: Any, device: torch.device, *, width: int, seed: int) -> None:
        self._aggregates, self._device = aggregates, device
        self._gram: Tensor | None = None
        self.parameters = 0
        self.dtype = torch.float64
        self.once = not may_be_read_again(aggregates)
        rng = torch.Generator().manual_seed(seed)
        sketch: Tensor | None = None
        for block, dtype in doubled_blocks(aggregates, device):
            self.dtype = max(self.dtype, dtype, key=lambda dtype: torch.finfo(dtype).eps)
            if sketch is None:
                sketch = block.new_zeros(len(block), width)
                energies = block.new_zeros(len(block))
                short = len(block) <= LONG
                self._gram = block.new_zeros(len(block), len(block)) if self.once and short else None
            energies += block.square().sum(1)
            if self._gram is not None:
                self._gram += block @ block.T
            self._add(sketch, block, rng)
        if sketch is None or not len(sketch):
            missing = "parameters" if sketch is None else "rounds"
            raise ValueError(
                f"sums must have the shape (rounds, parameters), but there are no {missing}. Give at least one of each."
            )
        if not bool(torch.isfinite(energies).all()):
            broken = int((~torch.isfinite(energies)).nonzero()[0])
            raise ValueError(
                f"sums must be finite, but there is NaN or infinity in round {broken}. Leave it out or record it again."
            )
        self.sketch, self.lengths = sketch, energies.sqrt()
        self.heard = energies > SILENCE**2 * energies.max()

    def _add(self, sketch: Tensor, block: Tensor, rng: torch.Generator) -> None:
        width, size = sketch.shape[1], block.shape[1]
        factors = torch.randn(size, generator=rng, dtype=torch.float64).to(block.device)
        factors[: max(0, width - self.parameters)] = 1  # the first of each column
        start = 0
        while start < size:
            column = self.parameters % width
            count = min(width - column, size - start)
            sketch[:, column : column + count] += block[:, start : start + count] * factors[start : start + count]
            start += count
            self.parameters += count

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Inner products of all pairs of rounds, with each parameter multiplied by its weight (parameters,)."""
        gram = self._gram
        if gram is None or weights is not None:
            gram = self.sketch.new_zeros(len(self.sketch), len(self.sketch))
            for block, place in self._again():
                weighted = block if weights is None else block * weights[place]
                gram += weighted @ weighted.T
        return gram

    def squares(self, weights: Tensor | None = None) -> Tensor:
        """(rounds,): each round's squared length, with each parameter multiplied by its weight (parameters,)."""
        if weights is None and not self.once:
            return self.lengths.square()
        total = torch.zeros_like(self.lengths)
        for block, place in self._again():
            total += (block if weights is None else block * weights[place]).square().sum(1)
        return total

    def doubled(self, directions: Tensor, weights: Tensor | None = None) -> Tensor:
        """(rounds, any): the Gram matrix times directions (rounds, any), without making the matrix."""
        product = torch.zeros_like(directions)
        for block, place in self._again():
            weighted = block if weights is None else block * weights[place]
            product += weighted @ (weighted.T @ directions)
        return product

    def filtered(self, signal: Tensor, weights: Tensor) -> Tensor:
        """(parameters,): the energy of each parameter's weighted sums outside the signal (rounds, rank)."""
        energies = []
        for block, _ in self._again():
            weighted = weights[:, None] * block
            energies.append((weighted.square().sum(0) - (signal.T @ weighted).square().sum(0)).clamp(min=0))
        return torch.cat(energies)

    def _again(self) -> Iterator[tuple[Tensor, slice]]:
        start = 0
        for block, _ in doubled_blocks(self.sketch if self.once else self._aggregates, self._device):
            yield block, slice(start, start + block.shape[1])
            start += block.shape[1]


def may_be_read_again(aggregates: Any) -> bool:
    """Whether the sums are not an iterator, which is used up when it was read."""
    return isinstance(aggregates, Tensor | np.ndarray | list | tuple)


def doubled_blocks(aggregates: Any, device: torch.device) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Pieces (rounds, some parameters) in double precision, and the precision they came in.

    `aggregates` is a tensor, an array, a memory map or an iterable of such pieces.
    """
    rounds: int | None = None
    for piece in [aggregates] if isinstance(aggregates, Tensor | np.ndarray) else aggregates:
        array = isinstance(piece, np.ndarray)
        if not (array or isinstance(piece, Tensor)) or piece.ndim != 2 or len(piece) != (rounds or len(piece)):
            raise ValueError(
                "sums must have the shape (rounds, parameters), with the same rounds in every block, not "
                f"{tuple(getattr(piece, 'shape', ()))} ({type(piece).__name__}). Flatten each round's sum into one row."
            )
        rounds = len(piece)
        width = max(1, BLOCK // max(1, rounds))
        for start in range(0, piece.shape[1], width):
            columns = piece[:, start : start + width]
            if not isinstance(columns, Tensor):  # a memory map is read here, whatever machine wrote it
                columns = torch.tensor(columns.astype(columns.dtype.newbyteorder("="), copy=False))
            block = columns.detach()
            dtype = block.dtype if block.dtype.is_floating_point else torch.float64
            yield block.to(device, torch.float64), dtype
