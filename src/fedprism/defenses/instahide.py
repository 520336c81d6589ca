"""InstaHide: MixUp, and then a random sign for every entry.

Huang, Song, Li, Arora, "InstaHide: Instance-hiding Schemes for Private Distributed Learning", ICML 2020 (inside
and across data sets); coefficients as in Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and
Defenses in Federated Learning", NeurIPS 2021. Broken in Carlini et al., 2021: `solvers.decode_mixtures`.

Differs from the published code in what MixUp differs in. Signs hide nothing of pixels from 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.checks import shown
from fedprism.defenses.base import Context
from fedprism.defenses.mixup import Chance, Mixing, MixUp, draw_coefficients, draw_partners, mixed_from, soft_labels
from fedprism.errors import BadInput
from fedprism.types import Batch

PRIVATE_MIXED = 2
"""How many of the samples in a mixture are the client's own where the others are public."""
LEAST_PRIVATE_WEIGHT = 0.3
"""The least that these two weigh together."""


@dataclass(frozen=True, repr=False)
class InstaHide(MixUp):
    """MixUp with every entry's sign drawn anew.

    With `cross`, public data in the model's input space, only two partners are the client's own samples, and weigh at
    least 0.3 together; the public ones' labels play no part (Inter-InstaHide). Captures cannot hold such a defense.
    """

    cross: Batch | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cross is not None and not isinstance(self.cross, Batch):
            raise BadInput(
                f"InstaHide's cross must be a Batch of public data, not {shown(self.cross)}. Leave it out to "
                "mix the client's own samples."
            )

    def __repr__(self) -> str:
        public = f", cross=<{len(self.cross)} public samples>" if self.cross is not None else ""
        return f"InstaHide(k={self.k}, bound={self.bound}{public})"

    def mixing(self, samples: int, rng: torch.Generator, owned: Tensor | None = None) -> Mixing:
        """As MixUp's; public partners are counted on from the client's own: the first has the index `samples`."""
        if self.cross is None:
            return super().mixing(samples, rng, owned)
        public = self.k - PRIVATE_MIXED
        if samples < PRIVATE_MIXED or len(self.cross) < public:
            raise BadInput(
                f"InstaHide needs {PRIVATE_MIXED} own and k - {PRIVATE_MIXED} = {public} public samples, but "
                f"there are {samples} and {len(self.cross)}. Lower k or give more data."
            )
        owned = torch.arange(samples) if owned is None else owned
        chance = Chance.out_of(rng, owned)
        partner = draw_partners(chance, samples, PRIVATE_MIXED - 1, besides=owned)
        others = samples + draw_partners(chance, len(self.cross), public, first=PRIVATE_MIXED)
        weight = (PRIVATE_MIXED, LEAST_PRIVATE_WEIGHT)
        return Mixing(
            torch.cat([owned.unsqueeze(1), partner, others], dim=1),
            draw_coefficients(chance, self.k, self.bound, private=weight),
        )

    def on_batch(self, batch: Batch, context: Context, rng: torch.Generator) -> Batch:
        pool, owned = mixed_from(batch, context)
        mixing = self.mixing(len(pool), rng, owned)
        inputs, labelled = pool.tensor, mixing
        if self.cross is not None:
            if self.cross.tensor.shape[1:] != inputs.shape[1:]:
                raise BadInput(
                    f"InstaHide's public samples have shape {tuple(self.cross.tensor.shape[1:])}, the client's "
                    f"{tuple(inputs.shape[1:])}. Bring them to that shape."
                )
            inputs = torch.cat([inputs, self.cross.tensor.to(inputs)])
            labelled = Mixing(mixing.partners[:, :PRIVATE_MIXED], mixing.coefficients[:, :PRIVATE_MIXED])
        mixed = mixing.of(inputs)
        signs = 2 * torch.randint(2, mixed.shape, generator=rng) - 1
        return Batch(mixed * signs.to(mixed), labelled.of(soft_labels(pool, context)))
