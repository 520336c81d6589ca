"""Who took part in which round, from sums of updates and counts of participation.

Lam, Wei, Brooks, Reddi and Mitzenmacher, "Gradient Disaggregation: Breaking Privacy in Federated Learning by
Reconstructing the User Participant Matrix", 2021.

Differs from the paper in: all users are searched for at once instead of one integer program each; counts are not
needed, they only say whose a column is and make up for rounds; noise is modelled, so a column is accepted if noise
explains what it leaves over and not otherwise; columns come with a proof that no other column would do, or with the
columns that would; counts may be unknown, inexact, under noise or of windows that overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedprism.runtime.executors import Executor
from fedprism.runtime.progress import Listener
from fedprism.solvers.participation.analytics import Analytics, read_analytics, unknown_users
from fedprism.solvers.participation.answers import Participation, ParticipationStatus, UserStatus
from fedprism.solvers.participation.columns import Columns
from fedprism.solvers.participation.counts import (
    CountLikelihood,
    SoftCounts,
    agreement_with_limits,
    limits_by_chance,
)
from fedprism.solvers.participation.exact_search import ExactSearch
from fedprism.solvers.participation.given import Given, read_given
from fedprism.solvers.participation.heuristics import message_passing
from fedprism.solvers.participation.naming import name_columns
from fedprism.solvers.participation.proofs import compare_users, list_alternatives, prove
from fedprism.solvers.participation.quick_search import (
    few_left,
    search_by_messages,
    search_quickly,
    search_with_cohorts,
)
from fedprism.solvers.participation.subspace import SignalSpace, signal_space
from fedprism.solvers.participation.sums import may_be_read_again
from fedprism.solvers.participation.unnamed_rules import Unnamed, doubted
from fedprism.solvers.participation.unnamed_search import PATIENCE, SHORT_PATIENCE, search_unnamed

FEW_USERS, SHORT_WINDOW = 32, 32
"""Users and rounds of a window up to which counts find columns, and all that would do, faster than they name them."""
PARTS = (8, 4, 3)
"""Parts of the rounds that are tried as the number of users where noise hides it and the spectrum's guess fails."""
WIDER = (1.0, 1.3, 2.0)
"""Factors on the number of users that are tried as the rank where noise hides it."""


def recover_participation(
    aggregates: Any,
    windows: Any = None,
    counts: Any = None,
    *,
    users: int | None = None,
    known: Any = None,
    cohort_sizes: Any = None,
    count_tolerance: int = 0,
    count_likelihood: CountLikelihood | None = None,
    certify: bool = True,
    time_limit: float = 60.0,
    executor: Executor | None = None,
    progress: Listener | None = None,
    seed: int = 0,
) -> Participation:
    """Every user's column of the participation matrix, from sums of updates that do not change between rounds.

    aggregates (rounds, parameters): a tensor, an array, a memory map, or an iterable of blocks of parameters.
    windows (windows, rounds) in {0, 1}; counts (users, windows) how often each user took part in each window, NaN or -1
    where unknown, right up to `count_tolerance`. Without windows and counts columns come out unnamed. With
    count_likelihood(reported, true), a log-likelihood, counts are reports under noise and may be any numbers, NaN where
    unknown. `users`: how many users there are behind the sums, read off their singular values unless said. known
    (rounds, users): participation as far as it is known, NaN or -1 elsewhere. cohort_sizes (rounds,): how many took
    part. Means are turned into sums first: multiply each round by its cohort size, or by the samples behind it where
    the mean is weighted by them. `time_limit` in seconds holds for the integer programs that are solved for what faster
    methods leave over; `executor` runs them. An interrupt ends the search and returns what is known by then.

    A proof that a column is the only one assumes that the user sends something that no one else does: not zeros in
    every round, and no combination of what others send. If the sums' rank says that this holds of all users, nothing is
    assumed; if it does not, no user is certified whose column is a combination of other users'.
    """
    device = aggregates.device if isinstance(aggregates, Tensor) else torch.device("cpu")
    given = read_given(
        windows, counts, known, cohort_sizes, users=users, count_tolerance=count_tolerance, device=device
    )
    expected = users or (len(given.counts) if given.counts is not None else None)
    sizes = given.cohort_sizes
    space_at = partial(signal_space, aggregates, cohort_sizes=sizes, device=device, seed=seed)
    try:
        space = space_at(expected_rank=expected)
    except KeyboardInterrupt:
        return _stopped(given, expected)
    given = given.over(len(space.silent), expected or space.rank)
    assert given.windows is not None
    assert given.counts is not None
    silent = space.silent if sizes is None else torch.zeros_like(space.silent)  # empty rounds are among what is known
    soft = SoftCounts(given.windows, given.counts, count_likelihood) if count_likelihood is not None else None
    limits = given.counts if soft is None else torch.full_like(given.counts, torch.nan)
    columns = Columns(space, read_analytics(given.windows, limits, given.known, silent, count_tolerance))
    listener = progress or (lambda done, total: None)
    nothing_known = soft is None and not bool(columns.informed.any())
    if nothing_known and not (space.clear and space.quiet) and may_be_read_again(aggregates):
        best = [columns]
        with suppress(KeyboardInterrupt):
            _search_ranks(best, space_at, expected, listener, seed)
        hopeless = None if bool(best[0].unnamed.any()) else _hopeless(space, expected)
        assumed = users is None and not best[0].space.clear
        return best[0].answer(hopeless, assumed_rank=assumed, only_found=expected is None)
    hopeless = _hopeless(space, expected)
    if hopeless is None:
        try:
            if soft is not None:
                _search_under_noise(columns, soft, listener, seed)
            elif nothing_known:
                _search_without_counts(columns, columns.entries[:0], None, listener, seed)
            else:
                everyone = expected == len(given.counts) and space.rank <= len(given.counts)
                tightened = _search(columns, sizes if everyone else None, listener, seed)
                exact = ExactSearch(columns, executor, listener, time_limit)
                exact.solve_missing(tightened)
                exact.tell_twins_apart(tightened)
                compare_users(columns)
                if certify:
                    prove(columns, exact)
                    list_alternatives(columns, exact)
        except KeyboardInterrupt:
            compare_users(columns)
    return columns.answer(hopeless, assumed_rank=not space.clear and users is None)


def _search_ranks(
    best: list[Columns], space_at: Callable[..., SignalSpace], expected: int | None, progress: Listener, seed: int
) -> None:
    """Under noise, without counts: try several ranks and keep the one at which most columns are found in `best`.

    Noise of real updates is not white: what looks like the rank may be another gap. In a space a little larger than the
    users' columns span more of them are found, and no others; in one far larger the sums say too little.
    """
    first = best[0]
    live = int((~first.space.silent).sum())
    guessed = [first.space.rank, *(live // part for part in PARTS)]
    ranks = guessed if expected is None else [round(factor * expected) for factor in WIDER]
    most = 0
    for rank in dict.fromkeys(ranks):
        if not 0 < rank < min(live - 1, first.space.parameters):
            continue
        analytics = first.analytics if expected is not None else unknown_users(rank, first.analytics)
        same = first.space.clear and rank == first.space.rank
        tried = first if same else Columns(space_at(expected_rank=rank, rank_is_certain=True), analytics)
        try:
            _search_without_counts(tried, tried.entries[:0], None, progress, seed, patience=SHORT_PATIENCE)
        finally:
            found = int((tried.unnamed & ~tried.doubtful).sum())
            if found > most:
                best[0] = tried
        if found == (expected or rank) or found < most:
            return
        most = max(most, found)


def _search(columns: Columns, sizes: Tensor | None, progress: Listener, seed: int) -> Analytics:
    """With counts that are right up to a tolerance: fast methods first, without counts where these leave much over.

    Returns what is known with what cohort sizes add to it.
    """
    known = columns.analytics
    search_by_messages(columns, known, progress)
    small = columns.space.rank <= FEW_USERS and known.tiles.shape[1] <= SHORT_WINDOW
    if not (few_left(columns) or small) or not bool(columns.informed.all()):
        solved = columns.entries[columns.solved & ~columns.given]
        _search_without_counts(columns, solved, None, progress, seed, patience=SHORT_PATIENCE)
    search_quickly(columns, known, progress)
    return known if sizes is None else search_with_cohorts(columns, known, sizes, progress)


def _search_under_noise(columns: Columns, soft: SoftCounts, progress: Listener, seed: int) -> None:
    """With counts under noise: they weigh in the search and in the naming, and exclude nothing."""

    def by_messages() -> Tensor:
        known = soft.into(columns.analytics)
        return columns.evidence.polished(message_passing(columns.evidence, known), known)

    _search_without_counts(columns, columns.entries[:0], soft, progress, seed, more=by_messages)


def _search_without_counts(
    columns: Columns,
    candidates: Tensor,
    soft: SoftCounts | None,
    progress: Listener,
    seed: int,
    *,
    more: Callable[[], Tensor] | None = None,
    patience: int = PATIENCE,
) -> None:
    """Find columns as such, then say whose they are. Of an interrupted search what was found is named all the same."""
    given = columns.entries[columns.given & columns.solved & columns.entries.any(1)]
    found: list[Unnamed] = []
    try:
        search_unnamed(
            columns.evidence, given, candidates, more=more, patience=patience, seed=seed, progress=progress, into=found
        )
    finally:
        if found:
            _name(columns, doubted(columns.evidence, found[0], given), given, soft)


def _name(columns: Columns, found: Unnamed, given: Tensor, soft: SoftCounts | None) -> None:
    """Who of the users that are not given has which of the columns."""
    others = ~(found.columns[:, None] == given).all(2).any(1) if len(given) else torch.ones_like(found.certain)
    pool = Unnamed(found.columns[others], found.certain[others])
    users = (~columns.given).nonzero()[:, 0]
    known = columns.analytics.of(users)
    rate = float(pool.columns.double().mean()) if len(pool.columns) else 0.5
    agreement, by_chance = agreement_with_limits(known, pool.columns), limits_by_chance(known, rate)
    proof = by_chance
    if soft is not None:
        agreement, by_chance = agreement + soft.agreement(pool.columns)[users], by_chance + soft.by_chance(rate)[users]
    naming = name_columns(agreement, by_chance, hidden=columns.space.rank - len(found.columns))
    columns.name(users, pool, naming, proof)


def _hopeless(space: SignalSpace, users: int | None) -> ParticipationStatus | None:
    """Why the sums cannot tell anything, if so."""
    if space.equations < 1:
        return ParticipationStatus.NO_REDUNDANCY
    if space.rank >= space.parameters and (users is None or space.rank < users):
        return ParticipationStatus.TOO_FEW_PARAMETERS
    return None


def _stopped(given: Given, users: int | None) -> Participation:
    """Nothing was read of the sums: no column is known."""
    rounds = given.windows.shape[1] if given.windows is not None else 0
    count = users or 0
    return Participation(
        matrix=torch.zeros(rounds, count, dtype=torch.bool),
        certified=torch.zeros(count, dtype=torch.bool),
        residual=torch.full((count,), torch.nan, dtype=torch.float64),
        statuses=(UserStatus.UNSOLVED,) * count,
        status=ParticipationStatus.STOPPED,
        alternatives={},
        rank=0,
        noise=float("nan"),
    )
