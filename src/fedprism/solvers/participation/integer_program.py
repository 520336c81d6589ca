"""One user's participation as an integer program: slow, but it finds, and it proves that nothing (else) is there.

Find p in {0, 1}^rounds with |Nᵀp| <= tolerance in every equation and lower <= S p <= upper, where N is the orthogonal
complement of the sums' column space and S sums over windows. Lam et al., "Gradient Disaggregation: Breaking Privacy in
Federated Learning by Reconstructing the User Participant Matrix", ICML 2021.

Differs from the paper in: linear, not quadratic, so that HiGHS solves it; the equations are constraints instead of an
objective where there is no noise, so that a proof of infeasibility is possible; under noise the objective is the sum
of absolute residuals; entries that the counts decide are no variables; and what the solver returns is checked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from fedprism.runtime.executors import Executor, Failure

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.signedinteger[Any]]
Bools: TypeAlias = NDArray[np.bool_]

SMALLEST_BOUND = 1e-3
"""Equations are scaled so that their bounds are no smaller: a thousand times what SciPy lets HiGHS miss."""
REPEATS = 20
"""How many columns that fail the check are cut off before the program counts as failed."""


class ColumnOutcome(StrEnum):
    FOUND = "a column fulfils all equations and sums"
    INFEASIBLE = "no column, or no other one, fulfils all equations and sums"
    TIME_LIMIT = "the time limit was reached before a column was found or excluded"
    FAILED = "the solver gave no answer"


OUTCOMES = {0: ColumnOutcome.FOUND, 1: ColumnOutcome.TIME_LIMIT, 2: ColumnOutcome.INFEASIBLE}
"""By the status of `scipy.optimize.milp`; any other is a failure."""


class ColumnSolution(NamedTuple):
    column: Bools | None
    """(rounds,). With least residual it may be there at the time limit: the best one so far."""
    outcome: ColumnOutcome


Objective: TypeAlias = Literal["any", "least residual"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnProgram:
    """What is known of one user's column p.

    complement (rounds, equations): |complement.T @ p| <= tolerance, which should be ten times what rounding error
    leaves, or more. sums (windows, rounds) of zeros and ones: lower <= sums @ p <= upper, infinite where unknown.
    fixed (rounds,): 0 and 1 where the entry is known, else -1. excluded (columns, rounds): answers that do not count.
    "least residual" asks for the smallest sum of |complement.T @ p| instead of any column; the tolerance may be
    infinite then.
    """

    complement: Floats
    tolerance: float
    sums: Floats
    lower: Floats
    upper: Floats
    fixed: Integers
    excluded: Bools
    objective: Objective = "any"
    time_limit: float = 60.0

    def without(self, *columns: Bools) -> ColumnProgram:
        """The same program with more columns excluded; infeasible if it had no other solutions."""
        return replace(self, excluded=np.vstack([self.excluded, *columns]).astype(bool))

    def fulfilled_by(self, column: Bools) -> bool:
        """Whether a column is a solution, without any solver's word for it."""
        totals = self.sums @ column
        known = self.fixed >= 0
        return bool(
            np.all((totals >= self.lower) & (totals <= self.upper))
            and np.all(column[known] == self.fixed[known])
            and np.all(np.abs(self.complement.T @ column) <= self.tolerance)
            and not np.any(np.all(self.excluded == column, axis=1))
        )


def solved_columns(programs: Iterable[ColumnProgram], executor: Executor) -> Iterator[tuple[int, ColumnSolution]]:
    """Solutions with the indices of their programs, in order of completion."""
    for index, outcome in executor.run(solve_column, programs):
        yield index, ColumnSolution(None, ColumnOutcome.FAILED) if isinstance(outcome, Failure) else outcome


def solve_column(program: ColumnProgram) -> ColumnSolution:
    """Solve one program by branch and bound.

    What HiGHS returns is rounded and checked. A column that fails the check is no solution, so cutting it off loses
    nothing, and HiGHS is asked again.
    """
    deadline = time.monotonic() + program.time_limit
    decided = decide(program)
    if decided is None:
        return ColumnSolution(None, ColumnOutcome.INFEASIBLE)
    if np.all(decided >= 0):
        if program.fulfilled_by(decided == 1):
            return ColumnSolution(decided == 1, ColumnOutcome.FOUND)
        return ColumnSolution(None, ColumnOutcome.INFEASIBLE)
    cut_off: list[Bools] = []
    for _ in range(REPEATS):
        solution = _branch_and_bound(program.without(*cut_off), decided, deadline - time.monotonic())
        if solution.column is None or program.fulfilled_by(solution.column):
            return solution
        cut_off.append(solution.column)
    return ColumnSolution(None, ColumnOutcome.FAILED)


def decide(program: ColumnProgram) -> Integers | None:
    """The fixed entries and those that the sums decide, -1 elsewhere; None where the sums contradict each other.

    A window in which every free round must be 1, or none may be, is decided; that can decide others that overlap it.
    """
    decided = program.fixed.copy()
    while True:
        ones, free = program.sums @ (decided == 1), program.sums @ (decided < 0)
        if np.any(ones > program.upper) or np.any(ones + free < program.lower):
            return None
        full = (free > 0) & (ones + free <= program.lower)
        empty = (free > 0) & (ones >= program.upper)
        if not np.any(full | empty):
            return decided
        decided[(decided < 0) & np.any(program.sums[full], axis=0)] = 1
        decided[(decided < 0) & np.any(program.sums[empty], axis=0)] = 0


def _branch_and_bound(program: ColumnProgram, decided: Integers, time_limit: float) -> ColumnSolution:
    """Variables: the free entries of the column and, for the least residual, one bound for each equation."""
    if time_limit <= 0:
        return ColumnSolution(None, ColumnOutcome.TIME_LIMIT)
    free, ones = decided < 0, decided == 1
    equations, offset, bound = _equations(program, free, ones)
    variables, bounds = int(free.sum()), 0 if program.objective == "any" else len(equations)

    def rows(matrix: Any, lower: Any, upper: Any) -> LinearConstraint:
        return LinearConstraint(np.pad(matrix, ((0, 0), (0, variables + bounds - matrix.shape[1]))), lower, upper)

    decided_sums = program.sums @ ones
    # Only columns that agree with what is decided can come up again.
    excluded = program.excluded[np.all(program.excluded[:, ~free] == ones[~free], axis=1)][:, free]
    constraints = [
        rows(program.sums[:, free], program.lower - decided_sums, program.upper - decided_sums),
        rows(np.where(excluded, 1.0, -1.0), -np.inf, excluded.sum(1) - 1.0),
    ]
    if program.objective == "any":
        constraints.append(rows(equations, -offset - bound, -offset + bound))
    else:
        constraints.append(rows(np.hstack([equations, -np.eye(bounds)]), -np.inf, -offset))
        constraints.append(rows(np.hstack([equations, np.eye(bounds)]), -offset, np.inf))
    answer = milp(
        np.r_[np.zeros(variables), np.ones(bounds)],
        integrality=np.r_[np.ones(variables), np.zeros(bounds)],
        bounds=Bounds(0, np.r_[np.ones(variables), np.full(bounds, bound)]),
        constraints=constraints,
        options={"time_limit": time_limit},
    )
    column = None
    if answer.x is not None:
        column = ones.copy()
        column[free] = answer.x[:variables] > 0.5
    return ColumnSolution(column, OUTCOMES.get(answer.status, ColumnOutcome.FAILED))


def _equations(program: ColumnProgram, free: Bools, ones: Bools) -> tuple[Floats, Floats, float]:
    """(matrix, offset, bound): |matrix @ free entries + offset| <= bound for every solution.

    Where there are more equations than unknowns, an orthogonal transformation makes them as few; their bound grows by
    as much as it can, so that no solution is lost.
    """
    matrix, offset = program.complement[free].T, program.complement[ones].sum(0)
    bound = program.tolerance
    if program.objective == "any" and len(matrix) > matrix.shape[1] + 1:
        triangle: Any = np.linalg.qr(np.column_stack([matrix, offset]), mode="r")
        matrix, offset, bound = triangle[:, :-1], triangle[:, -1], bound * math.sqrt(len(matrix))
    scale = max(1.0, SMALLEST_BOUND / bound) if bound > 0 else 1.0
    return scale * matrix, scale * offset, scale * bound
