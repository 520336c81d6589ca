"""Proof that a column is the only one: a linear function that every other column would make larger.

Let z = S y + Cᵀ λ, with S the equations of the sums (Sᵀ p = 0 up to noise) and C p = c the exact counts. If z is
positive wherever p is 0 and negative wherever p is 1, then for any other q of zeros and ones with the same counts
z·q - z·p = y·Sᵀ(q - p) is at least the smallest |z|, so |Sᵀ(q - p)| is at least that over |y|. This holds
whatever found the column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedprism.solvers.participation.analytics import Analytics
from fedprism.solvers.participation.subspace import SignalSpace

ITERATIONS = 1600
"""Iterations of gradient descent after which no proof is expected any more."""
FIRST_CHECK = 25
"""Iterations before the first check of what is proved; later ones come at twice the iterations of the one before."""
STEP = 0.5
"""Step of the descent: two families of equations of norm one make a gradient of Lipschitz constant 2."""


def separation(space: SignalSpace, known: Analytics, columns: Tensor) -> Tensor:
    """For every column (users, rounds) a proved lower bound on |Sᵀ(q - p)| for all other columns q, or 0.

    The dual vector minimises a squared hinge loss, by accelerated gradient descent in single precision for all columns
    at once. What it proves is then computed in double precision, however good or bad the vector is.
    """
    basis, factor = torch.linalg.qr(space.sensing)
    length = known.windows.sum(1).clamp(min=1)
    overlap = known.windows.sum(0).max().clamp(min=1)
    sums = known.windows / (length * overlap).sqrt()[:, None]  # both families of equations now have norm one
    bound = torch.zeros(len(columns), dtype=torch.float64, device=columns.device)
    waiting = torch.arange(len(columns), device=columns.device)
    sign = 1 - 2 * columns.float()
    free, exact = (known.fixed < 0).float(), (known.least == known.most).float()
    fast_basis, fast_sums = basis.float(), sums.float()
    weights, counts = (sign * free) @ fast_basis, exact * ((sign * free) @ fast_sums.T)
    ahead_w, ahead_c, momentum = weights, counts, 1.0
    check = FIRST_CHECK
    for iteration in range(1, ITERATIONS + 1):
        reach = sign * (ahead_w @ fast_basis.T + ahead_c @ fast_sums)
        push = free * sign * (1 - reach).clamp(min=0)
        next_w = ahead_w + STEP * push @ fast_basis
        next_c = ahead_c + STEP * exact * (push @ fast_sums.T)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        pull = (momentum - 1) / following
        ahead_w, ahead_c = next_w + pull * (next_w - weights), next_c + pull * (next_c - counts)
        weights, counts, momentum = next_w, next_c, following
        if iteration == check:
            check *= 2
            proved = _proved(weights.double(), counts.double(), basis, factor, sums, sign, free)
            bound[waiting] = proved
            rest = proved <= 0
            if not bool(rest.any()):
                break
            waiting, sign, free, exact = waiting[rest], sign[rest], free[rest], exact[rest]
            weights, counts, ahead_w, ahead_c = weights[rest], counts[rest], ahead_w[rest], ahead_c[rest]
    return bound


def _proved(
    weights: Tensor, counts: Tensor, basis: Tensor, factor: Tensor, sums: Tensor, sign: Tensor, free: Tensor
) -> Tensor:
    """The bound that these dual vectors prove: smallest |z|, if on the right side everywhere, over |y|."""
    dual = sign * (weights @ basis.T + counts @ sums)
    margin = torch.where(free > 0, dual, torch.inf).amin(1)
    lengths = torch.linalg.solve_triangular(factor, weights.T, upper=True).norm(dim=0)  # z = Q w = S (R⁻¹ w)
    bound = torch.where(margin > 0, margin / lengths.clamp(min=1e-300), 0.0)
    return torch.where(torch.isfinite(margin), bound, torch.inf)
