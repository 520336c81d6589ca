"""Optimises a guess of the batch until it would have produced the observed update.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019; Zhao, Mopuri, Bilen, "iDLG", 2020; Geiping, Bauermeister,
Dröge, Moeller, "Inverting Gradients", NeurIPS 2020; Huang et al., "Evaluating Gradient Inversion Attacks and Defenses",
NeurIPS 2021 (batch-norm statistics); Eloul et al., "Mixing Gradients Strategies", 2022 (three attacks).

Differs from the papers in: L-BFGS uses a line search, without which many starts diverge; the iterate and the restart
returned are the ones with the smallest objective; `inverting_gradients` lets three starts race within the iterations of
one, because a bad start ends in a poor minimum that the objective shows early; steps along signs follow a difference of
two gradients where the network allows it (`solvers.differences`); deltas of several local steps go through
the client's own training; who knows of pruning goes on from the answer that ignores it, using that what was not sent is
smaller than what was (`pruned.SmallerThanSent`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedprism import progress
from fedprism.attacks.base import Attack, only_round
from fedprism.attacks.fitting import samples_together
from fedprism.attacks.forward import (
    FORWARD_NEEDS,
    FORWARD_USES,
    Forward,
    QuickForward,
    forward_model,
    input_box,
    moments_in_passing,
)
from fedprism.attacks.matching_labels import GivenLabels, Labels, given_labels
from fedprism.attacks.two_losses import ClientLosses
from fedprism.batchnorm import FIELDS, Normalise, Pull, pull_prior
from fedprism.checks import choice
from fedprism.errors import BadInput, NotApplicable
from fedprism.solvers.differences import TwoLosses
from fedprism.solvers.distances import Distance, Sent, cosine
from fedprism.solvers.graphs import Engine
from fedprism.solvers.matching import LBFGS, Adam, Matching, Progress, Search, match_gradients
from fedprism.solvers.objective import Parts, Prior
from fedprism.solvers.priors import BatchMoments
from fedprism.types import Batch, Observation, Reconstruction

Start: TypeAlias = Callable[[tuple[int, ...], torch.Generator], Tensor]


def gaussian_start(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Standard normal noise."""
    return torch.randn(shape, generator=rng)


def uniform_start(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Uniform noise in [0, 1)."""
    return torch.rand(shape, generator=rng)


_NORMALISED_BY = {
    Normalise.CLIENT: "what the client's mode says",
    Normalise.OWN: "the guess's own statistics",
    Normalise.EXACT: "the exact statistics",
    Normalise.RUNNING: "the running statistics",
}


class _Task(NamedTuple):
    """What an update asks of every run on it.

    joint: labels are looked for too. parts: how to ask for some samples at a time, where memory is short; `note` says
    so. losses: where the slope is a difference of two gradients, of which; `slopes` says so, or why not.
    """

    gradients_of: Callable[[Tensor, Tensor | None], Sent]
    target: tuple[Tensor, ...]
    priors: tuple[Prior, ...]
    box: tuple[Tensor, Tensor] | None
    joint: bool
    parts: Parts | None
    note: str
    losses: TwoLosses | None
    slopes: str


@dataclass(frozen=True, kw_only=True, repr=False)
class GradientMatching(Attack):
    """Gradient matching with any distance, priors, label handling, optimiser and start.

    labels: granted (KNOWN), read off the last layer (INFERRED), or optimised along with the inputs (JOINT).
    restarts: how many random starts; the one with the smallest objective is returned. With `race`, each start gets only
    this share of the iterations, and the best of them all that are left: the total is that of one full run.
    unroll: repeat the client's local steps for a delta; without it the delta is read as one gradient.
    adaptive: put every part of the defense that can be repeated, where it is known, into the forward model. Pruning is
    left out at first and followed from the answer on, for `iterations` more at `follow` times the learning rate:
    what was not sent counts nothing until it is too large, so that from noise the objective with pruning in it may
    hardly descend (trained networks with batch norm), and at the full rate the answer may be lost at once.
    normalise: by which statistics batch-norm layers normalise the guess.
    pull: towards which statistics the guess's own are drawn, by a prior of weight `pull_weight`: the sum over the
    batch-norm layers of the l2 distances of means and of variances (`solvers.moments_distance`).
    engine: how iterations are run; the diagnostics say how they were.
    memory: how many bytes may be used, as far as one can tell; 70 % of a GPU's where nothing is said. A batch that
    needs more is worked on in parts, where its gradient is the mean of theirs: the same answer up to rounding, for
    1.2 to 1.4 times the time.
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
    follow: float = 0.3
    normalise: Normalise = Normalise.CLIENT
    pull: Pull = Pull.NONE
    pull_weight: float = 1e-3
    engine: Engine = Engine()  # noqa: RUF009 (frozen)
    memory: int | None = None

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
        if not 0 < self.follow <= 1:
            raise BadInput(f"expected follow above 0 and at most 1, found {self.follow}; 0.3 is usual.")
        if self.memory is not None and self.memory < 1:
            raise BadInput(
                f"expected at least one byte of memory, found {self.memory}; leave it out to use what is there."
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
        given, box = given_labels(self.labels, observation, seen, batch), input_box(observation)
        shape = (batch, *(observation.knowledge.input_shape or ()))
        task = self._task(forward.ignoring_pruning(), pull, given, box, shape)
        runs = self._attempts(task, given.classes, shape, rng, total=self._iterations(forward))
        best = min(runs, key=lambda run: run.objective)
        notes, found = [f"labels {given.note}", self._batchnorm_note(), task.note], dict[str, Any]()
        if forward.follows_pruning:
            best = self._match(
                self._task(forward, pull, given, box, shape),
                best.inputs,
                best.label_logits,
                lr=self.follow * self.lr,
                iterations=self.iterations,
                progress_of=(self._iterations(forward) - self.iterations, self._iterations(forward)),
            )
            # The first iterate is the answer that ignores pruning: what is returned is never worse by this objective.
            found = {"ignoring_pruning": float(best.history[0]), "following_pruning": best.objective}
            more = "more" if found["following_pruning"] < found["ignoring_pruning"] else "no more"
            notes.append(f"following the pruning explains {more}")
        guessed = given.fixed if best.label_logits is None else best.label_logits.argmax(dim=1)
        ordered = batch == 1 or (self.labels is Labels.KNOWN and given.distinct)
        return Reconstruction(
            inputs=best.inputs,
            labels=guessed,
            ambiguity=frozenset() if ordered else frozenset({"order"}),
            status="; ".join(filter(None, [best.status, *notes])),
            diagnostics={
                "objective": best.objective,
                "restart_objectives": [run.objective for run in runs],
                "iterations_run": len(best.history),
                "labels": given.note,
                "normalise": self.normalise.value,
                "pull": self.pull.value,
                "pull_distance": _distance(pull, best.inputs),
                "stepping": best.stepping,
                "slopes": task.slopes,
                **found,
            },
        )

    def _batchnorm_note(self) -> str:
        """What was known about batch norm, in words; empty where nothing was asked for."""
        if self.normalise is Normalise.CLIENT and self.pull is Pull.NONE:
            return ""
        pulled = "not pulled" if self.pull is Pull.NONE else f"pulled towards the {self.pull.value} statistics"
        return f"batch norm by {_NORMALISED_BY[self.normalise]}, {pulled}"

    @property
    def _heat(self) -> int:
        """How many iterations each start of a race has; 0 where there is none."""
        return int(self.race * self.iterations)

    def _iterations(self, forward: Forward) -> int:
        """Those of all runs together."""
        from_starts = self.iterations if self._heat else self.iterations * self.restarts
        return from_starts + (self.iterations if forward.follows_pruning else 0)

    def _task(
        self,
        forward: Forward,
        pull: BatchMoments | None,
        given: GivenLabels,
        box: tuple[Tensor, Tensor] | None,
        shape: tuple[int, ...],
    ) -> _Task:
        quick = QuickForward(forward, channels_last=self.engine.channels_last)

        def labels_of(logits: Tensor | None, which: slice = slice(None)) -> Tensor:
            if logits is not None:
                return torch.softmax(logits, dim=1)
            assert given.fixed is not None
            return given.fixed[which]

        like, joint = forward.target[0], given.fixed is None
        labels = like.new_full((shape[0], given.classes), 1 / given.classes) if given.fixed is None else given.fixed
        some = Batch(like.new_zeros(()).expand(shape), labels)
        client, slopes = self._losses(quick, some)
        passes = None if client is None else client.passes
        together = samples_together(quick, some, self.memory, passes=passes, coupled=pull is not None)
        apart = together.samples < shape[0]
        parts = Parts(lambda inputs, logits, which: quick(inputs, labels_of(logits, which)), together.samples)
        if pull is not None and quick.direct:
            watched = quick.model if client is None else client.network
            pull = replace(pull, moments_of=moments_in_passing(watched, unbiased=self.pull is Pull.RUNNING))
        whole = quick.factoring(shape) if self.distance is cosine and not apart and client is None else quick
        return _Task(
            gradients_of=lambda inputs, logits: whole(inputs, labels_of(logits)),
            target=forward.target,
            priors=self.priors if pull is None else (*self.priors, pull),
            box=box,
            joint=joint,
            parts=parts if apart else None,
            note=together.note,
            losses=None if client is None else client.of(labels_of, together=together.samples if apart else None),
            slopes=slopes,
        )

    def _losses(self, quick: QuickForward, some: Batch) -> tuple[ClientLosses | None, str]:
        """The two losses to take differences of, where that will do, and how the slope is found, in words."""
        if not (isinstance(self.optimizer, Adam) and self.optimizer.signed):
            return None, "exact, because steps do not follow signs"
        if not self.engine.differences:
            return None, "exact, as the engine asks"
        if not quick.direct:
            return None, "exact, because the update is not one gradient of the batch"
        client = ClientLosses(quick, some)
        if client.refusal:
            return None, f"exact, because no difference can be taken ({client.refusal})"
        return client, "the difference of two gradients"

    def _attempts(
        self, task: _Task, classes: int, shape: tuple[int, ...], rng: torch.Generator, *, total: int
    ) -> list[Matching]:
        """A run from every start; in a race, short ones and then one that goes on from the best of them."""
        like, runs, each = task.target[0], list[Matching](), self._heat or self.iterations
        for number in range(self.restarts):
            start = self.start(shape, rng).to(like)
            if self.engine.channels_last and start.dim() == 4:
                start = start.contiguous(memory_format=torch.channels_last)
            label_start = torch.randn(shape[0], classes, generator=rng).to(like) if task.joint else None
            runs.append(self._match(task, start, label_start, iterations=each, progress_of=(number * each, total)))
        if self._heat:
            winner, done = min(runs, key=lambda run: run.objective), self.restarts * each
            goes_on, left = (winner.inputs, winner.label_logits), self.iterations - done
            runs.append(self._match(task, *goes_on, iterations=left, progress_of=(done, total)))
        return runs

    def _match(
        self,
        task: _Task,
        start: Tensor,
        label_start: Tensor | None,
        *,
        iterations: int,
        progress_of: tuple[int, int],
        lr: float | None = None,
    ) -> Matching:
        """One run. progress_of: the iterations before it, and those of all runs."""
        before, total = progress_of
        search = self.search(
            iterations=iterations, box=task.box, progress=lambda step, _: progress.report(before + step, total)
        )
        search = replace(search, priors=task.priors, lr=self.lr if lr is None else lr)
        return match_gradients(
            task.gradients_of,
            task.target,
            start,
            search,
            label_start=label_start,
            parts=task.parts,
            losses=task.losses,
        )

    def search(self, *, iterations: int, box: tuple[Tensor, Tensor] | None, progress: Progress) -> Search:
        """What the solver is asked for."""
        return Search(
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


def _distance(pull: BatchMoments | None, inputs: Tensor) -> float | None:
    """How far the guess's statistics are from the wanted ones, without the weight."""
    with torch.no_grad():
        return None if pull is None else float(pull.distance(inputs))
