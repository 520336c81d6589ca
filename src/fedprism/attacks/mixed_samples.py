"""The samples behind mixtures, looked for in all updates at once.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021
(section 5): MixUp trains on averages of samples, and the attacker is told which were averaged with what weights.

Differs from the paper in: the paper finds every update's mixtures by themselves and takes them apart afterwards
(`attacks.encodings`), where each mixture is as many unknowns as a sample and its errors end up in the samples. Here the
samples themselves are the unknowns, and every further update says more about them. InstaHide's signs are not told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.base import Attack, Circumstances
from fedprism.attacks.encodings import each_update, known_labels, mixtures_behind
from fedprism.attacks.gradient_matching.attack import GradientMatching, MatchingTask
from fedprism.attacks.gradient_matching.forward import Forward, PreparedForward, input_box, moments_of_last_pass
from fedprism.defenses.instahide import InstaHide
from fedprism.defenses.mixup import Told
from fedprism.errors import MissingKnowledge, NotApplicable
from fedprism.naming import preset
from fedprism.solvers.matching.priors import BatchMoments, TotalVariation
from fedprism.types import Observation, Reconstruction


@dataclass(frozen=True, kw_only=True, repr=False)
class MixedSamples(Attack):
    """Finds the samples that, mixed as told, explain all updates together."""

    matching: GradientMatching = known_labels(TotalVariation(0.01))  # noqa: RUF009 (frozen)
    """Its priors are about the samples, its pull about each update's mixtures; known pruning doubles its iterations."""

    citation: ClassVar[str] = "Huang et al. 2021 (MixUp, with what was mixed told); the samples are ours to look for"

    @property
    def needs(self) -> frozenset[str]:
        return self.matching.needs | {"mixing", "labels"}

    @property
    def uses(self) -> frozenset[str]:
        return self.matching.uses

    def not_worth(self, circumstances: Circumstances) -> str | None:
        named = "it needs an attacker who is granted labels and mixing"
        return named if circumstances.mixes else "no client of this plan mixes samples"

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        singles, weights = _mixtures(self.name, observation)
        updates = [self._update(single, each) for single, each in zip(singles, weights, strict=True)]
        ignoring = [update._replace(forward=update.forward.ignoring_pruning()) for update in updates]
        matrix, samples = torch.cat(weights), weights[0].shape[1]
        shape = (samples, *observation.knowledge.sample_shape)
        task_of = partial(self._task, shape=shape, box=input_box(observation))
        follows = any(update.forward.follows_pruning for update in updates)
        solution = self.matching.solve(task_of(ignoring), rng, partial(task_of, updates) if follows else None)
        best, notes = solution.best, [solution.note] if solution.note else []
        if int(torch.linalg.matrix_rank(matrix)) < samples:
            notes.append("there are too few mixtures to tell the samples apart")
        mixtures = f"{len(matrix)} mixtures of {samples} samples at once"
        return Reconstruction(
            inputs=best.inputs,
            status="; ".join([mixtures, str(best.status), *notes]),
            diagnostics={
                "objective": best.objective,
                "iterations_run": len(best.history),
                "stepping": best.stepping,
                **solution.diagnostics,
            },
        )

    def _update(self, single: Observation, weights: Tensor) -> _MixedUpdate:
        (update,), labels = single.rounds, single.knowledge.labels
        if not isinstance(labels, Tensor):
            raise MissingKnowledge(self.name, "labels")
        forward, pull = self.matching.forward(single, update)
        like = forward.target[0]
        return _MixedUpdate(forward, pull, weights.to(like), labels.to(like.device))

    def _task(
        self, updates: Sequence[_MixedUpdate], *, shape: tuple[int, ...], box: tuple[Tensor, Tensor] | None
    ) -> MatchingTask:
        together = _Together(updates, self.matching)
        priors = (*self.matching.priors, together.pull)
        return MatchingTask(together.gradients_of, tuple(together.target), shape, priors, box)


@preset(MixedSamples)
def mixup_at_once() -> MixedSamples:
    """Gradient matching for the images of a client that mixes them, in all its updates at once."""
    return MixedSamples()


def _mixtures(name: str, observation: Observation) -> tuple[tuple[Observation, ...], tuple[Tensor, ...]]:
    """One observation per update, and how its mixtures are made of the samples: (mixtures, samples) each."""
    knowledge = observation.knowledge
    mixing = None if knowledge.mixing is None else Told.of(knowledge.mixing, len(observation.rounds))
    if mixing is None or mixing.coefficients is None:
        raise MissingKnowledge(name, "mixing")
    if knowledge.defense is not None and any(isinstance(part, InstaHide) for part in knowledge.defense.members):
        raise NotApplicable(f"{name} needs mixtures without random signs, not InstaHide; use instahide-decoding.")
    singles = each_update(observation)
    matrix = torch.zeros(len(mixing.mapping), int(mixing.mapping.max()) + 1, dtype=torch.float64)
    matrix.scatter_add_(1, mixing.mapping.cpu(), mixing.coefficients.double().cpu())
    return singles, tuple(matrix[rows.cpu()] for rows in mixtures_behind(mixing, singles))


class _MixedUpdate(NamedTuple):
    """An update and what its mixtures are made of."""

    forward: Forward
    pull: BatchMoments | None
    weights: Tensor
    labels: Tensor


class _Together:
    """All updates as one: what samples would have sent, one update after the other, each divided by its length."""

    def __init__(self, updates: Sequence[_MixedUpdate], matching: GradientMatching) -> None:
        self.updates = []
        self.target = list[Tensor]()
        for forward, pull, weights, labels in updates:
            prepared = PreparedForward(forward, channels_last=matching.engine.channels_last)
            if pull is not None and prepared.direct:
                moments_of = moments_of_last_pass(prepared.model, unbiased=matching.batchnorm.unbiased)
                pull = replace(pull, moments_of=moments_of)
            length = torch.linalg.vector_norm(torch.stack([tensor.norm() for tensor in forward.target]))
            scale = 1 / length.clamp(min=torch.finfo(length.dtype).tiny)
            self.updates.append((prepared, pull, weights, labels, scale))
            self.target += [scale * tensor for tensor in forward.target]

    def gradients_of(self, samples: Tensor, logits: Tensor | None) -> list[Tensor]:
        return [
            scale * gradient
            for prepared, _, weights, labels, scale in self.updates
            for gradient in prepared(_mixed(weights, samples), labels)
        ]

    def pull(self, samples: Tensor) -> Tensor:
        """The mean of the updates' pulls; zero where nothing is pulled."""
        pulls = [pull(_mixed(weights, samples)) for _, pull, weights, _, _ in self.updates if pull is not None]
        return torch.stack(pulls).mean() if pulls else samples.new_zeros(())


def _mixed(weights: Tensor, samples: Tensor) -> Tensor:
    mixtures: Tensor = torch.tensordot(weights, samples, dims=1)
    return mixtures
