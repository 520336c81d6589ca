"""The attacker's forward model: the client's own `local_update`, set up from what the attacker knows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedprism import losses
from fedprism.batchnorm import Normalise, buffers_of, normalised
from fedprism.client import FedAvg, FedSGD, Protocol, local_update
from fedprism.defenses.base import Chain, Defense
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.types import Batch, LossFn, Observation, Round, Update

FORWARD_NEEDS = frozenset({"model", "loss"})
FORWARD_USES = frozenset({"local_lr", "local_epochs", "local_batch_size", "local_momentum", "defense"})


@dataclass(frozen=True)
class Forward:
    """What a client holding (inputs, labels) would have sent, in the order of `names`; `target` is what was sent.

    Parameters that are not in `names` were not sent: they are taken to be frozen.
    """

    model: nn.Module
    params: Update
    buffers: Update
    target: tuple[Tensor, ...]
    names: tuple[str, ...]
    loss: LossFn
    protocol: Protocol
    defense: Defense

    def __call__(self, inputs: Tensor, labels: Tensor, *, create_graph: bool = True) -> list[Tensor]:
        answer = local_update(
            self.model,
            self.params,
            Batch(inputs, labels),
            loss=self.loss,
            protocol=self.protocol,
            rng=torch.Generator(),  # nothing random is left: no shuffling, deterministic parts of the defense
            defense=self.defense,
            buffers=self.buffers,
            trained=self.names,
            create_graph=create_graph,
        )
        return [answer.update[name] for name in self.names]


def forward_model(
    observation: Observation,
    seen: Round,
    *,
    unroll: bool = True,
    adaptive: bool = True,
    normalise: Normalise = Normalise.CLIENT,
) -> Forward:
    """Set the forward model up.

    `unroll` repeats the client's local steps; without it a delta is read as minus one gradient. `adaptive` puts the
    defense, where it is known, into the forward model. `normalise` says what batch-norm layers normalise by.
    """
    model, knowledge = observation.model, observation.knowledge
    if model is None or knowledge.loss is None:
        raise MissingKnowledge("the attacker's forward model", "model" if model is None else "loss")
    names = tuple(name for name, _ in model.named_parameters() if name in seen.update)
    scale = 1.0 / seen.clients if seen.reduction == "sum" else 1.0
    protocol: Protocol = FedSGD()
    if seen.kind == "delta":
        if unroll:
            protocol = local_protocol(observation, seen)
        else:
            scale = -scale
    known = knowledge.defense if adaptive else None
    params = {name: seen.params[name] for name, _ in model.named_parameters()}
    model, buffers = normalised(model, params, buffers_of(observation, seen), knowledge, normalise)
    return Forward(
        model=model,
        params=params,
        buffers=buffers,
        target=tuple(scale * seen.update[name] for name in names),
        names=names,
        loss=losses.resolve(knowledge.loss),
        protocol=protocol,
        defense=known.deterministic(seen.update) if known is not None else Chain(),
    )


def local_protocol(observation: Observation, seen: Round) -> FedAvg:
    """How the client trained; the order in which it shuffled its samples stays unknown."""
    knowledge = observation.knowledge
    for field in ("local_lr", "local_epochs", "local_batch_size"):
        if getattr(knowledge, field) is None:
            raise MissingKnowledge("unrolling a client's local training", field)
    protocol = FedAvg(
        lr=knowledge.local_lr or 0.0,
        epochs=knowledge.local_epochs or 1,
        batch_size=knowledge.local_batch_size,
        momentum=knowledge.local_momentum or 0.0,
        shuffle=False,
    )
    if seen.clients > 1:
        # One step on each client's whole batch averages to one step on the union; several steps do not.
        if protocol.epochs > 1 or (knowledge.local_batch_size or 0) * seen.clients < _batch_size(observation):
            raise NotApplicable(
                f"unrolling expects one client's local training, found an aggregate of {seen.clients} clients over "
                "several local steps; disaggregate first, or set unroll=False."
            )
        protocol = dataclasses.replace(protocol, batch_size=None)
    return protocol


def one_local_step(observation: Observation, seen: Round) -> bool:
    """Whether each client is known to have taken a single step on all its samples: then a delta is one gradient."""
    knowledge, size = observation.knowledge, _batch_size(observation)
    return knowledge.local_epochs == 1 and 0 < size <= (knowledge.local_batch_size or 0) * seen.clients


def _batch_size(observation: Observation) -> int:
    size = observation.knowledge.batch_size
    return size if isinstance(size, int) else 0


def input_box(observation: Observation) -> tuple[Tensor, Tensor] | None:
    """The pixel range in the model's input space, (low, high) broadcastable to a batch; None where it is unknown."""
    bounds, normalization = observation.knowledge.bounds, observation.knowledge.normalization
    if bounds is None:
        return None
    like = next(iter(observation.rounds[0].params.values()))
    low, high = (torch.tensor(bound, dtype=like.dtype, device=like.device) for bound in bounds)
    if normalization is None:
        return low, high
    shape = observation.knowledge.input_shape or (len(normalization[0]),)
    if {len(part) for part in normalization} != {shape[0]}:
        raise BadInput(
            f"expected a mean and a std for each of {shape[0]} channels, found {len(normalization[0])} and "
            f"{len(normalization[1])}; correct the normalization."
        )
    mean, std = (
        torch.tensor(values, dtype=like.dtype, device=like.device).view(1, -1, *[1] * (len(shape) - 1))
        for values in normalization
    )
    return (low - mean) / std, (high - mean) / std
