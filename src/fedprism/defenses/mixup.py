"""MixUp: train on weighted averages of k samples and of their labels.

Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", ICLR 2018; with k > 2 and a bound on the
coefficients as a defense by Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in
Federated Learning", NeurIPS 2021.

Differs from the published code in: the mixture of a sample starts with that sample and belongs to its index, so that a
short last batch gets its own mixtures; over an epoch these are the published mixtures in another order.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import one_hot

from fedprism.checks import shown, whole
from fedprism.defenses.base import Chain, Context, Defense
from fedprism.errors import BadInput
from fedprism.randomness import seeded_layers
from fedprism.types import Batch, is_soft

MOST_MIXED = 64
OWN_SHARE = 3.0
"""The first coefficient's Dirichlet parameter; that of the others is 1."""
MOST_REDRAWS = 10_000


class Mixing(NamedTuple):
    """Which samples are in a mixture and with what weight, one row a mixture: (rows, k) and (rows, k)."""

    partners: Tensor
    coefficients: Tensor

    def of(self, samples: Tensor) -> Tensor:
        """The mixtures of `samples` (samples, ...), on their device."""
        partners, coefficients = self.partners.to(samples.device), self.coefficients.to(samples)
        shape = (-1, *[1] * (samples.dim() - 1))
        # One partner after the other: all of them at once are k times the batch.
        return torch.stack(
            [coefficients[:, j].view(shape) * samples[partners[:, j]] for j in range(partners.shape[1])]
        ).sum(0)


@dataclass(frozen=True)
class MixUp(Defense):
    """Replaces every sample by an average of itself and k - 1 other ones, and its label by that of their labels.

    The coefficients are Dirichlet(3, 1, ..., 1), the 3 for the sample itself, drawn again until none is above `bound`.
    Partners are distinct. They come from all that the client trains on in the round, where the context has it, else
    from the batch. Every step mixes anew. In a chain it comes before what else changes batches.
    """

    k: int = 4
    bound: float = 0.65

    def __post_init__(self) -> None:
        name = type(self).__name__
        whole(self.k, f"{name}'s k", MOST_MIXED, least=2)
        if not isinstance(self.bound, int | float) or not 1 / self.k < self.bound <= 1:
            raise BadInput(
                f"expected {name}'s bound above 1 / k = {1 / self.k:.3g} and at most 1, found {shown(self.bound)}; "
                "0.65 is common."
            )

    def mixing(self, samples: int, rng: torch.Generator, own: Tensor | None = None) -> Mixing:
        """The next mixtures out of `rng`, on the CPU: a row for each of `own`, all of a client's `samples` unless said.

        This is the first thing that is drawn for a batch, so whoever has the generator can repeat it.
        """
        if samples < self.k:
            raise BadInput(
                f"expected at least k = {self.k} samples to mix, found {samples}; lower k or give the client more data."
            )
        own = torch.arange(samples) if own is None else own
        return Mixing(draw_partners(own, samples, self.k, rng), draw_coefficients(len(own), self.k, self.bound, rng))

    def on_batch(self, batch: Batch, context: Context, rng: torch.Generator) -> Batch:
        pool, own = mixed_from(batch, context)
        mixing = self.mixing(len(pool), rng, own)
        return Batch(mixing.of(pool.inputs), mixing.of(soft_labels(pool, context)))

    def deterministic(self, observed: object = None) -> Defense:
        # An attacker who does not know the coefficients looks for the mixtures: those are what went into the gradient.
        return Chain()


def mixed_from(batch: Batch, context: Context) -> tuple[Batch, Tensor]:
    """The samples that may be mixed, and which of them the batch holds."""
    pool = context.batch if context.batch is not None else batch
    if context.batch is None or context.indices is None:
        return pool, torch.arange(len(batch))
    return pool, context.indices.cpu()


def draw_partners(own: Tensor, samples: int, k: int, rng: torch.Generator) -> Tensor:
    """(own, k): rows of one of `own` and k - 1 others out of `samples`; but for clashes, no column repeats a sample."""
    columns = [torch.randperm(samples, generator=rng)[: len(own)] for _ in range(k - 1)]
    partners = torch.stack([own, *columns], dim=1)
    in_order = partners.sort(dim=1).values
    clashing = (in_order[:, 1:] == in_order[:, :-1]).any(1).nonzero().flatten()
    # Rows with a repeat are drawn again, uniformly: the k smallest of random keys, the own one below all others.
    for some in torch.split(clashing, 1024):
        keys = torch.rand(len(some), samples, generator=rng)
        keys[torch.arange(len(some)), own[some]] = -1.0
        partners[some] = keys.topk(k, dim=1, largest=False).indices
    return partners


def draw_coefficients(
    rows: int, k: int, bound: float, rng: torch.Generator, private: tuple[int, float] = (1, 0.0)
) -> Tensor:
    """(rows, k) Dirichlet(3, 1, ..., 1) in double precision, each row drawn again until no entry is above `bound`.

    `private`: of how many leading entries the sum must be at least how much.
    """
    drawn = torch.empty(rows, k, dtype=torch.float64)
    count, share = private
    open_rows = torch.arange(rows)
    for _ in range(MOST_REDRAWS):
        drawn[open_rows] = _dirichlet(len(open_rows), k, rng)
        current = drawn[open_rows]
        open_rows = open_rows[(current.amax(1) > bound) | (current[:, :count].sum(1) < share)]
        if len(open_rows) == 0:
            return drawn
    raise BadInput(f"expected a bound that mixtures of {k} often meet, found {bound}; raise it.")


def _dirichlet(rows: int, k: int, rng: torch.Generator) -> Tensor:
    """Gamma variables over their sum; one of whole shape is a sum of exponential ones."""
    first = torch.empty(rows, int(OWN_SHARE), dtype=torch.float64).exponential_(generator=rng).sum(1, keepdim=True)
    gammas = torch.cat([first, torch.empty(rows, k - 1, dtype=torch.float64).exponential_(generator=rng)], dim=1)
    return gammas / gammas.sum(1, keepdim=True)


def soft_labels(data: Batch, context: Context) -> Tensor:
    """The labels as rows of class weights, as wide as the model's outputs where the context has the model."""
    if is_soft(data.labels):
        return data.labels
    classes = int(data.labels.max()) + 1 if context.model is None else _outputs_of(context.model, data.inputs)
    return one_hot(data.labels, classes).to(data.inputs.dtype)


_OUTPUTS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def _outputs_of(model: nn.Module, inputs: Tensor) -> int:
    """How many classes the model tells apart; found by a forward pass once, since it does not change."""
    if model not in _OUTPUTS:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        # Copies, because batch-norm writes into its buffers; two samples, because it refuses a single one.
        copies = {name: tensor.detach().clone() for name, tensor in state.items()}
        with torch.no_grad(), seeded_layers(torch.Generator()):
            _OUTPUTS[model] = functional_call(model, copies, (inputs[:2],)).shape[-1]
    return _OUTPUTS[model]
