"""What is said of each user's column, and of all of them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from torch import Tensor


class UserStatus(StrEnum):
    CERTIFIED = "the only column of zeros and ones that explains the sums and keeps the counts"
    SOLVED = "a column that explains the sums and keeps the counts; another one may exist"
    AMBIGUOUS = "several columns explain the sums and keep the counts; the alternatives that were found are listed"
    UNNAMED = "a column that explains the sums; its user is not known"
    UNCERTAIN = "the likeliest column found; others would do nearly as well"
    UNSOLVED = "no column that explains the sums was found"
    GIVEN = "determined by the counts alone, or known beforehand"
    INACTIVE = "never took part"


class ParticipationStatus(StrEnum):
    COMPLETE = "every user's column was found"
    ASSUMED_RANK = (
        "every user's column was found; the sums do not show how many users there are: as many as counted were taken"
    )
    PARTIAL = "some columns were not found"
    PARTIAL_ASSUMED_RANK = (
        "some columns were not found; the sums do not show how many users there are: as many as counted were taken"
    )
    UNNAMED = "as many columns were found as the sums hold users; the users of some of them are not known"
    UNNAMED_ASSUMED_RANK = (
        "columns were found whose users are not known; noise hides how many users there are, and whether these are all"
    )
    PARTIAL_UNNAMED = "some columns were not found; the users of others are not known"
    STOPPED = "stopped before the sums were read: nothing but what was known was used"
    NO_REDUNDANCY = "no more rounds than users: the sums say nothing about participation; more rounds are needed"
    TOO_FEW_PARAMETERS = "fewer parameters than users: the sums cannot tell users apart; longer updates are needed"


class Participation(NamedTuple):
    matrix: Tensor
    """(rounds, users) bool. A column that was not found is the best guess, and `statuses` says so.

    Columns that belong to nobody who was counted come after those of the users. Without counts all columns do; there
    are as many as the sums hold users, empty where they were not found.
    """
    certified: Tensor
    """(users,): proved to be the only solution."""
    residual: Tensor
    """(users,): the part of the column outside the space of the sums, relative to its length."""
    statuses: tuple[UserStatus, ...]
    status: ParticipationStatus
    alternatives: dict[int, Tensor]
    """User -> other columns (alternatives, rounds) that explain the sums and keep the user's counts as well.

    All of them where there are few and time is left, without noise and with `certify`; else those that came up.
    """
    rank: int
    """How many users' updates the sums were found to be made of."""
    noise: float
    """Standard deviation of the noise in the sums, relative to their root mean square."""
