"""The fast search: which heuristic is tried on which users, and what known cohort sizes add."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedprism.runtime.progress import Listener
from fedprism.solvers.participation.analytics import Analytics
from fedprism.solvers.participation.columns import Columns
from fedprism.solvers.participation.evidence import Evidence
from fedprism.solvers.participation.heuristics import difference_map, hopping, message_passing

FEW = 0.25
"""Fraction of users without a column up to which another attempt may help: more are not bad luck."""
RESTART_STEPS = (0.5, 0.3)
"""Step lengths of the attempts from random starts, on either side of the usual 0.4."""


def search_by_messages(columns: Columns, known: Analytics, progress: Listener) -> None:
    """The fastest attempt on all users that are not solved yet."""
    _attempt(columns, known, progress, lambda known, _: message_passing(columns.evidence, known))


def search_quickly(columns: Columns, known: Analytics, progress: Listener) -> None:
    """Try the other heuristics one after the other on all users that are not solved yet."""
    evidence = columns.evidence
    attempt = partial(_attempt, columns, known, progress)
    if not columns.space.quiet:
        attempt(lambda known, guesses: hopping(evidence, known, start=guesses))
    if columns.space.quiet or few_left(columns):
        attempt(lambda known, guesses: difference_map(evidence, known, start=guesses))
    for step in RESTART_STEPS:
        if few_left(columns):
            attempt(partial(_walk_from_anywhere, evidence, step))
    _note_exact_exchanges(columns, known)


def _walk_from_anywhere(evidence: Evidence, step: float, known: Analytics, guesses: Tensor) -> Tensor:
    return difference_map(evidence, known, start=random_like(guesses, 0), step=step)


def random_like(columns: Tensor, seed: int) -> Tensor:
    """Uniform values in [0, 1] as a start for the difference map."""
    return torch.rand(columns.shape, generator=torch.Generator().manual_seed(seed)).to(columns.device)


def few_left(columns: Columns) -> bool:
    """Whether what is left over is worth slower attempts."""
    return len(columns.unsolved()) <= FEW * len(columns.solved)


def _attempt(
    columns: Columns, known: Analytics, progress: Listener, method: Callable[[Analytics, Tensor], Tensor]
) -> None:
    """Run a method on the unsolved users and keep its columns where they are better than the guesses."""
    users = columns.unsolved()
    if not len(users):
        return
    evidence, known, guesses = columns.evidence, known.of(users), columns.entries[users]
    candidates = evidence.polished(method(known, guesses), known)
    better = evidence.residual(candidates) < evidence.residual(guesses)
    better |= ~known.satisfied(guesses)
    columns.entries[users] = torch.where(better[:, None], candidates, guesses)
    columns.solved[users] = evidence.accepts(columns.entries[users], known)
    progress(int(columns.solved.sum()), len(columns.solved))


def _note_exact_exchanges(columns: Columns, known: Analytics) -> None:
    """Without noise, a column that one exchange turns into another that explains the sums is one of several."""
    users = columns.unsolved()
    if not columns.space.quiet or not len(users):
        return
    evidence, known = columns.evidence, known.of(users)
    exchange = evidence.best_exchange(columns.entries[users], known)
    both = evidence.explains(columns.entries[users], known) & evidence.explains(exchange.columns, known)
    for user, other in zip(users[both].tolist(), exchange.columns[both], strict=True):
        columns.solved[user] = True
        columns.add_alternative(user, other)


def search_with_cohorts(columns: Columns, known: Analytics, sizes: Tensor, progress: Listener) -> Analytics:
    """Fix the entries that the solved columns leave no choice about in each round's cohort, and search again.

    Returns what is known with these entries, which rest on other users' columns: no proof may be built on them.
    """
    while len(users := columns.unsolved()):
        remaining = sizes - columns.entries[columns.solved | columns.unnamed].sum(0)
        if bool((remaining < 0).any()) or bool((remaining > len(users)).any()):
            return known  # some solved column must be another user's: no ground to stand on
        decided = torch.where((known.fixed[users] < 0) & (remaining == 0), 0, known.fixed[users])
        decided = torch.where((known.fixed[users] < 0) & (remaining == len(users)), 1, decided)
        if torch.equal(decided, known.fixed[users]):
            return known
        fixed = known.fixed.clone()
        fixed[users] = decided
        known = known._replace(fixed=fixed)
        search_by_messages(columns, known, progress)
        search_quickly(columns, known, progress)
        if len(columns.unsolved()) == len(users):
            return known
    return known
