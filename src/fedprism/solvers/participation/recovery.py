"""Who took part in which round, from sums of updates and counts of participation.

Lam, Wei, Brooks, Reddi and Mitzenmacher, "Gradient Disaggregation: Breaking Privacy in Federated Learning by
Reconstructing the User Participant Matrix", 2021.

Differs from the paper in: all users are searched for at once instead of one integer program each; noise is modelled, so
that a column is accepted where noise explains what it leaves over and not otherwise; columns come with a proof that no
other column would do, or with the columns that would; counts may be unknown, inexact or of windows that overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .analytics import Analytics, read_analytics
from .certificate import separation
from .evidence import Evidence
from .integer_program import ColumnOutcome, ColumnProgram, ColumnSolution, Executor, solved_columns
from .lattice import LatticeUnavailable, recover_by_lattice
from .searching import Found, difference_map, hopping, message_passing
from .subspace import SignalSpace, signal_space

LATTICE_ROUNDS = 256
"""Lattices of more rounds take longer to reduce than integer programs to solve."""

FEW = 0.25
"""Share of users without a column up to which searching again may help."""
PROBE = 2000
"""Steps of the search for a second column."""

Progress = Callable[[int, int], None]


class UserStatus(StrEnum):
    CERTIFIED = "the only column of zeros and ones that explains the sums and keeps the counts"
    SOLVED = "a column that explains the sums and keeps the counts; that there is no other is not proved"
    AMBIGUOUS = "several columns explain the sums and keep the counts; the alternatives that were found are listed"
    UNCERTAIN = "the likeliest column found; noise leaves others nearly as likely"
    UNSOLVED = "no column that explains the sums was found"
    GIVEN = "determined by the counts alone, or known beforehand"
    INACTIVE = "never took part"


class ParticipationStatus(StrEnum):
    COMPLETE = "every user's column was found"
    ASSUMED_RANK = "every user's column was found; noise hides how many users there are, so the number given was used"
    PARTIAL = "some columns were not found"
    NO_REDUNDANCY = "no more rounds than users: the sums say nothing about participation; more rounds are needed"
    TOO_FEW_PARAMETERS = "fewer parameters than users: the sums cannot tell users apart; longer updates are needed"


class Participation(NamedTuple):
    matrix: Tensor
    """(rounds, users) bool. A column that was not found is the best guess, and `statuses` says so."""
    certified: Tensor
    """(users,): proved to be the only solution."""
    residual: Tensor
    """(users,): the part of the column outside the space of the sums, relative to its length."""
    statuses: tuple[UserStatus, ...]
    status: ParticipationStatus
    alternatives: dict[int, Tensor]
    """User -> other columns (alternatives, rounds) that explain the sums and keep the user's counts as well."""
    rank: int
    """How many users' updates the sums were found to be made of."""
    noise: float
    """Standard deviation of the noise in the sums, relative to their root mean square."""


def recover_participation(
    aggregates: Any,
    windows: Any,
    counts: Any,
    *,
    users: int | None = None,
    known: Any = None,
    cohort_sizes: Any = None,
    examples: Any = None,
    reduction: Literal["sum", "mean", "weighted_mean"] = "sum",
    count_tolerance: int = 0,
    certify: bool = True,
    time_limit: float = 60.0,
    executor: Executor | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Participation:
    """Every user's column of the participation matrix, from sums of updates that do not change between rounds.

    aggregates (rounds, parameters): a tensor, an array, a memory map, or an iterable of blocks of parameters.
    windows (windows, rounds) in {0, 1}; counts (users, windows) how often each user took part in each window, NaN or -1
    where unknown, right up to `count_tolerance`. `users`: how many users there are behind the sums, read off their
    singular values unless said. known (rounds, users): participation as far as it is known, NaN or -1 elsewhere.
    cohort_sizes (rounds,): how many took part; needed where `reduction` is "mean". examples (rounds,): how many samples
    stand behind each round; needed for "weighted_mean". `time_limit` in seconds holds for the integer programs that
    are solved for what faster methods leave over; `executor` runs them. An interrupt ends them and returns what
    was found.
    """
    device = aggregates.device if isinstance(aggregates, Tensor) else torch.device("cpu")
    windows, counts, known, cohort_sizes, examples = (
        None if value is None else torch.as_tensor(value).to(device, torch.float64)
        for value in (windows, counts, known, cohort_sizes, examples)
    )
    if cohort_sizes is not None and cohort_sizes.shape != windows.shape[1:]:
        raise ValueError(
            f"expected one cohort size a round, found shape {tuple(cohort_sizes.shape)} for windows of shape "
            f"{tuple(windows.shape)}; give as many."
        )
    factors = _factors(reduction, cohort_sizes, examples)
    expected = users or int(counts.shape[0])
    space = signal_space(
        aggregates, expected_rank=expected, factors=factors, cohort_sizes=cohort_sizes, device=device, seed=seed
    )
    silent = space.silent if cohort_sizes is None else space.silent | (cohort_sizes == 0)
    analytics = read_analytics(windows, counts, known, silent, count_tolerance)
    search = _Search(space, analytics, executor, progress)
    hopeless = search.hopeless(users)
    if hopeless is None:
        search.find()
        if cohort_sizes is not None and expected == len(counts):
            search.use_cohorts(cohort_sizes)
        search.deadline = time.monotonic() + time_limit
        search.solve_leftovers()
        search.tell_twins_apart()
        search.known = analytics  # a proof must not rest on what other users' columns leave of the cohorts
        search.compare_users()
        if certify:
            search.certify()
    return search.answer(hopeless or (None if space.clear or users is not None else ParticipationStatus.ASSUMED_RANK))


def _factors(reduction: str, cohort_sizes: Tensor | None, examples: Tensor | None) -> Tensor | None:
    """What turns each round's mean back into a sum, (rounds,)."""
    if reduction == "sum":
        return None
    factors = cohort_sizes if reduction == "mean" else examples
    if factors is None:
        missing = "cohort_sizes" if reduction == "mean" else "examples, the samples behind each round,"
        raise ValueError(f"expected {missing} to turn a {reduction} back into a sum, found none; give them.")
    return factors


class _Search:
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
        statuses = tuple(self._status(user) for user in range(len(self.columns)))
        missing = {UserStatus.UNSOLVED, UserStatus.UNCERTAIN} & set(statuses)
        if status is None or (status is ParticipationStatus.ASSUMED_RANK and missing):
            status = ParticipationStatus.PARTIAL if missing else ParticipationStatus.COMPLETE
        return Participation(
            matrix=self.columns.T.contiguous(),
            certified=self.unique & self.found,
            residual=self.evidence.residual(self.columns) / self.columns.double().norm(dim=1).clamp(min=1),
            statuses=statuses,
            status=status,
            alternatives={user: torch.stack(found) for user, found in sorted(self.others.items())},
            rank=self.space.rank,
            noise=self.space.noise,
        )

    def _status(self, user: int) -> UserStatus:
        if not self.found[user]:
            explained = self.evidence.explains(self.columns[user : user + 1], self.known.of(torch.tensor([user])))
            return UserStatus.UNCERTAIN if bool(explained) else UserStatus.UNSOLVED
        if self.given[user]:
            return UserStatus.GIVEN if self.columns[user].any() else UserStatus.INACTIVE
        if user in self.others or self.indistinct[user]:
            return UserStatus.AMBIGUOUS
        return UserStatus.CERTIFIED if self.unique[user] else UserStatus.SOLVED
