"""The layers of a network whose gradients span what they were fed, and how far guessed images are outside of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism.client.batchnorm import buffers_of
from fedprism.network.batchnorm import batchnorm_layers
from fedprism.network.fed import LayerInput, inputs_of_layers, layer_input
from fedprism.network.forward_pass import evaluating, same
from fedprism.network.network_map import NetworkMap, network_map
from fedprism.network.operations import Operation
from fedprism.solvers.matching.spans import LEAST_NOISE_VALUES, Span, gradient_span
from fedprism.types import Observation, Update, move

EQUATIONS = 6
"""Equations per unknown in least squares: with less than 3 rounding grows, more than this gains nothing."""


@dataclass(frozen=True)
class Candidate:
    """A layer that a few samples feed at fewer places than its weight has rows and columns."""

    layer: LayerInput
    operation: Operation
    centred: bool
    """Whether batch norm by the batch's own statistics follows: only deviations from the mean are spanned then."""


@dataclass(frozen=True)
class SpannedLayer:
    candidate: Candidate
    span: Span
    ones: float
    """What stands for the bias's input of one behind the features; 0 without a bias."""

    def complete(self, fed: Tensor) -> Tensor:
        """Of what the layer is fed, (samples, places, features), what must be in the span."""
        if self.candidate.centred:
            return fed - fed.mean((0, 1), keepdim=True)
        return torch.cat([fed, torch.full_like(fed[..., :1], self.ones)], 2) if self.ones else fed


@dataclass(frozen=True)
class Network:
    """A network as its layers are fed, ready to be differentiated, and what of it a gradient may span."""

    model: nn.Module
    tensors: Update
    candidates: tuple[Candidate, ...]
    by_batch: bool
    """Whether batch norm takes its statistics from the batch, so that samples depend on each other."""

    def fed(self, layers: Iterable[SpannedLayer], dtype: torch.dtype) -> Callable[[Tensor], list[Tensor]]:
        """The function from inputs to what must be in the span of each layer."""
        layers = list(layers)
        model = copy.deepcopy(self.model).to(dtype)
        device = next(iter(self.tensors.values())).device
        function = inputs_of_layers(model, move(self.tensors, device, dtype), [s.candidate.layer for s in layers])
        return lambda inputs: [layer.complete(fed) for layer, fed in zip(layers, function(inputs), strict=True)]


def network_of(observation: Observation) -> Network:
    """The network in the mode in which the client trained it, without what is random or written into buffers."""
    assert observation.model is not None
    round = observation.round
    network = network_map(observation)
    centred = _centred(observation, network)
    counts: dict[str, int] = {}
    for operation in network.operations:
        counts[operation.weight] = counts.get(operation.weight, 0) + 1
    candidates = []
    for operation in network.operations:
        layer = layer_input(operation)
        whole = layer is not None and operation.weight in round.update and counts[operation.weight] == 1
        if whole and layer is not None and len(operation.inputs) == len(operation.outputs):
            candidates.append(Candidate(layer, operation, operation.number in centred))
    model = copy.deepcopy(observation.model).requires_grad_(False)
    tensors = {**round.params, **buffers_of(observation, round)}
    by_batch = False
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    for name, layer_ in batchnorm_layers(model).items():
        if layer_.training or layer_.running_mean is None:
            by_batch = True
            layer_.track_running_stats = False
            layer_.running_mean = layer_.running_var = layer_.num_batches_tracked = None
            tensors = {key: tensor for key, tensor in tensors.items() if key not in _statistics(name)}
    return Network(model, tensors, tuple(candidates), by_batch)


def _statistics(name: str) -> set[str]:
    return {f"{name}.{part}" for part in ("running_mean", "running_var", "num_batches_tracked")}


def _centred(observation: Observation, network: NetworkMap) -> set[int]:
    """The numbers of the operations whose outputs batch norm centres by the batch's own mean."""
    assert observation.model is not None
    model, normalised = copy.deepcopy(observation.model), list[Tensor]()
    training = [layer for layer in batchnorm_layers(model).values() if layer.training]
    if not training or not isinstance(network.inputs, Tensor):
        return set()
    for layer in training:
        layer.register_forward_pre_hook(lambda _, args: normalised.append(args[0].clone()))
    with torch.no_grad(), evaluating(model):
        sent = {**buffers_of(observation, observation.round), **observation.round.params}
        functional_call(model, sent, (network.inputs,))
    return {o.number for o in network.operations for fed in normalised if same(fed, o.outputs)}


def spanned_layers(network: Network, gradient: Update, samples: int, passes: int = 1) -> list[SpannedLayer]:
    """The layers whose gradient spans what so many samples fed them, each in so many passes over the data."""
    spanned = []
    for candidate in network.candidates:
        operation = candidate.operation
        rows, most = operation.rows(gradient), samples * passes * operation.places
        if most + LEAST_NOISE_VALUES > min(rows.shape):
            continue
        ones = 0.0
        if operation.bias is not None and operation.bias in gradient and not candidate.centred:
            bias = gradient[operation.bias][:, None]
            # As large as a feature is in the mean, so that it counts as much as one.
            ones = float(rows.norm() / math.sqrt(rows.shape[1]) / bias.norm()) if bool(bias.any()) else 0.0
            rows = torch.cat([rows, ones * bias], 1) if ones else rows
        span = gradient_span(rows, most=most)
        if span.informative:
            spanned.append(SpannedLayer(candidate, span, ones))
    return spanned


class Shares:
    """How much of what guessed images feed the layers is outside the layers' spans."""

    def __init__(self, network: Network, layers: list[SpannedLayer], dtype: torch.dtype) -> None:
        self.fed = network.fed(layers, dtype)
        self.bases = [layer.span.basis.to(dtype) for layer in layers]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The mean over the layers of (the energy outside the span) / (the energy of deviations from the mean place).

        A plain share would call flat images nearly right: one direction holds most of what layers are fed.
        """
        total = inputs.new_zeros(())
        for fed, basis in zip(self.fed(inputs), self.bases, strict=True):
            outside = fed - fed @ basis.T @ basis
            spread = fed - fed.mean(1, keepdim=True) if fed.shape[1] > 1 else fed
            total = total + outside.square().sum() / spread.square().sum().clamp_min(torch.finfo(fed.dtype).tiny)
        return total / len(self.bases)


class Outside:
    """What guessed images feed the layers outside the layers' spans, as a residual of least squares.

    Instead of all directions outside a span, random ones among them are looked at: enough to determine the images.
    """

    def __init__(self, network: Network, layers: list[SpannedLayer], near: Tensor, rng: torch.Generator) -> None:
        self.fed = network.fed(layers, torch.float64)
        with torch.no_grad():
            fed = self.fed(near.double())
        places = sum(each.shape[0] * each.shape[1] for each in fed)
        wanted = math.ceil(EQUATIONS * near.numel() / places)
        self.directions = []
        for layer, each in zip(layers, fed, strict=True):
            spread = each - each.mean(1, keepdim=True) if each.shape[1] > 1 else each
            scale = float(spread.norm())
            self.directions.append(_outside(layer.span.basis, wanted, rng) / (scale if scale > 0 else 1.0))

    def __call__(self, inputs: Tensor) -> Tensor:
        fed = self.fed(inputs)
        return torch.cat([(each @ way).flatten() for each, way in zip(fed, self.directions, strict=True)])


def _outside(basis: Tensor, wanted: int, rng: torch.Generator) -> Tensor:
    """Random orthogonal directions (features, some) outside a span, as long as to keep the expected energy."""
    features, rank = basis.shape[1], len(basis)
    some = min(wanted, features - rank)
    drawn = torch.randn(features, some, generator=rng, dtype=torch.float64).to(basis.device)
    drawn = torch.linalg.qr(drawn - basis.T @ (basis @ drawn)).Q
    drawn = drawn - basis.T @ (basis @ drawn)
    lengthened: Tensor = drawn * math.sqrt((features - rank) / some)
    return lengthened


def described(network: Network, layers: list[SpannedLayer], gradient: Update) -> dict[str, str]:
    """Which layers help and which do not, in a few words each."""
    helping = {layer.candidate.operation.weight: layer for layer in layers}
    words = {}
    for candidate in network.candidates:
        operation, name = candidate.operation, candidate.operation.weight
        size = min(operation.rows(gradient).shape)
        if name in helping:
            span = helping[name].span
            words[name] = f"rank {span.rank} of {size}"
        else:
            words[name] = f"{operation.places} places per sample, at most rank {size}: says nothing"
    return words
