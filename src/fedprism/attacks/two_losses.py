"""A client's loss at two sets of weights, for gradient matching by differences (`solvers.differences`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedprism.attacks.forward import QuickForward, changes_updates
from fedprism.defenses.base import Context
from fedprism.errors import out_of_memory
from fedprism.solvers.differences import ALL, Held, TwoLosses, looked_at
from fedprism.solvers.distances import Gradients
from fedprism.solvers.twice import for_first_derivatives, made_of
from fedprism.types import Batch, Update

LabelsOf = Callable[[Tensor | None, slice], Tensor]
FEW = 2
"""So many samples show whether the network has kinks that cannot be held; batch norm refuses a single one."""


class ClientLosses:
    """Two copies of the client's network, one of which holds weights that may be moved.

    `refusal` says why no difference may be taken for batches like `some`; it is empty where one may.
    """

    kinked = True

    def __init__(self, quick: QuickForward, some: Batch) -> None:
        self.quick = quick
        moved = {name: weight.detach().clone() for name, weight in quick.trained.items()}
        self.weights, self.moved = list(quick.trained.values()), list(moved.values())
        self.network, self.moved_network = (
            _made_of(quick.original, {**quick.frozen, **weights, **quick.scratch}) for weights in (quick.trained, moved)
        )
        self.refusal, self.kinked = self._look(some[:FEW])

    def of(self, labels_of: LabelsOf, *, together: int | None = None) -> TwoLosses:
        """The losses with the labels that label logits stand for; of so many samples at a time."""

        def sent_of(gradients: Gradients, inputs: Tensor, logits: Tensor | None) -> list[Tensor]:
            forward, batch = self.quick.forward, Batch(inputs, labels_of(logits, ALL))
            here = Context(model=self.network, params=self.quick.params, batch=batch)
            update: Update = dict(zip(self.quick.trained, gradients, strict=True))
            update = forward.defense.on_update(update, here, torch.Generator())
            return [update[name] for name in forward.names]

        return TwoLosses(
            loss=lambda inputs, logits, which: self._loss(self.network, inputs, labels_of(logits, which)),
            moved_loss=lambda inputs, logits, which: self._loss(self.moved_network, inputs, labels_of(logits, which)),
            weights=self.weights,
            moved=self.moved,
            sent_of=sent_of if changes_updates(self.quick.forward.defense) else None,
            kinked=self.kinked,
            together=together,
        )

    def passes(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Two passes at once: memory has to hold one, and of the other what holds the kinks."""
        return self._loss(self.network, inputs, labels), self._loss(self.network, inputs, labels)

    def _look(self, few: Batch) -> Held:
        try:
            with torch.random.fork_rng(devices=[]):
                return looked_at(self.of(lambda logits, which: few.labels), torch.zeros_like(few.inputs), None)
        except (RuntimeError, ValueError, TypeError) as error:
            if out_of_memory(error):
                raise
            return Held((str(error).splitlines() or [type(error).__name__])[0], True)

    def _loss(self, network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        self.quick.reset()
        # What a confident network leaves to one is lost in float32, and a difference would show it.
        outputs = network(inputs).double()
        return self.quick.loss(outputs, labels.double() if labels.is_floating_point() else labels)


def _made_of(model: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    model = for_first_derivatives(model)
    made_of(model, tensors)
    return model
