"""Which columns are proved to be the only ones, and which others would do.

Everything here rests on what the caller knows, never on what other users' columns leave of a cohort.

Duality: let z = S y + Cᵀ λ, with S the equations of the sums (Sᵀ p = 0 up to noise) and C p = c the exact counts. If z
is positive wherever p is 0 and negative wherever p is 1, then for any other q of zeros and ones with the same counts
z·q - z·p = y·Sᵀ(q - p) is at least the smallest |z|, so |Sᵀ(q - p)| is at least that over |y|, whatever solver gave p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedprism.solvers.participation.analytics import Analytics
from fedprism.solvers.participation.columns import Columns
from fedprism.solvers.participation.exact_search import ExactSearch
from fedprism.solvers.participation.heuristics import difference_map
from fedprism.solvers.participation.integer_program import ColumnOutcome
from fedprism.solvers.participation.quick_search import random_like
from fedprism.solvers.participation.subspace import SignalSpace

MOST_LISTED = 10
"""Alternatives of a user after which no more are looked for."""
PROBE = 2000
"""Iterations of the search for a second column, a quarter of those for the first."""
ITERATIONS = 1600
"""Iterations of gradient descent after which no proof is expected any more."""
FIRST_CHECK = 25
"""Iterations before the first check of what is proved; later ones come at twice the iterations of the one before."""
STEP = 0.5
"""Step of the descent: two families of equations of norm one make a gradient of Lipschitz constant 2."""


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
        columns.proved[users] = distance_of_others(columns.space, known, entries) > needed


def distance_of_others(space: SignalSpace, known: Analytics, columns: Tensor) -> Tensor:
    """For every column (users, rounds) a proved lower bound on |Sᵀ(q - p)| for all other columns q, or 0.

    The dual vector minimises a squared hinge loss, by accelerated gradient descent in single precision for all columns
    at once. What it proves is then computed in double precision, however good or bad the vector is.
    """
    basis, live = space.basis, (~space.silent).double()
    length = known.windows.sum(1).clamp(min=1)
    overlap = known.windows.sum(0).max().clamp(min=1)
    sums = known.windows / (length * overlap).sqrt()[:, None]  # both families of equations now have norm one
    bound = torch.zeros(len(columns), dtype=torch.float64, device=columns.device)
    waiting = torch.arange(len(columns), device=columns.device)
    sign = 1 - 2 * columns.float()
    free, exact = (known.fixed < 0).float(), (known.least == known.most).float()
    fast_basis, fast_live, fast_sums = basis.float(), live.float(), sums.float()

    def sensed(values: Tensor) -> Tensor:
        return fast_live * values - (values @ fast_basis) @ fast_basis.T

    weights, counts = sensed(sign * free), exact * ((sign * free) @ fast_sums.T)
    ahead_w, ahead_c, momentum = weights, counts, 1.0
    check = FIRST_CHECK
    for iteration in range(1, ITERATIONS + 1):
        reach = sign * (ahead_w + ahead_c @ fast_sums)
        push = free * sign * (1 - reach).clamp(min=0)
        next_w = ahead_w + STEP * sensed(push)
        next_c = ahead_c + STEP * exact * (push @ fast_sums.T)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        pull = (momentum - 1) / following
        ahead_w, ahead_c = next_w + pull * (next_w - weights), next_c + pull * (next_c - counts)
        weights, counts, momentum = next_w, next_c, following
        if iteration == check:
            check *= 2
            proved = _proved(weights.double(), counts.double(), space, sums, sign, free)
            bound[waiting] = proved
            rest = proved <= 0
            if not bool(rest.any()):
                break
            waiting, sign, free, exact = waiting[rest], sign[rest], free[rest], exact[rest]
            weights, counts, ahead_w, ahead_c = weights[rest], counts[rest], ahead_w[rest], ahead_c[rest]
    return bound


def _proved(weights: Tensor, counts: Tensor, space: SignalSpace, sums: Tensor, sign: Tensor, free: Tensor) -> Tensor:
    """The bound that these dual vectors prove: smallest |z|, if on the right side everywhere, over |y|.

    weights (users, rounds) become S y with the nearest y: the part that lies in the space counts for nothing.
    """
    live = ~space.silent
    weights = live * weights - (weights @ space.basis) @ space.basis.T
    dual = sign * (weights + counts @ sums)
    margin = torch.where(free > 0, dual, torch.inf).amin(1)
    lengths = (weights[:, live] / space.weights[live]).norm(dim=1)  # S = diag(weights) N with N orthonormal
    bound = torch.where(margin > 0, margin / lengths.clamp(min=1e-300), 0.0)
    return torch.where(torch.isfinite(margin), bound, torch.inf)


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
