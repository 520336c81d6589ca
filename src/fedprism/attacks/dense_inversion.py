"""Reads inputs off the gradient of the first dense layer, in closed form.

Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", 2018; Eloul et al., "Enhancing
Privacy against Inversion Attacks in Federated Learning by using Mixing Gradients Strategies", 2022.

Differs from the papers in: batches with distinct labels are solved exactly (`solvers.solve_output_layer`) and carried
back through a stack of dense layers; for other hidden layers inputs that two rows agree on are preferred.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedprism import losses
from fedprism.attacks.base import NO_DENSE_LAYER, Circumstances, UpdateAttack
from fedprism.attacks.certificate import certified, explaining_labels, left_by_noise, only_signs, rounding_error
from fedprism.attacks.gradient_matching.forward import FORWARD_USES
from fedprism.client.observed import adds_gradients, direction
from fedprism.errors import NotApplicable
from fedprism.naming import preset
from fedprism.network.network_map import Activation, NetworkMap, network_map
from fedprism.network.operations import Operation
from fedprism.solvers.closed_form import dense, labels
from fedprism.types import Observation, Reconstruction, Round, Update

MOST_READINGS = 8
"""How many readings of the labels are tried at most."""
POLISHING_STEPS = 20
"""Alternations between the network's signals and the inputs that fit them."""
ROUNDED = 1e-4
"""Share of the largest feature that rounding may leave in a silent unit's."""
MOST_COMPARED = 4096
"""How many rows are compared with each other at most: those with the largest bias gradients."""


CHECKED = (dense.DenseStatus.EXACT, dense.DenseStatus.LAYER, dense.DenseStatus.RESIDUAL)
"""What the solvers say of inputs that may explain the whole update, before that is tried."""


class _Answer(NamedTuple):
    inputs: Tensor
    labels: Tensor | None
    status: dense.DenseStatus


@dataclass(frozen=True, kw_only=True, repr=False)
class DenseInversion(UpdateAttack):
    """Direct inversion of the dense layer that the input feeds. `floor`: smallest divisor relative to the largest."""

    floor: float = 1e-6

    citation: ClassVar[str] = "Phong et al. 2018; Eloul et al. 2022 (direct inversion of a dense layer)"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"loss", "batch_size"}) | FORWARD_USES - {"defense"}

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return None if circumstances.dense_layer_first else NO_DENSE_LAYER

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        round = observation.round
        network = network_map(observation)
        layer = network.fed_by_input(round.update) or network.fed_by_input()
        if layer is None:
            raise NotApplicable(
                "dense-inversion needs a dense layer fed by the input, but this model has none; "
                "use gradient-matching instead."
            )
        gradient = direction(round, observation.knowledge)
        weight_grad, bias_grad = _gradient(layer, gradient)
        size = observation.knowledge.batch_size
        batch = size if isinstance(size, int) else dense.numerical_rank(weight_grad, bias_grad)
        answer = None
        if bool(bias_grad.any()):
            single = batch == 1
            answer = (
                _single(weight_grad, bias_grad, counted=isinstance(size, int))
                if single
                else _solve_stack(observation, gradient, network, batch)
            )
        if answer is None:
            answer = _rows(weight_grad, bias_grad, batch, self.floor)
        inputs = answer.inputs.to(weight_grad.dtype).view(-1, *observation.knowledge.sample_shape)
        finite = torch.isfinite(inputs.flatten(1)).all(1)  # a quotient beyond all numbers is no answer
        inputs = inputs[finite]
        labels = answer.labels[finite.cpu()] if answer.labels is not None else explaining_labels(observation, inputs)
        return Reconstruction(
            inputs=inputs,
            labels=labels,
            ambiguity=frozenset({"order"}),
            status=_status(observation, answer.status, inputs, labels, (weight_grad, bias_grad)),
            diagnostics={"layer": layer.weight, "batch_size": batch},
        )


@preset(DenseInversion)
def dense_inversion() -> DenseInversion:
    """Direct inversion of the first dense layer."""
    return DenseInversion()


def _gradient(layer: Operation, gradient: Update) -> tuple[Tensor, Tensor]:
    """The layer's weight and bias gradient."""
    if layer.bias is None or layer.bias not in gradient or layer.weight not in gradient:
        raise NotApplicable(
            f"dense-inversion needs the weight and the bias of '{layer.weight}' in the update, "
            f"but there is no {'bias' if layer.weight in gradient else 'weight'}; use gradient-matching instead."
        )
    return layer.rows(gradient), gradient[layer.bias]


def _status(
    observation: Observation,
    status: dense.DenseStatus,
    inputs: Tensor,
    labels: Tensor | None,
    gradient: tuple[Tensor, Tensor],
) -> dense.DenseStatus:
    """What the whole update says about inputs that should explain it, and the layer about those that it confirms."""
    if status is not dense.DenseStatus.NOT_INVERTIBLE and only_signs(gradient):
        return dense.DenseStatus.SIGNS
    if status in CHECKED:
        explained = certified(observation, inputs, labels)
        if explained:
            return dense.DenseStatus.EXACT
        if not left_by_noise(observation, inputs, labels) or (explained is None and len(inputs) >= len(gradient[1])):
            return dense.DenseStatus.UNCHECKABLE
        rounding = rounding_error(direction(observation.round))
        if not len(inputs) or dense.outside(inputs.flatten(1), *gradient) > rounding:
            return dense.DenseStatus.RESIDUAL
        status = dense.DenseStatus.LAYER if explained is None else dense.DenseStatus.ELSEWHERE
    elif status is not dense.DenseStatus.AGREED:
        return status
    return status if adds_gradients(observation.round, observation.knowledge) else dense.DenseStatus.UNCONFIRMED


def _single(weight_grad: Tensor, bias_grad: Tensor, *, counted: bool) -> _Answer:
    """One sample: every row is a multiple of its input.

    Unless it is known that there is one, rows of one size may be the mean of many: two classes send opposite errors.
    """
    told = counted or dense.differ_in_size(bias_grad[bias_grad != 0])
    status = dense.DenseStatus.LAYER if told else dense.DenseStatus.UNDETERMINED
    return _Answer(dense.invert_single(weight_grad, bias_grad).unsqueeze(0), None, status)


def _solve_stack(observation: Observation, gradient: Update, network: NetworkMap, batch: int) -> _Answer | None:
    """Solve the output layer for its inputs and go back layer by layer; None where the network is no dense stack."""
    stack, round = network.stack(), observation.round
    if stack is None or not losses.is_cross_entropy(observation.knowledge.loss):
        return None
    layers, activations = stack
    if any(layer.bias is None or layer.bias not in gradient for layer in layers):
        return None
    gradients = [_gradient(layer, gradient) for layer in layers]
    last = layers[-1]
    weight, bias = last.rows(round.params), round.params[last.bias or ""]
    solution, counts = min(
        # Of a difference it may be unknown what was subtracted from what.
        (
            _solve_output(weight, bias, gradients[-1], sign * gradients[-1][1], network.outputs, batch)
            for sign in ((1, -1) if round.kind == "delta" else (1,))
        ),
        key=lambda reading: reading[0].residual,
    )
    if not math.isfinite(solution.residual):
        return None
    status, inputs, residual = solution.status, solution.inputs, solution.residual
    signals, fitting_most = solution.signals, inputs
    for number in range(len(layers) - 1, 0, -1):
        onward = layers[number].rows(round.params).double()
        signals = signals @ onward * activations[number - 1].slope(inputs, ROUNDED)
        fitting_most = dense.outvote(signals, *gradients[number - 1])
        inputs, layer_residual = dense.back_substitute(signals, *gradients[number - 1])
        residual = max(residual, layer_residual)
    if status is not dense.DenseStatus.BLENDED and not dense.explains(residual, weight.dtype):
        # Noise upsets features that were solved for layer by layer; a unit near its threshold was taken for silent.
        polished = [
            _polish(start, round, layers, activations, gradients[0], counts) for start in (inputs, fitting_most)
        ]
        inputs, residual = min(polished, key=lambda answer: answer[1])
    return _Answer(inputs, counts.nonzero().flatten(), status)


def _polish(
    inputs: Tensor,
    round: Round,
    layers: tuple[Operation, ...],
    activations: tuple[Activation, ...],
    gradient: tuple[Tensor, Tensor],
    counts: Tensor,
) -> tuple[Tensor, float]:
    """Alternate between the signals the network sends back for the inputs and the inputs that fit these signals."""
    weights = [layer.rows(round.params).double() for layer in layers]
    biases = [round.params[layer.bias or ""].double() for layer in layers]
    targets = one_hot(counts.nonzero().flatten(), len(counts)).to(inputs)
    best, best_residual = inputs, math.inf
    for _ in range(POLISHING_STEPS):
        features = [inputs]
        for weight, bias, activation in zip(weights, biases, activations, strict=False):
            features.append(activation.function(features[-1] @ weight.T + bias))
        signals = (torch.softmax(features[-1] @ weights[-1].T + biases[-1], dim=1) - targets) / len(targets)
        for number in range(len(layers) - 1, 0, -1):
            signals = signals @ weights[number] * activations[number - 1].slope(features[number], 0.0)
        inputs, residual = dense.back_substitute(signals, *gradient)
        if residual < best_residual:
            best, best_residual = inputs, residual
    return best, best_residual


def _solve_output(
    weight: Tensor,
    bias: Tensor,
    gradient: tuple[Tensor, Tensor],
    class_grad: Tensor,
    some_outputs: Tensor,
    batch: int,
) -> tuple[dense.OutputLayerSolution, Tensor]:
    """Solve the output layer under several readings of the labels; keep the one that explains the gradient best.

    class_grad (classes,): the bias gradient, negative where a class may be present.
    """
    guess = torch.softmax(some_outputs.double(), dim=1).mean(0)
    waiting: list[tuple[Tensor | None, float | None]] = [(None, None), (torch.full_like(guess, 1 / len(guess)), None)]
    waiting.append((guess, None))
    tried: dict[tuple[int, ...], dense.OutputLayerSolution] = {}
    while waiting and len(tried) < MOST_READINGS:
        probabilities, scale = waiting.pop(0)
        counts = labels.label_counts(class_grad.double(), batch, probabilities=probabilities, scale=scale).counts
        key = tuple(counts.tolist())
        if key not in tried:
            tried[key] = dense.solve_output_layer(weight, bias, *gradient, counts)
            if not math.isfinite(tried[key].residual):
                continue
            predicted = tried[key].signals.sum(0) + counts.to(guess) / batch
            waiting.append((predicted, dense.scale_of(tried[key].signals.sum(0), class_grad.double())))
    best = min(tried, key=lambda key: tried[key].residual)
    return tried[best], torch.tensor(best)


def _rows(weight_grad: Tensor, bias_grad: Tensor, batch: int, floor: float) -> _Answer:
    """Inputs that rows agree on; failing that, the rows with the largest bias gradients, as many as samples."""
    strongest = bias_grad.abs().argsort(descending=True)[:MOST_COMPARED]
    rows = dense.invert_dense(weight_grad[strongest], bias_grad[strongest], floor=floor)
    agreed = dense.agreeing_rows(rows, bias_grad[strongest])
    chosen = agreed if agreed.status is dense.DenseStatus.AGREED else rows
    return _Answer(chosen.inputs[:batch], None, chosen.status)
