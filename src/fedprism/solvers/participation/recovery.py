"""Who took part in which round, from sums of updates and counts of participation.

Lam, Wei, Brooks, Reddi and Mitzenmacher, "Gradient Disaggregation: Breaking Privacy in Federated Learning by
Reconstructing the User Participant Matrix", 2021.

Differs from the paper in: all users are searched for at once instead of one integer program each; noise is modelled, so
that a column is accepted where noise explains what it leaves over and not otherwise; columns come with a proof that no
other column would do, or with the columns that would; counts may be unknown, inexact or of windows that overlap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedprism.runtime.executors import Executor
from fedprism.runtime.progress import Listener
from fedprism.solvers.participation.analytics import read_analytics
from fedprism.solvers.participation.answers import Participation, ParticipationStatus
from fedprism.solvers.participation.columns import Columns
from fedprism.solvers.participation.exact_search import ExactSearch
from fedprism.solvers.participation.given import read_given
from fedprism.solvers.participation.proofs import compare_users, list_alternatives, prove
from fedprism.solvers.participation.quick_search import search_quickly, search_with_cohorts
from fedprism.solvers.participation.subspace import SignalSpace, signal_space


def recover_participation(
    aggregates: Any,
    windows: Any,
    counts: Any,
    *,
    users: int | None = None,
    known: Any = None,
    cohort_sizes: Any = None,
    count_tolerance: int = 0,
    certify: bool = True,
    time_limit: float = 60.0,
    executor: Executor | None = None,
    progress: Listener | None = None,
    seed: int = 0,
) -> Participation:
    """Every user's column of the participation matrix, from sums of updates that do not change between rounds.

    aggregates (rounds, parameters): a tensor, an array, a memory map, or an iterable of blocks of parameters.
    windows (windows, rounds) in {0, 1}; counts (users, windows) how often each user took part in each window, NaN or -1
    where unknown, right up to `count_tolerance`. `users`: how many users there are behind the sums, read off their
    singular values unless said. known (rounds, users): participation as far as it is known, NaN or -1 elsewhere.
    cohort_sizes (rounds,): how many took part. Means are turned into sums first: multiply each round by its cohort
    size, or by the samples behind it where the mean is weighted by them. `time_limit` in seconds holds for the integer
    programs that are solved for what faster methods leave over; `executor` runs them. An interrupt ends the search and
    returns what is known by then.

    A proof that a column is the only one assumes that the user sends something that no one else does: not zeros in
    every round, and no combination of what others send. If the sums' rank says that this holds of all users, nothing is
    assumed; if it does not, no user is certified whose column is a combination of other users'.
    """
    device = aggregates.device if isinstance(aggregates, Tensor) else torch.device("cpu")
    given = read_given(
        windows, counts, known, cohort_sizes, users=users, count_tolerance=count_tolerance, device=device
    )
    expected = users or len(given.counts)
    sizes = given.cohort_sizes
    space = signal_space(aggregates, expected_rank=expected, cohort_sizes=sizes, device=device, seed=seed)
    silent = space.silent if sizes is None else torch.zeros_like(space.silent)  # empty rounds are among what is known
    analytics = read_analytics(given.windows, given.counts, given.known, silent, count_tolerance)
    columns = Columns(space, analytics)
    hopeless = _hopeless(space, expected)
    if hopeless is None:
        everyone = expected == len(given.counts) and space.rank <= expected
        listener = progress or (lambda done, total: None)
        try:
            reachable = analytics
            search_quickly(columns, reachable, listener)
            if sizes is not None and everyone:
                reachable = search_with_cohorts(columns, reachable, sizes, listener)
            exact = ExactSearch(columns, executor, listener, time_limit)
            exact.solve_missing(reachable)
            exact.tell_twins_apart(reachable)
            compare_users(columns)
            if certify:
                prove(columns, exact)
                list_alternatives(columns, exact)
        except KeyboardInterrupt:
            compare_users(columns)
    return columns.answer(hopeless or (None if space.clear or users is not None else ParticipationStatus.ASSUMED_RANK))


def _hopeless(space: SignalSpace, users: int) -> ParticipationStatus | None:
    """Why the sums cannot tell anything, if so."""
    if space.equations < 1:
        return ParticipationStatus.NO_REDUNDANCY
    if space.rank >= space.parameters and space.rank < users:
        return ParticipationStatus.TOO_FEW_PARAMETERS
    return None
