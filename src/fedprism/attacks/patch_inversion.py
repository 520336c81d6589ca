"""Reads a picture off the gradients of the patch layer and of its positions or first attention, in closed form.

Lu, Zhang, Zhao, He, Cheng, "APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers", CVPR 2022.

Differs from the paper in: the patch layer is solved instead of the first attention layer, so the picture comes out
without inverting anything else (`solvers.invert_patches`); noise is weighed against the range of the pixels; and an
answer is called exact only if the whole update was computed again from it and agrees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.base import Circumstances, UpdateAttack
from fedprism.attacks.certificate import explaining_labels, left_by_noise, rounding_error, unexplained, within
from fedprism.attacks.gradient_matching.forward import FORWARD_USES, input_box
from fedprism.attacks.refinement import refine
from fedprism.client.observed import direction
from fedprism.errors import NotApplicable
from fedprism.inputs import single_tensor
from fedprism.naming import preset
from fedprism.network.network_map import network_map
from fedprism.network.patches import PatchLayer, patch_layer
from fedprism.solvers.closed_form.patches import (
    DETERMINED,
    InvertedPatches,
    PatchStatus,
    TokensFed,
    invert_patches,
    invert_patches_by_attention,
)
from fedprism.types import Observation, Reconstruction, Update

NO_PATCHES = "the input feeds no layer of patches that positions or an attention layer open in this model"
EXACT = "the input gives the whole update to rounding error"
ROUNDED = "the input gives the whole update to rounding error, but rounding leaves {} of {} patches open"
UNCHECKED = "{}; the rest of the update was not compared"
CONTRADICTED = "{}; {:.2g} of the whole update stays unexplained"
UNSEEN = "; {} values are in no patch and stay unknown"
SILENT_HEAD = "'{}' is zero, so no gradient passes it: nothing to read in this round, try a later one"
UNIFORM = math.sqrt(12)
"""The range of evenly spread values in units of their standard deviation."""
APART = 1e-3
"""Least distance, relative to their size, of what is added to two patches: else rounding hides which is which."""
WORTH_REFINING = 0.5
"""Part of the update that may be unexplained at most by samples that are refined: others are none of the client's."""
HALVED = 0.5
"""Part of what closed form left unexplained that refined samples may leave."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PatchInversion(UpdateAttack):
    """Solves the layer that embeds patches for its inputs, by the position parameter's gradient or the attention's.

    What rounding leaves open behind the attention is looked for in the rest of the update: at most `most_open` numbers,
    in `steps` steps.
    """

    most_open: int = 256
    steps: int = 60

    citation: ClassVar[str] = "Lu et al. 2022 (APRIL, position embeddings of Vision Transformers)"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"batch_size", "bounds", "normalization", "labels", "loss"}) | FORWARD_USES

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return None if circumstances.patches_first else NO_PATCHES

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        gradient = direction(observation.round, observation.knowledge)
        layer = _layer(observation, gradient)
        size = observation.knowledge.batch_size
        if isinstance(size, int) and size > 1:
            raise NotApplicable(
                f"patch-inversion needs the update of one sample, not of {size}; use row-space-inversion for "
                "few patches, else gradient-matching."
            )
        level, spread = _expected(observation, layer)
        solved = _solved(observation, layer, gradient, layer.fed(level), spread)
        answer = _checked(observation, layer.inputs(solved.patches, level))
        refined = self._refined(observation, layer, gradient, solved, answer, spread)
        if refined is not None:
            determined = _determined(layer, refined, spread)
            solved, answer = solved._replace(determined=determined), refined.answer
        unseen = len(level) - layer.placed.entries.numel()
        inputs = answer.inputs
        box = input_box(observation)
        if box is not None and solved.status is PatchStatus.RESIDUAL and refined is None:
            inputs = inputs.clamp(*box)
        return Reconstruction(
            inputs=inputs,
            labels=answer.labels,
            status=_status(observation, solved, answer) + (UNSEEN.format(unseen) if unseen and len(inputs) else ""),
            diagnostics={
                "layer": layer.weight,
                "read": layer.position if layer.at_patches(gradient) is not None else "the first attention",
                "determined": int(solved.determined.sum()),
                "patches": len(layer.placed.entries),
                "layer_residual": solved.residual,
                "refined_numbers": 0 if refined is None else refined.numbers,
                "residual": answer.residual,
            },
        )

    def _refined(
        self,
        observation: Observation,
        layer: PatchLayer,
        gradient: Update,
        solved: InvertedPatches,
        answer: _Answer,
        spread: float,
    ) -> _Refined | None:
        """The samples that explain the whole update better, if the closed form leaves a few numbers open."""
        if answer.labels is None or bool(solved.determined.all()):
            return None
        if answer.residual is None or answer.residual > WORTH_REFINING:
            return None
        # A position's gradient leaves every sum of patches open a little: refining some of them makes nothing better.
        if layer.at_patches(gradient) is not None or not _told_apart(layer):
            return None
        patches = solved.patches.shape[1]
        if patches * len(solved.span) > self.most_open:
            return None
        each = spread * torch.eye(patches, dtype=solved.span.dtype, device=solved.span.device)
        directions = torch.einsum("mp,sf->mspf", each, solved.span).flatten(0, 1)
        nothing = torch.zeros_like(answer.samples[0])
        moved = layer.inputs(directions, nothing) - layer.inputs(torch.zeros_like(directions[:1]), nothing)
        found = refine(observation, answer.samples, moved.unsqueeze(1), answer.labels, self.steps)
        better = _checked(observation, found.samples)
        if better.residual is None or better.residual > max(
            HALVED * answer.residual, rounding_error(direction(observation.round))
        ):
            return None
        return _Refined(better, found.error, len(directions))


@preset(PatchInversion)
def patch_inversion() -> PatchInversion:
    """Closed-form inversion of a layer of patches, as in Vision Transformers."""
    return PatchInversion()


class _Answer(NamedTuple):
    """Samples held against the whole update."""

    samples: Tensor
    """(samples, entries)"""
    inputs: Tensor
    labels: Tensor | None
    residual: float | None


class _Refined(NamedTuple):
    answer: _Answer
    error: Tensor
    """(samples, entries)"""
    numbers: int
    """How many were solved for."""


def _checked(observation: Observation, samples: Tensor) -> _Answer:
    like = observation.round.params[next(iter(observation.round.params))]
    inputs = single_tensor(observation.knowledge.shaped(samples, like=like))
    known = observation.knowledge.labels
    labels = known if isinstance(known, Tensor) and len(known) == len(inputs) else None
    labels = explaining_labels(observation, inputs) if labels is None else labels
    residual = unexplained(observation, inputs, labels) if labels is not None else None
    return _Answer(samples, inputs, labels, residual)


def _told_apart(layer: PatchLayer) -> bool:
    """Whether what is added to the patches differs from place to place."""
    if layer.attention is None:
        return False
    fixed = layer.attention.fixed
    return len(fixed) < 2 or float(torch.pdist(fixed).min()) > APART * float(fixed.norm(dim=1).max())


def _determined(layer: PatchLayer, refined: _Refined, spread: float) -> Tensor:
    """Which patches (patches,) are settled, by what the whole update leaves open of them."""
    entries, slope = layer.placed.entries.to(refined.error.device), layer.placed.slope.to(refined.error)
    variance = (refined.error[0][entries] * slope).square().mean(1)
    return variance < (1 - DETERMINED) * spread**2


def _layer(observation: Observation, gradient: Update) -> PatchLayer:
    """The patch layer, with what the attack needs of it in the update."""
    layer = patch_layer(observation)
    if layer is None:
        raise NotApplicable(
            "patch-inversion needs a first layer that cuts the input into patches which do not overlap, "
            "but this model has none; use gradient-matching instead."
        )
    if layer.weight not in gradient:
        raise NotApplicable(
            f"patch-inversion needs the gradient of '{layer.weight}', but the update does not hold it; "
            "use gradient-matching instead."
        )
    return layer


def _solved(
    observation: Observation, layer: PatchLayer, gradient: Update, level: Tensor, spread: float
) -> InvertedPatches:
    """The patches by the position parameter's gradient; failing that, by that of the first attention's projections."""
    matrix = layer.placed.operation
    weight_grad, at_patches = matrix.rows(gradient), layer.at_patches(gradient)
    if at_patches is not None:
        return invert_patches(weight_grad, at_patches, level, spread)
    attention = layer.attention
    projections_grad = None if attention is None else attention.rows(gradient)
    if attention is None or projections_grad is None:
        position = layer.position
        missing = "no parameter is added to its patches" if position is None else f"'{position}' is not sent"
        raise NotApplicable(
            f"patch-inversion needs the gradient of a position parameter behind '{layer.weight}', or of the first "
            f"attention, but {missing} and no attention is fed by its patches; use gradient-matching instead."
        )
    weight = matrix.rows(observation.round.params)
    # What the layer is fed of a blank input is a part of what it returns for it, and not of what is added.
    fixed = attention.fixed - layer.placed.offset.to(weight).double() @ weight.double().T
    fed = TokensFed(fixed, attention.tokens, attention.gain, attention.shift, attention.centred)
    return invert_patches_by_attention(weight, weight_grad, projections_grad, fed, level, spread)


def _expected(observation: Observation, layer: PatchLayer) -> tuple[Tensor, float]:
    """What inputs are like before the update is read: a flat input, and the spread of what the layer is fed."""
    shape = observation.knowledge.sample_shape
    device = next(iter(observation.round.params.values())).device
    level, reach = torch.zeros(shape, dtype=torch.float64, device=device), UNIFORM
    box = input_box(observation)
    if box is not None:
        low, high = (bound.double() for bound in box)
        level = (level + (low + high) / 2).view(shape)
        reach = float((high - low).mean())
    return level.flatten(), reach / UNIFORM * float(layer.placed.slope.abs().mean())


def _status(observation: Observation, solved: InvertedPatches, answer: _Answer) -> str:
    """How far the answer can be trusted, by what was computed again."""
    if solved.status is PatchStatus.EMPTY:
        last = network_map(observation).output_layer()
        silent = last is not None and not bool(observation.round.params[last.weight].any())
        return SILENT_HEAD.format(last.weight) if last is not None and silent else solved.status
    if not len(solved.patches):
        return solved.status
    noise = left_by_noise(observation, answer.inputs, answer.labels)
    limit = rounding_error(direction(observation.round))
    explained = None if answer.residual is None else within(answer.residual, limit, noise)
    if explained is None:
        return UNCHECKED.format(solved.status)
    if not explained:
        return CONTRADICTED.format(solved.status, answer.residual)
    determined = solved.determined
    return EXACT if bool(determined.all()) else ROUNDED.format(int((~determined).sum()), len(determined))
