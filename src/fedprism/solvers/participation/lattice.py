"""Participation by lattice reduction: for columns that continuous methods miss, where rounds hardly outnumber users.

The whole-number vectors z with Nᵀz = 0 form a lattice, and a user's column is a very short vector of it. One reduction
gives a basis that all users share. A user's counts and known rounds then confine the column to a slice of that lattice
of far smaller dimension, in which a second reduction (Kannan's embedding of the affine slice) lays it open.

Lenstra, Lenstra, Lovász, "Factoring polynomials with rational coefficients", 1982 (LLL); Kannan, "Minkowski's convex
body theorem and integer programming", 1987 (embedding); Schnorr, Euchner, "Lattice basis reduction: improved practical
algorithms and solving subset sum problems", 1994 (BKZ). Nothing is proved here, but every column is checked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedprism.solvers.participation.integer_program import Bools, ColumnProgram, Floats, Integers, decide

FINEST = 2.0**-40
"""Equations are divided by this before they are rounded to whole numbers, or by their tolerance where it is larger."""
UNIT = 8
"""Columns are multiplied with this, so that they can be measured from their expected values, which are fractions."""
FLAG = UNIT // 2
"""Marks vectors in which the counts are subtracted once."""
FORCING = UNIT * 2**12
"""Weight of what must be zero: counts and known rounds."""
BLOCK_SIZES = (10, 20, 30)
"""Rising block sizes of BKZ: the next is only tried where the one before did not lay the column open."""
LOOPS = 8
"""Tours of the basis for each block size."""
SPURIOUS = 0.01
"""Vectors so long that inexact equations miss them by more than this are no solutions of the equations."""

BREAKDOWNS = (ArithmeticError, RuntimeError, ValueError)
"""What numbers that outgrow the package or the arrays end in: that column is not found, the others are."""


class LatticeUnavailable(ImportError):
    """The optional package for lattice reduction is not installed."""


def recover_by_lattice(programs: Sequence[ColumnProgram], *, time_limit: float = 60.0) -> list[Bools | None]:
    """A solution of each program, or None. They share their complement; other columns may fulfil them as well.

    Single reductions are not interrupted: the time limit counts between them. Meant for up to about 250 rounds.
    Counts that are not exact, and missing ones, take no part in the search.
    """
    reduction = _Reduction()
    deadline = time.monotonic() + time_limit
    columns: list[Bools | None] = [None] * len(programs)
    if not programs or not programs[0].complement.shape[1]:
        return columns
    shared = np.zeros((0, len(programs[0].complement)), dtype=np.int64)
    with suppress(*BREAKDOWNS):
        shared = _solutions(reduction, programs[0].complement, max(program.tolerance for program in programs))
    for index, program in enumerate(programs):
        if time.monotonic() > deadline:
            break
        with suppress(*BREAKDOWNS):
            columns[index] = _search(reduction, program, shared)
    return columns


def _solutions(reduction: _Reduction, complement: Floats, tolerance: float) -> Integers:
    """A reduced basis (rank, rounds) of the whole-number vectors that fulfil the equations."""
    rounds, equations = complement.shape
    scale = 1 / max(tolerance, FINEST)
    basis = np.hstack([np.eye(rounds, dtype=np.int64), np.rint(scale * complement).astype(np.int64)])
    vectors = reduction.lll(basis)[: rounds - equations, :rounds]
    length = np.abs(vectors).sum(1)
    missed = np.abs(vectors @ complement).max(1)
    solutions: Bools = (missed <= tolerance * (1 + length)) & (tolerance * length < SPURIOUS)
    return vectors[solutions]


def _search(reduction: _Reduction, program: ColumnProgram, shared: Integers) -> Bools | None:
    """The column from the shared basis or, where the equations are too inexact for one, from the equations."""
    decided = decide(program)
    if decided is None:
        return None
    column = _embed(reduction, program, decided, shared, np.zeros((len(shared), 0), dtype=np.int64))
    if column is None:
        free = decided != 0
        units = np.eye(len(free), dtype=np.int64)[free]
        weight = UNIT / max(program.tolerance, FINEST)
        equations = np.rint(weight * program.complement[free]).astype(np.int64)
        column = _embed(reduction, program, decided, units, equations)
    return column


def _embed(
    reduction: _Reduction, program: ColumnProgram, decided: Integers, vectors: Integers, equations: Integers
) -> Bools | None:
    """Look for a combination of `vectors` (any, rounds) that is the column; equations (any, m) should become small.

    The last row of the basis subtracts the counts, the known rounds and the expected values of the free ones.
    """
    free, counted = decided < 0, program.lower == program.upper
    expected = _expected(program, decided)
    forced = np.hstack([vectors[:, ~free], vectors @ program.sums[counted].astype(np.int64).T])
    target = np.r_[decided[~free], program.lower[counted]].astype(np.int64)
    basis = np.block(
        [
            [FORCING * forced, equations, UNIT * vectors[:, free], np.zeros((len(vectors), 1), dtype=np.int64)],
            [-FORCING * target, np.zeros(equations.shape[1], dtype=np.int64), -expected[free], np.array([FLAG])],
        ]
    )
    reduced = reduction.lll(basis)
    reduced = reduced[~np.any(reduced[:, : len(target)], axis=1), len(target) :]
    for size in (0, *BLOCK_SIZES):
        if size and len(reduced) > 1:
            reduced = reduction.bkz(reduced, size)
        for vector in reduced[np.abs(reduced[:, -1]) == FLAG]:
            values = np.sign(vector[-1]) * vector[equations.shape[1] : -1] + expected[free]
            column: Bools = decided == 1
            column[free] = values == UNIT
            if np.all((values == 0) | (values == UNIT)) and program.fulfilled_by(column):
                return column
    return None


def _expected(program: ColumnProgram, decided: Integers) -> Integers:
    """Each round's expected value from its window's count, in units; zero where no count is known."""
    expected = np.zeros(len(decided))
    for window, least, most in zip(program.sums > 0, program.lower, program.upper, strict=True):
        free = window & (decided < 0)
        if least == most and free.any():
            expected[free] = (least - np.sum(decided[window] == 1)) / free.sum()
    return np.rint(UNIT * expected).astype(np.int64)


class _Reduction:
    """The optional package, behind two functions on arrays of whole numbers, one vector a row.

    A reduction that runs out of precision stops halfway with an error; what it leaves is a basis all the same.
    """

    def __init__(self) -> None:
        try:
            import fpylll
        except ImportError as missing:
            raise LatticeUnavailable(
                'fpylll, the package for lattice reduction, is not installed. Run pip install "fedprism[lattice]", '
                "or leave these columns to the integer programs."
            ) from missing
        self._package: Any = fpylll

    def lll(self, basis: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows that depend on others become zero and come first; they are left out."""
        matrix = self._package.IntegerMatrix.from_matrix(basis.tolist())
        with suppress(RuntimeError):
            self._package.LLL.reduction(matrix)
        reduced = _array(matrix)
        return reduced[np.any(reduced, axis=1)]

    def bkz(self, basis: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        bkz = self._package.BKZ
        matrix = self._package.IntegerMatrix.from_matrix(basis.tolist())
        options = bkz.Param(min(size, len(basis)), flags=bkz.AUTO_ABORT | bkz.MAX_LOOPS, max_loops=LOOPS)
        with suppress(RuntimeError):
            bkz.reduction(matrix, options)
        return _array(matrix)


def _array(matrix: Any) -> NDArray[np.int64]:
    return np.array([[int(entry) for entry in row] for row in matrix], dtype=np.int64).reshape(
        matrix.nrows, matrix.ncols
    )
