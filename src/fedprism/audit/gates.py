"""The checks that stop a pipeline (`--fail-above psnr=15`), and the conclusion of an audit: verdict and exit code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedprism.audit.summary import Summary, title
from fedprism.errors import BadInput
from fedprism.evaluation.severity import HIGHER_IS_CLOSER, number
from fedprism.evaluation.verdict import MEANING, Verdict, ceiling_of, situations, verdict
from fedprism.naming import counted, nearest

Kind = Literal["above", "below", "ceiling-above"]
SINGLE = {"above": "max-", "below": "min-"}
"""What a metric begins with if a check is about the best-recovered sample and not about the mean."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """`--fail-above psnr=15`: fails if any configuration's mean over samples and seeds is above.

    `max-psnr=15` checks the best-recovered sample. `--fail-below mse=0.01` is for metrics that are lower where more
    leaks, `--fail-ceiling-above 20` for the bound on every attacker, known to the tested attacks or not.
    """

    metric: str = ""
    limit: float
    single: bool = False
    kind: Kind = "above"

    def __str__(self) -> str:
        if self.kind == "ceiling-above":
            return f"{self.limit:g}"
        return f"{SINGLE[self.kind] if self.single else ''}{self.metric}={self.limit:g}"

    @property
    def flag(self) -> str:
        return f"--fail-{self.kind} {self}"

    def value(self, row: Summary) -> float | None:
        """What is checked in one configuration; None if it was not measured."""
        if self.kind == "ceiling-above":
            ceiling = ceiling_of([row])
            return None if ceiling is None else ceiling.value
        figure = row.figure(self.metric)
        return None if figure is None else figure.closest if self.single else figure.mean

    def is_open(self, rows: Sequence[Summary]) -> bool:
        """Whether nothing shows that one setting is within the limit, nor that it is beyond.

        That it leaks less than the limit is no evidence either: a longer attack may recover more.
        """
        ceiling = ceiling_of(rows)
        if self.kind == "ceiling-above":
            return ceiling is None
        if any(self.tripped(row) is not None for row in rows):
            return False
        if verdict(rows) is Verdict.LEAKS:
            return ceiling is None or ceiling.metric != self.metric or ceiling.value > self.limit
        return verdict(rows) is not Verdict.PROTECTED

    def tripped(self, row: Summary) -> float | None:
        """The value beyond the limit, or one that is no number; else None."""
        value = self.value(row)
        within = value is None or (value >= self.limit if self.kind == "below" else value <= self.limit)
        return None if within else value


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The result of a check: it passes only with evidence that nothing is beyond the limit."""

    gate: Gate
    worst: str | None
    """The configuration that leaks most by this check."""
    value: float | None
    beyond: int
    """How many configurations are beyond the limit."""
    failed_runs: int
    inconclusive: int
    """Settings without evidence: what was recovered is within the limit, and no ceiling shows that more cannot be."""

    @property
    def passed(self) -> bool:
        return self.value is not None and not self.beyond and not self.failed_runs and not self.inconclusive

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it fails, one sentence each."""
        if self.value is None:
            return (f"Nothing was measured for {self.gate.flag}.",)
        sentences = []
        if self.beyond and self.gate.kind == "ceiling-above" and math.isinf(self.value):
            sentences.append(f"{self.worst}: no ceiling is known; {self.beyond} are unknown or beyond the limit.")
        elif self.beyond:
            value, limit = (number(self.gate.metric, each) for each in (self.value, self.gate.limit))
            sentences.append(f"{self.worst}: {value} is beyond the limit of {limit}; {self.beyond} in all.")
        if self.failed_runs:
            sentences.append(f"{counted(self.failed_runs, 'run')} failed; what was not tested cannot pass.")
        if self.inconclusive:
            sentences.append(
                f"{counted(self.inconclusive, 'setting')} inconclusive: tested attacks stay within the limit, a better "
                "one may not (--allow-inconclusive lets them pass)."
            )
        return tuple(sentences)

    def as_dict(self) -> dict[str, Any]:
        about = {"check": str(self.gate), "flag": self.gate.flag, **vars(self.gate), "passed": self.passed}
        return {**about, **{name: value for name, value in vars(self).items() if name != "gate"}, "why": self.reasons}


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What an audit comes to. Made once per command, and kept in results.json."""

    verdict: Verdict
    weights: str
    """Where the model's weights come from."""
    gates: tuple[Judgement, ...] = ()
    allow_untested: bool = False

    @property
    def exit_code(self) -> int:
        """2 if nothing was tested, 1 if a check failed, else 0."""
        if self.verdict is Verdict.NOT_TESTED:
            return 0 if self.allow_untested else 2
        return 0 if all(gate.passed for gate in self.gates) else 1

    @property
    def sentences(self) -> tuple[str, ...]:
        """The verdict and why checks fail, for terminals and pull requests."""
        said = f"{self.verdict.upper()} ({self.weights}): {MEANING[self.verdict]}."
        return (said, *(f"Failed {gate.gate.flag}: {' '.join(gate.reasons)}" for gate in self.gates if not gate.passed))

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "weights": self.weights,
            "exit_code": self.exit_code,
            "sentences": self.sentences,
            "checks": [gate.as_dict() for gate in self.gates],
        }


@dataclass(frozen=True, kw_only=True)
class Checks:
    """The checks that were asked for."""

    gates: tuple[Gate, ...] = ()
    allow_inconclusive: bool = False
    allow_untested: bool = False

    def concluded(self, rows: Sequence[Summary], weights: str) -> Conclusion:
        """The verdict on the configurations of an audit, and the result of each check."""
        attacks = [row for row in rows if row.cell["kind"] != "utility"]
        return Conclusion(
            verdict=verdict(attacks),
            weights=weights,
            gates=tuple(self._judged(gate, attacks, sum(row.failed for row in rows)) for gate in self.gates),
            allow_untested=self.allow_untested,
        )

    def _judged(self, gate: Gate, rows: Sequence[Summary], failed_runs: int) -> Judgement:
        values = [(value, row) for row in rows if (value := gate.value(row)) is not None]
        choose = min if gate.kind == "below" else max
        value, worst = choose(values, key=lambda pair: pair[0], default=(None, None))
        open_settings = sum(map(gate.is_open, situations(rows)))
        return Judgement(
            gate=gate,
            worst=None if worst is None else title(worst.cell),
            value=value,
            beyond=sum(gate.tripped(row) is not None for row in rows),
            failed_runs=failed_runs,
            inconclusive=0 if self.allow_inconclusive else open_settings,
        )


def parse_gate(text: str, metrics: Sequence[str], kind: Literal["above", "below"] = "above") -> Gate:
    """A check from METRIC=VALUE, about one of these metrics."""
    name, equals, limit_text = text.partition("=")
    single = name.startswith(SINGLE[kind])
    metric = name.removeprefix(SINGLE[kind])
    usable = [word for word in metrics if word in HIGHER_IS_CLOSER and HIGHER_IS_CLOSER[word] == (kind == "above")]
    example = f"{usable[0] if usable else 'psnr' if kind == 'above' else 'mse'}={15 if kind == 'above' else 0.01}"
    try:
        limit = float(limit_text)
        if not equals or not math.isfinite(limit):
            raise ValueError
    except ValueError as error:
        raise BadInput(f"--fail-{kind} takes METRIC=VALUE, not '{text}'. Example: --fail-{kind} {example}.") from error
    if metric in HIGHER_IS_CLOSER and HIGHER_IS_CLOSER[metric] != (kind == "above"):
        other, direction = ("below", "lower") if kind == "above" else ("above", "higher")
        raise BadInput(
            f"--fail-{kind} cannot check {metric}: {direction} values mean a larger leak. Write --fail-{other} {text}."
        )
    if metric not in usable:
        hint = nearest(metric, usable) if usable else f"add {example.partition('=')[0]} to scores.metrics of the plan."
        raise BadInput(f"the plan has no metric '{metric}' for --fail-{kind}; {hint}")
    return Gate(metric=metric, limit=limit, single=single, kind=kind)
