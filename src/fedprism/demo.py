"""The embedded audit: photographs that need no download, two networks, and what a defense changes.

Nothing here knows how a case ends. Cases are simulated, attacked and scored like any other, and every sentence about a
result is made from the numbers that were measured.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

import fedprism as fp
from fedprism import results
from fedprism.attacks import Attack
from fedprism.defenses import Defense, GaussianNoise, Prune

FAITHFUL_PSNR = 30.0
RECOGNISABLE_SSIM = 0.5
TRACES_SSIM = 0.2
TRACES_AVD = 0.9
"""Relative to a blank image: edges must be clearly nearer to the original's than no edges at all."""
MATCHING_ITERATIONS = 150
"""Enough for the undefended photograph to come back on most seeds, in about fifteen seconds."""


class Reading(StrEnum):
    """How much of a picture came back, worst for its owner first. The value is what is said of the picture."""

    FAITHFUL = "came back faithfully"
    RECOGNISABLE = "came back recognisable"
    TRACES = "came back in traces"
    GONE = "did not come back"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A client's batch of photographs (by their numbers in the data set) and the network it is training."""

    name: str
    title: str
    images: tuple[int, ...]
    network: Callable[[int], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attack on one target. `label` names the defense; `defended` says what the client does before sending."""

    target: Target
    attack: Attack
    attack_name: str
    defense: Defense = dataclasses.field(default_factory=fp.chain)
    label: str = "no defense"
    defended: str = "the client sends its gradient as it is"
    threat: fp.ThreatModel = fp.threats.honest_but_curious

    @property
    def undefended(self) -> bool:
        return self.defense == fp.chain()

    @property
    def title(self) -> str:
        """Short, unique in the audit."""
        return f"{self.target.name}, {self.label}{', attacker knows it' if self.knows_defense else ''}"

    @property
    def knows_defense(self) -> bool:
        return "defense" in self.threat.grants

    @property
    def attacker(self) -> str:
        return f"the server, which follows the protocol{' and knows the defense' if self.knows_defense else ''}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a case. Pictures are pixels in [0, 1], (images, channels, height, width), both in one order."""

    case: Case
    names: tuple[str, ...]
    originals: Tensor
    recovered: Tensor
    scores: fp.Scores
    residual: float | None
    knowledge_used: tuple[str, ...]
    status: str

    @property
    def readings(self) -> tuple[Reading, ...]:
        """How much of each picture came back."""
        values = self.scores.values
        return tuple(map(_reading, values["psnr"], values["ssim"], values["avd"], values["avd_floor"]))

    @property
    def worst(self) -> Reading:
        """The reading of the picture that fared worst, seen by its owner."""
        return min(self.readings, key=list(Reading).index)

    @property
    def psnr(self) -> float:
        return self.scores.mean("psnr")


def cases(iterations: int = MATCHING_ITERATIONS) -> tuple[Case, ...]:
    """The audit's cases. The same attack, with the same budget, meets the update without and with defenses."""
    batch = Target(
        name="8 photos",
        title="A batch of eight photographs, a fully connected network",
        images=tuple(range(8)),
        network=lambda seed: fp.models.build("fc2", seed=seed, input_shape=(3, 32, 32), hidden=256, classes=10),
    )
    single = Target(
        name="1 photo",
        title="One photograph, a small convolutional network (LeNet with sigmoids)",
        images=(1,),
        network=lambda seed: fp.models.uniform_(
            fp.models.build("lenet", input_shape=(3, 32, 32), classes=10), seed=seed
        ),
    )
    inversion = Case(target=batch, attack=fp.attacks.dense_inversion(), attack_name="dense-inversion")
    matching = Case(
        target=single, attack=dataclasses.replace(fp.attacks.idlg(), iterations=iterations), attack_name="idlg"
    )
    wide = Target(
        name="1 photo, wide",
        title="One photograph, a wider convolutional network with ReLUs",
        images=(1,),
        network=lambda seed: fp.models.build(
            "lenet", seed=seed, input_shape=(3, 32, 32), classes=10, width=32, activation="relu"
        ),
    )
    smooth = dataclasses.replace(
        fp.attacks.inverting_gradients(), iterations=4 * iterations, priors=(fp.attacks.TotalVariation(0.01),)
    )
    angle = Case(target=wide, attack=smooth, attack_name="inverting-gradients")
    informed = fp.threats.honest_but_curious.granting("defense")
    return (
        inversion,
        _pruned(inversion, 0.9),
        _noised(inversion, 0.03),
        matching,
        _noised(matching, 0.003),
        angle,
        _pruned(angle, 0.97),
        dataclasses.replace(_pruned(angle, 0.97), threat=informed),
    )


def _pruned(case: Case, ratio: float) -> Case:
    defended = f"the client sends only the largest {1 - ratio:.0%} of each tensor's entries and zeroes the rest"
    return dataclasses.replace(case, defense=Prune(ratio), label=f"pruning {ratio:.0%}", defended=defended)


def _noised(case: Case, std: float) -> Case:
    defended = f"the client adds Gaussian noise of standard deviation {std} to every entry"
    return dataclasses.replace(case, defense=GaussianNoise(std), label=f"noise {std}", defended=defended)


def audit(
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    iterations: int = MATCHING_ITERATIONS,
    announce: Callable[[str], None] = lambda title: None,
) -> tuple[Outcome, ...]:
    """Play every case; `announce` is told the title of each before it starts."""
    outcomes = []
    with _one_thread():
        for case in cases(iterations):
            announce(case.title)
            outcomes.append(play(case, seed=seed, device=device))
    return tuple(outcomes)


def play(case: Case, *, seed: int = 0, device: str | torch.device | None = None) -> Outcome:
    """Simulate the case, attack what the server sees, and compare with the truth."""
    photos = fp.data.load("photos", size=32, crops=1)
    batch = photos.batch(case.target.images)
    scenario = fp.Scenario(model=case.target.network(seed), clients=[batch], defense=case.defense)
    observation, truth = fp.simulate(scenario, case.threat, seed=seed)
    found = fp.run(case.attack, observation, seed=seed, device=device)
    matched = fp.match(found, truth)
    return Outcome(
        case=case,
        names=tuple(photos.class_names[label] for label in batch.labels.tolist()),
        originals=matched.truth,
        recovered=matched.found,
        scores=fp.score(found, truth),
        residual=fp.residual(observation, found),
        knowledge_used=tuple(sorted(found.knowledge_used)),
        status=str(found.status),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from a second thread, and on busy cores threads wait minutes for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- what it means ---------------------------------------------------------------------------------------------------


def verdict(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """What happened, what the defense changed and what knowing it changed, in plain words."""
    sentences = [f"{_what_came_back(outcome)} {_labels(outcome)}"]
    bare = next(o for o in outcomes if o.case.undefended and o.case.target == outcome.case.target)
    if outcome is not bare:
        sentences.append(_what_the_defense_changed(outcome, bare))
    unaware = next((o for o in outcomes if outcome.case.knows_defense and _differ_in_threat(o, outcome)), None)
    if unaware is not None:
        gain = outcome.psnr - unaware.psnr
        effect = "the conclusion is the same" if outcome.worst is unaware.worst else f"now it {outcome.worst}"
        sentences.append(
            f"An attacker who knows the defense gets {gain:+.1f} dB compared with one who does not: {effect}."
        )
    return " ".join(sentences)


def headline(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """The audit in two or three sentences."""
    bare = [o for o in outcomes if o.case.undefended]
    readings = [reading for o in bare for reading in o.readings]
    readable = sum(reading in (Reading.FAITHFUL, Reading.RECOGNISABLE) for reading in readings)
    defended = [o for o in outcomes if not o.case.undefended]
    stopped = [o for o in defended if o.worst is Reading.GONE]
    leaking = [o.case.title for o in defended if o.worst is not Reading.GONE]
    sentences = [
        f"Without a defense, {readable} of {len(readings)} photographs could be read from the update alone.",
        f"Of {len(defended)} defended cases, {len(stopped)} stopped the attack.",
    ]
    if leaking:
        sentences.append(f"Not enough: {'; '.join(leaking)}.")
    return tuple(sentences)


def _reading(psnr: float | None, ssim: float | None, avd: float | None, floor: float | None) -> Reading:
    """No single metric is trusted with a "no": noise hides a picture from AVD, a colour cast hides it from PSNR."""
    if psnr is None or ssim is None or avd is None or floor is None:
        return Reading.GONE
    if psnr >= FAITHFUL_PSNR:
        return Reading.FAITHFUL
    if ssim >= RECOGNISABLE_SSIM:
        return Reading.RECOGNISABLE
    return Reading.TRACES if avd < TRACES_AVD * floor or ssim >= TRACES_SSIM else Reading.GONE


def _what_came_back(outcome: Outcome) -> str:
    total, counts = len(outcome.readings), Counter(outcome.readings)
    if total == 1:
        said = f"The photograph {outcome.worst}"
    elif outcome.worst is Reading.GONE:
        said = f"None of the {total} photographs came back"
    elif len(counts) == 1:
        said = f"All {total} photographs {outcome.worst}"
    else:
        said = f"Of {total} photographs " + ", ".join(
            f"{counts[reading]} {reading}" for reading in Reading if counts[reading]
        )
    return f"{said} ({'mean ' if total > 1 else ''}PSNR {outcome.psnr:.1f} dB)."


def _labels(outcome: Outcome) -> str:
    labels = "label" if len(outcome.names) == 1 else "labels"
    if outcome.scores.labels_match is None:
        return f"The attack gives no {labels}."
    return f"The {labels} leaked as well." if outcome.scores.labels_match else f"The {labels} it gives are not right."


def _what_the_defense_changed(outcome: Outcome, bare: Outcome) -> str:
    defense = outcome.case.label.capitalize()
    change = f"the PSNR went from {bare.psnr:.1f} to {outcome.psnr:.1f} dB"
    if outcome.worst is Reading.GONE:
        return f"{defense} stopped this attack: {change}."
    if outcome.worst is Reading.TRACES:
        return f"{defense} is not enough: {change}, but what the photographs show can still be made out."
    return f"{defense} hardly helps: {change}, and the picture can still be read."


def _differ_in_threat(first: Outcome, second: Outcome) -> bool:
    return first is not second and dataclasses.replace(first.case, threat=second.case.threat) == second.case


# --- how it is shown -------------------------------------------------------------------------------------------------


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row a case, for the terminal."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    numbers = {"PSNR dB": "psnr", "SSIM": "ssim", "AVD": "avd", "blank": "avd_floor"}
    for column in ("data", "defense", *numbers, "labels", "pictures"):
        shown.add_column(column, justify="right" if column in numbers else "left")
    for outcome in outcomes:
        case = outcome.case
        shown.add_row(
            case.target.name,
            f"{case.label}{', known' if case.knows_defense else ''}",
            *(f"{outcome.scores.mean(metric):.{1 if metric == 'psnr' else 2}f}" for metric in numbers.values()),
            {True: "leaked", False: "wrong", None: "none"}[outcome.scores.labels_match],
            outcome.worst.name.lower(),
        )
    return shown


def results_json(outcomes: Sequence[Outcome], seed: int) -> bytes:
    """Every number and sentence of the audit. No clock, host or path: two runs of one seed compare equal."""
    return results.as_json(
        {
            "format": "fedprism-demo/1",
            "headline": headline(outcomes),
            "records": [dataclasses.asdict(_record(outcome, seed)) for outcome in outcomes],
            "verdicts": [verdict(outcome, outcomes) for outcome in outcomes],
        }
    )


def _record(outcome: Outcome, seed: int) -> fp.Record:
    case, scores = outcome.case, outcome.scores
    return fp.Record(
        kind="attack",
        cell={
            "case": case.title,
            "attack": case.attack_name,
            "settings": repr(case.attack),
            "defense": repr(case.defense),
            "threat": case.threat.name,
            "images": outcome.names,
        },
        knowledge_used=outcome.knowledge_used,
        scores={
            **scores.values,
            "labels_match": scores.labels_match,
            "resolved": sorted(scores.resolved),
            "readings": [reading.name.lower() for reading in outcome.readings],
        },
        residual=outcome.residual,
        status=outcome.status,
        seed=seed,
        versions=results.versions(),
    )
