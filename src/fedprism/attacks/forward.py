"""The attacker's forward model: the client's own `local_update`, set up from what the attacker knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism import losses
from fedprism.attacks.pruned import FollowedPruning, SignsOfTheLargest, SmallerThanSent
from fedprism.batchnorm import Normalise, batchnorm_layers, buffers_of, normalised
from fedprism.client import FedAvg, FedSGD, Protocol, batch_gradient, local_update
from fedprism.defenses.base import Chain, Context, Defense, chain
from fedprism.defenses.compression import SignCompression
from fedprism.defenses.pruning import Prune
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.solvers.distances import Sent
from fedprism.solvers.factors import Factors, uses_of
from fedprism.solvers.priors import Moments, channel_moments
from fedprism.solvers.twice import for_second_derivatives, made_of, taking
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

    @property
    def follows_pruning(self) -> bool:
        return any(isinstance(part, FollowedPruning) for part in _parts(self.defense))

    def ignoring_pruning(self) -> Forward:
        """The same, with every other part of the defense."""
        others = (part for part in _parts(self.defense) if not isinstance(part, FollowedPruning))
        return dataclasses.replace(self, defense=chain(*others))


class QuickForward:
    """The same as a Forward, set up once for the many times that gradient matching asks and differentiates it.

    Layers are put together for second derivatives (`solvers.twice`), and nothing on the way waits for the device, so
    that a whole iteration can be captured. What looks at single examples, or at the batch, goes the client's own way.
    """

    def __init__(self, forward: Forward, *, channels_last: bool = False) -> None:
        self.plain = leaves_batch_alone(forward.defense)
        self.original = forward.model
        self.model = for_second_derivatives(forward.model) if self.plain else forward.model
        self.forward = dataclasses.replace(forward, model=self.model)
        self.loss = forward.defense.on_loss(forward.loss)
        layout = torch.channels_last if channels_last else torch.preserve_format
        self.params = {
            name: p.detach().to(memory_format=layout if p.dim() == 4 else torch.preserve_format)
            for name, p in forward.params.items()
        }
        self.trained = {name: self.params[name].clone().requires_grad_() for name in forward.names}
        self.frozen = {name: p for name, p in self.params.items() if name not in self.trained}
        self.scratch = {name: tensor.detach().clone() for name, tensor in forward.buffers.items()}
        # What batch norm writes into its buffers in train mode it never reads there: one copy does for all iterations.
        normalising = tuple(f"{name}." for name in batchnorm_layers(forward.model))
        self.rewritten = [name for name in self.scratch if not name.startswith(normalising)]
        if self.plain:
            made_of(self.model, {**self.frozen, **self.trained, **self.scratch})

    @property
    def direct(self) -> bool:
        """Whether one gradient of the whole batch is all there is to it."""
        return self.plain and isinstance(self.forward.protocol, FedSGD)

    def factoring(self, shape: tuple[int, ...]) -> Callable[[Tensor, Tensor], Sent]:
        """The same for batches of this shape, with factors where these are worth it (`solvers.factors`)."""
        first = next(iter(self.params.values()))
        if not self.direct or first.is_cuda or changes_updates(self.forward.defense):
            return self
        try:
            with taking(self.model) as taken, torch.random.fork_rng(devices=[]):
                outputs = functional_call(
                    self.model, {**self.trained, **self.frozen, **self.scratch}, (first.new_zeros(shape),)
                )
        except ValueError:  # a batch that the model refuses: whoever asks for its gradient is told
            return self
        # A weight that is used elsewhere too has further gradients.
        once = [name for name, uses in uses_of(self.trained, outputs).items() if uses == 1]
        factored = [name for name in once if len(taken.get(name, ())) == 1]
        if not factored or len(factored) == len(self.trained):
            return self
        return lambda inputs, labels: self._with_factors(factored, Batch(inputs, labels))

    def _with_factors(self, factored: Sequence[str], batch: Batch) -> list[Tensor | Factors]:
        self.reset()
        written = {name: weight for name, weight in self.trained.items() if name not in factored}
        with taking(self.model) as taken:
            held = {**self.frozen, **self.scratch, **{name: self.trained[name].detach() for name in factored}}
            outputs = functional_call(self.model, {**written, **held}, (batch.inputs,))
        products = [taken[name][0] for name in factored]
        grads = torch.autograd.grad(
            self.loss(outputs, batch.labels),
            [*written.values(), *(each.product for each in products)],
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        lefts = grads[len(written) :]
        factors = [Factors(left, each.columns) for left, each in zip(lefts, products, strict=True)]
        update: dict[str, Tensor | Factors] = dict(zip(written, grads, strict=False))
        update |= zip(factored, factors, strict=True)
        return [update[name] for name in self.forward.names]

    def __call__(self, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        forward = self.forward
        if not self.direct:
            return forward(inputs, labels)
        self.reset()
        batch = Batch(inputs, labels)
        update = batch_gradient(self.model, self.trained, None, batch, self.loss, create_graph=True)
        here = Context(model=self.model, params=self.params, batch=batch)
        update = forward.defense.on_update(update, here, torch.Generator())
        return [update[name] for name in forward.names]

    def reset(self) -> None:
        for name in self.rewritten:
            self.scratch[name].copy_(self.forward.buffers[name])


def moments_in_passing(model: nn.Module, *, unbiased: bool) -> Callable[[Tensor], list[Moments]]:
    """What `layer_moments` would say of the inputs that the model was asked for last, without a pass of its own.

    It is said once: kept until the next pass, the moments would keep the whole autograd graph of this one alive,
    its memory and nodes that belong to the CUDA stream on which it was made.
    """
    found: dict[str, Moments] = {}
    for name, layer in batchnorm_layers(model).items():

        def watch(layer: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            found[name] = channel_moments(args[0], unbiased=unbiased)

        layer.register_forward_pre_hook(watch)
    return lambda inputs: [found.pop(name) for name in batchnorm_layers(model)]


def leaves_batch_alone(defense: Defense) -> bool:
    """Whether a defense looks neither at the batch before the gradient nor at single examples' gradients."""
    return not defense.per_example and all(type(part).on_batch is Defense.on_batch for part in _parts(defense))


def changes_updates(defense: Defense) -> bool:
    """Whether a defense does anything to the gradient of the whole batch."""
    return any(type(part).on_update is not Defense.on_update for part in _parts(defense))


def _parts(defense: Defense) -> tuple[Defense, ...]:
    return defense.defenses if isinstance(defense, Chain) else (defense,)


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
    scale = seen.share
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
        defense=repeatable(known, seen) if known is not None else Chain(),
    )


def repeatable(defense: Defense, seen: Round) -> Defense:
    """Every part of a defense that an attacker can repeat, in order; of pruning one client's update, how it follows it.

    In a sum over clients an entry may be missing from some updates and not from others, so that its size says nothing.
    """
    parts = _parts(defense)
    return chain(
        *(
            _followed(seen.update, parts[number + 1 :])
            if isinstance(part, Prune) and seen.clients == 1
            else part.deterministic(seen.update)
            for number, part in enumerate(parts)
        )
    )


def _followed(observed: Update, later: Sequence[Defense]) -> Defense:
    """How pruning is followed, by what came after it."""
    signs = any(isinstance(part, SignCompression) for part in later)
    return SignsOfTheLargest.of(observed) if signs else SmallerThanSent.of(observed)


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
