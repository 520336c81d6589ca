"""Updates that become others from round to round, as if clients' data or the model changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedprism.randomness import generator
from fedprism.simulation.rounds import Answer, name_of
from fedprism.types import Update


class Drift:
    """Turns each client's update away from what it was in the first round, by half within `half_life` rounds.

    What replaces it is noise of the same size, which changes just as slowly.
    """

    def __init__(self, half_life: float, seed: int) -> None:
        self._keep, self._seed = 0.5 ** (1 / half_life), seed
        self._noise: dict[int, tuple[int, Update]] = {}
        """Client -> the last round it took part in, and the noise it sent."""

    def drifted(self, given: Sequence[Answer]) -> list[Answer]:
        return [answer._replace(update=self._turned(answer)) for answer in given]

    def _turned(self, answer: Answer) -> Update:
        client, now = answer.draw.client, answer.draw.round
        rng = generator(self._seed, "drift", name_of(client), now)
        before, old = self._noise.get(client, (0, None))
        kept = self._keep ** (now - before)
        noise, update = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, tensor in answer.update.items():
            size = float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0
            fresh = size * (1 - kept**2) ** 0.5 * torch.randn(tensor.shape, generator=rng).to(tensor)
            noise[name] = fresh if old is None else kept * old[name] + fresh
            update[name] = self._keep**now * tensor + noise[name]
        self._noise[client] = (now, noise)
        return update
