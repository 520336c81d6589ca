"""Samples out of the row space of the first layer's gradient, where that layer is applied at few places.

For recurrent layers, convolutions over short series, encoders that several inputs share, the first adapter of LoRA and
small batches in front of a dense layer. What the row space leaves open are a few numbers: with overlapping windows
none, otherwise those are solved for by least squares on the whole gradient.

Row spaces of gradients as spans of what a layer was fed: Petrov et al., "DAGER: Exact Gradient Inversion for Large
Language Models", NeurIPS 2024, who look tokens up in it. Here nothing has to be known of the samples.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from fedprism.attacks.base import Circumstances, UpdateAttack
from fedprism.attacks.certificate import certified
from fedprism.attacks.gradient_matching.forward import FORWARD_USES, Forward, likely_forward
from fedprism.attacks.gradient_matching.labels import Labels, given_labels
from fedprism.client.observed import direction
from fedprism.errors import NotApplicable
from fedprism.inputs import values_in
from fedprism.network.places import PlacedLayer, placed_layers
from fedprism.pixels import to_inputs
from fedprism.runtime import progress
from fedprism.solvers.closed_form.row_space import Fed, OpenSpace, open_space
from fedprism.types import Observation, Reconstruction, Update

NO_FEW_PLACES = "the input feeds no layer of this model at fewer places than it has units"


class RowSpaceStatus(StrEnum):
    EXACT = "the samples explain the whole update to rounding error"
    CLOSED_FORM = "the row space leaves one sample; whether it explains the whole update was not shown"
    APPROXIMATE = "no start ended at samples that explain the whole update: the best of them"


class _Reading(NamedTuple):
    layer: PlacedLayer
    space: OpenSpace


@dataclass(frozen=True, kw_only=True, repr=False)
class RowSpaceInversion(UpdateAttack):
    """Samples that lie in the row space of the first layer's gradient and explain the whole update.

    `starts` random samples begin the search, each of at most `steps` steps; `most_open` numbers are solved for.
    """

    starts: int = 8
    steps: int = 60
    most_open: int = 64

    citation: ClassVar[str] = "Petrov et al. 2024 (row spaces of gradients)"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape", "loss", "batch_size"})

    @property
    def reads_any_inputs(self) -> bool:
        return True

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"labels", "bounds", "normalization"}) | FORWARD_USES

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return None if circumstances.few_places else NO_FEW_PLACES

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        size = observation.knowledge.batch_size
        assert isinstance(size, int)
        layer, space = self._reading(observation, size)
        open_numbers = size * len(space.directions)
        if open_numbers:
            samples, labels, explains = self._search(observation, space, size, rng)
        else:
            samples, labels = space.origin.repeat(size, 1), _labels(observation, size)
            explains = bool(certified(observation, observation.knowledge.shaped(samples), labels))
        status = RowSpaceStatus.APPROXIMATE if open_numbers else RowSpaceStatus.CLOSED_FORM
        return Reconstruction(
            inputs=observation.knowledge.shaped(samples),
            labels=labels,
            ambiguity=frozenset({"order"}),
            status=RowSpaceStatus.EXACT if explains else status,
            diagnostics={"layer": layer.operation.weight, "rank": space.rank, "open_numbers": open_numbers},
        )

    def _reading(self, observation: Observation, size: int) -> _Reading:
        """The layer whose row space leaves the fewest numbers open."""
        gradient, readings = direction(observation.round, observation.knowledge), []
        for layer in placed_layers(observation):
            weight = layer.operation.weight
            units = len(layer.operation.rows(gradient)) if weight in gradient else 0
            if size * len(layer.entries) > units:  # the rows then span less than what was fed
                continue
            space = _space(observation, layer, gradient, size)
            if space is not None and size * len(space.directions) <= self.most_open:
                readings.append(_Reading(layer, space))
        if not readings:
            raise NotApplicable(
                "row-space-inversion expects a first layer that is applied at fewer places than it has units and "
                f"inputs and leaves at most {self.most_open} numbers open, found none for {size} samples of this "
                "model; use gradient-matching instead."
            )
        return min(readings, key=lambda reading: len(reading.space.directions))

    def _search(
        self, observation: Observation, space: OpenSpace, size: int, rng: torch.Generator
    ) -> tuple[Tensor, Tensor, bool]:
        """Least squares on the direction of the whole gradient, from random samples, until one explains the update."""
        labels = _labels(observation, size)
        misfit = _Misfit(observation, space, labels)
        best, smallest = None, np.inf
        for number in range(self.starts):
            progress.report(number, self.starts)
            start = (_plausible(observation, size, rng) - space.origin) @ torch.linalg.pinv(space.directions)
            solution = least_squares(
                misfit, start.flatten().numpy(), jac="3-point", max_nfev=self.steps, xtol=PRECISION
            )
            if solution.cost < smallest:
                best, smallest = misfit.samples(solution.x), solution.cost
                if certified(observation, observation.knowledge.shaped(best), labels):
                    return best, labels, True
        assert best is not None
        return best, labels, False


def row_space_inversion() -> RowSpaceInversion:
    """Samples out of the row space of a first layer that is applied at few places."""
    return RowSpaceInversion()


PRECISION = 1e-12
"""Relative change of the open numbers at which least squares in double precision stops."""


class _Misfit:
    """The difference between the directions of two updates in double precision, as a function of the open numbers."""

    def __init__(self, observation: Observation, space: OpenSpace, labels: Tensor) -> None:
        self.forward, self.space, self.labels = _doubled(likely_forward(observation)), space, labels
        self.observation = observation
        self.target = _unit(self.forward.target)

    def samples(self, numbers: np.ndarray) -> Tensor:
        numbers_ = torch.from_numpy(numbers).view(-1, len(self.space.directions))
        return self.space.origin + numbers_ @ self.space.directions

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        samples = self.samples(numbers)
        inputs = self.observation.knowledge.shaped(samples, like=samples)
        unit = _unit(self.forward(inputs, self.labels, create_graph=False))
        # Of a difference it may be unknown what was subtracted from what.
        turned = self.observation.round.kind == "delta" and float(unit @ self.target) < 0
        return (unit + self.target if turned else unit - self.target).numpy()


def _unit(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    together = torch.cat([tensor.detach().flatten().double().cpu() for tensor in tensors])
    unit: Tensor = together / together.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return unit


def _doubled(forward: Forward) -> Forward:
    def double(update: Update) -> dict[str, Tensor]:
        return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in update.items()}

    return dataclasses.replace(
        forward,
        model=forward.model.double(),
        params=double(forward.params),
        buffers=double(forward.buffers),
        target=tuple(tensor.double() for tensor in forward.target),
    )


def _space(observation: Observation, layer: PlacedLayer, gradient: Update, samples: int) -> OpenSpace | None:
    operation = layer.operation
    rows, with_bias = operation.rows(gradient).cpu(), operation.bias is not None and operation.bias in gradient
    if with_bias:
        rows = torch.cat([rows, gradient[operation.bias or ""].cpu()[:, None]], 1)
    fed = Fed(layer.entries, layer.slope, layer.offset)
    size = values_in(observation.knowledge.blank(1))
    return open_space(rows, fed, size, with_bias=with_bias, most=samples * len(layer.entries))


def _labels(observation: Observation, size: int) -> Tensor:
    known = observation.knowledge.labels
    if isinstance(known, Tensor):
        return known
    labels = given_labels(Labels.INFERRED, observation, observation.round, size).fixed
    assert labels is not None
    return labels


def _plausible(observation: Observation, size: int, rng: torch.Generator) -> Tensor:
    """Random samples (samples, entries): spread over the range of inputs where it is known, else around zero."""
    known, entries = observation.knowledge, values_in(observation.knowledge.blank(1))
    if known.bounds is None:
        return torch.randn(size, entries, generator=rng, dtype=torch.float64)
    drawn = torch.rand(size, entries, generator=rng, dtype=torch.float64)
    low, high = known.bounds
    pixels = low + (high - low) * drawn
    if known.normalization is None:
        return pixels
    return to_inputs(pixels.view(size, *known.sample_shape), known.normalization).flatten(1)
