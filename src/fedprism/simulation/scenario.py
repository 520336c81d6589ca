"""A federation in words: who holds what, and how they train together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedprism import losses
from fedprism.checks import shown, whole
from fedprism.client.update import FedSGD, Protocol
from fedprism.defenses.base import Chain, Defense, chain, check_number
from fedprism.defenses.counts import CountRelease
from fedprism.display.words import ShortRepr
from fedprism.errors import BadInput, FedprismError, out_of_memory, told
from fedprism.inputs import arguments, shape_of, tensors_of, types_of
from fedprism.types import Batch, LossFn, Reduction, is_soft

FEW = 2
"""Samples that a model and a loss are tried on: some refuse a single one."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Scenario(ShortRepr):
    """A federation: the model, each client's data, and how they train together.

    Inputs are what the model is fed; `normalization` (mean, std per channel) says how pixels in `bounds` became inputs.
    Clients train in train mode unless `training` is False. Parameters that do not require gradients are frozen: neither
    trained nor sent. `public_data` is data of the same kind that belongs to no client, for threat models that grant it.

    `participation` says who takes part: None everyone in every round; a probability, with which each client takes part
    in each round; or a (rounds, clients) tensor of True and False. A sum over nobody is zeros; a mean over nobody does
    not exist, so that where aggregates are means, a round of nobody is drawn again, and refused where it is given.

    With `frozen` the server sends the same model every round. `window` lets device analytics count how often each
    client took part in every `window` rounds, and `counts` says how exactly they report it. With `drift` each client's
    update is half new after so many rounds, which stands for data or a model that change. In each round a client trains
    on a random `fraction` of its data; a defense that mixes samples mixes these with all of it.

    With `sends_buffers` clients send their buffers (batch-norm statistics) along, as software that sends whole state
    dicts does, and the server averages them; without, they stay as they are.
    """

    model: nn.Module
    clients: Sequence[Batch]
    protocol: Protocol = field(default_factory=FedSGD)
    defense: Defense = field(default_factory=Chain)
    loss: str | LossFn = "cross_entropy"
    rounds: int = 1
    aggregation: Reduction = "mean"
    training: bool = True
    public_data: Batch | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    participation: float | Tensor | None = None
    frozen: bool = False
    window: int | None = None
    counts: CountRelease = field(default_factory=CountRelease)
    drift: float | None = None
    fraction: float = 1.0
    sends_buffers: bool = False

    def __post_init__(self) -> None:
        if not self.clients or self.rounds < 1:
            raise BadInput(
                f"a scenario needs at least one client and one round, not {len(self.clients)} clients and "
                f"{self.rounds} rounds. Give Scenario(clients=[Batch(inputs, labels)])."
            )
        for number, data in enumerate(self.clients):
            _check_batch(data, number)
        chain(self.defense)  # refuses what is no defense
        _check_part(self.fraction, "fraction")
        if self.window is not None:
            whole(self.window, "window", self.rounds)
        if self.drift is not None:
            check_number(self.drift, "drift", "100 makes updates half new after 100 rounds")
        if not isinstance(self.counts, CountRelease):
            raise BadInput(
                f"counts must be released in a way such as fp.defenses.LaplaceCounts(1.0), not {shown(self.counts)}."
            )
        if isinstance(self.participation, Tensor):
            _check_participation(self.participation, self.rounds, len(self.clients), self.aggregation)
        elif self.participation is not None:
            _check_part(self.participation, "participation")


def check_fits(model: nn.Module, data: Batch, number: int, loss: str | LossFn = "cross_entropy") -> None:
    """Two samples through network and loss: both must accept them, and class numbers must be of the model's classes."""
    # Clones: a model that writes into its inputs must not change what the client holds.
    training, few = model.training, data[:FEW].to(torch.device("cpu")).map(torch.clone)
    args, kwargs = arguments(few.inputs)
    try:
        with torch.no_grad(), unchanged_settings():
            outputs = model.eval()(*args, **kwargs)
    except FedprismError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        bytes_given = any(tensor.dtype == torch.uint8 for tensor in tensors_of(few.inputs))
        remedy = "give floating-point numbers, pixels in [0, 1]" if bytes_given else "change the model or the data"
        raise BadInput(
            f"the model does not accept the inputs of client {number}, of shape {shape_of(few.inputs)} "
            f"and type {types_of(few.inputs)} ({told(error)}). Hint: {remedy}."
        ) from error
    finally:
        model.train(training)
    if any(tensor._version for tensor in tensors_of(few.inputs)):
        raise BadInput(
            "the model changes its inputs in place. Use operations without inplace there, or a copy of the inputs."
        )
    function = losses.resolve(loss)
    if function in losses.OF_CLASSES:
        _check_classes(losses.predictions(outputs), data.labels, number)
    if losses.name_of(function) or number == 0:  # a loss of a user's own may be slow: tried once
        _check_loss(function, outputs, few.labels, number)


def _check_loss(loss: LossFn, outputs: Any, labels: Tensor, number: int) -> None:
    try:
        with torch.no_grad(), unchanged_settings():
            value: object = loss(outputs, labels)
    except FedprismError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise BadInput(
            f"the loss does not accept the model's outputs and the labels of client {number}, of shape "
            f"{tuple(labels.shape)} and type {labels.dtype} ({told(error)}). Change the loss or the "
            "labels."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise BadInput(f"the loss must return one number, not {shown(value)}. Return the mean over the batch.")
    if not bool(torch.isfinite(value)):
        raise BadInput(
            f"the loss on the samples of client {number} is {float(value)}. Correct the model's weights, "
            "the loss or the data."
        )


@contextmanager
def unchanged_settings() -> Iterator[None]:
    """Inside the block runs a user's code; what it changes of torch's settings is restored, and refused."""
    before = _settings()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        after = _settings()
        torch.set_default_dtype(before["default dtype"])
        torch.set_num_threads(before["number of threads"])
    changed = [name for name, value in before.items() if after[name] != value]
    if changed:
        raise BadInput(
            f"the model and the loss change torch's settings: {' and the '.join(changed)}. Remove that from them."
        )


def _settings() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "gradient mode": torch.is_grad_enabled(),
    }


def _check_classes(outputs: Tensor, labels: Tensor, number: int) -> None:
    """Whole numbers must be classes; other labels are compared with the outputs by the loss itself."""
    if outputs.dim() < 2 or (labels.is_floating_point() and not is_soft(labels)):
        return
    single = outputs.dim() == 2
    classes = outputs.shape[-1] if single else losses.classes_of(outputs, labels[: len(outputs)])
    if is_soft(labels):
        lowest, width = 0, labels.shape[-1] if single else classes
    else:
        counted = labels[labels != losses.IGNORED_LABEL]
        lowest, width = (int(counted.min()), int(counted.max()) + 1) if len(counted) else (0, 1)
    if width > classes or lowest < 0:
        raise BadInput(
            f"labels of client {number} go up to {width - 1}, but the model has {classes} classes "
            f"(outputs of shape {tuple(outputs.shape)}). Change the model or the labels."
        )


def _check_batch(data: Batch, number: int) -> None:
    labels = data.labels
    if not isinstance(labels, Tensor):
        raise BadInput(
            f"client {number} has no labels, but {shown(labels)}; training and some defenses need them. "
            "Give Batch(inputs, labels)."
        )
    tensors = _tensors(data, number)
    sizes = {len(tensor) for tensor in tensors}
    if sizes != {len(labels)} or len(labels) == 0:
        raise BadInput(
            f"client {number} has {' and '.join(map(str, sorted(sizes)))} inputs and {len(labels)} "
            "labels; it needs as many of each, and at least one. Check the client's batch."
        )
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*tensors, labels)):
        raise BadInput(f"client {number} has inputs or labels that are not finite. Remove NaN and infinity.")


def _tensors(data: Batch, number: int) -> tuple[Tensor, ...]:
    """The tensors of the inputs, each with a dimension of samples."""
    inputs: object = data.inputs
    each = (
        list(inputs.values()) if isinstance(inputs, dict) else list(inputs) if isinstance(inputs, tuple) else [inputs]
    )
    for tensor in each or [None]:
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or tensor.is_complex():
            raise BadInput(
                f"inputs of client {number} must be a tensor (batch, ...), or a tuple or dict of such "
                f"tensors, not {shown(tensor)}. Convert them with torch.as_tensor."
            )
    return tuple(tensor for tensor in each if isinstance(tensor, Tensor))


def _check_part(value: object, name: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value <= 1):  # type: ignore[operator]
        raise BadInput(
            f"{name} must be a number above 0 and at most 1, not {shown(value)}. Leave it out for all of them."
        )


def _check_participation(given: Tensor, rounds: int, clients: int, aggregation: Reduction) -> None:
    if given.shape != (rounds, clients):
        raise BadInput(
            f"participation must have shape (rounds, clients) = ({rounds}, {clients}), not {tuple(given.shape)}."
        )
    if not bool(((given == 0) | (given == 1)).all()):
        raise BadInput("participation must be True and False. Compare with a threshold first.")
    empty = ~given.bool().any(1)
    if bool(empty.all()):
        raise BadInput("nobody takes part in any round. Set an entry of participation.")
    if aggregation != "sum" and bool(empty.any()):
        raise BadInput(
            f"nobody takes part in round {int(empty.nonzero()[0])}, and aggregates are means. Leave such "
            "rounds out, or use aggregation='sum'."
        )
