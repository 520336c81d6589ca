"""What a defense is: the identity at every stage of a client's round, overriding the stages it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.types import Batch, LossFn, Update


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where in a round a stage is called; what a stage does not know is None."""

    model: nn.Module | None = None
    params: Update | None = None
    batch: Batch | None = None
    indices: Tensor | None = None
    client: str | None = None
    round: int | None = None
    step: int | None = None


class Defense:
    """The identity. Subclasses are frozen dataclasses whose fields are the strengths of the defense.

    Stages, in the order a round meets them: which samples form the batch; the batch itself; the loss; the gradient of
    each example, (batch, *shape) a parameter; the update that leaves the client; the list of all clients' updates.
    No stage changes its arguments in place.
    """

    def on_draw(self, dataset: Batch, context: Context, rng: torch.Generator) -> Tensor:
        return torch.arange(len(dataset))

    def on_batch(self, batch: Batch, context: Context, rng: torch.Generator) -> Batch:
        return batch

    def on_loss(self, loss: LossFn) -> LossFn:
        return loss

    def on_examples(self, grads: Update, context: Context, rng: torch.Generator) -> Update:
        return grads

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return update

    def on_aggregate(self, updates: Sequence[Update], context: Context, rng: torch.Generator) -> Sequence[Update]:
        return updates

    def deterministic(self, observed: Update | None = None) -> Defense:
        """What an attacker who knows this defense can repeat in its own forward model; random parts are left out.

        `observed` is the update it saw, which may fix what the defense did to it (which entries pruning kept).
        """
        return self

    @property
    def members(self) -> tuple[Defense, ...]:
        """The defenses of a chain, chains within it taken apart; a single defense is its own member."""
        return (self,)

    def overrides(self, *stages: str) -> bool:
        """Whether a member does anything at one of these stages. Examples' gradients are costly: computed only then."""
        return any(getattr(type(d), stage) is not getattr(Defense, stage) for d in self.members for stage in stages)

    @property
    def sums_only(self) -> bool:
        """Whether nobody sees a single client's update: what would be seen client by client is seen as an aggregate."""
        return False


@dataclass(frozen=True, repr=False)
class Chain(Defense):
    """Several defenses, one after the other, at every stage. Build it with `chain`."""

    defenses: tuple[Defense, ...] = ()

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.defenses))})"

    def on_draw(self, dataset: Batch, context: Context, rng: torch.Generator) -> Tensor:
        chosen, left = torch.arange(len(dataset)), dataset
        for defense in self.defenses:
            if defense.overrides("on_draw"):  # asking the others would copy the whole data set
                drawn = defense.on_draw(left, context, rng)
                chosen, left = chosen[drawn], left[drawn]
        return chosen

    def on_batch(self, batch: Batch, context: Context, rng: torch.Generator) -> Batch:
        for defense in self.defenses:
            batch = defense.on_batch(batch, context, rng)
        return batch

    def on_loss(self, loss: LossFn) -> LossFn:
        for defense in self.defenses:
            loss = defense.on_loss(loss)
        return loss

    def on_examples(self, grads: Update, context: Context, rng: torch.Generator) -> Update:
        for defense in self.defenses:
            grads = defense.on_examples(grads, context, rng)
        return grads

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        for defense in self.defenses:
            update = defense.on_update(update, context, rng)
        return update

    def on_aggregate(self, updates: Sequence[Update], context: Context, rng: torch.Generator) -> Sequence[Update]:
        for defense in self.defenses:
            updates = defense.on_aggregate(updates, context, rng)
        return updates

    def deterministic(self, observed: Update | None = None) -> Defense:
        return chain(*(defense.deterministic(observed) for defense in self.defenses))

    @property
    def members(self) -> tuple[Defense, ...]:
        return tuple(member for defense in self.defenses for member in defense.members)

    @property
    def sums_only(self) -> bool:
        return any(defense.sums_only for defense in self.defenses)


def chain(*defenses: Defense) -> Defense:
    """The defenses applied in this order, itself a defense; `chain()` is the identity. Nested chains are flattened."""
    flat: list[Defense] = []
    for defense in defenses:
        if not isinstance(defense, Defense):
            raise BadInput(
                f"expected defenses, one after the other, found {shown(defense)}; give objects such as Prune(0.9)."
            )
        flat.extend(defense.members)
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))
