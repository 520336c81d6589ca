"""What each defense prevents and costs, one line per defense: for the terminal and for pull requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from fedprism.audit.summary import Summary, defense_title
from fedprism.evaluation.severity import Leak, number
from fedprism.evaluation.verdict import Verdict, ceiling_of, leak_of, loosest, situations, verdict

COLUMNS = ("defense", "verdict", "recovered", "ceiling", "accuracy", "slowdown", "epsilon")


@dataclass(frozen=True, kw_only=True)
class DefenseLine:
    """One defense over all that was tried against it. Empty text: not measured."""

    defense: str
    verdict: Verdict
    recovered: str
    """What the attack that recovered most got."""
    ceiling: str
    accuracy: str
    time_factor: str
    epsilon: str

    @property
    def cells(self) -> tuple[str, ...]:
        """In the order of `COLUMNS`."""
        fields = (self.recovered, self.ceiling, self.accuracy, self.time_factor, self.epsilon)
        return (self.defense, str(self.verdict), *fields)


def by_defense(rows: Sequence[Summary]) -> list[DefenseLine]:
    """In the order of the plan."""
    groups: dict[str, list[Summary]] = {}
    for row in rows:
        groups.setdefault(defense_title(row.cell), []).append(row)
    return [_line(defense, members) for defense, members in groups.items()]


def table(lines: Sequence[DefenseLine]) -> Table:
    """For the terminal, without the columns that no line fills."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    filled = [place for place in range(len(COLUMNS)) if any(line.cells[place] for line in lines)]
    for place in filled:
        shown.add_column(COLUMNS[place], overflow="fold", no_wrap=place > 0)
    for line in lines:
        shown.add_row(*(line.cells[place] for place in filled))
    return shown


def _line(defense: str, rows: Sequence[Summary]) -> DefenseLine:
    attacks = [row for row in rows if row.cell["kind"] != "utility"]
    cost = next((row for row in rows if row.cell["kind"] == "utility" and row.accuracy is not None), None)
    worst = max(attacks, key=_told, default=None)
    ceiling = ceiling_of(loosest(situations(attacks))) if attacks else None
    return DefenseLine(
        defense=defense,
        verdict=verdict(attacks),
        recovered="" if worst is None else _recovered(worst),
        ceiling="" if ceiling is None or not ceiling.known else number(ceiling.metric, ceiling.value),
        accuracy="" if cost is None or cost.accuracy is None else f"{cost.accuracy:.1%}",
        time_factor="" if cost is None or cost.time_factor is None else f"{cost.time_factor:.2f}x",
        epsilon="" if cost is None or cost.epsilon is None else f"{cost.epsilon:.3g}",
    )


def _told(row: Summary) -> tuple[bool, float, int, int]:
    """The order of attacks: those that recovered the largest share of the samples last."""
    share = row.recovered / row.samples if row.samples else 0.0
    return leak_of(row) is not Leak.UNTESTED, share, row.recovered, -list(Leak).index(leak_of(row))


def _recovered(row: Summary) -> str:
    """How many samples the attack recovered, at least recognisably."""
    leak = leak_of(row)
    if not leak.judged:
        return leak.value
    return f"{row.recovered} of {row.samples}"
