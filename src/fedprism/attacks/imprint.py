"""A server that sends a first layer which sorts the samples of a batch into bins, and reads off each bin.

Fowl, Geiping, Czaja, Goldblum, Goldstein, "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with
Modified Models", ICLR 2022.

Every row of the layer measures the same linear statistic of the input, here its mean; the biases are minus the edges of
the bins. Behind a ReLU, a row passes the samples above its edge, and the columns of the next layer are all the same, so
that a sample sends the same error to every row it passes. The gradients of two neighbouring rows then differ by the
samples between their edges: where that is one sample, the difference of the weight gradients divided by that of the
bias gradients is the sample itself.

Differs from the paper in: the layer is one that the model has, a dense layer fed by the input with a ReLU and a dense
layer behind it, not one put in front; the rows come in random order, which the trapdoor keeps; bins in which samples
with opposite errors blend are told by values outside the pixel range or a statistic outside the bin, and left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedprism.attacks.base import NO_DENSE_LAYER, NOBODY_TAMPERS, Circumstances, UpdateAttack
from fedprism.attacks.certificate import certified, explaining_labels
from fedprism.attacks.gradient_matching.forward import FORWARD_USES, input_box
from fedprism.errors import BadInput, NotApplicable
from fedprism.naming import preset
from fedprism.network.forward_pass import same
from fedprism.network.network_map import NetworkMap, network_map
from fedprism.network.probing import probed_map
from fedprism.types import Observation, Reconstruction, Round, Update

FIRST_LAYERS = 2
"""Layers that the attack looks at: the one that is imprinted and the one behind it."""
SLACK = 0.01
"""How far outside the pixel range, or its bin, a sample may lie, relative to the range or the spread: rounding."""


class ImprintStatus(StrEnum):
    EXACT = "as many bins as samples hold a gradient, and they give the observed update to rounding error"
    UNCONFIRMED = (
        "as many bins as samples hold a gradient; the rest of the update does not confirm that each holds one sample"
    )
    SOME = "fewer bins than samples hold a gradient: some of them blend the samples that they hold"
    UNCOUNTED = "the bins that hold a gradient; the number of samples is not known, so some bins may blend several"
    EMPTY = "no bin holds what could be a sample"


class _Layers(NamedTuple):
    """Names of the layer that is imprinted and of the one behind it."""

    weight: str
    bias: str
    next_weight: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Imprint(UpdateAttack):
    """Bins the mean of the input's values by the rows of the first dense layer.

    centre, spread: the mean and standard deviation that the server expects of that statistic; the edges are the
    quantiles of the normal distribution with these. floor: the smallest answer of a bin relative to the largest.
    """

    centre: float = 0.45
    spread: float = 0.15
    floor: float = 1e-4

    citation: ClassVar[str] = "Fowl et al. 2022 (imprint layer)"

    def __post_init__(self) -> None:
        if not self.spread > 0 or not 0 < self.floor < 1:
            raise BadInput(
                f"spread must be above 0 and floor between 0 and 1, not {self.spread} and {self.floor}; "
                "change the one that is out of range."
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape", "trapdoor"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"batch_size", "bounds", "normalization", "loss"}) | FORWARD_USES - {"defense"}

    def not_worth(self, circumstances: Circumstances) -> str | None:
        if not circumstances.tampers:
            return NOBODY_TAMPERS
        return None if circumstances.dense_layer_first else NO_DENSE_LAYER

    def tamper(self, model: nn.Module, params: Update, rng: torch.Generator) -> tuple[Update, dict[str, Tensor]]:
        """The parameters with an imprinted first layer, and the order of its rows."""
        names = _layers(probed_map(model, params))
        weight, next_weight = params[names.weight], params[names.next_weight]
        rows, features = weight.shape
        order = torch.randperm(rows, generator=rng)
        levels = (torch.arange(rows) + 0.5) / rows
        edges = self.centre + self.spread * torch.special.ndtri(levels)
        # Rows as long as the honest ones, which noise and a glance at their lengths tell less from these.
        length = float(torch.linalg.vector_norm(weight, dim=1).mean()) or 1.0
        gain = length * features**0.5
        bias = torch.empty(rows).scatter(0, order, -gain * edges)
        # One error for all rows; kept small, because the next layer adds up all rows.
        column = torch.randn(len(next_weight), 1, generator=rng) / rows
        return {
            **params,
            names.weight: torch.full_like(weight, gain / features),
            names.bias: bias.to(params[names.bias]),
            names.next_weight: column.to(next_weight).expand_as(next_weight).contiguous(),
        }, {"order": order, "edges": edges}

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        round = observation.round
        assert observation.trapdoor is not None
        names = _layers(network_map(observation))
        inputs, bins = self._bins(round, names, observation.trapdoor)
        inputs = inputs.to(round.params[names.weight].dtype).view(-1, *observation.knowledge.sample_shape)
        kept = _within(inputs, observation)
        size = observation.knowledge.batch_size
        status = _status(int(kept.sum()), size if isinstance(size, int) else None)
        labels = explaining_labels(observation, inputs[kept])
        if status is ImprintStatus.EXACT and not certified(observation, inputs[kept], labels):
            status = ImprintStatus.UNCONFIRMED
        return Reconstruction(
            inputs=inputs[kept],
            labels=labels,
            ambiguity=frozenset({"order"}),
            status=status,
            diagnostics={"bins": bins[kept].tolist(), "answered": len(inputs), "left_out": int((~kept).sum())},
        )

    def _bins(self, round: Round, names: _Layers, trapdoor: Update) -> tuple[Tensor, Tensor]:
        """What each bin that answers holds, (answering, features), and the numbers of these bins."""
        weight_grad, bias_grad = (_update(round, name).double() for name in (names.weight, names.bias))
        order = trapdoor["order"].to(weight_grad.device)
        edges = trapdoor["edges"].to(weight_grad)
        # The last bin has no upper edge.
        steps = bias_grad[order] - torch.cat([bias_grad[order][1:], bias_grad.new_zeros(1)])
        answers = steps.abs() > self.floor * steps.abs().max()
        bins = answers.nonzero().flatten()
        above = torch.cat([weight_grad[order], weight_grad.new_zeros(1, weight_grad.shape[1])])
        inputs = (above[bins] - above[bins + 1]) / steps[bins].unsqueeze(1)
        upper = torch.cat([edges[1:], edges.new_full((1,), torch.inf)])
        slack, statistic = SLACK * self.spread, inputs.mean(1)
        inside = (statistic > edges[bins] - slack) & (statistic < upper[bins] + slack)
        return inputs[inside], bins[inside]


@preset(Imprint)
def imprint() -> Imprint:
    """Sorts the samples into bins by their mean value and reads off each bin, in closed form."""
    return Imprint()


def _layers(network: NetworkMap | None) -> _Layers:
    """The two first layers, where they are dense with a ReLU between."""
    operations = () if network is None else network.operations
    reason = "fewer layers" if len(operations) < FIRST_LAYERS else "another kind of layer"
    if network is not None and len(operations) >= FIRST_LAYERS:
        first, second = operations[:FIRST_LAYERS]
        if network.fed_by_input() is first and second in network.layers:
            reason = "no bias" if first.bias is None else "something other than a ReLU between them"
            plain = not (first.transposed or second.transposed)
            if first.bias is not None and plain and same(torch.relu(first.outputs), second.inputs):
                return _Layers(first.weight, first.bias, second.weight)
    raise NotApplicable(
        "imprint needs a dense layer with a bias, a ReLU and a dense layer as the first layers of the model, "
        f"but it has {reason}; use mkor or class-fishing instead."
    )


def _update(round: Round, name: str) -> Tensor:
    if name not in round.update:
        raise NotApplicable(f"imprint needs '{name}', but the update does not hold it; record the whole update.")
    return round.update[name]


def _within(inputs: Tensor, observation: Observation) -> Tensor:
    """Which inputs are finite and within the pixel range, where that is known: blends of opposite signs are not."""
    finite = torch.isfinite(inputs.flatten(1)).all(1)
    box = input_box(observation)
    if box is None or not len(inputs):
        return finite
    low, high = box
    slack = SLACK * (high - low)
    return finite & ((inputs >= low - slack) & (inputs <= high + slack)).flatten(1).all(1)


def _status(answered: int, size: int | None) -> ImprintStatus:
    if not answered:
        return ImprintStatus.EMPTY
    if size is None:
        return ImprintStatus.UNCOUNTED
    return ImprintStatus.EXACT if answered == size else ImprintStatus.SOME
