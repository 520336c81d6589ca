"""The Cocktail Party Attack's published optimisation as one writes it down: Adam, differentiated automatically.

It takes 25,000 steps. A hundred are timed and multiplied up, which is to be said of its seconds; whitening is counted
once. `CocktailObjective` takes the same steps to the end, faster, with its slopes written out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedprism_papers.cocktail_party.published_objective import CocktailObjective
from workloads.base import best_of

OBJECTIVE = CocktailObjective()
SAMPLE = 100
"""Steps that are timed, three times; the fastest count."""


def published_seconds(gradient: Tensor, size: int, image_shape: Sequence[int]) -> float:
    """Seconds of the whole optimisation, multiplied up: gradient (units, pixels) of `size` images of that shape."""
    once, signal = best_of(3, gradient.device, lambda: _whitened(gradient, size))
    steps, _ = best_of(3, gradient.device, lambda: _steps(signal, image_shape, SAMPLE))
    return once + steps / SAMPLE * OBJECTIVE.iterations


def _whitened(gradient: Tensor, size: int) -> Tensor:
    centred = gradient - gradient.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh(centred @ centred.T / (centred.shape[1] - 1))
    whitening = vectors[:, -size:].T * values[-size:].clamp(min=1e-20).rsqrt()[:, None]
    return whitening @ gradient


def _steps(signal: Tensor, image_shape: Sequence[int], steps: int) -> Tensor:
    """Un-mixing rows after so many steps. `alike` counts rows with themselves too, which is a constant."""
    size = len(signal)
    rows = torch.eye(size, device=signal.device).requires_grad_()
    adam = torch.optim.Adam([rows], lr=OBJECTIVE.lr)
    for _ in range(steps):
        unit = rows / rows.norm(dim=1, keepdim=True)
        images = (unit @ signal).view(-1, *image_shape)
        variation = images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean()
        alike = ((unit @ unit.T).abs() * OBJECTIVE.temperature).exp().sum() / (size * (size - 1))
        loss = OBJECTIVE.independence * alike + OBJECTIVE.total_variation * variation
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    return rows.detach()
