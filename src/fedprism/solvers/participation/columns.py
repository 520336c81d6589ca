"""What a recovery knows so far: one column per user, and what is proved about it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedprism.solvers.participation.analytics import Analytics
from fedprism.solvers.participation.answers import Participation, ParticipationStatus, UserStatus
from fedprism.solvers.participation.evidence import Evidence
from fedprism.solvers.participation.naming import POSSIBLE, Naming
from fedprism.solvers.participation.subspace import SignalSpace
from fedprism.solvers.participation.unnamed_rules import Unnamed

TELLING = math.log(1e-3)
"""Log-probability that any column agrees with a user's counts below which these are a guide to its column."""
MOST_ALTERNATIVES = 10
"""Columns that are listed beside a user's likeliest."""
DEPENDENT = 1e-9
"""Eigenvalue of the columns' Gram matrix, relative to the largest, up to which columns are combinations of others."""


class Columns:
    """Every stage of a recovery writes here, and what it writes is valid at any time: an interrupt loses nothing.

    `analytics` is what the caller knows. Only `entries`, `solved`, `proved` and `alternatives` change.
    """

    def __init__(self, space: SignalSpace, analytics: Analytics) -> None:
        self.space, self.analytics, self.evidence = space, analytics, Evidence(space)
        self.given = (analytics.fixed >= 0).all(1)
        """(users,): the counts decide the whole column."""
        self.informed = analytics.informed | self.given
        """(users,): something is known of the user that a search can go by."""
        self.indistinct = self._same_knowledge()
        self.entries = analytics.fixed == 1
        """(users, rounds): the column, or the best guess where it is not solved."""
        self.solved = self.given & self.evidence.explains(self.entries, analytics)
        self.proved = self.solved.clone()
        """(users,): no other column explains the sums."""
        self.alternatives: dict[int, list[Tensor]] = {}
        self.unnamed = torch.zeros_like(self.solved)
        """(users,): the column is one of several users'."""
        self.doubtful = torch.zeros_like(self.solved)
        """(users,): the column was found without counts, and something else would do nearly as well."""
        self.extra = Unnamed(self.entries[:0], self.solved[:0])
        """Columns of nobody who is counted, as far as is known."""

    def _same_knowledge(self) -> Tensor:
        """(users,): the same is known of another user, although the rank says that no two columns are equal."""
        known = self.analytics
        active = (known.tile_most > 0).any(1)
        if self.space.rank < int(active.sum()):
            return torch.zeros_like(active)
        everything = torch.cat([known.least, known.most, known.fixed], 1)
        _, groups, sizes = torch.unique(everything, dim=0, return_inverse=True, return_counts=True)
        return torch.logical_and(sizes[groups] > 1, active & self.informed & ~self.given)

    def unsolved(self) -> Tensor:
        return (self.informed & ~self.solved & ~self.unnamed).nonzero()[:, 0]

    def unproved(self) -> Tensor:
        """Solved users of whom neither a proof nor an alternative is known."""
        ambiguous = self.indistinct.clone()
        ambiguous[list(self.alternatives)] = True
        return (self.solved & ~self.proved & ~ambiguous).nonzero()[:, 0]

    def accept(self, user: int, column: Tensor, known: Analytics) -> None:
        """Take the column of a slower method if it passes the same test as any other."""
        if bool(self.evidence.explains(column[None], known.of(torch.tensor([user])))):
            self.entries[user], self.solved[user] = column, True

    def name(self, users: Tensor, pool: Unnamed, naming: Naming, proof: Tensor) -> None:
        """Give users (any,) the columns of the pool; proof (any,): log-probability that any column agrees with a
        user's."""
        for place, user in enumerate(users.tolist()):
            number, strong = int(naming.column[place]), float(proof[place]) < TELLING
            if strong and not bool(naming.sure[place]):
                if number >= 0:  # as good as found by counts, which will list all others that would do
                    self.entries[user], self.solved[user] = pool.columns[number], True
                continue
            self.solved[user], self.unnamed[user], self.doubtful[user] = False, False, False
            self.alternatives.pop(user, None)
            if number < 0:
                continue
            sure = bool(naming.sure[place])
            self.entries[user] = pool.columns[number]
            self.solved[user], self.unnamed[user] = sure, not sure
            self.doubtful[user] = not (strong or bool(pool.certain[number]))
            for other in (naming.chance[place] > POSSIBLE).nonzero()[:, 0].tolist() if not sure else ():
                if other != number and len(self.alternatives.get(user, ())) < MOST_ALTERNATIVES:
                    self.add_alternative(user, pool.columns[other])
        rest = torch.ones(len(pool.columns), dtype=torch.bool, device=pool.columns.device)
        rest[naming.column[naming.column >= 0].to(rest.device)] = False
        uncounted = max(0, self.space.rank - len(self.entries)) if self.space.clear else 0
        places = rest.nonzero()[:, 0][:uncounted]  # any more belong to users who could not be told apart
        self.extra = Unnamed(pool.columns[places], pool.certain[places])

    def add_alternative(self, user: int, column: Tensor) -> None:
        listed = self.alternatives.setdefault(user, [])
        if not any(torch.equal(column, other) for other in listed):
            listed.append(column)

    def answer(
        self, hopeless: ParticipationStatus | None, *, assumed_rank: bool, only_found: bool = False
    ) -> Participation:
        """only_found: leave out users of whom no column is known, because nobody knows how many there are."""
        if only_found:
            self._keep(self.solved | self.unnamed | self.doubtful)
        certified = self.proved & self.solved & (self.given | ~self._dependent())
        statuses = tuple(self._status(user, certified) for user in range(len(self.entries)))
        extra = (UserStatus.UNNAMED if certain else UserStatus.UNCERTAIN for certain in self.extra.certain.tolist())
        entries = torch.cat([self.entries, self.extra.columns])
        return Participation(
            matrix=entries.T.contiguous(),
            certified=torch.cat([certified, torch.zeros_like(self.extra.certain)]),
            residual=self.evidence.residual(entries) / entries.double().norm(dim=1).clamp(min=1),
            statuses=(*statuses, *extra),
            status=hopeless or overall(frozenset(statuses), assumed_rank=assumed_rank),
            alternatives={user: torch.stack(others) for user, others in sorted(self.alternatives.items())},
            rank=self.space.rank,
            noise=self.space.noise,
        )

    def _keep(self, users: Tensor) -> None:
        for name in ("given", "indistinct", "entries", "solved", "proved", "informed", "unnamed", "doubtful"):
            setattr(self, name, getattr(self, name)[users])
        self.analytics = self.analytics.of(users)
        places = users.nonzero()[:, 0].tolist()
        self.alternatives = {places.index(u): others for u, others in self.alternatives.items() if u in places}

    def _dependent(self) -> Tensor:
        """(users,): the column is a combination of other users' columns, so it may not be in the sums at all.

        The space of the sums does not hold the column of a user who sends zeros, or what others send. If its counts are
        those of a column that is there all the same, this column would be proved to be the only one.
        """
        active = (self.analytics.tile_most > 0).any(1)
        dependent = torch.zeros_like(self.solved)
        if self.space.clear and int(active.sum()) <= self.space.rank <= len(active):
            return dependent  # as many independent updates as users: every column is in the space
        users = (self.solved & self.entries.any(1)).nonzero()[:, 0]
        if len(users):
            columns = self.entries[users].double()
            values, vectors = torch.linalg.eigh(columns @ columns.T)
            dependent[users] = vectors[:, values < DEPENDENT * values[-1]].square().sum(1) > DEPENDENT
        return dependent

    def _status(self, user: int, certified: Tensor) -> UserStatus:
        if self.doubtful[user]:
            return UserStatus.UNCERTAIN
        if self.unnamed[user]:
            return UserStatus.UNNAMED
        if not self.solved[user] and not self.informed[user]:
            return UserStatus.UNSOLVED
        if not self.solved[user]:
            known = self.analytics.of(torch.tensor([user]))
            explained = self.evidence.explains(self.entries[user : user + 1], known)
            return UserStatus.UNCERTAIN if bool(explained) else UserStatus.UNSOLVED
        if self.given[user]:
            return UserStatus.GIVEN if self.entries[user].any() else UserStatus.INACTIVE
        if user in self.alternatives or self.indistinct[user]:
            return UserStatus.AMBIGUOUS
        return UserStatus.CERTIFIED if certified[user] else UserStatus.SOLVED


def overall(statuses: frozenset[UserStatus], *, assumed_rank: bool) -> ParticipationStatus:
    """What is said of all users together."""
    missing = bool({UserStatus.UNSOLVED, UserStatus.UNCERTAIN} & statuses)
    if UserStatus.UNNAMED in statuses:
        if missing:
            return ParticipationStatus.PARTIAL_UNNAMED
        return ParticipationStatus.UNNAMED_ASSUMED_RANK if assumed_rank else ParticipationStatus.UNNAMED
    if not statuses:
        return ParticipationStatus.PARTIAL_ASSUMED_RANK
    if assumed_rank:
        return ParticipationStatus.PARTIAL_ASSUMED_RANK if missing else ParticipationStatus.ASSUMED_RANK
    return ParticipationStatus.PARTIAL if missing else ParticipationStatus.COMPLETE
