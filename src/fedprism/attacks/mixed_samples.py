"""The samples behind mixtures, looked for in all updates at once.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021
(section 5): MixUp trains on averages of samples, and the attacker is told which were averaged with what weights.

Differs from the paper in: the paper finds every update's mixtures by themselves and takes them apart afterwards
(`attacks.encodings`), where each mixture is as many unknowns as a sample and its errors end up in the samples. Here the
samples themselves are the unknowns: those whose mixtures explain all updates together. The more updates there are, the
more is said about the same unknowns, where for the paper's attacker every update brings as many further ones. Signs as
InstaHide's are not told and cannot be put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism import progress
from fedprism.attacks.base import Attack
from fedprism.attacks.encodings import each_update, known_labels, mixtures_behind
from fedprism.attacks.forward import Forward, QuickForward, forward_model, input_box, moments_in_passing
from fedprism.attacks.gradient_matching import GradientMatching
from fedprism.batchnorm import Pull, pull_prior
from fedprism.defenses.base import Chain
from fedprism.defenses.instahide import InstaHide
from fedprism.defenses.mixup import Told
from fedprism.errors import MissingKnowledge, NotApplicable
from fedprism.solvers.matching import Matching, match_gradients
from fedprism.solvers.priors import BatchMoments, TotalVariation
from fedprism.types import Observation, Reconstruction


@dataclass(frozen=True, kw_only=True, repr=False)
class MixedSamples(Attack):
    """Finds the samples that, mixed as told, explain all updates together.

    matching: how gradients are matched. Its priors are about the samples, its pull about the statistics of each
    update's mixtures. Its iterations are of all updates at once; where pruning is known, as many follow it.
    """

    matching: GradientMatching = known_labels(TotalVariation(0.01))  # noqa: RUF009 (frozen)

    citation: ClassVar[str] = "Huang et al. 2021 (MixUp, with what was mixed told); the samples are ours to look for"
    reads_many: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        return self.matching.needs | {"mixing", "labels"}

    @property
    def uses(self) -> frozenset[str]:
        return self.matching.uses

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        mixed = _Mixed.of(self, observation)
        matching, box = self.matching, input_box(observation)
        seen = [self._seen(part, weights) for part, weights in zip(mixed.parts, mixed.weights, strict=True)]
        follows = any(one.forward.follows_pruning for one in seen)
        from_starts = matching.iterations * (1 if matching.race else matching.restarts)
        total = from_starts + (matching.iterations if follows else 0)
        ignoring = [one._replace(forward=one.forward.ignoring_pruning()) for one in seen]
        best = self._from_starts(_Together(ignoring, matching), mixed.shape, box, rng, total)
        notes, found = list[str](), dict[str, Any]()
        if follows:
            together, lr = _Together(seen, matching), matching.follow * matching.lr
            best = self._match(together, best.inputs, box, matching.iterations, (from_starts, total), lr=lr)
            found = {"ignoring_pruning": float(best.history[0]), "following_pruning": best.objective}
            more = "more" if found["following_pruning"] < found["ignoring_pruning"] else "no more"
            notes.append(f"following the pruning explains {more}")
        matrix, samples = torch.cat(mixed.weights), mixed.shape[0]
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
                **found,
            },
        )

    def _seen(self, part: Observation, weights: Tensor) -> _Seen:
        (update,), matching, labels = part.rounds, self.matching, part.knowledge.labels
        if not isinstance(labels, Tensor):
            raise MissingKnowledge(self.name, "labels")
        forward = forward_model(
            part, update, unroll=matching.unroll, adaptive=matching.adaptive, normalise=matching.normalise
        )
        pull = pull_prior(
            forward.model, forward.params, forward.buffers, part.knowledge, matching.pull, matching.pull_weight
        )
        like = forward.target[0]
        return _Seen(forward, pull, weights.to(like), labels.to(like.device))

    def _from_starts(
        self,
        together: _Together,
        shape: tuple[int, ...],
        box: tuple[Tensor, Tensor] | None,
        rng: torch.Generator,
        total: int,
    ) -> Matching:
        """The best run of all starts; in a race, one that goes on from the best of the short ones."""
        matching = self.matching
        heat = int(matching.race * matching.iterations)
        each, runs = heat or matching.iterations, list[Matching]()
        for number in range(matching.restarts):
            start = matching.start(shape, rng).to(together.target[0])
            runs.append(self._match(together, start, box, each, (number * each, total)))
        best = min(runs, key=lambda run: run.objective)
        done = heat * matching.restarts
        return self._match(together, best.inputs, box, matching.iterations - done, (done, total)) if heat else best

    def _match(
        self,
        together: _Together,
        start: Tensor,
        box: tuple[Tensor, Tensor] | None,
        iterations: int,
        progress_of: tuple[int, int],
        lr: float | None = None,
    ) -> Matching:
        """One run. progress_of: the iterations before it, and those of all runs."""
        before, total = progress_of
        search = self.matching.search(
            iterations=iterations, box=box, progress=lambda step, _: progress.report(before + step, total)
        )
        search = replace(search, priors=(*search.priors, together.pull), lr=lr or self.matching.lr)
        return match_gradients(together.gradients_of, together.target, start, search)


def mixup_at_once() -> MixedSamples:
    """Gradient matching for the images of a client that mixes them, in all its updates at once."""
    return MixedSamples()


class _Mixed(NamedTuple):
    """One observation an update, and how its mixtures are made of the samples."""

    parts: tuple[Observation, ...]
    weights: tuple[Tensor, ...]
    """For each update (mixtures, samples)."""
    shape: tuple[int, ...]
    """(samples, *input_shape)"""

    @classmethod
    def of(cls, attack: MixedSamples, observation: Observation) -> _Mixed:
        knowledge = observation.knowledge
        told = None if knowledge.mixing is None else Told.of(knowledge.mixing, len(observation.rounds))
        if told is None or told.coefficients is None:
            raise MissingKnowledge(attack.name, "mixing")
        if any(isinstance(part, InstaHide) for part in _parts(knowledge.defense)):
            raise NotApplicable(
                f"{attack.name} expects mixtures without random signs, found InstaHide; use instahide-decoding."
            )
        parts = each_update(observation)
        samples = int(told.mapping.max()) + 1
        matrix = torch.zeros(len(told.mapping), samples, dtype=torch.float64)
        matrix.scatter_add_(1, told.mapping.cpu(), told.coefficients.double().cpu())
        weights = tuple(matrix[rows.cpu()] for rows in mixtures_behind(told, parts))
        return cls(parts, weights, (samples, *(knowledge.input_shape or ())))


class _Seen(NamedTuple):
    """An update and what its mixtures are made of."""

    forward: Forward
    pull: BatchMoments | None
    weights: Tensor
    labels: Tensor


class _Together:
    """All updates as one: what samples would have sent, one update after the other, each divided by its length.

    So every update counts the same, and how their lengths compare counts too.
    """

    def __init__(self, seen: Sequence[_Seen], matching: GradientMatching) -> None:
        self.updates = []
        self.target = list[Tensor]()
        for one in seen:
            quick = QuickForward(one.forward, channels_last=matching.engine.channels_last)
            pull = one.pull
            if pull is not None and quick.direct:
                pull = replace(pull, moments_of=moments_in_passing(quick.model, unbiased=matching.pull is Pull.RUNNING))
            length = torch.linalg.vector_norm(torch.stack([t.norm() for t in one.forward.target]))
            scale = 1 / length.clamp(min=torch.finfo(length.dtype).tiny)
            self.updates.append((quick, pull, one.weights, one.labels, scale))
            self.target += [scale * tensor for tensor in one.forward.target]

    def gradients_of(self, samples: Tensor, logits: Tensor | None) -> list[Tensor]:
        found = list[Tensor]()
        for quick, _, weights, labels, scale in self.updates:
            found += [scale * gradient for gradient in quick(_mixed(weights, samples), labels)]
        return found

    def pull(self, samples: Tensor) -> Tensor:
        """The mean of the updates' pulls; zero where nothing is pulled."""
        pulls = [pull(_mixed(weights, samples)) for _, pull, weights, _, _ in self.updates if pull is not None]
        return torch.stack(pulls).mean() if pulls else samples.new_zeros(())


def _mixed(weights: Tensor, samples: Tensor) -> Tensor:
    mixtures: Tensor = torch.tensordot(weights, samples, dims=1)
    return mixtures


def _parts(defense: Any) -> tuple[Any, ...]:
    return defense.defenses if isinstance(defense, Chain) else (defense,)
