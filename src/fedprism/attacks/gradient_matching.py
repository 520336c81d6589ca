"""Optimises a guess of the batch until it would have produced the observed update.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019; Zhao, Mopuri, Bilen, "iDLG", 2020; Geiping, Bauermeister,
Dröge, Moeller, "Inverting Gradients", NeurIPS 2020; Huang et al., "Evaluating Gradient Inversion Attacks and Defenses",
NeurIPS 2021 (batch-norm statistics); Eloul et al., "Mixing Gradients Strategies", 2022 (three attacks).

Differs from the papers in: L-BFGS uses a line search, without which many starts diverge; the iterate and the restart
returned are the ones with the smallest objective; `inverting_gradients` lets three starts race within the iterations of
one, because a bad start ends in a poor minimum that the objective shows early; deltas of several local steps go through
the client's own training; who knows of pruning also uses that what was not sent is smaller than what was
(`forward.SmallerThanSent`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedprism import losses, progress
from fedprism.attacks.base import Attack, only_round
from fedprism.attacks.forward import FORWARD_NEEDS, FORWARD_USES, Forward, QuickForward, forward_model, input_box
from fedprism.attacks.structure import trace
from fedprism.batchnorm import FIELDS, Normalise, Pull, pull_prior
from fedprism.checks import choice
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.solvers.graphs import Engine
from fedprism.solvers.labels import label_counts
from fedprism.solvers.matching import (
    LBFGS,
    Adam,
    Distance,
    Matching,
    Prior,
    cosine,
    match_gradients,
    squared_error,
)
from fedprism.solvers.priors import BatchMoments, Orthogonality, TotalVariation
from fedprism.types import Observation, Reconstruction, Round, is_soft

Start: TypeAlias = Callable[[tuple[int, ...], torch.Generator], Tensor]


def gaussian_start(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Standard normal noise."""
    return torch.randn(shape, generator=rng)


def uniform_start(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Uniform noise in [0, 1)."""
    return torch.rand(shape, generator=rng)


class Labels(StrEnum):
    """Where the labels come from."""

    KNOWN = "known"
    INFERRED = "inferred"
    JOINT = "joint"

    def __repr__(self) -> str:
        return f"Labels.{self.name}"


_NORMALISED_BY = {
    Normalise.CLIENT: "what the client's mode says",
    Normalise.OWN: "the guess's own statistics",
    Normalise.EXACT: "the exact statistics",
    Normalise.RUNNING: "the running statistics",
}


class _Labels(NamedTuple):
    fixed: Tensor | None
    classes: int
    note: str


@dataclass(frozen=True, kw_only=True, repr=False)
class GradientMatching(Attack):
    """Gradient matching with any distance, priors, label handling, optimiser and start.

    labels: granted (KNOWN), read off the last layer (INFERRED), or optimised along with the inputs (JOINT).
    restarts: how many random starts; the one with the smallest objective is returned. With `race`, each start gets only
    this share of the iterations, and the best of them all that are left: the total is that of one full run.
    unroll: repeat the client's local steps for a delta; without it the delta is read as one gradient.
    adaptive: put every part of the defense that can be repeated, where it is known, into the forward model.
    normalise: by which statistics batch-norm layers normalise the guess.
    pull: towards which statistics the guess's own are drawn, by a prior of weight `pull_weight`: the sum over the
    batch-norm layers of the l2 distances of means and of variances (`solvers.moments_distance`).
    engine: how iterations are run; the diagnostics say how they were.
    """

    distance: Distance = cosine
    priors: tuple[Prior, ...] = ()
    labels: Labels = Labels.INFERRED
    optimizer: Adam | LBFGS = Adam()  # noqa: RUF009 (frozen)
    start: Start = gaussian_start
    lr: float = 0.1
    iterations: int = 1000
    restarts: int = 1
    race: float = 0.0
    tolerance: float = 0.0
    unroll: bool = True
    adaptive: bool = True
    normalise: Normalise = Normalise.CLIENT
    pull: Pull = Pull.NONE
    pull_weight: float = 1e-3
    engine: Engine = Engine()  # noqa: RUF009 (frozen)

    citation: ClassVar[str] = (
        "Zhu et al. 2019 (DLG); Zhao et al. 2020 (iDLG); Geiping et al. 2020; Huang et al. 2021; Eloul et al. 2022"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", Labels(choice(self.labels, "labels", Labels)))
        object.__setattr__(self, "normalise", Normalise(choice(self.normalise, "normalise", Normalise)))
        object.__setattr__(self, "pull", Pull(choice(self.pull, "pull", Pull)))
        if self.lr <= 0 or self.iterations < 1 or self.restarts < 1:
            raise BadInput(
                f"expected lr > 0 and at least one iteration and one restart, found lr {self.lr}, "
                f"{self.iterations} iterations and {self.restarts} restarts; change the one that is out of range."
            )
        if not 0 <= self.race * self.restarts < 1:
            raise BadInput(
                f"expected race times restarts in [0, 1), found {self.race} times {self.restarts}; "
                "leave iterations for the winner."
            )
        if not self.pull_weight > 0:
            raise BadInput(f'expected pull_weight above 0, found {self.pull_weight}; set pull="none" to do without it.')

    @property
    def needs(self) -> frozenset[str]:
        statistics = {FIELDS[chosen] for chosen in (self.normalise, self.pull) if chosen in FIELDS}
        labels = {"labels"} if self.labels is Labels.KNOWN else set()
        return FORWARD_NEEDS | {"input_shape", "batch_size"} | labels | statistics

    @property
    def uses(self) -> frozenset[str]:
        return FORWARD_USES | {"bounds", "normalization"}

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        seen = only_round(self, observation.rounds)
        forward = forward_model(observation, seen, unroll=self.unroll, adaptive=self.adaptive, normalise=self.normalise)
        pull = pull_prior(
            forward.model, forward.params, forward.buffers, observation.knowledge, self.pull, self.pull_weight
        )
        batch = observation.knowledge.batch_size
        if not isinstance(batch, int):
            raise NotApplicable(f"gradient-matching expects one batch_size, found {batch}; use then(PerClient(), …).")
        given = self._labels(observation, seen, batch)
        runs = self._attempts(observation, forward, pull, given, batch, rng)
        best = min(runs, key=lambda run: run.objective)
        guessed = given.fixed if best.label_logits is None else best.label_logits.argmax(dim=1)
        ordered = batch == 1 or (self.labels is Labels.KNOWN and _distinct(given.fixed))
        return Reconstruction(
            inputs=best.inputs,
            labels=guessed,
            ambiguity=frozenset() if ordered else frozenset({"order"}),
            status="; ".join(filter(None, [best.status, f"labels {given.note}", self._batchnorm_note()])),
            diagnostics={
                "objective": best.objective,
                "restart_objectives": [run.objective for run in runs],
                "iterations_run": len(best.history),
                "labels": given.note,
                "normalise": self.normalise.value,
                "pull": self.pull.value,
                "pull_distance": _distance(pull, best.inputs),
                "stepping": best.stepping,
            },
        )

    def _batchnorm_note(self) -> str:
        """What was known about batch norm, in words; empty where nothing was asked for."""
        if self.normalise is Normalise.CLIENT and self.pull is Pull.NONE:
            return ""
        pulled = "not pulled" if self.pull is Pull.NONE else f"pulled towards the {self.pull.value} statistics"
        return f"batch norm by {_NORMALISED_BY[self.normalise]}, {pulled}"

    def _attempts(
        self,
        observation: Observation,
        forward: Forward,
        pull: BatchMoments | None,
        given: _Labels,
        batch: int,
        rng: torch.Generator,
    ) -> list[Matching]:
        """A run from every start; in a race, short ones and then one that goes on from the best of them."""
        like, joint = forward.target[0], given.fixed is None
        heat = int(self.race * self.iterations)
        total = self.iterations if heat else self.iterations * self.restarts
        box, runs, done = input_box(observation), list[Matching](), 0
        quick = QuickForward(forward, channels_last=self.engine.channels_last)
        if pull is not None and quick.direct:
            pull = replace(pull, moments_of=quick.moments_in_passing(unbiased=self.pull is Pull.RUNNING))
        priors: tuple[Prior, ...] = self.priors if pull is None else (*self.priors, pull)

        def gradients_of(inputs: Tensor, logits: Tensor | None) -> list[Tensor]:
            labels = given.fixed if logits is None else torch.softmax(logits, dim=1)
            assert labels is not None
            return quick(inputs, labels)

        def attempt(start: Tensor, label_start: Tensor | None, iterations: int) -> None:
            nonlocal done
            runs.append(
                match_gradients(
                    gradients_of,
                    forward.target,
                    start,
                    label_start=label_start,
                    distance=self.distance,
                    priors=priors,
                    optimizer=self.optimizer,
                    lr=self.lr,
                    iterations=iterations,
                    tolerance=self.tolerance,
                    box=box,
                    progress=lambda step, _: progress.report(done + step, total),
                    engine=self.engine,
                )
            )
            done += iterations

        for _ in range(self.restarts):
            start = self.start((batch, *(observation.knowledge.input_shape or ())), rng).to(like)
            if self.engine.channels_last and start.dim() == 4:
                start = start.contiguous(memory_format=torch.channels_last)
            label_start = torch.randn(batch, given.classes, generator=rng).to(like) if joint else None
            attempt(start, label_start, heat or self.iterations)
        if heat:
            winner = min(runs, key=lambda run: run.objective)
            attempt(winner.inputs, winner.label_logits, self.iterations - done)
        return runs

    def _labels(self, observation: Observation, seen: Round, batch: int) -> _Labels:
        knowledge, device = observation.knowledge, next(iter(seen.params.values())).device
        network = trace(observation)
        classes = network.outputs.shape[-1]
        if self.labels is Labels.KNOWN:
            if not isinstance(knowledge.labels, Tensor):
                raise MissingKnowledge(self.name, "labels")
            _check_labels(knowledge.labels, batch, classes)
            return _Labels(knowledge.labels.to(device), classes, "known")
        if self.labels is Labels.JOINT:
            return _Labels(None, classes, "optimised jointly")
        last = network.output_layer()
        if last is None or last.weight not in seen.update:
            raise NotApplicable(
                "inferring labels expects a dense output layer in the update, found none; "
                'set labels="joint" or grant the labels.'
            )
        sign = -1.0 if seen.kind == "delta" else 1.0
        # Row sums of the weight gradient carry the same signs where the features are not negative.
        has_bias = last.bias is not None and last.bias in seen.update
        class_grad = seen.update[last.bias or ""] if has_bias else seen.update[last.weight].sum(1)
        loss = losses.name_of(knowledge.loss) if knowledge.loss is not None else None
        recovery = label_counts(sign * class_grad, batch, loss=loss or "unknown")
        if len(recovery.labels) != batch:
            raise NotApplicable(
                f"inferring labels expects softmax cross-entropy, found {loss or 'a loss of its own'}; "
                'set labels="joint" or grant the labels.'
            )
        return _Labels(recovery.labels.to(device), classes, f"inferred ({recovery.status})")


def _distance(pull: BatchMoments | None, inputs: Tensor) -> float | None:
    """How far the guess's statistics are from the wanted ones, without the weight."""
    with torch.no_grad():
        return None if pull is None else float(pull.distance(inputs))


def _check_labels(labels: Tensor, batch: int, classes: int) -> None:
    fits = labels.shape == (batch, classes) if is_soft(labels) else labels.shape == (batch,) and labels.max() < classes
    if not fits:
        raise BadInput(
            f"expected {batch} labels below the model's {classes} classes, found shape {tuple(labels.shape)} with "
            f"largest value {labels.max().item():g}; give the labels of this batch."
        )


def _distinct(labels: Tensor | None) -> bool:
    return labels is not None and not is_soft(labels) and len(set(labels.tolist())) == len(labels)


def dlg() -> GradientMatching:
    """Deep leakage from gradients: squared distance, labels optimised jointly, L-BFGS."""
    return GradientMatching(
        distance=squared_error,
        labels=Labels.JOINT,
        optimizer=LBFGS(line_search=True),
        lr=1.0,
        iterations=300,
        tolerance=1e-9,
    )


def idlg() -> GradientMatching:
    """Improved DLG: the label is read off the last layer first."""
    return replace(dlg(), labels=Labels.INFERRED)


def inverting_gradients() -> GradientMatching:
    """Inverting gradients: cosine distance, total variation, signed Adam in the pixel box, three starts that race."""
    return GradientMatching(priors=(TotalVariation(1e-3),), iterations=4800, restarts=3, race=0.1)


def bn_exact() -> GradientMatching:
    """Inverting gradients, given the private batch's statistics: the guess keeps its own, drawn towards the exact ones.

    This is what the published BN_exact does: its layers stay in train mode, and only the prior sees the statistics.
    """
    return replace(_gradattack(), normalise=Normalise.OWN, pull=Pull.EXACT)


def bn_infer() -> GradientMatching:
    """Inverting gradients, guessing the private statistics: the guess keeps its own, drawn towards the running ones."""
    return replace(_gradattack(), normalise=Normalise.OWN, pull=Pull.RUNNING)


def bn_proxy() -> GradientMatching:
    """Inverting gradients, with the running statistics in place of the private ones."""
    return replace(_gradattack(), normalise=Normalise.RUNNING)


def _gradattack() -> GradientMatching:
    """The published weights: 0.05 of total variation and, where something is pulled, 0.001."""
    return replace(inverting_gradients(), priors=(TotalVariation(0.05),))


def mixing_l2() -> GradientMatching:
    """First attack of the mixing-gradients paper: squared distance."""
    return _mixing(squared_error)


def mixing_angle() -> GradientMatching:
    """Second attack of the mixing-gradients paper: angle and total variation."""
    return _mixing(cosine, TotalVariation(1e-4))


def mixing_orthogonal() -> GradientMatching:
    """Third attack of the mixing-gradients paper: angle, total variation and input orthogonality."""
    return _mixing(cosine, TotalVariation(1e-4), Orthogonality(1e-4))


def _mixing(distance: Distance, *priors: Prior) -> GradientMatching:
    return GradientMatching(
        distance=distance,
        priors=priors,
        labels=Labels.JOINT,
        optimizer=LBFGS(),
        start=uniform_start,
        lr=0.05,
        iterations=550,
    )
