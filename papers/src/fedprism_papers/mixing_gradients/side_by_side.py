"""Gradient matching of many updates in one tensor program: what is small leaves a machine idle when done one by one.

`SideBySide(attack=attack)` is an attack on an observation of several updates, such as `joined` makes of several.
It gives every update what the attack alone would give it, up to rounding and the differences that `matching_trials`
names, and draws the starts of all of them from one generator. After a reduction it takes all parts at once. There are
no restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedprism.attacks import Attack, split_updates
from fedprism.attacks.gradient_matching.attack import GradientMatching
from fedprism.attacks.gradient_matching.batchnorm import Pull
from fedprism.attacks.gradient_matching.forward import Forward, input_box
from fedprism.attacks.gradient_matching.labels import given_labels
from fedprism.client.update import FedSGD, stacked_gradients
from fedprism.errors import NotApplicable
from fedprism.runtime import memory, progress
from fedprism.solvers.matching.gradients import LBFGS
from fedprism.types import Batch, Observation, Reconstruction, Update
from fedprism_papers.mixing_gradients.convolutions import AsProducts
from fedprism_papers.mixing_gradients.matching_trials import Trials, TrialStatus, match_trials

ONE_BY_ONE = "Attack them one by one, with the attack itself."


@dataclass(frozen=True, kw_only=True, repr=False)
class SideBySide(Attack):
    """The attack on all updates of an observation at once."""

    attack: GradientMatching

    citation: ClassVar[str] = "the attack's, which is run on many updates at once; fedprism 2026"

    @property
    def needs(self) -> frozenset[str]:
        return self.attack.needs

    @property
    def uses(self) -> frozenset[str]:
        return self.attack.uses

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        attack, parts = self.attack, split_updates(observation)
        problem = _problem(attack, parts)
        start = self._start(problem, rng)
        return _answer(problem, self._matched(problem, start), parts, start.inputs)

    def _start(self, problem: _Problem, rng: torch.Generator) -> _Start:
        like, size = problem.target[0], problem.batch
        inputs, logits = list[Tensor](), list[Tensor]()
        for _ in range(problem.trials):
            inputs.append(self.attack.start((size, *problem.input_shape), rng))
            if problem.labels is None:
                logits.append(torch.randn(size, problem.classes, generator=rng))
        drawn = torch.stack(logits).to(like) if logits else None
        if drawn is not None and problem.likely is not None:
            drawn += problem.likely.to(drawn)
        return _Start(torch.stack(inputs).to(like), drawn)

    def _matched(self, problem: _Problem, start: _Start) -> Trials:
        """All trials at once, or fewer at a time if memory has run out."""
        attack, together = self.attack, memory.together(problem.trials)
        solved = list[Trials]()
        for first in range(0, problem.trials, together):
            chosen = slice(first, first + together)
            part = problem.part(chosen)
            fraction, passed = len(part.target[0]) / problem.trials, first / problem.trials

            def report(step: int, of: int, fraction: float = fraction, passed: float = passed) -> None:
                progress.report(int(of * (passed + fraction * step / of)), of)

            solved.append(
                match_trials(
                    part.gradients_of,
                    part.target,
                    start.inputs[chosen],
                    attack.settings(iterations=attack.iterations, box=problem.box, progress=report),
                    label_start=None if start.logits is None else start.logits[chosen],
                )
            )
        return _joined(solved)


class _Start(NamedTuple):
    inputs: Tensor
    logits: Tensor | None


@dataclass(frozen=True)
class _Problem:
    """Every update to be explained: parameters and targets are (trials, *shape), labels (trials, batch) or unknown."""

    forward: Forward
    params: Update
    target: tuple[Tensor, ...]
    labels: Tensor | None
    likely: Tensor | None
    """What is added to the logits that a search for labels starts from."""
    note: str
    batch: int
    classes: int
    input_shape: tuple[int, ...]
    box: tuple[Tensor, Tensor] | None

    @property
    def trials(self) -> int:
        return len(self.target[0])

    def part(self, chosen: slice) -> _Problem:
        return replace(
            self,
            params={name: tensor[chosen].requires_grad_() for name, tensor in self.params.items()},
            target=tuple(tensor[chosen] for tensor in self.target),
            labels=None if self.labels is None else self.labels[chosen],
        )

    def gradients_of(self, inputs: Tensor, logits: Tensor | None) -> list[Tensor]:
        """What clients would have sent, differentiably."""
        forward = self.forward
        labels = self.labels if logits is None else torch.softmax(logits, dim=-1)
        assert labels is not None
        with AsProducts() if inputs.is_cuda else nullcontext():
            loss = forward.defense.on_loss(forward.loss)
            batch = Batch(inputs, labels)
            gradients = stacked_gradients(forward.model, self.params, forward.buffers, batch, loss, create_graph=True)
        return [gradients[name] for name in forward.names]


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise NotApplicable(f"side-by-side needs {words}. {ONE_BY_ONE}")


def _problem(attack: GradientMatching, parts: Sequence[Observation]) -> _Problem:
    if not parts:
        raise NotApplicable("side-by-side needs at least one update. Record a round first.")
    batch = parts[0].knowledge.batch_size
    if not isinstance(batch, int) or any(part.knowledge.batch_size != batch for part in parts):
        raise NotApplicable(f"side-by-side needs updates of batches of one size, and to know it. {ONE_BY_ONE}")
    _require(attack.starts.restarts <= 1, f"an attack without restarts, not {attack!r}")
    _require(isinstance(attack.optimizer, LBFGS), f"an attack with L-BFGS, not {attack!r}")
    _require(attack.batchnorm.pull is Pull.NONE, f"an attack that pulls no statistics, not {attack!r}")
    forwards = [attack.forward(part, part.rounds[0])[0] for part in parts]
    unchanged = "gradients, not updates of several local steps or by a defense on batches, examples or updates"
    for forward in forwards:
        changes = forward.defense.overrides("on_batch", "on_examples", "on_update")
        _require(isinstance(forward.protocol, FedSGD) and not changes, unchanged)
    shapes = {tuple((n, t.shape) for n, t in zip(f.names, f.target, strict=True)) for f in forwards}
    _require(len(shapes) == 1, "updates that all hold the same parameters")
    given = [given_labels(attack.labels, part, part.rounds[0], batch) for part in parts]
    labels = [labels.fixed for labels in given if labels.fixed is not None]
    likely = [labels.likely for labels in given if labels.likely is not None]
    return _Problem(
        forward=forwards[0],
        params={name: torch.stack([f.params[name].detach() for f in forwards]) for name in forwards[0].params},
        target=tuple(torch.stack(tensors) for tensors in zip(*(f.target for f in forwards), strict=True)),
        labels=torch.stack(labels) if labels else None,
        likely=torch.stack(likely) if likely else None,
        note="; ".join(dict.fromkeys(labels.note for labels in given)),
        batch=batch,
        classes=given[0].outputs[0],
        input_shape=parts[0].knowledge.sample_shape,
        box=input_box(parts[0]),
    )


def _joined(solved: Sequence[Trials]) -> Trials:
    """The trials of several runs, one after the other."""
    logits = [part.label_logits for part in solved if part.label_logits is not None]
    return Trials(
        inputs=torch.cat([part.inputs for part in solved]),
        label_logits=torch.cat(logits) if logits else None,
        objectives=torch.cat([part.objectives for part in solved]),
        statuses=tuple(status for part in solved for status in part.statuses),
        steps=max(part.steps for part in solved),
        stepping=solved[0].stepping,
    )


def _answer(problem: _Problem, best: Trials, parts: Sequence[Observation], starts: Tensor) -> Reconstruction:
    labels = problem.labels if best.label_logits is None else best.label_logits.argmax(dim=-1)
    assert labels is not None
    counts = {status: best.statuses.count(status) for status in TrialStatus if status in best.statuses}
    told = [f"{count} of {len(parts)}: {status}" for status, count in counts.items()]
    return Reconstruction(
        inputs=best.inputs.flatten(0, 1),
        labels=labels.flatten(0, 1),
        owners=tuple(part.subject or f"update {k}" for k, part in enumerate(parts) for _ in range(problem.batch)),
        ambiguity=frozenset({"order"}),
        status="; ".join([*told, f"labels {problem.note}"]),
        diagnostics={
            "objectives": best.objectives.tolist(),
            "statuses": [status.name for status in best.statuses],
            "starts": starts.flatten(0, 1).cpu(),
            "steps_run": best.steps,
            "stepping": best.stepping,
            "labels": problem.note,
        },
    )
