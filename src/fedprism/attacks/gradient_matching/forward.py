"""The attacker's forward model: the client's own `local_update`, set up from what the attacker knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedprism import losses
from fedprism.attacks.gradient_matching.batchnorm import Normalise, normalised_model
from fedprism.attacks.gradient_matching.pruned import FollowedPruning, SignsOfTheLargest, SmallerThanSent
from fedprism.client.batchnorm import buffers_of
from fedprism.client.observed import direction, known_training, local_steps, mean_update
from fedprism.client.update import FedAvg, FedSGD, Protocol, batch_gradient, local_update
from fedprism.defenses.base import Chain, Context, Defense, chain
from fedprism.defenses.compression import SignCompression
from fedprism.defenses.pruning import Prune
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.inputs import Inputs
from fedprism.network.batchnorm import batchnorm_layers
from fedprism.pixels import to_inputs
from fedprism.runtime.double_backward import for_second_derivatives, install_tensors
from fedprism.runtime.moments import Moments, channel_moments
from fedprism.types import Batch, LossFn, Observation, Round, Update

UNROLLING = "unrolling a client's local training"
FORWARD_NEEDS = frozenset({"model", "loss"})
FORWARD_USES = frozenset(
    {"local_lr", "local_epochs", "local_batch_size", "local_momentum", "local_optimizer", "defense"}
)


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

    def __call__(self, inputs: Inputs, labels: Tensor, *, create_graph: bool = True) -> list[Tensor]:
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

    @property
    def follows_pruning(self) -> bool:
        return any(isinstance(part, FollowedPruning) for part in self.defense.members)

    def ignoring_pruning(self) -> Forward:
        """The same, with every other part of the defense."""
        others = (part for part in self.defense.members if not isinstance(part, FollowedPruning))
        return dataclasses.replace(self, defense=chain(*others))


class PreparedForward:
    """A Forward prepared for repeated double differentiation, in which nothing waits for the device.

    A defense that looks at single examples, or at the batch, goes the client's own way.
    """

    def __init__(self, forward: Forward, *, channels_last: bool = False) -> None:
        self.keeps_batches = not forward.defense.overrides("on_batch", "on_examples")
        self.original = forward.model
        self.model = for_second_derivatives(forward.model) if self.keeps_batches else forward.model
        self.forward = dataclasses.replace(forward, model=self.model)
        self.loss = forward.defense.on_loss(forward.loss)
        layout = torch.channels_last if channels_last else torch.preserve_format
        self.params = {
            name: p.detach().to(memory_format=layout if p.dim() == 4 else torch.preserve_format)
            for name, p in forward.params.items()
        }
        self.trained = {name: self.params[name].clone().requires_grad_() for name in forward.names}
        self.frozen = {name: p for name, p in self.params.items() if name not in self.trained}
        self.buffer_copies = {name: tensor.detach().clone() for name, tensor in forward.buffers.items()}
        # What batch norm writes into its buffers in train mode it never reads there: one copy does for all iterations.
        normalising = tuple(f"{name}." for name in batchnorm_layers(forward.model))
        self.buffers_to_reset = [name for name in self.buffer_copies if not name.startswith(normalising)]
        if self.keeps_batches:
            install_tensors(self.model, {**self.frozen, **self.trained, **self.buffer_copies})

    @property
    def direct(self) -> bool:
        """Whether the update is one gradient of the whole batch."""
        return self.keeps_batches and isinstance(self.forward.protocol, FedSGD)

    def __call__(self, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        if not self.direct:
            return self.forward(inputs, labels)
        self.reset()
        batch = Batch(inputs, labels)
        gradients = batch_gradient(self.model, self.trained, None, batch, self.loss, create_graph=True)
        return self.sent(gradients, batch, self.model)

    def sent(self, gradients: Update, batch: Batch, model: nn.Module) -> list[Tensor]:
        """What the defense makes of the batch's gradients."""
        here = Context(model=model, params=self.params, batch=batch)
        update = self.forward.defense.on_update(gradients, here, torch.Generator())
        return [update[name] for name in self.forward.names]

    def reset(self) -> None:
        for name in self.buffers_to_reset:
            self.buffer_copies[name].copy_(self.forward.buffers[name])


def moments_of_last_pass(model: nn.Module, *, unbiased: bool) -> Callable[[Tensor], list[Moments]]:
    """A function for the `layer_moments` of the model's last pass, which needs no pass of its own.

    It answers once per pass: kept longer, the moments would keep the pass's autograd graph alive, its memory and nodes
    that belong to its CUDA stream.
    """
    moments: dict[str, Moments] = {}
    for name, layer in batchnorm_layers(model).items():

        def watch(layer: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            moments[name] = channel_moments(args[0], unbiased=unbiased)

        layer.register_forward_pre_hook(watch)
    return lambda inputs: [moments.pop(name) for name in batchnorm_layers(model)]


def forward_model(
    observation: Observation,
    round: Round,
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
    names = tuple(name for name, _ in model.named_parameters() if name in round.update)
    if round.kind == "delta":  # clients that send everything send frozen parameters, too: these do not move at all
        names = tuple(name for name in names if bool(round.update[name].any())) or names
    protocol: Protocol = FedSGD()
    sent = mean_update(round)
    if round.kind == "delta" and unroll:
        protocol = local_protocol(observation, round)
    else:
        sent = direction(dataclasses.replace(round, update=sent, reduction="mean"), knowledge)
    known = knowledge.defense if adaptive else None
    params = {name: round.params[name] for name, _ in model.named_parameters()}
    model, buffers = normalised_model(model, params, buffers_of(observation, round), knowledge, normalise)
    return Forward(
        model=model,
        params=params,
        buffers=buffers,
        target=tuple(sent[name] for name in names),
        names=names,
        loss=losses.resolve(knowledge.loss),
        protocol=protocol,
        defense=repeatable_defense(known, round) if known is not None else Chain(),
    )


def likely_forward(observation: Observation) -> Forward:
    """The client's training as far as it is known; a delta of unknown training is read as one gradient step."""
    try:
        return forward_model(observation, observation.round)
    except MissingKnowledge as missing:
        if missing.field in ("loss", "model"):
            raise
        return forward_model(observation, observation.round, unroll=False)


def repeatable_defense(defense: Defense, round: Round) -> Defense:
    """The parts of a defense that an attacker can repeat; pruning of one client's update as it can be followed.

    In a sum over clients an entry may be missing from some updates and not from others, so that its size says nothing.
    """
    parts = defense.members
    return chain(
        *(
            _followed(round.update, parts[number + 1 :])
            if isinstance(part, Prune) and round.clients == 1
            else part.deterministic(round.update)
            for number, part in enumerate(parts)
        )
    )


def _followed(observed: Update, later: Sequence[Defense]) -> Defense:
    signs = any(isinstance(part, SignCompression) for part in later)
    return SignsOfTheLargest.of(observed) if signs else SmallerThanSent.of(observed)


def local_protocol(observation: Observation, round: Round) -> FedAvg:
    """How the client trained; the order in which it shuffled its samples stays unknown."""
    knowledge = observation.knowledge
    for field in ("local_epochs", "local_batch_size"):
        if getattr(knowledge, field) is None:
            raise MissingKnowledge(UNROLLING, field)
    protocol = known_training(knowledge, UNROLLING, steps=local_steps(round, knowledge))
    if round.clients > 1:
        # One step on each client's whole batch averages to one step on the union; several steps do not.
        if protocol.epochs > 1 or (local_steps(round, knowledge) or 1) > 1:
            raise NotApplicable(
                f"unrolling needs one client's local training, not an aggregate of {round.clients} clients over "
                "several local steps; disaggregate first, or set unroll=False."
            )
        protocol = dataclasses.replace(protocol, batch_size=None)
    return protocol


def input_box(observation: Observation) -> tuple[Tensor, Tensor] | None:
    """The pixel range in the model's input space, (low, high) broadcastable to a batch; None where it is unknown."""
    bounds, normalization = observation.knowledge.bounds, observation.knowledge.normalization
    if bounds is None:
        return None
    like = next(iter(observation.rounds[0].params.values()))
    low, high = (like.new_tensor(bound) for bound in bounds)
    if normalization is None:
        return low, high
    shape = observation.knowledge.sample_shape or (len(normalization[0]),)
    if {len(part) for part in normalization} != {shape[0]}:
        raise BadInput(
            f"the normalization must hold a mean and a std for each of {shape[0]} channels, not "
            f"{len(normalization[0])} and {len(normalization[1])}; correct it."
        )
    one_pixel = (1, *[1] * len(shape))
    return to_inputs(low.view(one_pixel), normalization), to_inputs(high.view(one_pixel), normalization)
