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

import highspy
import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from fedprism.runtime.executors import Executor, Failure

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.signedinteger[Any]]
Bools: TypeAlias = NDArray[np.bool_]

FEASIBILITY = 1e-8
"""By how much HiGHS may miss a bound."""
SMALLEST_BOUND = 1e-5
"""Equations are scaled so that their bounds are no smaller, and rounding error cannot make a solution infeasible."""
REPEATS = 20
"""How many columns that fail the check are cut off before the program counts as failed."""


class ColumnOutcome(StrEnum):
    FOUND = "a column fulfils all equations and sums"
    INFEASIBLE = "no column, or no other one, fulfils all equations and sums"
    TIME_LIMIT = "the time was up before a column was found or excluded"
    FAILED = "the solver gave no answer"


class ColumnSolution(NamedTuple):
    column: Bools | None
    """(rounds,). With least residual it may be there at the time limit: the best one so far."""
    outcome: ColumnOutcome
    detail: str = ""
    """Why it failed."""


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
    objective: Literal["any", "least residual"] = "any"
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
        if isinstance(outcome, Failure):
            outcome = ColumnSolution(None, ColumnOutcome.FAILED, outcome.reason)
        yield index, outcome


def solve_column(program: ColumnProgram) -> ColumnSolution:
    """Solve one program by branch and bound in one thread.

    What HiGHS returns is rounded and checked. A column that fails the check is no solution, so cutting it off loses
    nothing, and HiGHS is asked again.
    """
    deadline = time.monotonic() + program.time_limit
    decided = decide(program)
    if decided is None:
        return ColumnSolution(None, ColumnOutcome.INFEASIBLE)
    free = decided < 0
    column = decided == 1
    if not free.any():
        fulfilled = program.fulfilled_by(column)
        outcome = ColumnOutcome.FOUND if fulfilled else ColumnOutcome.INFEASIBLE
        return ColumnSolution(column if fulfilled else None, outcome)
    cut_off: list[Bools] = []
    for _ in range(REPEATS):
        answer = _branch_and_bound(program.without(*cut_off), decided, deadline - time.monotonic())
        if answer.values is None:
            return ColumnSolution(None, answer.outcome, answer.detail)
        column = column.copy()
        column[free] = answer.values > 0.5
        if program.fulfilled_by(column):
            return ColumnSolution(column, answer.outcome)
        cut_off.append(column)
    return ColumnSolution(None, ColumnOutcome.FAILED, f"{REPEATS} answers did not pass the check")


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


class _Answer(NamedTuple):
    values: Floats | None
    outcome: ColumnOutcome
    detail: str = ""


def _branch_and_bound(program: ColumnProgram, decided: Integers, time_limit: float) -> _Answer:
    """Values of the free coordinates."""
    if time_limit <= 0:
        return _Answer(None, ColumnOutcome.TIME_LIMIT)
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {
        "output_flag": False,
        "threads": 1,
        "parallel": "off",
        "time_limit": time_limit,
        "primal_feasibility_tolerance": FEASIBILITY,
        "mip_feasibility_tolerance": FEASIBILITY,
        # Measured to cost more than they gain: rounding hardly ever meets so many equations.
        "mip_heuristic_effort": 0.0,
        "mip_detect_symmetry": False,
        "mip_allow_restart": False,
    }
    if program.objective == "any":
        options["mip_max_improving_sols"] = 1
    for name, value in options.items():
        solver.setOptionValue(name, value)
    model = _model(program, decided)
    if solver.passModel(model) == highspy.HighsStatus.kError:
        return _Answer(None, ColumnOutcome.FAILED, "HiGHS refused the model")
    solver.run()
    status = solver.getModelStatus()
    feasible = solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(solver.getSolution().col_value)[: int((decided < 0).sum())] if feasible else None
    statuses = highspy.HighsModelStatus
    if values is not None and status in (statuses.kOptimal, statuses.kSolutionLimit):
        return _Answer(values, ColumnOutcome.FOUND)
    if status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible):  # nothing here is unbounded
        return _Answer(None, ColumnOutcome.INFEASIBLE)
    if status == statuses.kTimeLimit:
        return _Answer(values, ColumnOutcome.TIME_LIMIT)
    return _Answer(None, ColumnOutcome.FAILED, f"HiGHS ended with status {solver.modelStatusToString(status)}")


def _model(program: ColumnProgram, decided: Integers) -> Any:
    """Variables: the free entries of the column and, for the least residual, one bound for each equation."""
    free, ones = decided < 0, decided == 1
    variables = int(free.sum())
    equations, offset, bound = _equations(program, free, ones)
    rows: list[Any] = []
    if program.objective == "any":
        bounds = 0
        rows.append((equations, -offset - bound, -offset + bound))
    else:
        bounds = len(equations)
        one_each = scipy.sparse.identity(bounds)
        nothing = np.full(bounds, math.inf)
        rows.append((scipy.sparse.hstack([equations, -one_each]), -nothing, -offset))
        rows.append((scipy.sparse.hstack([equations, one_each]), -offset, nothing))
    members, decided_sums = program.sums[:, free], program.sums @ ones
    open_sums = np.any(members != 0, axis=1) & (np.isfinite(program.lower) | np.isfinite(program.upper))
    rows.append(
        (members[open_sums], (program.lower - decided_sums)[open_sums], (program.upper - decided_sums)[open_sums])
    )
    # Only columns that agree with what is decided can come up again.
    excluded = program.excluded[np.all(program.excluded[:, ~free] == ones[~free], axis=1)][:, free]
    sizes = excluded.sum(1).astype(float)
    rows.append((np.where(excluded, 1.0, -1.0), np.full(len(excluded), -math.inf), sizes - 1))

    matrix = scipy.sparse.vstack([_padded(block, variables + bounds) for block, _, _ in rows], format="csr")
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = matrix.shape[1], matrix.shape[0]
    model.col_cost_ = np.r_[np.zeros(variables), np.ones(bounds)]
    model.col_lower_ = np.zeros(variables + bounds)
    model.col_upper_ = np.r_[np.ones(variables), np.full(bounds, bound)]
    model.row_lower_ = np.concatenate([lower for _, lower, _ in rows])
    model.row_upper_ = np.concatenate([upper for _, _, upper in rows])
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
    kinds = highspy.HighsVarType
    model.integrality_ = [kinds.kInteger] * variables + [kinds.kContinuous] * bounds
    return model


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


def _padded(block: Any, width: int) -> Any:
    sparse = scipy.sparse.csr_matrix(block)
    sparse.resize(sparse.shape[0], width)
    return sparse
