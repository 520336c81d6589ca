"""What a defense is: the identity at every stage of a client's round, overriding the stages it changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

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

    Stages, in the order a round meets them: which samples form the batch; the batch; the loss; the gradient of each
    example, (batch, *shape); the update that leaves the client; all clients' updates. Arguments are never changed.
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
        """What an attacker can repeat in its forward model, without random parts, having seen the update `observed`."""
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
        return reduce(lambda given, defense: defense.on_batch(given, context, rng), self.defenses, batch)

    def on_loss(self, loss: LossFn) -> LossFn:
        return reduce(lambda given, defense: defense.on_loss(given), self.defenses, loss)

    def on_examples(self, grads: Update, context: Context, rng: torch.Generator) -> Update:
        return reduce(lambda given, defense: defense.on_examples(given, context, rng), self.defenses, grads)

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        return reduce(lambda given, defense: defense.on_update(given, context, rng), self.defenses, update)

    def on_aggregate(self, updates: Sequence[Update], context: Context, rng: torch.Generator) -> Sequence[Update]:
        return reduce(lambda given, defense: defense.on_aggregate(given, context, rng), self.defenses, updates)

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
            raise BadInput(f"a chain takes defenses such as Prune(0.9), not {shown(defense)}.")
        flat.extend(defense.members)
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))


def change_floats(update: Update, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The update with every floating-point tensor changed; whole numbers (counters among the buffers) stay."""
    return {name: change(tensor) if tensor.dtype.is_floating_point else tensor for name, tensor in update.items()}


def check_number(value: object, name: str, hint: str, *, zero: bool = False, most: float = math.inf) -> None:
    """Refuse what is no finite number above 0, or with `zero` of at least 0, and up to `most`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 <= value < math.inf and value <= most and (value > 0 or zero)):  # type: ignore[operator]
        limits = ("of at least 0" if zero else "above 0") + (f" and at most {most:g}" if most < math.inf else "")
        raise BadInput(f"{name} must be a number {limits}, not {shown(value)}; {hint}.")


def check_switch(value: object, name: str) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise BadInput(f"{name} must be True or False, not {shown(value)}.")
