"""A federation in words: who holds what, and how they train together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedprism.checks import shown, whole
from fedprism.client.update import FedSGD, Protocol
from fedprism.defenses.base import Chain, Defense, chain
from fedprism.errors import BadInput
from fedprism.types import Batch, LossFn, Reduction, is_soft


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A federation: the model, each client's data, and how they train together.

    Inputs are what the model is fed; `normalization` (mean, std per channel) says how pixels in `bounds` became inputs.
    Clients train in train mode unless `training` is False. Parameters that do not require gradients are frozen: neither
    trained nor sent. `public_data` is data of the same kind that belongs to no client, for threat models that grant it.

    `participation` says who takes part: None everyone in every round; a probability, with which each client takes part
    in each round; or a (rounds, clients) tensor of True and False. A sum over nobody is zeros; a mean over nobody does
    not exist, so that where aggregates are means, a round of nobody is drawn again, and refused where it is given.

    With `frozen` the server sends the same model every round. `window` lets device analytics count how often each
    client took part in every `window` rounds. In each round a client trains on a random `fraction` of its data;
    a defense that mixes samples mixes these with all of it.

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
    fraction: float = 1.0
    sends_buffers: bool = False

    def __post_init__(self) -> None:
        if not self.clients or self.rounds < 1:
            raise BadInput(
                f"expected at least one client and one round, found {len(self.clients)} clients and "
                f"{self.rounds} rounds; give Scenario(clients=[Batch(inputs, labels)])."
            )
        for number, data in enumerate(self.clients):
            _check_batch(data, number)
        chain(self.defense)  # refuses what is no defense
        _check_part(self.fraction, "fraction")
        if self.window is not None:
            whole(self.window, "window", self.rounds)
        if isinstance(self.participation, Tensor):
            _check_participation(self.participation, self.rounds, len(self.clients), self.aggregation)
        elif self.participation is not None:
            _check_part(self.participation, "participation")


def check_fits(model: nn.Module, data: Batch, number: int) -> None:
    """One sample through the network: its input must be accepted and every label must be one of the classes."""
    training = model.training
    try:
        with torch.no_grad():
            outputs = model.eval()(data.inputs[:1].cpu())
    except RuntimeError as error:
        raise BadInput(
            f"expected a model that accepts inputs of shape {tuple(data.inputs.shape[1:])} and type "
            f"{data.inputs.dtype}, as client {number} holds, found that it does not ({str(error).splitlines()[0]}); "
            "change the model or the data."
        ) from error
    finally:
        model.train(training)
    classes = outputs.shape[-1]
    width = data.labels.shape[-1] if is_soft(data.labels) else int(data.labels.max()) + 1
    if outputs.dim() != 2 or width > classes or (not is_soft(data.labels) and int(data.labels.min()) < 0):
        raise BadInput(
            f"expected labels of client {number} within the model's {classes} classes, found labels up to "
            f"{width - 1} and outputs of shape {tuple(outputs.shape)}; change the model or the labels."
        )


def _check_batch(data: Batch, number: int) -> None:
    inputs, labels = data.inputs, data.labels
    if not isinstance(labels, Tensor):
        raise BadInput(
            f"expected labels for client {number}, which training and some defenses need, found {shown(labels)}; "
            "give Batch(inputs, labels)."
        )
    if len(inputs) == 0 or len(inputs) != len(labels):
        raise BadInput(
            f"expected as many labels as inputs and at least one of each for client {number}, "
            f"found {len(inputs)} inputs and {len(labels)} labels; check the client's batch."
        )
    if not inputs.dtype.is_floating_point or not bool(torch.isfinite(inputs).all()):
        raise BadInput(
            f"expected finite floating-point inputs for client {number}, found {inputs.dtype} or values that are not "
            "finite; scale pixels to [0, 1] and remove NaN."
        )
    if labels.dtype != torch.int64 and not is_soft(labels):
        raise BadInput(
            f"expected labels of client {number} as whole numbers (int64) or soft rows (batch, classes), "
            f"found {labels.dtype} of shape {tuple(labels.shape)}; convert with labels.long()."
        )


def _check_part(value: object, name: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value <= 1):  # type: ignore[operator]
        raise BadInput(
            f"expected {name} to be a number above 0 and at most 1, found {shown(value)}; "
            "give one, or leave it out for all of them."
        )


def _check_participation(given: Tensor, rounds: int, clients: int, aggregation: Reduction) -> None:
    if given.shape != (rounds, clients):
        raise BadInput(
            f"expected participation of shape (rounds, clients) = ({rounds}, {clients}), found {tuple(given.shape)}; "
            "give one row a round and one column a client."
        )
    if not bool(((given == 0) | (given == 1)).all()):
        raise BadInput("expected participation of True and False, found other values; compare with a threshold first.")
    empty = ~given.bool().any(1)
    if bool(empty.all()):
        raise BadInput("expected someone to take part in some round, found nobody; set an entry of participation.")
    if aggregation != "sum" and bool(empty.any()):
        raise BadInput(
            f"expected someone to take part in every round where aggregates are means, found nobody in round "
            f"{int(empty.nonzero()[0])}; leave such rounds out or use aggregation='sum'."
        )
