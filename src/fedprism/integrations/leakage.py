"""Watching a run: cheap checks after each round, and a limit that stops it. They need no ground truth."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedprism.attacks.dense_inversion import dense_inversion
from fedprism.attacks.evidence import evidence
from fedprism.client.observed import adds_gradients, direction
from fedprism.errors import BadInput, FedprismError
from fedprism.inspection import inspect
from fedprism.integrations.facts import Leakage
from fedprism.runner import placed, run
from fedprism.solvers.closed_form.labels import CROWDED_RATIO, LabelStatus, label_counts
from fedprism.types import Knowledge, Observation, Round, Update

log = logging.getLogger("fedprism")

MOST_LETTERS = 40
"""Letters of a client's name that a message shows."""
MOST_SAMPLES = 4096
"""Updates of more samples than this are not looked at: a layer tells hardly any of so many, and looking takes long."""


class LeakageLimit(FedprismError):
    """A round gave away more than the watch allows: the run ends here."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """After each round: dense inversion, label recovery, the updates' lengths, and inspection of the model sent.

    stop_above: largest fraction of samples that may be read off an update. stop_on_findings: stop if inspection finds
    something serious.
    """

    stop_above: float | None = None
    stop_on_findings: bool = False

    def __post_init__(self) -> None:
        if self.stop_above is not None and not 0 <= self.stop_above <= 1:
            raise BadInput(f"stop_above must be a fraction from 0 to 1, not {self.stop_above}. 0.1 is a tenth.")

    def look(self, rounds: Sequence[Round], model: nn.Module | None, knowledge: Knowledge) -> Leakage:
        """What the checks get out of the updates of one round, the worst of them."""
        read = [(part, round_) for round_ in rounds if (part := samples_read(round_, model, knowledge)) is not None]
        samples, worst = max(read, key=lambda pair: pair[0], default=(None, None))
        labels = [part for round_ in rounds if (part := labels_read(round_, knowledge)) is not None]
        sent = {id(round_.params): round_.params for round_ in rounds}  # the same object for every client
        return Leakage(
            samples=samples,
            client=_client(worst) if samples else None,
            labels=max(labels, default=None),
            norm=max((length(round_.update) for round_ in rounds), default=None),
            serious=sum(len(inspect(params).serious) for params in sent.values()),
        )

    def judge(self, index: int, leakage: Leakage) -> None:
        """Log the leakage, and raise `LeakageLimit` where it is more than allowed."""
        samples, labels = ("unknown" if part is None else f"{part:.2f}" for part in (leakage.samples, leakage.labels))
        whose = "" if leakage.client is None else f" of {leakage.client[:MOST_LETTERS]}"
        log.warning(
            f"round {index}: leakage {samples} of samples{whose}, {labels} of labels; longest update "
            f"{leakage.norm or 0.0:.3g}; {leakage.serious} serious findings on the model sent"
        )
        if self.stop_above is not None and (leakage.samples or 0.0) > self.stop_above:
            raise LeakageLimit(
                f"{samples}{whose} in round {index} can be read from an update, and at most "
                f"{self.stop_above:.0%} of the samples are allowed: the run is stopped. Add a defense, or use "
                "larger batches."
            )
        if self.stop_on_findings and leakage.serious:
            raise LeakageLimit(
                f"round {index} has {leakage.serious} serious signs of tampering with the model: the run is "
                "stopped. Look at the capture with fedprism inspect."
            )


def _client(round_: Round | None) -> str | None:
    """Whose update it is, where that is one client and known."""
    return round_.participants[0] if round_ is not None and round_.participants and round_.clients == 1 else None


def samples_read(round_: Round, model: nn.Module | None, knowledge: Knowledge) -> float | None:
    """The fraction of the samples behind an update that dense inversion recovers, by the rule of reports.

    None where it does not apply, or nobody can tell.
    """
    size = sum(round_.examples) if round_.examples is not None else knowledge.batch_size
    if model is None or knowledge.input_shape is None or not isinstance(size, int) or size > MOST_SAMPLES:
        return None
    known = replace(knowledge, batch_size=size, labels=None)
    observation = Observation(model=model, rounds=(round_,), knowledge=known)
    try:
        reconstruction = run(dense_inversion(), observation)
    except (FedprismError, RuntimeError, TypeError, ValueError) as error:
        # Refusals are unknowns; so is a model that cannot be called with one batch: a check must not end a run.
        log.info("dense inversion does not apply: %s", error)
        return None
    if reconstruction.inputs is None or len(reconstruction.inputs) == 0:
        return 0.0
    found = evidence(placed(observation, frozenset(observation.granted()), torch.device("cpu")), reconstruction)
    if found.recovered:
        return min(1.0, found.samples / size)
    return None if found.residual is None else 0.0


def labels_read(round_: Round, knowledge: Knowledge) -> float | None:
    """1 if the signs of the last bias, taken for the output layer's, tell every label, else 0; None without a bias."""
    last = next((name for name in reversed(list(round_.update)) if name.endswith("bias")), None)
    size = sum(round_.examples) if round_.examples is not None else knowledge.batch_size
    if last is None or not isinstance(size, int) or knowledge.loss not in (None, "cross_entropy"):
        return None
    if len(round_.update[last]) < CROWDED_RATIO * size:
        return 0.0
    gradient = direction(round_, replace(knowledge, batch_size=size))[last].double()
    if adds_gradients(round_, knowledge):
        return float(label_counts(gradient, size).status is LabelStatus.TRUSTED)
    return float(int((gradient < 0).sum()) == size)  # sizes count labels only in sums of gradients; signs always tell


def length(update: Update) -> float:
    """The Euclidean length of all floating-point tensors as one vector."""
    squares = [t.detach().double().square().sum() for t in update.values() if t.dtype.is_floating_point]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
