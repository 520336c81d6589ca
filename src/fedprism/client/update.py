"""The forward model of a client: from its batch to the update it sends.

There is exactly one, `local_update`. The simulator runs it on the private batch; attacks run the same function on their
guesses and differentiate through it, so the two can never drift apart. `cohort` trains many clients at once out of the
same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedprism.checks import shown
from fedprism.client.batch_parts import bytes_kept, part_size
from fedprism.client.refusing import refusal
from fedprism.defenses.base import Chain, Context, Defense
from fedprism.errors import BadInput
from fedprism.inputs import Inputs, arguments, first_tensor, map_tensors, outputs_of, tensors_of, values_in
from fedprism.optimizers import OPTIMIZERS, SGD, LocalOptimizer, State
from fedprism.runtime import memory
from fedprism.types import Batch, Kind, LossFn, Update

LARGE_BATCH = 2**24
"""Input values from which the memory of a batch is measured: 112 images of 3 x 224 x 224, 5,462 of 3 x 32 x 32."""
BYTES_TOGETHER = 2**34
"""Bytes kept of a large batch at once; a bound that is the same on all devices, so that they add up the same parts."""


@dataclass(frozen=True, kw_only=True)
class FedSGD:
    """The client sends the gradient of its whole batch; `lr` is the step the server then takes."""

    lr: float = 0.1

    @property
    def kind(self) -> Kind:
        return "gradient"


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """The client trains with an optimizer and sends the difference of the parameters, after minus before.

    `batch_size` None means the whole data in one step. The last batch of an epoch may be short. `momentum` is SGD's.
    """

    lr: float = 0.01
    epochs: int = 1
    batch_size: int | None = None
    momentum: float = 0.0
    optimizer: LocalOptimizer = SGD()  # noqa: RUF009 (frozen)
    shuffle: bool = True

    def __post_init__(self) -> None:
        empty = self.epochs < 1 or (self.batch_size is not None and self.batch_size < 1)
        if empty or self.lr <= 0 or not 0 <= self.momentum < 1:
            raise BadInput(f"lr must be above 0, epochs and batch_size at least 1, and momentum in [0, 1), not {self}.")
        if not isinstance(self.optimizer, LocalOptimizer):
            raise BadInput(
                f"an optimizer such as fp.optimizers.Adam() is needed, not {shown(self.optimizer)}. Use one "
                f"of {', '.join(OPTIMIZERS)}."
            )
        nesterov = isinstance(self.optimizer, SGD) and self.optimizer.nesterov
        if nesterov != bool(self.momentum) and (nesterov or not self.optimizer.takes_momentum):
            raise BadInput(
                f"Nesterov's SGD needs momentum above 0, and Adam takes none: momentum is {self.momentum} "
                f"with {self.optimizer}. Change one of them."
            )

    @property
    def kind(self) -> Kind:
        return "delta"


Protocol = FedSGD | FedAvg


class LocalUpdate(NamedTuple):
    update: Update
    buffers: Update


def local_update(
    model: nn.Module,
    params: Update,
    data: Batch,
    *,
    loss: LossFn,
    protocol: Protocol,
    rng: torch.Generator,
    defense: Defense | None = None,
    buffers: Update | None = None,
    context: Context | None = None,
    trained: Collection[str] | None = None,
    create_graph: bool = False,
) -> LocalUpdate:
    """What a client that holds `data` sends, and its buffers (batch-norm statistics) afterwards.

    `trained` names the parameters that the client trains and sends, all of them unless said; the others are frozen.
    Neither the model nor any argument is changed. With `create_graph` the update is differentiable with respect to
    data.inputs and soft data.labels.
    """
    defense = defense or Chain()
    context = context or Context()
    loss = defense.on_loss(loss)
    # Batch-norm layers write into the buffers they are given: hand them copies.
    buffers = {name: b.detach().clone() for name, b in (buffers or dict(model.named_buffers())).items()}
    frozen = {name: p.detach() for name, p in params.items() if trained is not None and name not in trained}
    start = {name: p.detach().requires_grad_() for name, p in params.items() if name not in frozen}
    if not start:
        raise BadInput("the client trains no parameter: all are frozen. Unfreeze a layer.")
    fixed = {**frozen, **buffers}
    here = Context(model=model, params=params, batch=data, client=context.client, round=context.round)

    def gradient(current: Update, indices: Tensor, step: int) -> Update:
        within = replace(here, params={**frozen, **current}, indices=indices, step=step)
        return step_gradient(
            current, fixed, loss=loss, defense=defense, context=within, rng=rng, create_graph=create_graph
        )

    steps = step_indices(len(data), protocol, rng)
    update = trained_update(start, gradient, steps, protocol, create_graph=create_graph)
    update = defense.on_update(update, here, rng)
    if not create_graph:
        update = {name: tensor.detach() for name, tensor in update.items()}
    return LocalUpdate(update, buffers)


def step_gradient(
    trained: Update,
    fixed: Update,
    *,
    loss: LossFn,
    defense: Defense,
    context: Context,
    rng: torch.Generator,
    create_graph: bool = False,
    layout: torch.memory_format | None = None,
) -> Update:
    """The gradient of one local step on the samples that the context names, as far as a defense lets it through.

    `fixed` are the frozen parameters and the buffers; `layout` is that of images in memory, as they are unless said.
    """
    model, data, indices = context.model, context.batch, context.indices
    assert model is not None
    assert data is not None
    batch = defense.on_batch(data if indices is None else data[indices], context, rng)
    if layout is not None:
        batch = batch.map(lambda images: images.contiguous(memory_format=layout) if images.dim() == 4 else images)
    if not defense.overrides("on_examples"):
        return batch_gradient(model, trained, fixed, batch, loss, create_graph)
    examples = example_gradients(model, trained, fixed, batch, loss)
    return {name: gradients.mean(0) for name, gradients in defense.on_examples(examples, context, rng).items()}


def step_indices(size: int, protocol: Protocol, rng: torch.Generator) -> list[Tensor]:
    """The sample indices of every local step, epoch after epoch; with FedSGD one step on all `size` samples."""
    if isinstance(protocol, FedSGD):
        return [torch.arange(size)]
    steps: list[Tensor] = []
    for _ in range(protocol.epochs):
        order = torch.randperm(size, generator=rng) if protocol.shuffle else torch.arange(size)
        steps.extend(torch.split(order, protocol.batch_size or size))
    return steps


def trained_update(
    start: Update,
    gradient: Callable[[Update, Tensor, int], Update],
    steps: Sequence[Tensor],
    protocol: Protocol,
    *,
    create_graph: bool = False,
) -> Update:
    """What local training along `steps` sends: the gradient of the one step, or the parameters after minus before.

    `gradient(current, indices, step)` is that of one step. All else is entry by entry, so that tensors may carry a
    leading dimension of clients.
    """
    if isinstance(protocol, FedSGD):
        return gradient(start, steps[0], 0)
    end: Update = start
    state: State = {}
    for number, indices in enumerate(steps):
        step = gradient(end, indices, number)
        end, state = protocol.optimizer.step(
            end, step, state, number=number, lr=protocol.lr, momentum=protocol.momentum
        )
        if not create_graph:
            end = {name: p.detach().requires_grad_() for name, p in end.items()}
            state = {kind: {name: t.detach() for name, t in tensors.items()} for kind, tensors in state.items()}
    return {name: end[name] - p for name, p in start.items()}


def batch_gradient(
    model: nn.Module, params: Update, fixed: Update | None, batch: Batch, loss: LossFn, create_graph: bool = False
) -> Update:
    """The gradient of the loss of one batch; `fixed` are the frozen parameters and the buffers.

    None: the model is made of `params` already, which saves many small steps where it is asked again and again.
    """
    if create_graph or fixed is None:
        return _gradient(model, params, fixed, batch, loss, create_graph)
    return _gradient_in_parts(model, params, fixed, batch, loss)


def _gradient_in_parts(model: nn.Module, params: Update, fixed: Update, batch: Batch, loss: LossFn) -> Update:
    """Where memory is short or the batch large, the weighted mean of the gradients of parts, where it is one."""

    def without_trace(asked: Batch) -> list[Tensor]:
        copies = {name: tensor.clone() for name, tensor in fixed.items()}
        return list(_gradient(model, params, copies, asked, loss).values())

    fitting = _fitting(model, params, fixed, batch) if values_in(batch.inputs) >= LARGE_BATCH else None
    size, total = part_size(without_trace, batch, fitting), dict[str, Tensor]()
    if size >= len(batch):
        return _gradient(model, params, fixed, batch, loss)
    for first in range(0, len(batch), size):
        part = batch[first : first + size]
        for name, tensor in _gradient(model, params, fixed, part, loss).items():
            weighted = tensor * (len(part) / len(batch))
            total[name] = total[name] + weighted if name in total else weighted
    return total


def _fitting(model: nn.Module, params: Update, fixed: Update, batch: Batch) -> int:
    """How many samples of a large batch BYTES_TOGETHER hold, counted on two of them."""
    few, place = batch[:2], first_tensor(batch.inputs).device
    tensors = {**params, **{name: tensor.clone() for name, tensor in fixed.items()}}
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        there = [*tensors.values(), *tensors_of(few.inputs)]
        kept = bytes_kept(lambda: outputs_of(model, tensors, few.inputs), there)
    return max(1, BYTES_TOGETHER * len(few) // max(1, kept))


def _gradient(
    model: nn.Module, params: Update, fixed: Update | None, batch: Batch, loss: LossFn, create_graph: bool = False
) -> Update:
    try:
        args, kwargs = arguments(batch.inputs)
        outputs = model(*args, **kwargs) if fixed is None else outputs_of(model, {**params, **fixed}, batch.inputs)
    except ValueError as error:
        raise BadInput(refusal(model, {**params, **(fixed or {})}, batch, error)) from error
    value = loss(outputs, batch.labels)
    if not value.requires_grad:
        raise BadInput(
            "the loss does not depend on trained parameters: they are frozen, detached or computed under "
            "no_grad. Correct the model or the loss."
        )
    grads = torch.autograd.grad(
        value, list(params.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return dict(zip(params, grads, strict=True))


def stacked_gradients(
    model: nn.Module, params: Update, fixed: Update, batch: Batch, loss: LossFn, create_graph: bool = False
) -> Update:
    """The gradients of several clients, each with parameters of its own; only `fixed` has no dimension of clients."""

    def client_loss(current: dict[str, Tensor], x: Inputs, y: Tensor) -> Tensor:
        return loss(outputs_of(model, {**current, **fixed}, x), y)

    # The gradient of the sum: no client's loss depends on another's parameters.
    total = vmap(client_loss, randomness="error")(dict(params), batch.inputs, batch.labels).sum()
    grads = torch.autograd.grad(
        total, list(params.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return dict(zip(params, grads, strict=True))


def example_gradients(model: nn.Module, params: Update, fixed: Update, batch: Batch, loss: LossFn) -> Update:
    """Every example's own gradient, (batch, *shape) per parameter."""

    def example_loss(current: dict[str, Tensor], x: Inputs, y: Tensor) -> Tensor:
        outputs = outputs_of(model, {**current, **fixed}, map_tensors(lambda tensor: tensor.unsqueeze(0), x))
        return loss(outputs, y.unsqueeze(0))

    together = memory.together(len(batch))
    per_example = vmap(
        grad(example_loss),
        in_dims=(None, 0, 0),
        randomness="different",
        chunk_size=together if together < len(batch) else None,
    )
    result: dict[str, Tensor] = per_example(dict(params), batch.inputs, batch.labels)
    return result
