"""Which methods are tried on which users, in order, until every column is found and proved or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .analytics import Analytics
from .answers import Participation, ParticipationStatus, UserStatus
from .certificate import separation
from .evidence import Evidence
from .integer_program import ColumnOutcome, ColumnProgram, ColumnSolution, Executor, solved_columns
from .lattice import LatticeUnavailable, recover_by_lattice
from .searching import Found, difference_map, hopping, message_passing
from .subspace import SignalSpace

LATTICE_ROUNDS = 256
"""Lattices of more rounds take longer to reduce than integer programs to solve."""

FEW = 0.25
"""Share of users without a column up to which searching again may help."""
DEPENDENT = 1e-9
"""Eigenvalue of the columns' Gram matrix, relative to the largest, up to which columns are combinations of others."""
MOST_LISTED = 10
"""Alternatives of a user after which no more are looked for."""
PROBE = 2000
"""Steps of the search for a second column."""

Progress = Callable[[int, int], None]


class Search:
    """The columns found so far, and what is tried next."""

    def __init__(
        self,
        space: SignalSpace,
        known: Analytics,
        executor: Executor | None,
        progress: Progress | None,
    ) -> None:
        self.space, self.known, self.evidence = space, known, Evidence(space)
        self.executor, self.progress = executor, progress
        self.deadline = 0.0
        self.columns = known.fixed == 1
        self.given = (known.fixed >= 0).all(1)
        self.found = self.given & self.evidence.explains(self.columns, known)
        self.unique = self.found.clone()
        self.others: dict[int, list[Tensor]] = {}
        self.indistinct = torch.zeros_like(self.found)

    def run(self, time_limit: float, *, cohort_sizes: Tensor | None, certify: bool) -> None:
        """Everything that can be tried, in order. An interrupt leaves what was found so far."""
        given = self.known
        self.find()
        if cohort_sizes is not None:
            self.use_cohorts(cohort_sizes)
        self.deadline = time.monotonic() + time_limit
        self.solve_leftovers()
        self.tell_twins_apart()
        self.known = given  # a proof must not rest on what other users' columns leave of the cohorts
        self.compare_users()
        if certify:
            self.certify()
            self.list_alternatives()

    def hopeless(self, users: int | None) -> ParticipationStatus | None:
        """Why the sums cannot tell anything, if so."""
        if self.space.sensing.shape[1] < 1:
            return ParticipationStatus.NO_REDUNDANCY
        if self.space.rank >= self.space.parameters and self.space.rank < (users or len(self.columns)):
            return ParticipationStatus.TOO_FEW_PARAMETERS
        return None

    def find(self) -> None:
        """The fast methods, for all users that are not found yet."""
        self._try(message_passing)
        if not self.space.quiet:
            self._try(partial(hopping, start=self._unfound()[1]))
        if self.space.quiet or self._few_left():
            self._try(partial(difference_map, start=self._unfound()[1].float()))
        for step in (0.5, 0.3):
            if self._few_left():  # else it is not bad luck
                self._try(partial(difference_map, start=self._random(), step=step))
        self._note_exact_exchanges()

    def _few_left(self) -> bool:
        return int((~self.found).sum()) <= FEW * len(self.found)

    def _random(self) -> Tensor:
        """A random start for each user without a column."""
        guesses = self._unfound()[1]
        return torch.rand(guesses.shape, generator=torch.Generator().manual_seed(0)).to(guesses.device)

    def _unfound(self) -> tuple[Tensor, Tensor]:
        """Users without a column, and the best guesses for them."""
        left = (~self.found).nonzero()[:, 0]
        return left, self.columns[left]

    def _try(self, method: Callable[[Evidence, Analytics], Found]) -> None:
        left, guesses = self._unfound()
        if not len(left):
            return
        known = self.known.of(left)
        columns = self.evidence.polished(method(self.evidence, known).columns, known)
        better = self.evidence.residual(columns) < self.evidence.residual(guesses)
        better |= ~known.satisfied(guesses)
        self.columns[left] = torch.where(better[:, None], columns, guesses)
        self.found[left] = self.evidence.accepts(self.columns[left], known)
        if self.progress is not None:
            self.progress(int(self.found.sum()), len(self.found))

    def _note_exact_exchanges(self) -> None:
        """Without noise, a column that one exchange turns into another that explains the sums is one of several."""
        left = (~self.found).nonzero()[:, 0]
        if not self.space.quiet or not len(left):
            return
        known = self.known.of(left)
        exchange = self.evidence.best_exchange(self.columns[left], known)
        both = self.evidence.explains(self.columns[left], known) & self.evidence.explains(exchange.columns, known)
        for user, other in zip(left[both].tolist(), exchange.columns[both], strict=True):
            self.found[user] = True
            self._add_alternative(user, other)

    def use_cohorts(self, sizes: Tensor) -> None:
        """What the found columns leave of each round's cohort fixes entries of the others."""
        while not bool(self.found.all()):
            remaining = sizes - self.columns[self.found].sum(0)
            left = (~self.found).nonzero()[:, 0]
            if bool((remaining < 0).any()) or bool((remaining > len(left)).any()):
                return  # some found column must be another user's: no ground to stand on
            fixed = self.known.fixed[left]
            decided = torch.where((fixed < 0) & (remaining == 0), 0, fixed)
            decided = torch.where((fixed < 0) & (remaining == len(left)), 1, decided)
            if torch.equal(decided, fixed):
                return
            fixed = self.known.fixed.clone()
            fixed[left] = decided
            self.known = self.known._replace(fixed=fixed)
            before = int(self.found.sum())
            self.find()
            if int(self.found.sum()) == before:
                return

    def solve_leftovers(self) -> None:
        """One integer program a column for what is left."""
        likely = self.evidence.explains(self.columns, self.known)  # not clearly, though: no solver can help that
        left = (~self.found & ~likely).nonzero()[:, 0].tolist()
        seconds = (self.deadline - time.monotonic()) / max(1, len(left))
        if not left or seconds <= 0:
            return
        programs = [self._program(user, time_limit=seconds) for user in left]
        if self.space.quiet and self.known.rounds <= LATTICE_ROUNDS:
            self._reduce_lattice(left, programs)
            programs = [program for user, program in zip(left, programs, strict=True) if not self.found[user]]
            left = [user for user in left if not self.found[user]]
        for user, solution in self._solved(left, programs):
            self._take(user, solution.column)

    def _solved(self, users: list[int], programs: list[ColumnProgram]) -> Iterator[tuple[int, ColumnSolution]]:
        """Solutions as they are found. An interrupt ends the integer programs; what was found before it is kept."""
        try:
            for done, (index, solution) in enumerate(solved_columns(programs, self.executor), 1):
                if self.progress is not None:
                    self.progress(done, len(programs))
                yield users[index], solution
        except KeyboardInterrupt:
            self.deadline = 0.0

    def _reduce_lattice(self, users: list[int], programs: list[ColumnProgram]) -> None:
        """Short vectors of a lattice, where the package for it is installed; faster than integer programs if small."""
        try:
            reduced = recover_by_lattice(programs, time_limit=max(0.0, self.deadline - time.monotonic()) / 2)
        except LatticeUnavailable:
            return
        for user, column, found in zip(users, reduced.columns, reduced.found, strict=True):
            self._take(user, column if found else None)

    def tell_twins_apart(self) -> None:
        """Users with the same counts are led to the same column; where the rank says that all differ, find another."""
        active = self.columns.any(1)
        if self.space.rank < int(active.sum()):
            return
        _, groups, sizes = torch.unique(self.columns, dim=0, return_inverse=True, return_counts=True)
        for group in (sizes > 1).nonzero()[:, 0].tolist():
            twins = (active & self.found & ~self.given & (groups == group)).nonzero()[:, 0].tolist()
            for number, user in enumerate(twins[1:], 1):
                seconds = (self.deadline - time.monotonic()) / 2
                taken = self.columns[twins[:number]].cpu().numpy()
                if seconds <= 0:
                    return
                program = self._program(user, time_limit=seconds, excluded=taken)
                for _, solution in self._solved([user], [program]):
                    self._take(user, solution.column)

    def _take(self, user: int, solution: NDArray[np.bool_] | None) -> None:
        """Accept a solution of a user's program, if it stands up to the same test as any other column."""
        if solution is None:
            return
        column = torch.from_numpy(solution).to(self.columns.device, torch.bool)
        if bool(self.evidence.explains(column[None], self.known.of(torch.tensor([user])))):
            self.columns[user], self.found[user] = column, True

    def compare_users(self) -> None:
        """Users whose counts another user's column keeps as well: nothing tells which of the columns is whose."""
        sums = self.columns.double() @ self.known.windows.T
        self.indistinct = self._same_knowledge()
        for user in self.found.nonzero()[:, 0].tolist():
            fits = ((sums >= self.known.least[user]) & (sums <= self.known.most[user])).all(1) & self.found
            for other in self.columns[fits] if int(fits.sum()) > 1 else ():
                agrees = (self.known.fixed[user] < 0) | (self.known.fixed[user] == other)
                if bool(agrees.all()) and not torch.equal(other, self.columns[user]):
                    self._add_alternative(user, other)

    def _same_knowledge(self) -> Tensor:
        """(users,): whether the same is known of another user, although the rank says that no two columns are equal."""
        active = (self.known.tile_most > 0).any(1)
        if self.space.rank < int(active.sum()):
            return torch.zeros_like(self.found)
        everything = torch.cat([self.known.least, self.known.most, self.known.fixed], 1)
        _, groups, sizes = torch.unique(everything, dim=0, return_inverse=True, return_counts=True)
        return torch.logical_and(sizes[groups] > 1, active & ~self.given)

    def certify(self) -> None:
        """Prove that columns are the only ones: by duality for all, then by integer programs for the rest."""
        open_ = (self.found & ~self.unique & self._without_alternative()).nonzero()[:, 0]
        if len(open_):
            known = self.known.of(open_)
            bound = separation(self.space, known, self.columns[open_])
            needed = self.evidence.allowed_at_most(known.tile_most.sum(1)) + self.evidence.residual(self.columns[open_])
            self.unique[open_] = bound > needed
        self._probe()
        rest = (self.found & ~self.unique & self._without_alternative()).nonzero()[:, 0].tolist()
        seconds = (self.deadline - time.monotonic()) / max(1, len(rest))
        if not rest or seconds <= 0 or not self.space.quiet:  # under noise the bounds are too wide to exclude anything
            return
        programs = [
            self._program(user, time_limit=seconds, excluded=self.columns[user : user + 1].cpu().numpy())
            for user in rest
        ]
        for user, solution in self._solved(rest, programs):
            if solution.outcome is ColumnOutcome.INFEASIBLE:
                self.unique[user] = True
            elif solution.column is not None:
                self._add_alternative(user, torch.from_numpy(solution.column).to(self.columns.device, torch.bool))

    def list_alternatives(self) -> None:
        """All columns that would do, of users who have several: one more at a time, until there is none or enough."""
        open_ = [user for user in self.others if self.found[user]] if self.space.quiet else []
        while open_ and (seconds := (self.deadline - time.monotonic()) / len(open_)) > 0:
            taken = [torch.stack([self.columns[user], *self.others[user]]).cpu().numpy() for user in open_]
            programs = [
                self._program(user, time_limit=seconds, excluded=columns)
                for user, columns in zip(open_, taken, strict=True)
            ]
            growing = []
            for user, solution in self._solved(open_, programs):
                if solution.column is not None:
                    self._add_alternative(user, torch.from_numpy(solution.column).to(self.columns.device, torch.bool))
                    growing += [user] if len(self.others[user]) < MOST_LISTED else []
            open_ = growing

    def _probe(self) -> None:
        """Search again for columns that are not proved, from a random start: another column is an alternative."""
        left = (self.found & ~self.unique & self._without_alternative()).nonzero()[:, 0]
        if not len(left) or not self.space.quiet:
            return
        known, mine = self.known.of(left), self.columns[left]
        start = torch.rand(mine.shape, generator=torch.Generator().manual_seed(1)).to(mine.device)
        found = difference_map(self.evidence, known, start=start, iterations=PROBE)
        other = self.evidence.explains(found.columns, known) & (found.columns != mine).any(1)
        for user, column in zip(left[other].tolist(), found.columns[other], strict=True):
            self._add_alternative(user, column)

    def _without_alternative(self) -> Tensor:
        listed = torch.zeros_like(self.found)
        listed[list(self.others)] = True
        return ~(listed | self.indistinct)

    def _add_alternative(self, user: int, column: Tensor) -> None:
        listed = self.others.setdefault(user, [])
        if not any(torch.equal(column, other) for other in listed):
            listed.append(column)

    def _program(self, user: int, *, time_limit: float, excluded: NDArray[np.bool_] | None = None) -> ColumnProgram:
        known = self.known.of(torch.tensor([user]))
        tolerance = float(self.evidence.allowed_at_most(known.tile_most.sum(1)))
        return ColumnProgram(
            complement=self.space.sensing.cpu().numpy(),
            tolerance=tolerance,
            sums=known.windows.cpu().numpy(),
            lower=known.least[0].double().cpu().numpy(),
            upper=known.most[0].double().cpu().numpy(),
            fixed=known.fixed[0].cpu().numpy(),
            excluded=np.zeros((0, self.known.rounds), dtype=bool) if excluded is None else excluded,
            objective="any" if self.space.quiet else "least residual",
            time_limit=time_limit,
        )

    def answer(self, status: ParticipationStatus | None) -> Participation:
        certified = self.unique & self.found & (self.given | ~self._leaning())
        statuses = tuple(self._status(user, certified) for user in range(len(self.columns)))
        missing = {UserStatus.UNSOLVED, UserStatus.UNCERTAIN} & set(statuses)
        if status is None:
            status = ParticipationStatus.PARTIAL if missing else ParticipationStatus.COMPLETE
        if status is ParticipationStatus.ASSUMED_RANK and missing:
            status = ParticipationStatus.PARTIAL_ASSUMED_RANK
        return Participation(
            matrix=self.columns.T.contiguous(),
            certified=certified,
            residual=self.evidence.residual(self.columns) / self.columns.double().norm(dim=1).clamp(min=1),
            statuses=statuses,
            status=status,
            alternatives={user: torch.stack(found) for user, found in sorted(self.others.items())},
            rank=self.space.rank,
            noise=self.space.noise,
        )

    def _leaning(self) -> Tensor:
        """(users,): whose column is a combination of other users' columns, so that it may be none of its own.

        The space of the sums does not hold the column of a user who sends zeros, or what others send. If its counts are
        those of a column that is there all the same, this column would be proved to be the only one.
        """
        active = (self.known.tile_most > 0).any(1)
        leaning = torch.zeros_like(self.found)
        if self.space.clear and int(active.sum()) <= self.space.rank <= len(active):
            return leaning  # as many independent updates as users: every column is in the space
        users = (self.found & self.columns.any(1)).nonzero()[:, 0]
        if len(users):
            columns = self.columns[users].double()
            values, vectors = torch.linalg.eigh(columns @ columns.T)
            leaning[users] = vectors[:, values < DEPENDENT * values[-1]].square().sum(1) > DEPENDENT
        return leaning

    def _status(self, user: int, certified: Tensor) -> UserStatus:
        if not self.found[user]:
            explained = self.evidence.explains(self.columns[user : user + 1], self.known.of(torch.tensor([user])))
            return UserStatus.UNCERTAIN if bool(explained) else UserStatus.UNSOLVED
        if self.given[user]:
            return UserStatus.GIVEN if self.columns[user].any() else UserStatus.INACTIVE
        if user in self.others or self.indistinct[user]:
            return UserStatus.AMBIGUOUS
        return UserStatus.CERTIFIED if certified[user] else UserStatus.SOLVED
