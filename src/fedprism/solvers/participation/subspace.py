"""What the sums say about participation: the space in which every user's column lies, and how noisy it is.

G = P U (rounds x parameters), so the columns of P span the column space of G, and a column has no part in the
orthogonal complement of that space.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.participation.sums import Sums
from fedprism.solvers.separation.mixture import ROUNDING, effective_rank

MARGIN = 64
"""Columns of the sketch beyond a quarter more than the expected rank."""
QUIET = 1e-3
"""Squared residual that noise may leave in a column before all parameters are averaged over to reduce it; exchanging
one round for another in a column changes it by about one."""
HALF_THE_DIGITS = 3e-8
"""Singular values that come from a Gram matrix are rounded to this, relative to the largest."""
REWEIGHTINGS = 6
"""How often the rounds' noise is estimated anew, where cohorts are unknown."""
REFINEMENTS = 2
"""How often the parameters' noise is estimated anew."""
LEAST_ROUND_NOISE = 0.2
"""Lower bound on a round's noise, as a fraction of the median."""
LEAST_NOISE = 0.05
"""Lower bound on a parameter's noise, as a fraction of the mean."""
NOTHING_LEFT = 1e-12
"""Energy outside the signal, as a fraction of all, that is rounding error and says nothing of the rounds' noise."""
LEAST_LEVERAGE = 1e-3
"""Lower bound on how much of a round lies outside the signal, for a noise estimate that divides by it."""
TINY = 1e-300
"""Added to what may be zero before it is divided by."""


class SignalSpace(NamedTuple):
    """`sensing` (rounds, equations): sensing.T @ column is zero up to noise.

    Noise alone makes every entry of sensing.T @ column a centred normal variable, of variance |spread.T @ column|².
    """

    sensing: Tensor
    spread: Tensor
    rank: int
    clear: bool
    """Whether the rank stood out from rounding error and noise."""
    noise: float
    """Standard deviation of the noise in the sums, relative to their root mean square."""
    silent: Tensor
    """(rounds,): whether the sum is zero, so that nobody took part."""
    parameters: int

    @property
    def quiet(self) -> bool:
        """Whether noise is far too small to make one column look like another."""
        energy = float(self.spread.square().sum() + self.spread.sum(0).square().sum()) / 4  # if in every other round
        return self.sensing.shape[1] * energy < QUIET


def signal_space(
    aggregates: Any,
    *,
    expected_rank: int,
    cohort_sizes: Tensor | None,
    device: torch.device,
    seed: int,
) -> SignalSpace:
    """The space of the sums (rounds, parameters). `expected_rank` counts where their singular values leave it open."""
    width = expected_rank + expected_rank // 4 + MARGIN
    sums = Sums(aggregates, device, width=width, seed=seed)
    if cohort_sizes is not None:
        _check_empty_rounds(sums, cohort_sizes)
    live = sums.lengths > 0  # a round of nobody has no noise either, and would spoil its statistics
    space = _from_sketch(sums, live)
    if space is None or not space.quiet:
        space = _from_gram(sums, live, expected_rank, cohort_sizes)
    return space._replace(sensing=_padded(space.sensing, live), spread=_padded(space.spread, live))


def _check_empty_rounds(sums: Sums, sizes: Tensor) -> None:
    """Refuse sizes (rounds,) that do not belong to these sums."""
    if sizes.shape != sums.heard.shape:
        raise ValueError(
            f"expected one cohort size per round, found {len(sizes)} for sums over {len(sums.heard)} rounds; "
            "give as many."
        )
    wrong = sums.heard & (sizes == 0)
    if bool(wrong.any()):
        raise ValueError(
            f"expected nothing in rounds of nobody, found a sum in round {int(wrong.nonzero()[0])}, whose cohort size "
            "is 0; correct it, or leave the round out if it holds nothing but noise."
        )


def _padded(rows: Tensor, live: Tensor) -> Tensor:
    """The rows at the live rounds, zeros elsewhere."""
    padded = rows.new_zeros(len(live), rows.shape[1])
    padded[live] = rows
    return padded


def _from_sketch(sums: Sums, live: Tensor) -> SignalSpace | None:
    """The space of the sketch, where its rank is clear: all there is to know where the sums are free of noise."""
    sketch = sums.sketch[live]
    # Through the Gram matrix of the sketch's columns: singular values come out to half the digits, which tells signal
    # from rounding error, and the signal's directions to all of them.
    energies, right = torch.linalg.eigh(sketch.T @ sketch)
    energies, right = energies.flip(0).clamp(min=0), right.flip(1)
    values = energies[: min(*sketch.shape, sums.parameters)].sqrt()
    rank, clear = _rank(values, len(sketch), min(sketch.shape[1], sums.parameters), sums.dtype)
    if not clear or not 0 < rank < len(values):
        return None
    signal = sketch @ right[:, :rank] / values[:rank]
    complete = torch.linalg.qr(signal, mode="complete")[0]
    rest = complete[:, rank:].T @ sketch
    width = min(sketch.shape[1], sums.parameters)
    return _space(signal, complete[:, rank:], energies[:rank], float(rest.square().sum()), width, None, sums, clear)


def _rank(values: Tensor, rounds: int, width: int, dtype: torch.dtype) -> tuple[int, bool]:
    """How many singular values (descending) are signal, and whether that is clear.

    One value alone is no floor of noise: where there are no more parameters than users, the smallest signal may well
    be that far below the others.
    """
    rank, clear = effective_rank(values, torch.Size((rounds, width)), dtype)
    rounding = max(ROUNDING * torch.finfo(dtype).eps, HALF_THE_DIGITS)
    alone = rank == len(values) - 1 and float(values[-1]) > rounding * float(values[0])
    return rank, clear and not alone


def _from_gram(sums: Sums, live: Tensor, expected_rank: int, cohort_sizes: Tensor | None) -> SignalSpace:
    """The space under noise: all parameters count, but noisy rounds and noisy parameters count less.

    A parameter's noise is what its sums have outside the space found so far.
    """
    space = _weighted_rounds(sums.gram(), sums, live, expected_rank, cohort_sizes)
    for _ in range(0 if sums.once or not space.sensing.shape[1] else REFINEMENTS):
        noise = sums.filtered(_padded(space.sensing, live))
        weights = (noise + LEAST_NOISE * noise.mean() + TINY).rsqrt()
        gram = sums.gram(weights / weights.mean())
        space = _weighted_rounds(gram, sums, live, expected_rank, cohort_sizes)
    return space


def _weighted_rounds(
    gram: Tensor, sums: Sums, live: Tensor, expected_rank: int, cohort_sizes: Tensor | None
) -> SignalSpace:
    """The space of the live rounds from their inner products.

    Noise grows with the cohort. Where cohorts are unknown, every round's noise is read off what the signal leaves of
    it, again and again as the signal gets clearer.
    """
    gram = gram[live][:, live]
    rounds = len(gram)
    weights = gram.new_ones(rounds)
    if cohort_sizes is not None:
        weights = cohort_sizes.to(weights)[live].clamp(min=1).rsqrt()
    repeats = 1 if cohort_sizes is not None else REWEIGHTINGS
    for remaining in reversed(range(repeats)):
        whitened = weights[:, None] * gram * weights
        energies, basis = torch.linalg.eigh(whitened)
        energies, basis = energies.flip(0).clamp(min=0), basis.flip(1)
        values = energies[: sums.parameters].sqrt()  # beyond that they are zero, which is no gap
        rank, clear = _rank(values, rounds, sums.parameters, sums.dtype)
        rank = rank if clear else min(expected_rank, rounds, sums.parameters)
        rest = basis[:, rank:]
        if remaining and float(energies[rank:].sum()) > NOTHING_LEFT * float(energies.sum()):
            leverage = rest.square().sum(1).clamp(min=LEAST_LEVERAGE)
            variance = (rest * (whitened @ rest)).sum(1) / leverage / weights.square()
            # A round taken for all signal would get ever more weight: none may be far quieter than the others.
            weights = variance.clamp(min=LEAST_ROUND_NOISE * float(variance.median())).rsqrt()
            weights = weights / weights.max()
    left_out = float(energies[rank:].sum())
    width = min(sums.parameters, rank + _effective_width(energies[rank:]))
    return _space(basis[:, :rank], rest, energies[:rank], left_out, width, weights, sums, clear)


def _effective_width(energies: Tensor) -> int:
    """How many independent parameters would make noise as uneven as these energies of m equations say it is.

    Noise of covariance C has E sum(e) = m tr C and E sum(e^2) = m tr(C)^2 + m (m + 1) tr(C^2); the effective width is
    tr(C)^2 / tr(C^2), all parameters for white noise, few where noise is correlated, as that of minibatches is.
    """
    m = len(energies)
    trace = float(energies.sum()) / max(1, m)
    square = (float(energies.square().sum()) - m * trace**2) / max(1, m * (m + 1))
    return max(1, round(trace**2 / square)) if square > 0 else 2**53


def _space(
    signal: Tensor,
    complement: Tensor,
    energies: Tensor,
    left_out: float,
    width: int,
    weights: Tensor | None,
    sums: Sums,
    clear: bool,
) -> SignalSpace:
    """The spread is that of principal components under white noise, to second order.

    Noise also makes the signal look stronger than it is: an energy e is seen as (e + v width)(e + v equations) / e
    with v its variance (Benaych-Georges and Nadakuditi, "The singular values and vectors of low rank perturbations",
    2012), which is inverted here; what sinks in the noise counts as the weakest signal that would not.

    energies: squared singular values of the signal; left_out: their sum in the complement; width: how many parameters,
    or columns that stand for them, were looked at; weights (rounds,): what the rounds were multiplied with.
    """
    rounds, rank = signal.shape
    equations = max(1, rounds - rank)
    # The signal's directions take up noise of their own, which is missing from what is left out.
    variance = left_out / equations / max(1, width - rank)
    shifted = energies - variance * (width + equations)
    clean = (shifted + (shifted.square() - 4 * variance**2 * width * equations).clamp(min=0).sqrt()) / 2
    clean = clean.clamp(min=variance * (width * equations) ** 0.5 + TINY)
    spread = signal * (variance * (clean + variance * width)).sqrt() / clean
    if weights is not None:
        complement, spread = weights[:, None] * complement, weights[:, None] * spread
    total = (float(energies.sum()) + left_out) / max(1, rounds) / width
    return SignalSpace(
        sensing=complement,
        spread=spread,
        rank=rank,
        clear=clear,
        noise=(variance / total) ** 0.5 if total > 0 else 0.0,
        silent=sums.lengths <= 0,
        parameters=sums.parameters,
    )
