"""MixUp: train on weighted averages of k samples and of their labels.

Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", ICLR 2018; with k > 2 and a bound on the
coefficients as a defense by Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in
Federated Learning", NeurIPS 2021.

Differs from the published code in: the mixture of a sample starts with that sample and belongs to its index; partners
are uniform for each mixture separately, where the published ones come from permutations of the whole data.
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
from fedprism.types import Batch, Update, is_soft

MOST_MIXED = 64
"""Samples in one mixture at most: a bound on input."""
FIRST_CONCENTRATION = 3
"""The first coefficient's Dirichlet parameter; that of the others is 1."""
MOST_REDRAWS = 10_000
"""How often coefficients are drawn before the bound counts as unreachable."""
REDRAWN_TOGETHER = 8
"""Draws per mixture at a time: speed only, the first good one counts."""


class Mixing(NamedTuple):
    """Which samples are in each mixture and with what weight: (mixtures, k) and (mixtures, k)."""

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


class Told(NamedTuple):
    """What an attacker was told about mixtures: `Knowledge.mixing`, once it is seen to be in order."""

    mapping: Tensor
    coefficients: Tensor | None
    updates: Tensor

    @classmethod
    def of(cls, given: Update, rounds: int) -> Told:
        """Check a field of Knowledge about `rounds` updates."""
        if not {"mapping", "updates"} <= set(given) <= {"mapping", "coefficients", "updates"}:
            raise BadInput(f"mixing takes 'mapping', 'updates' and perhaps 'coefficients', not {shown(sorted(given))}.")
        mapping, coefficients, updates = given["mapping"], given.get("coefficients"), given["updates"]
        # Every sample has a mixture of its own, so no number is beyond how many entries there are.
        if mapping.dtype != torch.int64 or mapping.dim() != 2 or not _within(mapping, mapping.numel()):
            raise BadInput(
                f"mixing's mapping must be int64 (mixtures, k) of samples counted from 0, not {mapping.dtype} "
                f"of shape {tuple(mapping.shape)} or other numbers."
            )
        if updates.dtype != torch.int64 or updates.shape != mapping.shape[:1] or not _within(updates, rounds):
            raise BadInput(
                f"mixing's updates must be int64, for each mixture one of {rounds} rounds counted from 0, not "
                f"{updates.dtype} of shape {tuple(updates.shape)} or other numbers."
            )
        floats = coefficients is None or (coefficients.dtype.is_floating_point and coefficients.shape == mapping.shape)
        if coefficients is not None and not (floats and bool(((coefficients >= 0) & (coefficients <= 1)).all())):
            raise BadInput(
                f"mixing's coefficients must be from 0 to 1, of the mapping's shape {tuple(mapping.shape)}, "
                f"not {coefficients.dtype} of shape {tuple(coefficients.shape)} or other numbers."
            )
        return cls(mapping, coefficients, updates)


def _within(numbers: Tensor, most: int) -> bool:
    return numbers.numel() > 0 and bool(((numbers >= 0) & (numbers < most)).all())


@dataclass(frozen=True)
class MixUp(Defense):
    """Replaces every sample by an average of itself and k - 1 other ones, and its label by that of their labels.

    The coefficients are Dirichlet(3, 1, ..., 1), drawn again until none is above `bound`. Partners are distinct, out of
    all that the client holds, if the context has it, else out of the batch. In a chain it comes first.
    """

    k: int = 4
    bound: float = 0.65

    def __post_init__(self) -> None:
        name = type(self).__name__
        whole(self.k, f"{name}'s k", MOST_MIXED, least=2)
        if not isinstance(self.bound, int | float) or not 1 / self.k < self.bound <= 1:
            raise BadInput(
                f"{name}'s bound must be above 1 / k = {1 / self.k:.3g} and at most 1, not {shown(self.bound)}. "
                "0.65 is common."
            )

    def mixing(self, samples: int, rng: torch.Generator, owned: Tensor | None = None) -> Mixing:
        """The next mixtures out of `rng`, on the CPU: a row for each of `owned`, or for all `samples` of the client.

        One number is drawn, the first one for a batch; it and a sample's index decide the mixture of that sample.
        """
        if samples < self.k:
            raise BadInput(
                f"{samples} samples are fewer than k = {self.k} to mix. Lower k or give the client more data."
            )
        owned = torch.arange(samples) if owned is None else owned
        chance = Chance.out_of(rng, owned)
        partners = torch.cat([owned.unsqueeze(1), draw_partners(chance, samples, self.k - 1, besides=owned)], dim=1)
        return Mixing(partners, draw_coefficients(chance, self.k, self.bound))

    def on_batch(self, batch: Batch, context: Context, rng: torch.Generator) -> Batch:
        pool, owned = mixed_from(batch, context)
        mixing = self.mixing(len(pool), rng, owned)
        return Batch(mixing.of(pool.tensor), mixing.of(soft_labels(pool, context)))

    def deterministic(self, observed: object = None) -> Defense:
        # An attacker who does not know the coefficients looks for the mixtures: those are what went into the gradient.
        return Chain()


def mixed_from(batch: Batch, context: Context) -> tuple[Batch, Tensor]:
    """The samples that may be mixed, and which of them the batch holds."""
    pool = context.batch if context.batch is not None else batch
    if context.batch is None or context.indices is None:
        return pool, torch.arange(len(batch))
    return pool, context.indices.cpu()


class Chance(NamedTuple):
    """Random numbers that belong to samples: the same ones in whichever batch and order a sample comes."""

    key: int
    samples: Tensor
    """(rows,)"""

    @classmethod
    def out_of(cls, rng: torch.Generator, samples: Tensor) -> Chance:
        return cls(int(torch.randint(2**62, (), generator=rng)), samples)

    def uniform(self, first: int, count: int, rows: Tensor | None = None) -> Tensor:
        """(rows, count) in (0, 1), in double precision: the numbers from `first` on of these rows, of all unless said.

        Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014 (SplitMix), of key, sample, number.
        """
        samples = (self.samples if rows is None else self.samples[rows]).unsqueeze(1)
        numbers = torch.arange(first, first + count)
        bits = _scrambled(_scrambled(self.key + samples * _GOLDEN) + numbers * _GOLDEN)
        uniform: Tensor = (_shifted(bits, 11).double() + 0.5) / 2**53
        return uniform


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""The step of SplitMix64 as a signed number: 2 to the power of 64 over the golden ratio."""


def _scrambled(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ _shifted(bits, 27)) * (0x94D049BB133111EB - 2**64)
    scrambled: Tensor = bits ^ _shifted(bits, 31)
    return scrambled


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left also for negative numbers."""
    shifted: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted


def draw_partners(chance: Chance, samples: int, count: int, besides: Tensor | None = None, first: int = 0) -> Tensor:
    """(rows, count) distinct ones out of `samples`, none of them the one that the row has in `besides`.

    `first` is the number of the first random number to use.
    """
    rows = len(chance.samples)
    chosen_before = torch.empty(rows, 0, dtype=torch.int64) if besides is None else besides.unsqueeze(1)
    drawn = []
    for uniform in chance.uniform(first, count).unbind(1):
        partner = (uniform * (samples - chosen_before.shape[1])).long()
        for smaller in chosen_before.unbind(1):
            partner = partner + (partner >= smaller).long()
        drawn.append(partner)
        chosen_before = torch.cat([chosen_before, partner.unsqueeze(1)], dim=1).sort(dim=1).values
    return torch.stack(drawn, dim=1) if drawn else torch.empty(rows, 0, dtype=torch.int64)


def draw_coefficients(chance: Chance, k: int, bound: float, private: tuple[int, float] = (1, 0.0)) -> Tensor:
    """(rows, k) Dirichlet(3, 1, ..., 1) in double precision, each row drawn again until no entry is above `bound`.

    `private`: of how many leading entries the sum must be at least how much.
    """
    drawn = torch.empty(len(chance.samples), k, dtype=torch.float64)
    count, weight = private
    open_rows = torch.arange(len(drawn))
    wanted = FIRST_CONCENTRATION + k - 1
    for attempt in range(0, MOST_REDRAWS, REDRAWN_TOGETHER):
        numbers = chance.uniform(MOST_MIXED + attempt * wanted, REDRAWN_TOGETHER * wanted, open_rows)
        each = _dirichlet(numbers.view(-1, REDRAWN_TOGETHER, wanted))
        good = (each.amax(2) <= bound) & (each[..., :count].sum(2) >= weight)
        # The first good one of each row: how many are drawn together makes no difference.
        drawn[open_rows] = each[torch.arange(len(each)), good.int().argmax(1)]
        open_rows = open_rows[~good.any(1)]
        if len(open_rows) == 0:
            return drawn
    raise BadInput(f"mixtures of {k} rarely meet the bound {bound}. Raise it.")


def _dirichlet(uniform: Tensor) -> Tensor:
    """(..., k) gamma variables over their sum; one of whole shape is a sum of exponential ones."""
    first, others = (-uniform.log()).tensor_split([FIRST_CONCENTRATION], dim=-1)
    gammas = torch.cat([first.sum(-1, keepdim=True), others], dim=-1)
    return gammas / gammas.sum(-1, keepdim=True)


def soft_labels(data: Batch, context: Context) -> Tensor:
    """The labels as rows of class weights, as wide as the model's outputs where the context has the model."""
    if not isinstance(data.labels, Tensor):
        raise BadInput(f"MixUp needs labels to mix along with the samples, not {shown(data.labels)}.")
    if is_soft(data.labels):
        return data.labels
    classes = int(data.labels.max()) + 1 if context.model is None else _outputs_of(context.model, data.tensor)
    return one_hot(data.labels, classes).to(data.tensor.dtype)


_OUTPUTS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def _outputs_of(model: nn.Module, inputs: Tensor) -> int:
    """How many classes the model tells apart, by a forward pass once, since it does not change."""
    if model not in _OUTPUTS:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        # Copies, because batch-norm writes into its buffers; two samples, because it refuses a single one.
        copies = {name: tensor.detach().clone() for name, tensor in state.items()}
        with torch.no_grad(), seeded_layers(torch.Generator()):
            _OUTPUTS[model] = functional_call(model, copies, (inputs[:2],)).shape[-1]
    return _OUTPUTS[model]
