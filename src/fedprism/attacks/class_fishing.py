"""A server that sends a last layer through which only one class answers, and inverts the few samples of that class.

Wen, Geiping, Fowl, Goldblum, Goldstein, "Fishing for User Data in Large-Batch Federated Learning via Gradient
Magnification", ICML 2022.

All rows of the last layer but the fished class's are zero, and the other classes' biases are so large that the fished
class is never predicted. A sample of another class then sends nothing back: its error meets rows of zeros. A sample of
the fished class sends its whole error, through the one row that is left. So the gradient of every other layer is that
of the fished samples alone, whatever the size of the batch, and the fished class's bias gradient counts them.

Differs from the paper in: class fishing only. Where several samples have the class, the paper tells them apart over
several rounds by a cut through one feature; here they are counted and matched together. Batch-norm layers that
normalise by the batch mix its samples, before any trap.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedprism import losses
from fedprism.attacks.base import Attack, Circumstances, UpdateAttack
from fedprism.attacks.gradient_matching.forward import FORWARD_USES
from fedprism.attacks.gradient_matching.labels import Labels
from fedprism.attacks.gradient_matching.presets import inverting_gradients
from fedprism.client.observed import direction, local_steps
from fedprism.errors import BadInput, NotApplicable
from fedprism.naming import preset
from fedprism.network.network_map import network_map
from fedprism.network.operations import Operation
from fedprism.network.probing import probed_map
from fedprism.solvers.closed_form.labels import MOST_OFF, SampleUnit, sample_unit
from fedprism.types import Observation, Reconstruction, Round, Update

ROUNDING = 0.02
"""In samples: how far from a whole number rounding usually leaves a count."""


class FishingStatus(StrEnum):
    ONE = "one sample of the fished class was counted: the gradient below the last layer is its own"
    SEVERAL = "several samples of the fished class were counted: the gradient below the last layer is their mean"
    ABSENT = "no sample of the fished class was counted: nothing is recovered"
    UNSURE = "several counts of fished samples fit the update, of which the likeliest was taken"
    OPEN = "the counts of samples are not whole numbers: samples of other classes may contribute, too "


"(raise the bias)"


@dataclass(frozen=True, kw_only=True, repr=False)
class ClassFishing(UpdateAttack):
    """Fishes the samples of class `target` and inverts them with the attack `matching`.

    bias: how far the other classes' biases lie above the fished one's. It must exceed what the fished class's row can
    add, and the larger it is, the easier it is to see.
    """

    target: int = 0
    bias: float = 1000.0
    matching: Attack = dataclasses.replace(inverting_gradients(), labels=Labels.KNOWN)  # noqa: RUF009 (frozen)

    citation: ClassVar[str] = "Wen et al. 2022 (class fishing)"

    def __post_init__(self) -> None:
        if self.target < 0 or not self.bias > 0:
            raise BadInput(
                f"the class number must be at least 0 and the bias above 0, not {self.target} and {self.bias}; "
                "change the one that is out of range."
            )

    @property
    def needs(self) -> frozenset[str]:
        # The labels of what is fished are known by construction.
        fields = {"model", "input_shape", "batch_size", "loss", "trapdoor"}
        return (self.matching.needs | fields) - {"labels"}

    @property
    def uses(self) -> frozenset[str]:
        return self.matching.uses | FORWARD_USES - {"defense"}

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return "it fishes for one class, which a plan must name"

    def tamper(self, model: nn.Module, params: Update, rng: torch.Generator) -> tuple[Update, dict[str, Tensor]]:
        """The parameters with a last layer that lets the fished class alone answer."""
        network = probed_map(model, params)
        last = None if network is None else network.output_layer()
        bias = None if last is None or last.bias is None else params[last.bias]
        if last is None or last.bias is None or bias is None or self.target >= len(bias):
            layer = "none" if bias is None else f"one of {len(bias)} classes"
            raise NotApplicable(
                f"class-fishing needs a dense output layer with a bias and a class {self.target}, but this model "
                f"has {layer}; choose another class or another attack."
            )
        others = torch.arange(len(bias), device=bias.device) != self.target
        weight = last.rows(params).masked_fill(others.unsqueeze(1), 0.0)
        return {
            **params,
            last.weight: weight.T.contiguous() if last.transposed else weight.view(params[last.weight].shape),
            last.bias: torch.where(others, bias[self.target] + self.bias, bias),
        }, {"target": torch.tensor(self.target)}

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        assert observation.trapdoor is not None
        target = int(observation.trapdoor["target"])
        last = _output_layer(observation, observation.round)
        _check(observation)
        size = observation.knowledge.batch_size
        if not isinstance(size, int):
            raise NotApplicable(f"class-fishing needs one batch_size, not {size}; give one number.")
        gradient, unit = _counted(observation, last, target, size)
        counted = -float(gradient[last.bias or ""][target]) / unit.size
        count = max(round(counted), 0)
        status = _status(unit, counted, count)
        shape = observation.knowledge.sample_shape
        diagnostics = {"target": target, "fished": count, "counted": counted}
        if count == 0:
            empty = gradient[last.weight].new_zeros(0, *shape)
            return Reconstruction(inputs=empty, status=status, diagnostics=diagnostics)
        answer = self.matching.run(_fished(observation, gradient, last, target, count, 1 / (unit.size * count)), rng)
        return dataclasses.replace(
            answer,
            labels=torch.full((count,), target),
            ambiguity=answer.ambiguity | {"order"},
            status=f"{status}; {answer.status}",
            diagnostics={**answer.diagnostics, **diagnostics},
        )


@preset(ClassFishing)
def class_fishing() -> ClassFishing:
    """Fishes one class out of a batch of any size and inverts its samples by gradient matching."""
    return ClassFishing()


def _output_layer(observation: Observation, round: Round) -> Operation:
    last = network_map(observation).output_layer()
    if last is None or last.bias is None or last.bias not in round.update or last.weight not in round.update:
        raise NotApplicable(
            "class-fishing needs the weight and the bias of a dense output layer, but the update does not hold them; "
            "use gradient-matching instead."
        )
    return last


def _check(observation: Observation) -> None:
    if not losses.is_cross_entropy(observation.knowledge.loss):
        raise NotApplicable("class-fishing needs cross-entropy, not another loss; use gradient-matching instead.")
    if observation.round.kind == "delta" and (local_steps(observation.round, observation.knowledge) or 1) > 1:
        raise NotApplicable(
            "class-fishing needs a gradient or one local step, but the update is a delta of several steps; "
            "use gradient-matching instead."
        )


def _counted(observation: Observation, last: Operation, target: int, batch: int) -> tuple[Update, SampleUnit]:
    """The gradient and what one sample adds to it; of a difference it may be unknown what was subtracted from what."""
    readings, round = [], observation.round
    for sign in (1, -1) if round.kind == "delta" else (1,):
        gradient = {name: sign * tensor for name, tensor in direction(round, observation.knowledge).items()}
        unit = _sample_unit(gradient[last.bias or ""].double(), target, batch)
        if unit is not None:
            readings.append((gradient, unit))
    if not readings:
        raise NotApplicable(f"class-fishing needs a gradient of '{last.bias}', not zeros; fish another update.")
    return min(readings, key=lambda reading: reading[1].misfit)


def _sample_unit(bias_grad: Tensor, target: int, batch: int) -> SampleUnit | None:
    """What one sample adds to the output layer's bias gradient, whatever the update was multiplied by.

    A fished sample takes one away at the target. The other classes share every sample evenly, and each sample takes one
    away at its own class: they lie below the highest of them by their counts, unless samples of each of them are there.
    """
    others = bias_grad[torch.arange(len(bias_grad), device=bias_grad.device) != target]
    gaps = torch.cat([others.max() - others, -bias_grad[target].view(1)])
    lacking = torch.arange(len(gaps)) < len(others)
    return sample_unit(gaps, batch, step=len(others), lacking=lacking, error=ROUNDING)


def _status(unit: SampleUnit, counted: float, count: int) -> FishingStatus:
    if max(unit.misfit, abs(counted - count)) > MOST_OFF:
        return FishingStatus.OPEN
    if not unit.unique:
        return FishingStatus.UNSURE
    if count == 0:
        return FishingStatus.ABSENT
    return FishingStatus.ONE if count == 1 else FishingStatus.SEVERAL


def _fished(
    observation: Observation, gradient: Update, last: Operation, target: int, count: int, scale: float
) -> Observation:
    """What a client that holds only the fished samples would have sent of all layers but the last.

    The last layer is left out: its rows are the only ones in which the other samples take part.
    """
    body = {name: scale * tensor for name, tensor in gradient.items() if name not in (last.weight, last.bias)}
    if not body:
        raise NotApplicable(
            "class-fishing needs layers below the last one, but there are none; use dense-inversion instead."
        )
    device = next(iter(body.values())).device
    knowledge = dataclasses.replace(
        observation.knowledge, batch_size=count, labels=torch.full((count,), target, device=device)
    )
    part = dataclasses.replace(observation.rounds[0], update=body, kind="gradient", reduction="mean", clients=1)
    return dataclasses.replace(observation, rounds=(part,), knowledge=knowledge)
