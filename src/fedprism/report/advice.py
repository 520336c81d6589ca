"""Which of the tested defenses to take, why, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedprism.audit.system import PARTLY, RANDOM
from fedprism.evaluation.severity import HIGHER_IS_CLOSER, Leak, worst
from fedprism.evaluation.verdict import (
    CeilingFigure,
    Verdict,
    because,
    ceiling_of,
    leak_of,
    loosest,
    situations,
    verdict,
)
from fedprism.report.configurations import NO_DEFENSE, Configuration, accuracy_in_words, figure_in_words, label
from fedprism.utility.measuring import NOTHING_LEARNED

USUAL_LOSS = "cross_entropy"
TOLERATED_POINTS = 10.0
"""Points of accuracy that a recommended defense may cost, unless the plan says otherwise: a choice of ours."""
MOST_REASONS = 8
"""Defenses of which a reason is stated; a page stays readable."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A defense with everything that was tried against it, and what it costs."""

    name: str
    loss: str
    bare: bool
    rows: tuple[Configuration, ...]
    verdict: Verdict
    leak: Leak
    ceiling: CeilingFigure | None
    """The highest of all its settings; None if one of them is unknown."""
    cost: Configuration | None
    time_factor: float | None

    @property
    def title(self) -> str:
        name = "no defense" if self.bare else self.name
        return name if self.loss in ("", USUAL_LOSS) else f"{name} with the loss {self.loss}"

    @property
    def accuracy(self) -> float | None:
        return None if self.cost is None else self.cost.accuracy

    @property
    def epsilon(self) -> float | None:
        return None if self.cost is None else self.cost.epsilon

    @property
    def failed(self) -> int:
        return sum(row.failed for row in self.rows)

    @property
    def recovered(self) -> tuple[int, int] | None:
        """Of the attack that recovered the largest share: how many samples, of how many."""
        shares = [share for row in self.rows if (share := row.share) is not None and share[1]]
        return max(shares, key=lambda share: (share[0] / share[1], share[0]), default=None)

    @property
    def floor(self) -> float | None:
        """The share of the samples that the best tested attack recovered."""
        return None if self.recovered is None else self.recovered[0] / self.recovered[1]

    @property
    def most(self) -> float:
        """The share of the samples that no bound protects: 1 if no ceiling is known for one of its settings."""
        return max((_unbounded(ceiling_of(members)) for members in situations(self.rows)), default=1.0)

    @property
    def labels_leaked(self) -> float | None:
        return max((row.labels_leaked for row in self.rows if row.labels_leaked is not None), default=None)

    @property
    def known(self) -> bool:
        """Whether someone who knows the defense was among the attackers."""
        return self.bare or any("+defense" in row.cell.threat.split() and row.done for row in self.rows)

    def leakiest(self, metric: str) -> Configuration | None:
        """The configuration that leaks most: by what is said of it, then by the metric's mean."""
        answered = [row for row in self.rows if leak_of(row) is self.leak and row.done]
        return max(answered, key=lambda row: closeness(row, metric), default=None)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do, in sentences. `chosen` is None if nothing that was tested can be recommended."""

    headline: str
    chosen: Option | None = None
    reasons: tuple[str, ...] = ()
    price: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


def closeness(row: Configuration, metric: str) -> float:
    """A metric's mean so that higher is worse for the owner; what was not measured comes last."""
    figure = row.metrics.get(metric)
    if figure is None:
        return -math.inf
    return figure.mean if HIGHER_IS_CLOSER.get(metric, False) else -figure.mean


def options(rows: Sequence[Configuration], time_factors: Mapping[str, float]) -> tuple[Option, ...]:
    """One option per defense (and loss, which decides what training comes to), in the order of the plan."""
    groups: dict[tuple[str, str], list[Configuration]] = {}
    costs: dict[tuple[str, str], Configuration] = {}
    for row in rows:
        place = (row.cell.defense, row.cell.loss)
        if row.cell.kind == "utility":
            costs[place] = row
        elif row.cell.kind == "attack":
            groups.setdefault(place, []).append(row)
    return tuple(
        Option(
            name=name,
            loss=loss,
            bare=name == NO_DEFENSE,
            rows=tuple(members),
            verdict=verdict(members),
            leak=worst(map(leak_of, members)),
            ceiling=_highest(members),
            cost=costs.get((name, loss)),
            time_factor=time_factors.get(costs[name, loss].key) if (name, loss) in costs else None,
        )
        for (name, loss), members in groups.items()
    )


def _unbounded(ceiling: CeilingFigure | None) -> float:
    if ceiling is None:
        return 1.0
    return 0.0 if ceiling.low else ceiling.unbounded


def _highest(rows: Sequence[Configuration]) -> CeilingFigure | None:
    ceilings = [ceiling_of(members) for members in situations(rows)]
    known = [ceiling for ceiling in ceilings if ceiling is not None]
    return max(known, key=lambda each: each.value) if known and len(known) == len(ceilings) else None


def advise(
    choices: Sequence[Option],
    metric: str,
    delta: float | None = None,
    tolerated: float = TOLERATED_POINTS,
    weights: str = "",
) -> Advice:
    """The defense whose ceiling shows protection and that costs least accuracy, then time.

    A defense that attacks merely failed against is not recommended, nor one that costs more than `tolerated` points or
    nobody knows how many.
    `delta` is that at which epsilons are stated; `weights` says where the model's weights come from.
    """
    acceptable = [option for option in choices if _why_not(option, choices, tolerated) is None]
    if not acceptable:
        return _none_acceptable(choices, tolerated)
    chosen = min(acceptable, key=_preference)
    return Advice(
        headline="No defense is needed: the ceiling is low without one." if chosen.bare else f"Use {chosen.title}.",
        chosen=chosen,
        reasons=_reasons(chosen, choices, metric),
        price=_price(chosen, choices, delta),
        cautions=(*_of_weights(weights), *_cautions(chosen, choices)),
    )


def _preference(option: Option) -> tuple[bool, float, float, float]:
    """No defense first if it is enough; accuracy to the point, then the ceiling, then time."""
    accuracy = -1.0 if option.accuracy is None else round(option.accuracy, 2)
    ceiling = math.inf if option.ceiling is None else option.ceiling.value
    return (not option.bare, -accuracy, ceiling, option.time_factor or math.inf)


def _why_not(option: Option, choices: Sequence[Option], tolerated: float) -> str | None:
    """Why an option is not acceptable; None if it is."""
    if option.failed:
        return f"{option.failed} of its runs failed, and what was not tested cannot be recommended."
    if option.verdict is Verdict.LEAKS:
        return f"samples {option.leak}."
    if option.verdict is not Verdict.PROTECTED:
        return because(next(m for m in situations(option.rows) if verdict(m) is not Verdict.PROTECTED))
    if option.bare:
        return None
    lost = _points_lost(option, choices)
    if lost is None:
        return f"it is protected, but {_why_no_utility(option, choices)}."
    if lost > tolerated:
        return f"it costs {lost:.1f} points of accuracy, and {tolerated:g} are tolerated."
    return None


def _why_no_utility(option: Option, choices: Sequence[Option]) -> str:
    """Why nobody knows what an option costs in accuracy: a recommendation needs evidence of that, too."""
    bare = _without(option, choices)
    if bare is not None and bare.cost is not None and _learned_nothing(bare.cost):
        return (
            "its cost is unknown: trained without a defense, the model is not clearly better than always predicting "
            "the most frequent class. Give [utility] more epochs, or another lr"
        )
    return "its cost was not measured: add [utility] to the plan, and a run without a defense"


def _none_acceptable(choices: Sequence[Option], tolerated: float) -> Advice:
    if not choices:
        return Advice(headline="No recommendation: recorded updates do not show what another defense would change.")
    if all(option.verdict is Verdict.NOT_TESTED for option in choices):
        return Advice(headline="No recommendation: no attack ran to completion.")
    defended = [option for option in choices if not option.bare]
    unmeasured = any(
        option.verdict is Verdict.PROTECTED and not option.failed and _points_lost(option, choices) is None
        for option in defended
    )
    headline = "None of the tested defenses is acceptable." if defended else "No defense was tested."
    return Advice(
        headline="No defense can be recommended: the utility was not measured." if unmeasured else headline,
        reasons=tuple(f"{o.title}: {_why_not(o, choices, tolerated)}" for o in choices[:MOST_REASONS]),
        cautions=("Test stronger settings, other defenses, larger batches, or sums over more clients.",),
    )


def _points_lost(option: Option, choices: Sequence[Option]) -> float | None:
    """How many points of accuracy it costs; None if that was not measured, or training without it learned nothing."""
    bare = _without(option, choices)
    if bare is None or bare.cost is None or bare.accuracy is None or option.accuracy is None:
        return None
    return None if _learned_nothing(bare.cost) else 100 * (bare.accuracy - option.accuracy)


def _learned_nothing(cost: Configuration) -> bool:
    return any(NOTHING_LEARNED in status for status in cost.statuses)


def _reasons(chosen: Option, choices: Sequence[Option], metric: str) -> tuple[str, ...]:
    bare = _without(chosen, choices)
    sentences = [because(loosest(situations(chosen.rows)))]
    if bare is not None and bare is not chosen and bare.leak.judged:
        sentences.append(f"Without a defense, samples {bare.leak}.")
    leakiest = chosen.leakiest(metric)
    if leakiest is not None and metric in leakiest.metrics:
        sentences.append(
            f"The best attack, {leakiest.cell.attack} by {leakiest.attacker}, reached a mean {label(metric)} of "
            f"{figure_in_words(metric, leakiest.metrics[metric])}."
        )
    return tuple(sentences)


def _price(chosen: Option, choices: Sequence[Option], delta: float | None) -> tuple[str, ...]:
    bare = _without(chosen, choices)
    if chosen.cost is None or chosen.accuracy is None:
        return ("Its cost was not measured. Add [utility] to the plan.",)
    said = f"Test accuracy {accuracy_in_words(chosen.cost)}"
    if bare is not None and bare is not chosen and bare.accuracy is not None:
        said += f", without a defense {bare.accuracy:.1%}"
    sentences = [f"{said}."]
    if chosen.time_factor is not None:
        sentences.append(f"A training step takes {chosen.time_factor:.2f} times as long.")
    if chosen.epsilon is not None:
        at = "" if delta is None else f" at delta {delta:g}"
        sentences.append(f"It guarantees each example epsilon {chosen.epsilon:.3g}{at} over the whole training.")
    elif not chosen.bare:
        sentences.append("It gives no guarantee of differential privacy.")
    return tuple(sentences)


def _without(option: Option, choices: Sequence[Option]) -> Option | None:
    """The same without a defense."""
    return next((other for other in choices if other.bare and other.loss == option.loss), None)


def _of_weights(weights: str) -> tuple[str, ...]:
    if weights not in (RANDOM, PARTLY):
        return ()
    return (f"It was tested with {weights}; updates of a trained model may leak more or less.",)


def _cautions(chosen: Option, choices: Sequence[Option]) -> tuple[str, ...]:
    sentences = []
    if chosen.labels_leaked:
        sentences.append("Labels still leak under it.")
    if not chosen.known:
        sentences.append("It was not tested against someone who knows the defense; add such a threat to the plan.")
    most = max(len(situations(option.rows)) for option in choices)
    if len(situations(chosen.rows)) < most:
        sentences.append(f"It was tested in {len(situations(chosen.rows))} settings, others in up to {most}.")
    if all(sum(row.outcomes.values()) == 1 for row in chosen.rows):
        sentences.append("Every configuration ran with a single seed: random variation is unknown.")
    return tuple(sentences)
