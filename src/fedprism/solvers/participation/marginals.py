"""How likely each entry of a window is one, given how many ones there are and noisy readings of all entries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedprism.solvers.participation.analytics import Analytics

LONG = 64
"""Rounds of a tile beyond which the large-number limit stands in for the exact sum."""
EXPONENT = 600.0
"""Bound on the logarithm of a product of odds: the largest double is exp(709), and sums need room."""
CERTAIN = 1e6
"""Log-odds of an entry that is known, far beyond what readings say."""
LEAST_RATE = 1e-3
"""Bound on the rate of participation from 0 and from 1, so that its odds are finite."""
SHIFT_ACCURACY = 1e-4
"""Log-odds to which the shift of a long tile is bisected."""


def marginals(readings: Tensor, variance: Tensor, known: Analytics) -> Tensor:
    """Probabilities (users, rounds) that entries are one, from readings = entry + N(0, variance) and the counts.

    readings (users, rounds), variance (users, 1).
    """
    evidence = ((2 * readings - 1) / (2 * variance)).double()
    evidence = torch.where(known.fixed == 0, -CERTAIN, torch.where(known.fixed == 1, CERTAIN, evidence))
    tiled = known.tiled(evidence, -CERTAIN)
    long = known.tiles.shape[1] > LONG
    chances = _tilted(tiled, known) if long else _counted(tiled, known)
    return known.untiled(chances).to(readings.dtype)


def _counted(evidence: Tensor, known: Analytics) -> Tensor:
    """Exact: elementary symmetric polynomials of the odds, from both ends of the tile.

    Before entry i, forward[i][k] is the weight of k ones among the entries before it, and backward[k] the weight of
    all ways to go on to a count that is allowed.
    """
    length = evidence.shape[-1]
    highest = int(known.tile_most.max())
    evidence, allowed = _centred(evidence, known, highest)
    odds = evidence.exp()
    state = torch.zeros_like(allowed)
    state[..., 0] = 1
    forward = []
    for i in range(length):
        forward.append(state)
        state = state.clone()
        state[..., 1:] += odds[..., i : i + 1] * forward[-1][..., :-1]
    total = (state * allowed).sum(-1)
    chances, backward = torch.empty_like(odds), allowed
    for i in reversed(range(length)):
        included = torch.nn.functional.pad(backward[..., 1:], (0, 1)) * odds[..., i : i + 1]
        chances[..., i] = (forward[i] * included).sum(-1) / total
        backward = backward + included
    return chances


def _centred(evidence: Tensor, known: Analytics, highest: int) -> tuple[Tensor, Tensor]:
    """Evidence moved so that products of odds stay in range, and the weight of every count (users, tiles, counts).

    Moving the evidence of all entries of a tile by t multiplies the weight of k ones by exp(k t): where the count is
    known, that changes nothing. A count that is not known exactly has the weight of independent draws at the user's
    rate.
    """
    length = evidence.shape[-1]
    exact = known.tile_least == known.tile_most
    ordered = evidence.sort(-1, descending=True).values
    last_in = ordered.gather(-1, (known.tile_least - 1).clamp(min=0)[..., None])
    first_out = ordered.gather(-1, known.tile_least.clamp(max=length - 1)[..., None])
    limit = EXPONENT / max(1, min(length, highest))
    middle = (last_in.clamp(-CERTAIN, CERTAIN) + first_out.clamp(-CERTAIN, CERTAIN)) / 2
    evidence = torch.where(exact[..., None], evidence - middle, evidence).clamp(-limit, limit)
    counts = torch.arange(highest + 1, device=evidence.device)
    rate = known.rate.clamp(LEAST_RATE, 1 - LEAST_RATE)[:, None, None]
    prior = (counts * (rate / (1 - rate)).log()).clamp(-EXPONENT / 4, EXPONENT / 4)
    if known.tile_weights is not None:  # reports under noise: the likelier ones weigh more
        prior = prior + known.tile_weights[..., : highest + 1].clamp(min=-EXPONENT / 4)
        prior = prior - prior.amax(-1, keepdim=True).clamp(min=-EXPONENT / 4)
    prior = prior.exp()
    inside = (counts >= known.tile_least[..., None]) & (counts <= known.tile_most[..., None])
    return evidence, torch.where(inside, torch.where(exact[..., None], 1.0, prior), 0.0).double()


def _tilted(evidence: Tensor, known: Analytics) -> Tensor:
    """The limit of long tiles: independent entries whose evidence is moved until their number is as counted."""
    rate = known.rate.clamp(LEAST_RATE, 1 - LEAST_RATE)[:, None]
    shift = (rate / (1 - rate)).log().expand(known.tile_least.shape)
    free = (evidence + shift[..., None]).sigmoid().sum(-1)
    wanted = torch.minimum(torch.maximum(free, known.tile_least.double()), known.tile_most.double())
    low, high = shift.new_full(shift.shape, -2 * CERTAIN), shift.new_full(shift.shape, 2 * CERTAIN)
    for _ in range(math.ceil(math.log2(4 * CERTAIN / SHIFT_ACCURACY))):
        middle = (low + high) / 2
        below = (evidence + middle[..., None]).sigmoid().sum(-1) < wanted
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    shift = torch.where(wanted == free, shift, (low + high) / 2)
    return (evidence + shift[..., None]).sigmoid()
