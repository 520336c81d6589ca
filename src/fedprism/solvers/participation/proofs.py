"""Which columns are proved to be the only ones, and which others would do.

Everything here rests on what the caller knows, never on what other users' columns leave of a cohort.
"""

from __future__ import annotations

import torch

from fedprism.solvers.participation.certificate import separation
from fedprism.solvers.participation.columns import Columns
from fedprism.solvers.participation.exact_search import ExactSearch
from fedprism.solvers.participation.heuristics import difference_map
from fedprism.solvers.participation.integer_program import ColumnOutcome
from fedprism.solvers.participation.quick_search import random_like

MOST_LISTED = 10
"""Alternatives of a user after which no more are looked for."""
PROBE = 2000
"""Iterations of the search for a second column, a quarter of those for the first."""


def compare_users(columns: Columns) -> None:
    """Users whose counts another user's column keeps as well: nothing tells which of the columns is whose."""
    known = columns.analytics
    sums = columns.entries.double() @ known.windows.T
    for user in columns.solved.nonzero()[:, 0].tolist():
        fits = ((sums >= known.least[user]) & (sums <= known.most[user])).all(1) & columns.solved
        for other in columns.entries[fits] if int(fits.sum()) > 1 else ():
            agrees = (known.fixed[user] < 0) | (known.fixed[user] == other)
            if bool(agrees.all()) and not torch.equal(other, columns.entries[user]):
                columns.add_alternative(user, other)


def prove(columns: Columns, exact: ExactSearch) -> None:
    """Prove that columns are the only ones: by duality for all, then by integer programs for the rest."""
    _prove_by_duality(columns)
    if not columns.space.quiet:  # under noise the bounds are too wide to exclude anything
        return
    _probe(columns)
    users = columns.unproved().tolist()
    seconds = exact.seconds(len(users))
    if not users or seconds <= 0:
        return
    programs = {
        user: exact.program(user, columns.analytics, seconds, excluded=columns.entries[user : user + 1])
        for user in users
    }
    for user, column, outcome in exact.solutions(programs):
        if outcome is ColumnOutcome.INFEASIBLE:
            columns.proved[user] = True
        elif column is not None:
            columns.add_alternative(user, column)


def _prove_by_duality(columns: Columns) -> None:
    users = columns.unproved()
    if len(users):
        known, entries = columns.analytics.of(users), columns.entries[users]
        needed = columns.evidence.allowed_at_most(known.tile_most.sum(1)) + columns.evidence.residual(entries)
        columns.proved[users] = separation(columns.space, known, entries) > needed


def _probe(columns: Columns) -> None:
    """Search again from a random start: another column that explains the sums is an alternative."""
    users = columns.unproved()
    if not len(users):
        return
    known, entries = columns.analytics.of(users), columns.entries[users]
    others = difference_map(columns.evidence, known, start=random_like(entries, 1), iterations=PROBE)
    explained = columns.evidence.explains(others, known) & (others != entries).any(1)
    for user, column in zip(users[explained].tolist(), others[explained], strict=True):
        columns.add_alternative(user, column)


def list_alternatives(columns: Columns, exact: ExactSearch) -> None:
    """All columns that would do, of users who have several: one more at a time, until there is none or enough."""
    users = [user for user in columns.alternatives if columns.solved[user]] if columns.space.quiet else []
    while users and (seconds := exact.seconds(len(users))) > 0:
        programs = {}
        for user in users:
            listed = torch.stack([columns.entries[user], *columns.alternatives[user]])
            programs[user] = exact.program(user, columns.analytics, seconds, excluded=listed)
        users = []
        for user, column, _ in exact.solutions(programs):
            if column is not None:
                columns.add_alternative(user, column)
                users += [user] if len(columns.alternatives[user]) < MOST_LISTED else []
