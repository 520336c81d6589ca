"""Who took part in which round, from sums of updates and counts of participation.

Lam, Wei, Brooks, Reddi and Mitzenmacher, "Gradient Disaggregation: Breaking Privacy in Federated Learning by
Reconstructing the User Participant Matrix", 2021.

Differs from the paper in: all users are searched for at once instead of one integer program each; noise is modelled, so
that a column is accepted where noise explains what it leaves over and not otherwise; columns come with a proof that no
other column would do, or with the columns that would; counts may be unknown, inexact or of windows that overlap.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .analytics import read_analytics
from .answers import Participation, ParticipationStatus
from .given import read_given
from .integer_program import Executor
from .search import Progress, Search
from .subspace import signal_space


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
    are solved for what faster methods leave over; `executor` runs them. An interrupt ends the search and returns what
    was found.

    A proof that a column is the only one takes for granted that the user sends something of its own: not zeros in
    every round, and no combination of what others send. Where the sums' rank says that this holds of all users, nothing
    is taken for granted; where it does not, no user is certified whose column is a combination of other users'.
    """
    device = aggregates.device if isinstance(aggregates, Tensor) else torch.device("cpu")
    given = read_given(
        windows,
        counts,
        known,
        cohort_sizes,
        examples,
        reduction=reduction,
        users=users,
        count_tolerance=count_tolerance,
        device=device,
    )
    expected = users or len(given.counts)
    sizes = given.cohort_sizes
    space = signal_space(
        aggregates, expected_rank=expected, factors=given.factors, cohort_sizes=sizes, device=device, seed=seed
    )
    silent = space.silent if sizes is None else torch.zeros_like(space.silent)  # empty rounds are among what is known
    analytics = read_analytics(given.windows, given.counts, given.known, silent, count_tolerance)
    search = Search(space, analytics, executor, progress)
    hopeless = search.hopeless(users)
    if hopeless is None:
        everyone = expected == len(given.counts) and space.rank <= expected
        try:
            search.run(time_limit, cohort_sizes=sizes if everyone else None, certify=certify)
        except KeyboardInterrupt:
            search.known = analytics
            search.compare_users()
    return search.answer(hopeless or (None if space.clear or users is not None else ParticipationStatus.ASSUMED_RANK))
