"""Which of the tested defenses to take, why, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedprism.evaluation.severity import HIGHER_IS_CLOSER, Leak, worst
from fedprism.report.configurations import NO_DEFENSE, Configuration, figure_in_words, label, number
from fedprism.report.judging import judge
from fedprism.utility.measuring import NOTHING_LEARNED

USUAL_LOSS = "cross_entropy"
MUCH_ACCURACY = 0.1
"""A loss of accuracy that asks for a second look."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A defense with everything that was tried against it, and what it costs."""

    name: str
    loss: str
    bare: bool
    rows: tuple[Configuration, ...]
    leak: Leak
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
    def tested(self) -> int:
        """How many configurations were judged."""
        return sum(judge(row).judged for row in self.rows)

    @property
    def labels_leaked(self) -> float | None:
        return max((row.labels_leaked for row in self.rows if row.labels_leaked is not None), default=None)

    @property
    def known(self) -> bool:
        """Whether someone who knows the defense was among the attackers."""
        return self.bare or any("+defense" in row.cell.threat.split() and judge(row).judged for row in self.rows)

    def leakiest(self, metric: str) -> Configuration | None:
        """The configuration that fared worst: by what is said of it, then by the metric's mean."""
        judged = [row for row in self.rows if judge(row) is self.leak and row.done]
        return min(judged, key=lambda row: -closeness(row, metric), default=None)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do, in sentences. `chosen` is None where nothing that was tested can be recommended."""

    headline: str
    chosen: Option | None
    reasons: tuple[str, ...] = ()
    price: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    alternatives: tuple[Option, ...] = ()


def closeness(row: Configuration, metric: str) -> float:
    """A metric's mean so that higher is worse for the owner; what was not measured comes last."""
    figure = row.metrics.get(metric)
    if figure is None:
        return -math.inf
    return figure.mean if HIGHER_IS_CLOSER.get(metric, False) else -figure.mean


def options(rows: Sequence[Configuration], time_factors: Mapping[str, float]) -> tuple[Option, ...]:
    """One option a defense (and loss, which decides what training comes to), in the order of the plan."""
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
            leak=worst(map(judge, members)),
            cost=costs.get((name, loss)),
            time_factor=time_factors.get(costs[name, loss].key) if (name, loss) in costs else None,
        )
        for (name, loss), members in groups.items()
    )


def advise(choices: Sequence[Option], metric: str, delta: float | None = None) -> Advice:
    """The option under which least came back; of several, the one that costs least accuracy.

    `delta` is that at which epsilons are stated.
    """
    eligible = [option for option in choices if option.leak.judged and not option.failed]
    if not eligible:
        return Advice(headline=_why_none(choices), chosen=None)
    best = min(eligible, key=lambda option: _preference(option, metric))
    others = tuple(o for o in eligible if o is not best and _undominated(o, eligible))
    if best.leak.readable:
        return Advice(
            headline=f"Nothing that was tested is enough: even with {best.title}, samples {best.leak}.",
            chosen=None,
            cautions=("Test stronger settings, other defenses, larger batches, or sums over more clients.",),
            alternatives=(best, *others),
        )
    return Advice(
        headline=_headline(best),
        chosen=best,
        reasons=_reasons(best, choices, metric),
        price=_price(best, choices, delta),
        cautions=_cautions(best, choices),
        alternatives=others,
    )


def _preference(option: Option, metric: str) -> tuple[float, float, float]:
    leakiest = option.leakiest(metric)
    return (
        -list(Leak).index(option.leak),
        -(option.accuracy if option.accuracy is not None else -1.0),
        closeness(leakiest, metric) if leakiest is not None else 0.0,
    )


def _undominated(option: Option, eligible: Sequence[Option]) -> bool:
    """No other leaks at most as much and costs less, or leaks less at the same cost."""
    if option.accuracy is None:
        return False
    severity = list(Leak).index
    return not any(
        other is not option
        and other.accuracy is not None
        and severity(other.leak) >= severity(option.leak)
        and other.accuracy >= option.accuracy
        and (severity(other.leak) > severity(option.leak) or other.accuracy > option.accuracy)
        for other in eligible
    )


def _why_none(choices: Sequence[Option]) -> str:
    if not choices:
        return "No recommendation: recorded updates show what is, not what another defense would change."
    if any(option.failed for option in choices):
        return "No recommendation: cells failed, and what was not tested cannot be recommended."
    return "No recommendation: no configuration has a result."


def _headline(best: Option) -> str:
    if not best.bare:
        return f"Use {best.title}."
    return "No defense is needed against what was tested" + (f": {best.title}." if best.title != "no defense" else ".")


def _reasons(best: Option, choices: Sequence[Option], metric: str) -> tuple[str, ...]:
    bare = _without(best, choices)
    sentences = [f"Under it, samples {best.leak} in any of {best.tested} tested configurations."]
    if best.leak is Leak.TRACES:
        sentences = [f"Under it, samples {best.leak} at most, which is the least of all {len(choices)} options."]
    if best.bare:
        sentences = [f"Even without one, samples {best.leak}{' at most' if best.leak is Leak.TRACES else ''}."]
    if bare is not None and bare is not best and bare.leak.judged:
        sentences.append(f"Without a defense they {bare.leak}.")
    leakiest = best.leakiest(metric)
    if leakiest is not None and metric in leakiest.metrics:
        figure = leakiest.metrics[metric]
        sentences.append(
            f"The attack that did best against it, {leakiest.cell.attack} by {leakiest.attacker}, reached a mean "
            f"{label(metric)} of {figure_in_words(metric, figure)}"
            + (f"; the best guess reaches {number(metric, figure.null)}." if figure.null is not None else ".")
        )
    rivals = [o for o in choices if o is not best and o.leak is best.leak and o.accuracy is not None and not o.failed]
    if rivals and best.accuracy is not None:
        sentences.append("Of the options that leak as little it costs the least accuracy.")
    return tuple(sentences)


def _price(best: Option, choices: Sequence[Option], delta: float | None) -> tuple[str, ...]:
    bare = _without(best, choices)
    if best.accuracy is None:
        return ("What it costs was not measured: add [utility] to the plan.",)
    interval = best.cost.interval if best.cost is not None else None
    said = f"Test accuracy {best.accuracy:.1%}"
    if interval is not None:
        said += f" (95 % interval over seeds {interval[0]:.1%} to {interval[1]:.1%})"
    if bare is not None and bare is not best and bare.accuracy is not None:
        said += f", without a defense {bare.accuracy:.1%}"
    sentences = [f"{said}."]
    if best.time_factor is not None:
        sentences.append(f"A step takes {best.time_factor:.2f} times as long.")
    if best.epsilon is not None:
        at = "" if delta is None else f" at delta {delta:g}"
        sentences.append(f"It guarantees every example epsilon {best.epsilon:.3g}{at} over the whole training.")
    elif not best.bare:
        sentences.append("It gives no guarantee of differential privacy.")
    return tuple(sentences)


def _without(best: Option, choices: Sequence[Option]) -> Option | None:
    """The same without a defense."""
    return next((option for option in choices if option.bare and option.loss == best.loss), None)


def _costs_much(best: Option, bare: Option | None) -> bool:
    if bare is None or bare.accuracy is None or best.accuracy is None:
        return False
    return bare.accuracy - best.accuracy > MUCH_ACCURACY


def _cautions(best: Option, choices: Sequence[Option]) -> tuple[str, ...]:
    sentences = []
    bare = _without(best, choices) or best
    if bare.cost is not None and NOTHING_LEARNED in bare.cost.statuses:
        sentences.append(
            "Trained without a defense the model is no better than always answering with the most frequent class, so "
            "that accuracies say nothing about the price: give [utility] more epochs, or another lr."
        )
    if _costs_much(best, _without(best, choices)):
        sentences.append("It costs much accuracy: test settings between it and those that leak more.")
    if best.labels_leaked:
        sentences.append("Labels still leak under it.")
    if not best.known:
        sentences.append("It was not tested against someone who knows the defense; add such a threat to the plan.")
    most = max(option.tested for option in choices)
    if best.tested < most:
        sentences.append(f"It was tested in {best.tested} configurations, others in up to {most}.")
    if all(sum(row.outcomes.values()) == 1 for row in best.rows):
        sentences.append("Every configuration ran with a single seed: nothing says how much chance there is in it.")
    return tuple(sentences)
