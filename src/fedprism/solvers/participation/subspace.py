"""What the sums say about participation: the space in which every user's column lies, and how noisy it is.

G = P U (rounds x parameters), so the columns of P span the column space of G, and a column has no part in the
orthogonal complement of that space.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.participation.sums import LONG, Sums
from fedprism.solvers.separation.mixture import ROUNDING, effective_rank

MARGIN = 64
"""Columns of the sketch beyond a quarter more than the expected rank."""
UNKNOWN_WIDTH = 1280
"""Columns of the sketch where nobody says how many users there may be: enough for a thousand."""
QUIET = 1e-3
"""Squared residual that noise may leave in a column before all parameters are averaged over to reduce it; exchanging
one round for another in a column changes it by about one."""
HALF_THE_DIGITS = 3e-8
"""Singular values that come from a Gram matrix are rounded to this, relative to the largest."""
REWEIGHTINGS = 6
"""How often the rounds' noise is estimated anew, where cohorts are unknown."""
REFINEMENTS = 2
"""How often the parameters' noise is estimated anew."""
PASSES = 5
"""Passes over the sums of a long history: the basis converges by the square of the gap in each."""
PROBES = 16
"""Random directions that the evenness of a long history's noise is estimated from, to about a tenth."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class SignalSpace:
    """A column p lies in the space if weights * p is a combination of `signal`, up to noise.

    What noise alone leaves of weights * p outside of the signal is normal and equal in all directions, with variance
    |spread.T @ p|² in each. Nothing here grows with the square of the rounds, but for what asks for `sensing`.
    """

    signal: Tensor
    """(rounds, rank) orthonormal: the space of the weighted sums; zero in silent rounds."""
    weights: Tensor
    """(rounds,): what rounds are multiplied with because of their noise; zero in silent rounds."""
    spread: Tensor
    """(rounds, rank)"""
    clear: bool
    """Whether the rank stood out from rounding error and noise."""
    noise: float
    """Standard deviation of the noise in the sums, relative to their root mean square."""
    silent: Tensor
    """(rounds,): whether the sum is zero, so that nobody took part."""
    parameters: int

    @property
    def rank(self) -> int:
        return self.signal.shape[1]

    @property
    def equations(self) -> int:
        """How many independent equations every column satisfies."""
        return len(self.signal) - int(self.silent.sum()) - self.rank

    @property
    def quiet(self) -> bool:
        """Whether noise is far too small to make one column look like another."""
        energy = float(self.spread.square().sum() + self.spread.sum(0).square().sum()) / 4  # if in every other round
        return self.equations * energy < QUIET

    def outside(self, columns: Tensor) -> Tensor:
        """(users, rounds): what the weighted columns (users, rounds) have outside the signal."""
        weighted = columns.double() * self.weights
        return weighted - (weighted @ self.signal) @ self.signal.T

    @cached_property
    def basis(self) -> Tensor:
        """(rounds, rank) orthonormal: the space in which unweighted columns lie, without the silent rounds."""
        inverse = torch.where(self.silent, 0.0, 1 / self.weights.clamp(min=TINY))
        basis: Tensor = torch.linalg.qr(inverse[:, None] * self.signal)[0]
        return basis

    @cached_property
    def sensing(self) -> Tensor:
        """(rounds, equations): sensing.T @ column is zero up to noise. For solvers of few rounds."""
        live = ~self.silent
        complement = torch.linalg.qr(self.signal[live], mode="complete")[0][:, self.rank :]
        sensing = self.signal.new_zeros(len(live), complement.shape[1])
        sensing[live] = self.weights[live, None] * complement
        return sensing


class RankSought(NamedTuple):
    """How many users are expected, and whether that counts more than what singular values show."""

    expected: int | None
    certain: bool

    def of(self, values: Tensor, sums: Sums, rounds: int) -> tuple[int, bool]:
        """How many singular values are signal, and whether they show it."""
        rank, clear = _rank(values, rounds, sums.parameters, sums.dtype)
        if clear and not self.certain:
            return rank, True
        return min(self.expected or rank, rounds, sums.parameters), False


def signal_space(
    aggregates: Any,
    *,
    expected_rank: int | None,
    cohort_sizes: Tensor | None,
    device: torch.device,
    seed: int,
    rank_is_certain: bool = False,
) -> SignalSpace:
    """The space of the sums (rounds, parameters).

    `expected_rank` counts where their singular values leave it open, or in any case if the rank is certain: noise that
    is not the same in all directions may end in a gap of its own.
    """
    width = UNKNOWN_WIDTH if expected_rank is None else expected_rank + expected_rank // 4 + MARGIN
    sums = Sums(aggregates, device, width=width, seed=seed)
    if cohort_sizes is not None:
        _check_empty_rounds(sums, cohort_sizes)
    live = sums.lengths > 0  # a round of nobody has no noise either, and would spoil its statistics
    space = None if rank_is_certain else _from_sketch(sums, live)
    if space is None or not space.quiet:
        expected = space.rank if space is not None and expected_rank is None else expected_rank
        space = _under_noise(sums, live, RankSought(expected, rank_is_certain), cohort_sizes)
    return space


def _check_empty_rounds(sums: Sums, sizes: Tensor) -> None:
    """Refuse sizes (rounds,) that do not belong to these sums."""
    if sizes.shape != sums.heard.shape:
        raise ValueError(
            f"cohort_sizes must hold one size per round, not {len(sizes)} for sums over {len(sums.heard)} rounds."
        )
    wrong = sums.heard & (sizes == 0)
    if bool(wrong.any()):
        raise ValueError(
            f"round {int(wrong.nonzero()[0])} has a sum, although its cohort size is 0. "
            "Correct the size, or leave the round out if it holds nothing but noise."
        )


def _padded(rows: Tensor, live: Tensor) -> Tensor:
    """The rows at the live rounds, zeros elsewhere."""
    padded = rows.new_zeros(len(live), rows.shape[1])
    padded[live] = rows
    return padded


def _from_sketch(sums: Sums, live: Tensor) -> SignalSpace | None:
    """The space of the sketch, where its rank is clear: all there is to know where the sums are free of noise."""
    sketch = sums.sketch[live][:, : sums.parameters]
    # Through the Gram matrix of the sketch's columns: singular values come out to half the digits, which tells signal
    # from rounding error, and the signal's directions to all of them.
    energies, right = torch.linalg.eigh(sketch.T @ sketch)
    energies, right = energies.flip(0).clamp(min=0), right.flip(1)
    values = energies[: min(*sketch.shape, sums.parameters)].sqrt()
    rank, clear = _rank(values, len(sketch), min(sketch.shape[1], sums.parameters), sums.dtype)
    if not clear or not 0 < rank < len(values):
        return None
    signal = torch.linalg.qr(sketch @ right[:, :rank] / values[:rank])[0]
    left_out = float((sketch - signal @ (signal.T @ sketch)).square().sum())
    rest = energies[rank : len(sketch)]
    width = _effective_width(float(rest.sum()), float(rest.square().sum()), len(sketch) - rank)
    width = min(sketch.shape[1], sums.parameters, rank + width)
    return _space(signal, energies[:rank], left_out, width, None, sums, live, clear)


def _rank(values: Tensor, rounds: int, width: int, dtype: torch.dtype) -> tuple[int, bool]:
    """How many singular values (descending) are signal, and whether that is clear.

    One value alone is no floor of noise: where there are no more parameters than users, the smallest signal may well
    be that far below the others.
    """
    rank, clear = effective_rank(values, torch.Size((rounds, width)), dtype)
    rounding = max(ROUNDING * torch.finfo(dtype).eps, HALF_THE_DIGITS)
    alone = rank == len(values) - 1 and float(values[-1]) > rounding * float(values[0])
    return rank, clear and not alone


def _under_noise(sums: Sums, live: Tensor, sought: RankSought, cohort_sizes: Tensor | None) -> SignalSpace:
    """The space under noise: all parameters count, but noisy rounds and noisy parameters count less.

    A parameter's noise is what its sums have outside the space found so far.
    """
    weighted = _weighted_long if len(live) > LONG else _weighted_rounds
    space = weighted(sums, None, live, sought, cohort_sizes)
    for _ in range(0 if sums.once or space.equations < 1 else REFINEMENTS):
        noise = sums.filtered(space.signal, space.weights)
        weights = (noise + LEAST_NOISE * noise.mean() + TINY).rsqrt()
        space = weighted(sums, weights / weights.mean(), live, sought, cohort_sizes)
    return space


def _first_weights(live: Tensor, cohort_sizes: Tensor | None) -> tuple[Tensor, int]:
    """The live rounds' weights to begin with, and how often to look for the space with better and better ones.

    Noise grows with the cohort. Where cohorts are unknown, every round's noise is read off what the signal leaves of
    it, again and again as the signal gets clearer.
    """
    count = int(live.sum())
    if cohort_sizes is None:
        return torch.ones(count, dtype=torch.float64, device=live.device), REWEIGHTINGS
    return cohort_sizes.to(torch.float64)[live].clamp(min=1).rsqrt(), 1


def _noise_weights(missed: Tensor, leverage: Tensor, weights: Tensor) -> Tensor:
    """Better weights (rounds,) from the energy that the signal leaves of each weighted round."""
    variance = missed / leverage.clamp(min=LEAST_LEVERAGE) / weights.square()
    # A round taken for all signal would get ever more weight: none may be far quieter than the others.
    weights = variance.clamp(min=LEAST_ROUND_NOISE * float(variance.median())).rsqrt()
    return weights / weights.max()


def _weighted_rounds(
    sums: Sums, parameter_weights: Tensor | None, live: Tensor, sought: RankSought, cohort_sizes: Tensor | None
) -> SignalSpace:
    """The space of the live rounds from the inner products of all pairs."""
    gram = sums.gram(parameter_weights)[live][:, live]
    rounds = len(gram)
    weights, repeats = _first_weights(live, cohort_sizes)
    for remaining in reversed(range(repeats)):
        whitened = weights[:, None] * gram * weights
        energies, basis = torch.linalg.eigh(whitened)
        energies, basis = energies.flip(0).clamp(min=0), basis.flip(1)
        values = energies[: sums.parameters].sqrt()  # beyond that they are zero, which is no gap
        rank, clear = sought.of(values, sums, rounds)
        rest = basis[:, rank:]
        if remaining and float(energies[rank:].sum()) > NOTHING_LEFT * float(energies.sum()):
            weights = _noise_weights((rest * (whitened @ rest)).sum(1), rest.square().sum(1), weights)
    left_out = float(energies[rank:].sum())
    square = float(energies[rank:].square().sum())
    width = min(sums.parameters, rank + _effective_width(left_out, square, rest.shape[1]))
    return _space(basis[:, :rank], energies[:rank], left_out, width, weights, sums, live, clear)


def _weighted_long(
    sums: Sums, parameter_weights: Tensor | None, live: Tensor, sought: RankSought, cohort_sizes: Tensor | None
) -> SignalSpace:
    """The same for so many rounds that their pairs would not fit: by iterating on a basis little wider than the rank.

    Halko, Martinsson and Tropp, "Finding structure with randomness", 2011. Every pass over the sums also gives each
    round's energy outside the signal found in the pass before.
    """
    rounds = int(live.sum())
    sketch = sums.sketch[live][:, : sums.parameters]
    lengths = sums.squares(parameter_weights)[live]
    weights, _ = _first_weights(live, cohort_sizes)
    for passes in reversed(range(PASSES)):
        start = torch.linalg.qr(weights[:, None] * sketch)[0]
        product = sums.doubled(_padded(weights[:, None] * start, live), parameter_weights)[live]
        inner = start.T @ (weights[:, None] * product)  # the Gram matrix of the sums, as the basis sees it
        energies, rotation = torch.linalg.eigh((inner + inner.T) / 2)
        energies, rotation = energies.flip(0).clamp(min=0), rotation.flip(1)
        values = energies.sqrt()
        rank, clear = sought.of(values, sums, len(values) - 1)
        signal = start @ rotation[:, :rank]
        sketch = product  # one step nearer to the leading directions
        if passes and cohort_sizes is None:
            inside = (signal * (weights[:, None] * (product @ rotation[:, :rank]))).sum(1)
            missed = (weights.square() * lengths - inside).clamp(min=0)
            weights = _noise_weights(missed, 1 - signal.square().sum(1), weights)
    total = float((weights.square() * lengths).sum())
    left_out = max(0.0, total - float(energies[:rank].sum()))
    square = _square_of_rest(sums, parameter_weights, signal, weights, live)
    width = min(sums.parameters, rank + _effective_width(left_out, square, rounds - rank))
    return _space(signal, energies[:rank], left_out, width, weights, sums, live, clear)


def _square_of_rest(
    sums: Sums, parameter_weights: Tensor | None, signal: Tensor, weights: Tensor, live: Tensor
) -> float:
    """The sum of squares of the singular values' squares outside the signal, estimated by a few random directions."""
    probes = torch.randn(len(signal), PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probes = probes.to(signal)
    probes = probes - signal @ (signal.T @ probes)
    image = weights[:, None] * sums.doubled(_padded(weights[:, None] * probes, live), parameter_weights)[live]
    image = image - signal @ (signal.T @ image)
    return float(image.square().sum()) / PROBES


def _effective_width(total: float, square: float, equations: int) -> int:
    """How many independent parameters would make noise as uneven as the energies of m equations say it is.

    total and square: sums of the energies and of their squares.

    Noise of covariance C has E sum(e) = m tr C and E sum(e^2) = m tr(C)^2 + m (m + 1) tr(C^2); the effective width is
    tr(C)^2 / tr(C^2), all parameters for white noise, few where noise is correlated, as that of minibatches is.
    """
    m = equations
    trace = total / max(1, m)
    spare = (square - m * trace**2) / max(1, m * (m + 1))
    return max(1, round(trace**2 / spare)) if spare > 0 else 2**53


def _space(
    signal: Tensor,
    energies: Tensor,
    left_out: float,
    width: int,
    weights: Tensor | None,
    sums: Sums,
    live: Tensor,
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
    if weights is None:
        weights = signal.new_ones(rounds)
    total = (float(energies.sum()) + left_out) / max(1, rounds) / width
    return SignalSpace(
        signal=_padded(signal, live),
        weights=_padded(weights[:, None], live)[:, 0],
        spread=_padded(weights[:, None] * spread, live),
        clear=clear,
        noise=(variance / total) ** 0.5 if total > 0 else 0.0,
        silent=~live,
        parameters=sums.parameters,
    )
