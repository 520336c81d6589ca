"""Optimises a guess of the batch until it would have produced the observed update.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019; Zhao, Mopuri, Bilen, "iDLG", 2020; Geiping, Bauermeister,
Dröge, Moeller, "Inverting Gradients", NeurIPS 2020; Huang et al., "Evaluating Gradient Inversion Attacks and Defenses",
NeurIPS 2021 (batch-norm statistics); Eloul et al., "Mixing Gradients Strategies", 2022 (three attacks).

Differs from the papers in: L-BFGS uses a line search, without which many starts diverge; the iterate and the restart
returned are the ones with the smallest objective; in `inverting_gradients` three starts race within the iterations of
one; steps along signs follow a difference of two gradients where the network allows it (`matching.differences`); deltas
of several local steps go through the client's own training; an attacker who knows of pruning continues from the answer
that ignores it (`pruned.SmallerThanSent`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism.attacks.base import Circumstances, UpdateAttack
from fedprism.attacks.choices import OneOf, TermsOf
from fedprism.attacks.gradient_matching.batchnorm import BatchNorm, pull_prior
from fedprism.attacks.gradient_matching.fitting import samples_together
from fedprism.attacks.gradient_matching.forward import (
    FORWARD_NEEDS,
    FORWARD_USES,
    Forward,
    PreparedForward,
    forward_model,
    input_box,
    moments_of_last_pass,
)
from fedprism.attacks.gradient_matching.labels import GivenLabels, Labels, given_labels
from fedprism.attacks.gradient_matching.starts import Start, Starts, gaussian_start, uniform_start
from fedprism.attacks.gradient_matching.two_losses import ClientLosses
from fedprism.checks import choice
from fedprism.errors import BadInput, NotApplicable
from fedprism.runtime import progress
from fedprism.runtime.cuda_graphs import Engine
from fedprism.runtime.twice_differentiable import once_only, second_forms
from fedprism.solvers.matching.differences import TwoLosses
from fedprism.solvers.matching.distances import Distance, Gradients, cosine, squared_error
from fedprism.solvers.matching.gradients import LBFGS, Adam, Matching, MatchingSettings, Progress, match_gradients
from fedprism.solvers.matching.objective import Parts, Prior
from fedprism.solvers.matching.priors import BatchMoments, Orthogonality, TotalVariation
from fedprism.solvers.matching.race import race
from fedprism.types import Batch, Observation, Reconstruction, Round

DISTANCES = {"cosine": cosine, "squared-error": squared_error}
PRIORS = {"total_variation": TotalVariation, "orthogonality": Orthogonality}
OPTIMIZERS = {"adam": Adam(), "lbfgs": LBFGS()}
STARTS = {"gaussian": gaussian_start, "uniform": uniform_start}
"""What plans and the command line can name; in Python there are others."""

FOLLOWING_RATE = 0.3
"""Learning rate while pruning is followed, relative to the usual one, at which the answer may be lost at once."""

IN_ANOTHER_FORM = "has no second derivative in torch and was computed in a form that has one"
NO_NEIGHBOURS = "no smoothness is assumed, because the entries of a table have no neighbours"


class MatchingTask(NamedTuple):
    """What one update, or several, ask of every run on them."""

    gradients_of: Callable[[Tensor, Tensor | None], Gradients]
    target: tuple[Tensor, ...]
    shape: tuple[int, ...]
    priors: tuple[Prior, ...]
    box: tuple[Tensor, Tensor] | None
    outputs: tuple[int, ...] | None = None
    """The shape of labels that are looked for along with the inputs; None where labels are fixed."""
    likely_labels: Tensor | None = None
    """What is added to the logits that the search for labels starts from."""
    parts: Parts | None = None
    """How to work on some samples at a time, where memory is short."""
    losses: TwoLosses | None = None
    """Those whose gradients' difference is the slope, where it is one."""
    note: str = ""
    slopes: str = ""
    """How slopes are found, in words."""


class Solution(NamedTuple):
    best: Matching
    runs: list[Matching]
    note: str
    diagnostics: dict[str, Any]


@dataclass(frozen=True, kw_only=True, repr=False)
class GradientMatching(UpdateAttack):
    """Gradient matching with any distance, priors, label handling, optimiser and start.

    labels: granted (KNOWN), read off the last layer (INFERRED), optimised along with the inputs (JOINT), or optimised
    starting from those read off (REFINED). unroll: repeat the client's local steps for a delta, else read it as one
    gradient. adaptive: put every part of a known defense that can be repeated into the forward model; pruning is
    followed at the end, for as many iterations again.
    """

    distance: Annotated[Distance, OneOf(DISTANCES)] = cosine
    priors: Annotated[tuple[Prior, ...], TermsOf(PRIORS)] = ()
    labels: Labels = Labels.INFERRED
    optimizer: Annotated[Adam | LBFGS, OneOf(OPTIMIZERS)] = Adam()  # noqa: RUF009 (frozen)
    start: Annotated[Start, OneOf(STARTS)] = gaussian_start
    lr: float = 0.1
    iterations: int = 1000
    starts: Starts = Starts()  # noqa: RUF009 (frozen)
    tolerance: float = 0.0
    unroll: bool = True
    adaptive: bool = True
    batchnorm: BatchNorm = BatchNorm()  # noqa: RUF009 (frozen)
    engine: Engine = Engine()  # noqa: RUF009 (frozen)

    citation: ClassVar[str] = (
        "Zhu et al. 2019 (DLG); Zhao et al. 2020 (iDLG); Geiping et al. 2020; Huang et al. 2021; Eloul et al. 2022"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", Labels(choice(self.labels, "labels", Labels)))
        if self.lr <= 0 or self.iterations < 1:
            raise BadInput(
                f"lr must be above 0 and iterations at least one, not lr {self.lr} and {self.iterations} iterations; "
                "change the one that is out of range."
            )

    @property
    def needs(self) -> frozenset[str]:
        labels = {"labels"} if self.labels is Labels.KNOWN else set()
        return FORWARD_NEEDS | {"input_shape", "batch_size"} | labels | self.batchnorm.needs

    @property
    def uses(self) -> frozenset[str]:
        return FORWARD_USES | {"bounds", "normalization"}

    @property
    def reads_scaled_updates(self) -> bool:
        return True

    def not_worth(self, circumstances: Circumstances) -> str | None:
        from fedprism.attacks.gradient_matching import presets  # which are made of this class

        if self.batchnorm != BatchNorm():
            if not circumstances.batchnorm_between:
                return "the model has no batch-norm layers"
            return None if self == presets.bn_infer() else "variant of bn-infer; a plan can name it"
        if circumstances.dense_layer_tells:
            return "exact attacks apply to this model; a plan can name it all the same"
        standard = self == presets.inverting_gradients()
        return None if standard else "variant of inverting-gradients; a plan can name it"

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        before = rng.get_state()
        try:
            return self._answer(observation, rng)
        except RuntimeError as error:
            operation = once_only(error)
            if operation is None:
                raise
        rng.set_state(before)
        try:
            with second_forms():
                answer = self._answer(observation, rng)
        except RuntimeError as error:
            if (remaining := once_only(error)) is None:
                raise
            raise NotApplicable(
                f"gradient-matching needs operations with a second derivative, but {remaining} has none; "
                "put a form of it that has one into the model."
            ) from error
        return replace(answer, status=f"{answer.status}; {operation} {IN_ANOTHER_FORM}")

    def _answer(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        update = observation.round
        forward, pull = self.forward(observation, update)
        batch = observation.knowledge.batch_size
        if not isinstance(batch, int):
            raise NotApplicable(f"gradient-matching needs one batch_size, not {batch}; give one number.")
        labels = given_labels(self.labels, observation, update, batch)
        shape, box = (batch, *observation.knowledge.sample_shape), input_box(observation)
        task_of = partial(self._task, labels=labels, pull=pull, shape=shape, box=box)
        task = task_of(forward.ignoring_pruning())
        solution = self.solve(task, rng, partial(task_of, forward) if forward.follows_pruning else None)
        best = solution.best
        with torch.no_grad():
            pulled = None if pull is None else float(pull.distance(best.inputs))
        notes = [f"labels {labels.note}", self.batchnorm.note, task.note, solution.note]
        ordered = batch == 1 or (self.labels is Labels.KNOWN and labels.distinct)
        return Reconstruction(
            inputs=best.inputs,
            labels=labels.fixed if best.label_logits is None else labels.link.answer(best.label_logits),
            ambiguity=frozenset() if ordered else frozenset({"order"}),
            status="; ".join(filter(None, [best.status, *notes])),
            diagnostics={
                "objective": best.objective,
                "restart_objectives": [run.objective for run in solution.runs],
                "iterations_run": len(best.history),
                "labels": labels.note,
                "normalise": self.batchnorm.normalise.value,
                "pull": self.batchnorm.pull.value,
                "pull_distance": pulled,
                "stepping": best.stepping,
                "slopes": task.slopes,
                **solution.diagnostics,
            },
        )

    def forward(self, observation: Observation, update: Round) -> tuple[Forward, BatchMoments | None]:
        """The forward model, and the prior that pulls batch-norm statistics where one is asked for."""
        forward = forward_model(
            observation, update, unroll=self.unroll, adaptive=self.adaptive, normalise=self.batchnorm.normalise
        )
        return forward, pull_prior(
            forward.model, forward.params, forward.buffers, observation.knowledge, self.batchnorm
        )

    def _task(
        self,
        forward: Forward,
        *,
        labels: GivenLabels,
        pull: BatchMoments | None,
        shape: tuple[int, ...],
        box: tuple[Tensor, Tensor] | None,
    ) -> MatchingTask:
        prepared = PreparedForward(forward, channels_last=self.engine.channels_last)
        example = labels.example(forward.target[0], shape)
        client, slopes = self._losses(prepared, example)
        passes = None if client is None else client.passes
        together = samples_together(prepared, example, self.engine.memory, passes=passes, coupled=pull is not None)
        if pull is not None and prepared.direct:
            network = prepared.model if client is None else client.network
            pull = replace(pull, moments_of=moments_of_last_pass(network, unbiased=self.batchnorm.unbiased))
        priors = tuple(prior for prior in self.priors if _fits(prior, shape))
        parts = None
        if together.samples is not None:
            parts = Parts(lambda inputs, logits, which: prepared(inputs, labels.of(logits, which)), together.samples)
        return MatchingTask(
            gradients_of=lambda inputs, logits: prepared(inputs, labels.of(logits)),
            target=forward.target,
            shape=shape,
            priors=priors if pull is None else (*priors, pull),
            box=box,
            outputs=labels.outputs if labels.fixed is None else None,
            likely_labels=labels.likely,
            parts=parts,
            losses=None if client is None else client.of(labels.of, together=together.samples),
            note="; ".join(filter(None, [together.note, NO_NEIGHBOURS if priors != self.priors else ""])),
            slopes=slopes,
        )

    def _losses(self, prepared: PreparedForward, example: Batch) -> tuple[ClientLosses | None, str]:
        """The two losses to take differences of, where that will do, and how the slope is found, in words."""
        if not (isinstance(self.optimizer, Adam) and self.optimizer.signed):
            return None, "exact, because steps do not follow signs"
        if not self.engine.differences:
            return None, "exact, as the engine asks"
        if not prepared.direct:
            return None, "exact, because the update is not one gradient of the batch"
        client = ClientLosses(prepared, example)
        if client.refusal:
            return None, f"exact, because no difference can be taken ({client.refusal})"
        return client, "the difference of two gradients"

    def solve(
        self, task: MatchingTask, rng: torch.Generator, pruned: Callable[[], MatchingTask] | None = None
    ) -> Solution:
        """The best run of all starts. With a task that follows pruning, that run goes on with it."""
        started = self.starts.total(self.iterations)
        total = started if pruned is None else started + self.iterations
        runs = race(
            partial(self._match, task, total=total),
            (self._start(task, rng) for _ in range(self.starts.restarts)),
            iterations=self.iterations,
            heat=self.starts.heat(self.iterations),
            best=_lowest,
            resume=_end,
        )
        best = _lowest(runs)
        if pruned is None:
            return Solution(best, runs, "", {})
        lr = FOLLOWING_RATE * self.lr
        followed = self._match(pruned(), _end(best), self.iterations, started, total=total, lr=lr)
        # The first iterate is the answer that ignores pruning: what is returned is never worse by this objective.
        before, after = float(followed.history[0]), followed.objective
        note = f"following the pruning explains {'more' if after < before else 'no more'}"
        return Solution(followed, runs, note, {"ignoring_pruning": before, "following_pruning": after})

    def _start(self, task: MatchingTask, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Inputs, and the logits of labels where these are looked for."""
        like, inputs = task.target[0], self.start(task.shape, rng).to(task.target[0])
        if self.engine.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if task.outputs is None:
            return inputs, None
        logits = torch.randn(task.shape[0], *task.outputs, generator=rng).to(like)
        return inputs, logits if task.likely_labels is None else logits + task.likely_labels.to(like)

    def _match(
        self,
        task: MatchingTask,
        start: tuple[Tensor, Tensor | None],
        iterations: int,
        done: int,
        *,
        total: int,
        lr: float | None = None,
    ) -> Matching:
        """One run, `done` iterations after the first one of `total`."""
        settings = self.settings(
            iterations=iterations, box=task.box, progress=lambda step, _: progress.report(done + step, total)
        )
        settings = replace(settings, priors=task.priors, lr=self.lr if lr is None else lr)
        inputs, logits = start
        return match_gradients(
            task.gradients_of, task.target, inputs, settings, label_start=logits, parts=task.parts, losses=task.losses
        )

    def settings(self, *, iterations: int, box: tuple[Tensor, Tensor] | None, progress: Progress) -> MatchingSettings:
        """What the solver is told."""
        return MatchingSettings(
            distance=self.distance,
            priors=self.priors,
            optimizer=self.optimizer,
            lr=self.lr,
            iterations=iterations,
            tolerance=self.tolerance,
            box=box,
            progress=progress,
            engine=self.engine,
        )


def _fits(prior: Prior, shape: tuple[int, ...]) -> bool:
    return not isinstance(prior, TotalVariation) or prior.fits(shape)


def _lowest(runs: Sequence[Matching]) -> Matching:
    return min(runs, key=lambda run: run.objective)


def _end(run: Matching) -> tuple[Tensor, Tensor | None]:
    """Where a further run goes on."""
    return run.inputs, run.label_logits
