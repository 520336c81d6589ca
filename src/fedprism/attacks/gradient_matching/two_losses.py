"""A client's loss at two sets of weights, for gradient matching by differences (`matching.differences`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedprism.attacks.gradient_matching.forward import PreparedForward
from fedprism.errors import out_of_memory
from fedprism.runtime.double_backward import for_first_derivatives, install_tensors
from fedprism.solvers.matching.differences import ALL, KinkCheck, TwoLosses, check_kinks
from fedprism.solvers.matching.distances import Gradients
from fedprism.types import Batch

LabelsOf = Callable[[Tensor | None, slice], Tensor]
CHECKED_SAMPLES = 2
"""Samples on which kinks are looked for; batch norm refuses a single one."""


class ClientLosses:
    """Two copies of the client's network, one with weights that move; `refusal` says why no difference may be taken."""

    kinked = True

    def __init__(self, prepared: PreparedForward, example: Batch) -> None:
        self.prepared = prepared
        moved = {name: weight.detach().clone() for name, weight in prepared.trained.items()}
        self.weights, self.moved = list(prepared.trained.values()), list(moved.values())
        self.network, self.moved_network = (
            install_tensors(
                for_first_derivatives(prepared.original), {**prepared.frozen, **weights, **prepared.buffer_copies}
            )
            for weights in (prepared.trained, moved)
        )
        self.refusal, self.kinked = self._look(example[:CHECKED_SAMPLES])

    def of(self, labels_of: LabelsOf, *, together: int | None = None) -> TwoLosses:
        """The losses with these labels, of `together` samples at a time."""

        def sent_of(gradients: Gradients, inputs: Tensor, logits: Tensor | None) -> list[Tensor]:
            update = dict(zip(self.prepared.trained, gradients, strict=True))
            return self.prepared.sent(update, Batch(inputs, labels_of(logits, ALL)), self.network)

        return TwoLosses(
            loss=lambda inputs, logits, which: self._loss(self.network, inputs, labels_of(logits, which)),
            moved_loss=lambda inputs, logits, which: self._loss(self.moved_network, inputs, labels_of(logits, which)),
            weights=self.weights,
            moved=self.moved,
            sent_of=sent_of if self.prepared.forward.defense.overrides("on_update") else None,
            kinked=self.kinked,
            together=together,
        )

    def passes(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Two passes at once: memory has to hold one, and the kinks of the other."""
        return self._loss(self.network, inputs, labels), self._loss(self.network, inputs, labels)

    def _look(self, few: Batch) -> KinkCheck:
        try:
            with torch.random.fork_rng(devices=[]):
                return check_kinks(self.of(lambda logits, which: few.labels), torch.zeros_like(few.tensor), None)
        except (RuntimeError, ValueError, TypeError) as error:
            if out_of_memory(error):
                raise
            return KinkCheck((str(error).splitlines() or [type(error).__name__])[0], True)

    def _loss(self, network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        self.prepared.reset()
        # What a confident network leaves to one is lost in float32, and a difference would show it.
        outputs = _in_double(network(inputs))
        return self.prepared.loss(outputs, labels.double() if labels.is_floating_point() else labels)


def _in_double(outputs: Any) -> Any:
    """What a network returns, every tensor in it in double precision."""
    if isinstance(outputs, Tensor):
        return outputs.double() if outputs.is_floating_point() else outputs
    if type(outputs) is dict:
        return {name: _in_double(each) for name, each in outputs.items()}
    return tuple(_in_double(each) for each in outputs) if type(outputs) is tuple else outputs
