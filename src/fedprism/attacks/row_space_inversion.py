"""Samples out of the row space of the first layer's gradient, where that layer is applied at few places.

For recurrent layers, convolutions over short series, encoders that several inputs share, dense layers of their own for
each input, the first adapter of LoRA and small batches in front of a dense layer. What the row space leaves open are a
few numbers: with overlapping windows none, otherwise those are solved for by least squares on the whole gradient.

Row spaces of gradients as spans of what a layer was fed: Petrov et al., "DAGER: Exact Gradient Inversion for Large
Language Models", NeurIPS 2024, who look tokens up in it. Here nothing has to be known of the samples.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from fedprism import losses
from fedprism.attacks.base import Circumstances, UpdateAttack
from fedprism.attacks.certificate import certified, explaining_labels
from fedprism.attacks.gradient_matching.forward import FORWARD_USES, likely_forward
from fedprism.attacks.gradient_matching.labels import Labels, given_labels
from fedprism.attacks.refinement import doubled
from fedprism.client.observed import direction
from fedprism.errors import NotApplicable
from fedprism.inputs import values_in
from fedprism.naming import preset
from fedprism.network.places import PlacedLayer, placed_layers
from fedprism.pixels import to_inputs
from fedprism.runtime import progress
from fedprism.solvers.closed_form.row_space import Fed, OpenSpace, open_space
from fedprism.types import Observation, Reconstruction, Update

NO_FEW_PLACES = "the input feeds no layer of this model at fewer places than it has units"


class RowSpaceStatus(StrEnum):
    EXACT = "the samples explain the whole update to rounding error"
    AMBIGUOUS = "the samples are one answer of several that explain the whole update to rounding error"
    CLOSED_FORM = "the row space leaves one sample; whether it explains the whole update could not be checked"
    CONTRADICTED = "the row space leaves one sample, which does not explain the whole update"
    APPROXIMATE = "no start ended at samples that explain the whole update: the best of them"


class _Reading(NamedTuple):
    layers: tuple[PlacedLayer, ...]
    """One layer that sees all entries of a sample, or several that share them."""
    space: OpenSpace


class _Samples(NamedTuple):
    samples: Tensor
    """(samples, entries)"""
    labels: Tensor | None
    status: RowSpaceStatus


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
        layers, space = self._reading(observation, size)
        if len(space.directions):
            answer = self._search(observation, space, size, rng)
        else:
            answer = _only_sample(observation, space.origin.repeat(size, 1))
        if answer.status is RowSpaceStatus.EXACT and any(
            _explains_in_another_order(observation, layer, answer) for layer in layers
        ):
            answer = answer._replace(status=RowSpaceStatus.AMBIGUOUS)
        return Reconstruction(
            inputs=observation.knowledge.shaped(answer.samples),
            labels=answer.labels,
            ambiguity=frozenset({"order"}),
            status=answer.status,
            diagnostics={
                "layer": ", ".join(layer.operation.weight for layer in layers),
                "rank": space.rank,
                "open_numbers": size * len(space.directions),
            },
        )

    def _reading(self, observation: Observation, size: int) -> _Reading:
        """The layer, or layers that share the entries, whose row spaces leave the fewest numbers open."""
        gradient, readings, silent = direction(observation.round, observation.knowledge), list[_Reading](), None
        for layer in placed_layers(observation):
            weight = layer.operation.weight
            units = len(layer.operation.rows(gradient)) if weight in gradient else 0
            silent = silent or (weight if units and not bool(gradient[weight].any()) else None)
            if size * len(layer.entries) > units:  # the rows then span less than what was fed
                continue
            space = _space(observation, layer, gradient, size)
            if space is not None:
                readings.append(_Reading((layer,), space))
        whole = values_in(observation.knowledge.blank(1))
        readings = [each for each in (*readings, _shared(readings)) if each is not None and len(_seen(each)) == whole]
        readings = [each for each in readings if size * len(each.space.directions) <= self.most_open]
        if not readings and silent is not None:
            raise NotApplicable(
                f"row-space-inversion needs a gradient of '{silent}', but it is all zeros, as in the first step of "
                "LoRA; attack a later round."
            )
        if not readings:
            raise NotApplicable(
                "row-space-inversion needs a first layer that is applied at fewer places than it has units and "
                f"inputs and leaves at most {self.most_open} numbers open, but this model has none for {size} "
                "samples; use gradient-matching instead."
            )
        return min(readings, key=lambda reading: len(reading.space.directions))

    def _search(self, observation: Observation, space: OpenSpace, size: int, rng: torch.Generator) -> _Samples:
        """Least squares on the direction of the whole gradient, from random samples, until one explains the update."""
        misfits = [_Misfit(observation, space, labels) for labels in _possible_labels(observation, size)]
        best, smallest = None, np.inf
        for number in range(self.starts):
            progress.report(number, self.starts)
            start = (_plausible(observation, size, rng) - space.origin) @ torch.linalg.pinv(space.directions)
            for misfit in misfits:
                solution = least_squares(
                    misfit, start.flatten().numpy(), jac="3-point", max_nfev=self.steps, xtol=PRECISION
                )
                if solution.cost < smallest:
                    smallest = solution.cost
                    best = _Samples(misfit.samples(solution.x), misfit.labels, RowSpaceStatus.APPROXIMATE)
                    if certified(observation, observation.knowledge.shaped(best.samples), best.labels):
                        return best._replace(status=_exact_if_determined(solution.jac))
        assert best is not None
        return best


@preset(RowSpaceInversion)
def row_space_inversion() -> RowSpaceInversion:
    """Samples out of the row space of a first layer that is applied at few places."""
    return RowSpaceInversion()


PRECISION = 1e-12
"""Relative change of the open numbers at which least squares in double precision stops."""
MOST_LABELS = 16
"""Labels of a batch that are tried, each with a search of its own."""
DETERMINED = 1e-6
"""Slope of the misfit, relative to its steepest, below which a direction is left open: rounding of single precision."""


def _only_sample(observation: Observation, samples: Tensor) -> _Samples:
    """Samples that the row space leaves no choice of, held against the whole update."""
    inputs = observation.knowledge.shaped(samples)
    known = observation.knowledge.labels
    labels = known if isinstance(known, Tensor) else explaining_labels(observation, inputs)
    explained = certified(observation, inputs, labels)
    if explained is None:
        return _Samples(samples, labels, RowSpaceStatus.CLOSED_FORM)
    return _Samples(samples, labels, RowSpaceStatus.EXACT if explained else RowSpaceStatus.CONTRADICTED)


def _exact_if_determined(slopes: np.ndarray) -> RowSpaceStatus:
    """EXACT, unless the samples can be moved in some direction and explain the update as well."""
    sizes = np.linalg.svd(slopes, compute_uv=False)
    determined = slopes.shape[0] >= slopes.shape[1] and sizes[-1] > DETERMINED * sizes[0]
    return RowSpaceStatus.EXACT if determined else RowSpaceStatus.AMBIGUOUS


def _explains_in_another_order(observation: Observation, layer: PlacedLayer, answer: _Samples) -> bool:
    """Whether the samples explain the update as well with their places in reverse: the network knows no order then."""
    places = layer.entries
    if len(places) == 1 or len(set(places.flatten().tolist())) != places.numel() or not bool(layer.slope.all()):
        return False
    turned = answer.samples.clone()
    turned[:, places.flatten()] = answer.samples[:, places.flip(0).flatten()]
    return bool(certified(observation, observation.knowledge.shaped(turned), answer.labels))


class _Misfit:
    """The difference between the directions of two updates in double precision, as a function of the open numbers."""

    def __init__(self, observation: Observation, space: OpenSpace, labels: Tensor) -> None:
        self.forward, self.space, self.labels = doubled(likely_forward(observation)), space, labels
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


def _space(observation: Observation, layer: PlacedLayer, gradient: Update, samples: int) -> OpenSpace | None:
    """What the layer leaves open of the entries that it sees; the others are zero in it."""
    operation = layer.operation
    rows, with_bias = operation.rows(gradient).cpu(), operation.bias is not None and operation.bias in gradient
    if with_bias:
        rows = torch.cat([rows, gradient[operation.bias or ""].cpu()[:, None]], 1)
    size, seen = values_in(observation.knowledge.blank(1)), _entries(layer)
    numbers = torch.zeros(size, dtype=torch.long).scatter(0, seen, torch.arange(len(seen)))
    fed = Fed(numbers[layer.entries], layer.slope, layer.offset)
    space = open_space(rows, fed, len(seen), with_bias=with_bias, most=samples * len(layer.entries))
    if space is None:
        return None
    origin = torch.zeros(size, dtype=space.origin.dtype).scatter(0, seen, space.origin)
    directions = torch.zeros(len(space.directions), size, dtype=origin.dtype)
    directions[:, seen] = space.directions
    return OpenSpace(origin, directions, space.rank)


def _entries(layer: PlacedLayer) -> Tensor:
    """The numbers of the entries that a layer sees."""
    return layer.entries[layer.slope != 0].unique()  # type: ignore[no-untyped-call, no-any-return]


def _seen(reading: _Reading) -> set[int]:
    return {entry for layer in reading.layers for entry in _entries(layer).tolist()}


def _shared(readings: list[_Reading]) -> _Reading | None:
    """Layers that see different entries, as those of several inputs do, read together."""
    chosen: list[_Reading] = []
    for reading in sorted(readings, key=lambda each: len(each.space.directions)):
        if not any(_seen(reading) & _seen(other) for other in chosen):
            chosen.append(reading)
    if len(chosen) < 2:
        return None
    spaces = [reading.space for reading in chosen]
    origin = torch.stack([space.origin for space in spaces]).sum(0)
    directions = torch.cat([space.directions for space in spaces])
    layers = tuple(layer for reading in chosen for layer in reading.layers)
    return _Reading(layers, OpenSpace(origin, directions, max(space.rank for space in spaces)))


def _possible_labels(observation: Observation, size: int) -> list[Tensor]:
    """The labels that are granted or that the update tells; failing that, all there may be, if these are few."""
    known = observation.knowledge.labels
    if isinstance(known, Tensor):
        return [known]
    given = given_labels(Labels.INFERRED, observation, observation.round, size)
    if given.fixed is not None:
        return [given.fixed]
    classes = given.outputs[0] if len(given.outputs) == 1 and losses.is_cross_entropy(observation.knowledge.loss) else 0
    if not 0 < math.comb(classes + size - 1, size) <= MOST_LABELS:
        raise NotApplicable(
            f"row-space-inversion needs labels that the update tells, but they have to be {given.note}; "
            "grant the labels."
        )
    return [torch.tensor(labels) for labels in itertools.combinations_with_replacement(range(classes), size)]


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
