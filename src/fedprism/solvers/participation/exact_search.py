"""The slow search: integer programs and lattices, one user at a time, for what the fast search leaves over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedprism.runtime.executors import Executor, Serial
from fedprism.runtime.progress import Listener
from fedprism.solvers.participation.analytics import Analytics
from fedprism.solvers.participation.columns import Columns
from fedprism.solvers.participation.integer_program import ColumnOutcome, ColumnProgram, solved_columns
from fedprism.solvers.participation.lattice import LatticeUnavailable, recover_by_lattice

LATTICE_ROUNDS = 256
"""Lattices of more rounds take longer to reduce than integer programs to solve."""


class ExactSearch:
    """Runs programs for the users of `columns` until its time is up or the user interrupts."""

    def __init__(self, columns: Columns, executor: Executor | None, progress: Listener, time_limit: float) -> None:
        self.columns, self.executor, self.progress = columns, executor or Serial(), progress
        self.deadline = time.monotonic() + time_limit

    def seconds(self, programs: int) -> float:
        """The time for one of so many programs; not above zero once time is up."""
        return (self.deadline - time.monotonic()) / max(1, programs)

    def program(self, user: int, known: Analytics, seconds: float, excluded: Tensor | None = None) -> ColumnProgram:
        """The program for a user's column that is none of `excluded` (columns, rounds)."""
        space, known = self.columns.space, known.of(torch.tensor([user]))
        return ColumnProgram(
            complement=space.sensing.cpu().numpy(),
            tolerance=float(self.columns.evidence.allowed_at_most(known.tile_most.sum(1))),
            sums=known.windows.cpu().numpy(),
            lower=known.least[0].double().cpu().numpy(),
            upper=known.most[0].double().cpu().numpy(),
            fixed=known.fixed[0].cpu().numpy(),
            excluded=np.zeros((0, known.rounds), dtype=bool) if excluded is None else excluded.cpu().numpy(),
            objective="any" if space.quiet else "least residual",
            time_limit=seconds,
        )

    def solutions(self, programs: Mapping[int, ColumnProgram]) -> Iterator[tuple[int, Tensor | None, ColumnOutcome]]:
        """User, column and outcome as programs end. An interrupt ends the integer programs and keeps the rest."""
        users = list(programs)
        try:
            for done, (index, solution) in enumerate(solved_columns(list(programs.values()), self.executor), 1):
                self.progress(done, len(programs))
                column = None if solution.column is None else self._tensor(solution.column)
                yield users[index], column, solution.outcome
        except KeyboardInterrupt:
            self.deadline = 0.0

    def _tensor(self, column: np.ndarray) -> Tensor:
        return torch.from_numpy(column).to(self.columns.entries.device, torch.bool)

    def solve_missing(self, known: Analytics) -> None:
        """One integer program per user without a column; before them a lattice, which is faster where it is small."""
        columns = self.columns
        explained = columns.evidence.explains(columns.entries, known)  # not clearly, though: no solver can help that
        users = [user for user in columns.unsolved().tolist() if not explained[user]]
        seconds = self.seconds(len(users))
        if not users or seconds <= 0:
            return
        programs = {user: self.program(user, known, seconds) for user in users}
        if columns.space.quiet and known.rounds <= LATTICE_ROUNDS:
            self._reduce_lattice(programs, known)
            programs = {user: program for user, program in programs.items() if not columns.solved[user]}
        self._accept_solutions(programs, known)

    def _reduce_lattice(self, programs: Mapping[int, ColumnProgram], known: Analytics) -> None:
        try:
            columns = recover_by_lattice(list(programs.values()), time_limit=max(0.0, self.seconds(2)))
        except LatticeUnavailable:
            return
        for user, column in zip(programs, columns, strict=True):
            if column is not None:
                self.columns.accept(user, self._tensor(column), known)

    def _accept_solutions(self, programs: Mapping[int, ColumnProgram], known: Analytics) -> None:
        for user, column, _ in self.solutions(programs):
            if column is not None:
                self.columns.accept(user, column, known)

    def tell_twins_apart(self, known: Analytics) -> None:
        """Users with the same counts get the same column; where the rank says that all differ, find another."""
        columns = self.columns
        active = columns.entries.any(1)
        if columns.space.rank < int(active.sum()):
            return
        _, groups, sizes = torch.unique(columns.entries, dim=0, return_inverse=True, return_counts=True)
        for group in (sizes > 1).nonzero()[:, 0].tolist():
            twins = (active & columns.solved & ~columns.given & (groups == group)).nonzero()[:, 0].tolist()
            for number, user in enumerate(twins[1:], 1):
                seconds = self.seconds(2)
                if seconds <= 0:
                    return
                program = self.program(user, known, seconds, excluded=columns.entries[twins[:number]])
                self._accept_solutions({user: program}, known)
