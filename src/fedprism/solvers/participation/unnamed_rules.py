"""Which columns found without counts are users', and which only look like it.

Three things that are no user's column can lie in the space of the sums: sums and differences of users' columns that
happen to be zeros and ones; columns that come near it by chance, which noise makes possible; and columns off by a round
or two.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.solvers.participation.evidence import CLEARLY, Evidence

LEAST_ODDS = math.log(1e6)
"""Log odds at which a column is preferred over another that would do in its place."""
LEAST_CHANCE = math.log(1e-3)
"""Logarithm of how many columns that are no user's may be expected in the space before none of them is trusted."""
POWER_ITERATIONS = 60
"""Iterations towards a second vector within a column's rounds: accurate to 1e-5 where the others are below .9."""
INSIDE = 1e-3
"""Part of its square that a vector in the space may have outside of a column's rounds and still count as within."""
DEPENDENT = 1e-6
"""Part of a column's square outside the space of others up to which it is a combination of them."""
LEAST_COEFFICIENT = 0.1
"""Coefficient of a column in a combination of others from which on it could be exchanged for that combination."""
NEARLY = 2.0
"""Rounds, in units of those that noise leaves undecided, in which a column may differ from a combination of others."""
MOST_MISFIT = 1.8
"""Squared residual over what noise explains, relative to the median column's, beyond which a column is not trusted:
unions of two users' columns have 2 to 3 times as much, users' own columns on real updates mostly less than 1.5
times."""
MOST_COMBINATIONS = 10_000
"""Combinations that are zeros and ones beyond which no column is trusted."""
MOST_TERMS = 3
"""Users that the combinations consist of whose number is estimated."""


class Unnamed(NamedTuple):
    """Independent columns of users (any, rounds): whose they are is not known."""

    columns: Tensor
    certain: Tensor
    """(any,): whether nothing else would do nearly as well in its place."""


def confirmed(evidence: Evidence, columns: Tensor) -> Tensor:
    """Those of the columns that the sums explain, that no flip of a round does as well as, and that chance does not."""
    columns = columns[evidence.within_noise(columns)]
    if not len(columns):
        return columns
    changes = evidence.flip_changes(columns)[:, ~evidence.space.silent]
    clear = changes.amin(1) > CLEARLY * evidence.variance(columns)
    return columns[clear & (accidents(evidence, columns) < LEAST_CHANCE)]


def accidents(evidence: Evidence, columns: Tensor) -> Tensor:
    """(any,): log of how many random columns with as many ones would be accepted.

    The equations make of a random column as many normal values as there are equations.
    """
    space = evidence.space
    rounds, equations = len(space.silent) - int(space.silent.sum()), space.equations
    share = (columns.double().mean(1) * len(space.silent) / rounds).clamp(0.5 / rounds, 1 - 0.5 / rounds)
    choices = -rounds * (share * share.log() + (1 - share) * (1 - share).log())
    ratio = (evidence.allowed(columns).square() / evidence.of_random(columns)).clamp(1e-30, 1.0)
    return choices + equations / 2 * (1 - ratio + ratio.log())


def settled(evidence: Evidence, columns: Tensor, known: Tensor) -> Unnamed:
    """The likeliest independent columns out of those that lie in the space (any, rounds); `known` ones are kept.

    A column that is the sum of two others of the space gives way to them. Of columns that depend on each other those
    with the fewest ones are the likeliest, as long as users take part in fewer than half of the rounds.
    """
    columns = torch.unique(columns, dim=0)
    parts = _parts(evidence, columns)
    if len(parts):
        columns = torch.unique(torch.cat([columns, parts]), dim=0)
    return Unnamed(*_likeliest(evidence, columns, known)[:2])


def doubted(evidence: Evidence, found: Unnamed, known: Tensor) -> Unnamed:
    """The same after a look at what sums and differences of two or three columns would do in the place of one of them.

    As long as columns are missing, one of those found may be such a combination itself: how many there are by chance is
    estimated.
    """
    columns = found.columns
    others = _combinations(columns)
    if others is None:
        return found._replace(certain=_is_in(columns, known))
    everything = torch.unique(torch.cat([columns, confirmed(evidence, others)]), dim=0)
    columns, certain, _ = _likeliest(evidence, everything, known)
    if len(columns) < evidence.space.rank and _expected_combinations(evidence, columns) > LEAST_CHANCE:
        certain = _is_in(columns, known)
    if not evidence.space.quiet and len(columns):
        misfit = evidence.residual(columns).square() / evidence.variance(columns).clamp(min=1e-300)
        certain = certain & ((misfit < MOST_MISFIT * misfit.median()) | _is_in(columns, known))
    return Unnamed(columns, certain)


def _likeliest(evidence: Evidence, columns: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The independent columns with the fewest ones, whether each is preferred by far, and the others."""
    weight = columns.sum(1)
    weight = torch.where(_is_in(columns, known), -1, weight)
    weight = torch.where((columns | evidence.space.silent).all(1), -2, weight)  # whoever is always there
    columns = columns[weight.argsort(stable=True)]
    undecided = NEARLY * evidence.undecided_rounds(columns)
    kept = _independent(columns, undecided)
    if not evidence.space.quiet:
        kept &= ~_covering(columns, undecided)
    return columns[kept], _preferred(columns[kept], columns[~kept]), columns[~kept]


def _covering(columns: Tensor, undecided: Tensor) -> Tensor:
    """(any,): whether a column nearly contains another, as the union of two users' columns does under noise."""
    values = columns.double()
    weight = values.sum(1)
    missing = weight[:, None] - values @ values.T  # [a, c]: how many of a's rounds are not c's
    heavier = weight > weight[:, None]
    telling = weight[:, None] > 2 * undecided[:, None]
    return ((missing <= undecided) & heavier & telling).any(0)


def _log_odds(columns: Tensor) -> float:
    """By how much a round more in a column makes it less likely."""
    rate = float(columns.double().mean().clamp(1e-6, 1 - 1e-6)) if len(columns) else 0.5
    return math.log((1 - rate) / rate)


def _combinations(columns: Tensor) -> Tensor | None:
    """Columns that are a + b, a - b or a + b - c of others, if they are not too many; sums only with light ones.

    Whole numbers x of which none is below -1 have x² = x in sum if and only if all are zeros and ones: inner products
    tell.
    """
    values = columns.double()
    gram, weight = values @ values.T, values.sum(1)
    found = []
    light = weight * max(0.0, _log_odds(columns)) < LEAST_ODDS
    disjoint = ((gram == 0) & (light[:, None] | light)).triu(1).nonzero()
    nested = ((gram == weight) & ~torch.eye(len(gram), dtype=torch.bool, device=gram.device)).nonzero()
    if len(disjoint) + len(nested) > MOST_COMBINATIONS:
        return None
    found += [columns[disjoint[:, 0]] | columns[disjoint[:, 1]], columns[nested[:, 0]] & ~columns[nested[:, 1]]]
    count = len(disjoint) + len(nested)
    for less in range(len(columns)):
        fits = weight[less] - gram[less][:, None] - gram[less] + gram == 0
        fits[less], fits[:, less] = False, False
        pairs = fits.triu(1).nonzero()
        count += len(pairs)
        if count > MOST_COMBINATIONS:
            return None
        if len(pairs):
            found.append((columns[pairs[:, 0]].long() + columns[pairs[:, 1]].long() - columns[less].long()).bool())
    return torch.cat(found)


def _is_in(columns: Tensor, others: Tensor) -> Tensor:
    """(any,): whether a column is among the others."""
    if not len(others):
        return torch.zeros(len(columns), dtype=torch.bool, device=columns.device)
    both = torch.cat([columns, torch.unique(others, dim=0)])
    _, number, count = torch.unique(both, dim=0, return_inverse=True, return_counts=True)
    repeated: Tensor = (count[number] > 1)[: len(columns)]
    return repeated


def _parts(evidence: Evidence, columns: Tensor) -> Tensor:
    """(any, rounds): columns of the space that add up to one of these, in disjoint rounds.

    Such a column has a second vector of the space within its rounds, constant on each of its parts.
    """
    basis = evidence.space.basis
    parts = list[Tensor]()
    waiting = columns
    while len(waiting):
        rows = waiting.to(basis)
        own = rows @ basis
        own = own / own.norm(dim=1, keepdim=True).clamp(min=1e-300)
        rng = torch.Generator().manual_seed(0)
        vector = torch.randn(own.shape, generator=rng, dtype=torch.float64).to(basis)
        for _ in range(POWER_ITERATIONS):
            vector = vector - (vector * own).sum(1, keepdim=True) * own
            vector = vector / vector.norm(dim=1, keepdim=True).clamp(min=1e-300)
            values = rows * (vector @ basis.T)
            vector = values @ basis
        outside = 1 - values.square().sum(1)
        chosen = (outside < evidence.undecided_rounds(waiting) / waiting.sum(1).clamp(min=1) + INSIDE) & (
            waiting.sum(1) > 1
        )
        if not bool(chosen.any()):
            break
        upper = _upper_part(values[chosen], waiting[chosen])
        found = confirmed(evidence, evidence.corrected(torch.cat([upper, waiting[chosen] & ~upper])))
        waiting = found[~_is_in(found, torch.cat([columns, *parts]))]
        parts.append(waiting)
    return torch.cat(parts) if parts else columns[:0]


def _upper_part(values: Tensor, columns: Tensor) -> Tensor:
    """The rounds (any, rounds) of a column above the widest gap between the values on them."""
    ordered = torch.where(columns, values, torch.inf).sort(dim=1).values
    gaps = (ordered[:, 1:] - ordered[:, :-1]).nan_to_num(nan=0.0, posinf=0.0)
    gaps = torch.where(torch.isfinite(ordered[:, 1:]), gaps, 0.0)
    place = gaps.argmax(1, keepdim=True)
    threshold = (ordered.gather(1, place) + ordered.gather(1, place + 1)) / 2
    return columns & (values > threshold)


def _independent(columns: Tensor, undecided: Tensor) -> Tensor:
    """(any,): the first columns (any, rounds) that are no combinations of those before them, up to undecided rounds."""
    kept = torch.ones(len(columns), dtype=torch.bool, device=columns.device)
    values = columns.double()
    lengths = values.square().sum(1).clamp(min=1)
    least = undecided + DEPENDENT * lengths
    gram = values @ values.T / (lengths[:, None] * lengths).sqrt()
    factor, failed = torch.linalg.cholesky_ex(gram)
    if not bool(failed) and bool((factor.diagonal().square() * lengths > least).all()):
        return kept
    basis = values.new_zeros(0, values.shape[1])
    for number, row in enumerate(values):
        for _ in range(2):  # once more, for what rounding left
            row = row - (basis @ row) @ basis
        kept[number] = row.square().sum() > least[number]
        if kept[number]:
            basis = torch.cat([basis, (row / row.norm())[None]])
    return kept


def _preferred(kept: Tensor, dropped: Tensor) -> Tensor:
    """(any,): whether a kept column is by far likelier than each dropped one that would do in its place."""
    certain = torch.ones(len(kept), dtype=torch.bool, device=kept.device)
    if not len(dropped):
        return certain
    values = kept.double()
    coefficients = torch.linalg.lstsq(values.T, dropped.double().T).solution.T  # (dropped, kept)
    odds = (dropped.sum(1)[:, None] - kept.sum(1)) * _log_odds(kept)
    exchangeable = coefficients.abs() > LEAST_COEFFICIENT
    certain &= ~(exchangeable & (odds < LEAST_ODDS)).any(0)
    return certain


def _expected_combinations(evidence: Evidence, columns: Tensor) -> float:
    """Log of how many differences and sums of a few users' columns happen to be zeros and ones, beside plain sums.

    Plain sums are found out by their parts. As long as columns are missing, one of these may be among those found.
    """
    if not len(columns):
        return -math.inf
    rounds = len(evidence.space.silent) - int(evidence.space.silent.sum())
    rate = float(columns.sum(1).double().mean()) / rounds
    users = evidence.space.rank
    total = 0.0
    for plus, minus in product(range(1, MOST_TERMS), range(1, MOST_TERMS)):
        if plus + minus > MOST_TERMS:
            continue
        fits = sum(
            math.comb(plus, a) * math.comb(minus, b) * rate ** (a + b) * (1 - rate) ** (plus + minus - a - b)
            for a in range(plus + 1)
            for b in range(minus + 1)
            if a - b in (0, 1)
        )
        total += math.comb(users, plus) * math.comb(max(0, users - plus), minus) * fits**rounds
    return math.log(total) if total > 0 else -math.inf
