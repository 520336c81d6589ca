"""The figures of the mixing-gradients study, from the rows of its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedprism.recipes.base import Outcome, Row
from fedprism.recipes.mixing_accuracy import ACCURACY
from fedprism.recipes.mixing_charts import Drawing, Rate, bars, maps, page, points
from fedprism.recipes.mixing_direct import EQUAL, RANDOM
from fedprism.recipes.mixing_trials import ATTACKS, CRITERIA, FACES, FAITHFUL, SEEN


def strongest(row: Row, criterion: str) -> Rate | None:
    """That of the strongest of the attacks."""
    found = [entry for name in ATTACKS if isinstance(entry := row.entries.get(name), Outcome)]
    if not found:
        return None
    best = max(found, key=lambda entry: entry.mean(criterion))
    intervals = best.details["intervals"]
    assert isinstance(intervals, Mapping)
    return Rate(best.mean(criterion), *intervals[criterion])


def recovery_bars(rows: Sequence[Row]) -> list[Drawing]:
    """Figure 5: the dense layer, for both thresholds of the paper, and where a blank image has to be beaten."""
    own = [row for row in rows if row.cell["network"] == "dense"]
    efforts = dict.fromkeys(str(row.cell["effort"]) for row in own)
    drawn = list[Drawing]()
    for effort in efforts:
        for criterion in CRITERIA:
            groups: dict[str, dict[str, Rate]] = {}
            for row in own:
                rate = strongest(row, criterion) if row.cell["effort"] == effort else None
                if rate is not None:
                    series = f"{row.cell['loss']}, {row.cell['labels']} labels"
                    groups.setdefault(f"batch of {row.cell['batch']}", {})[series] = rate
            drawn.append(bars(f"Dense layer, best attack, {criterion} ({effort})", groups))
    return drawn


def recovery_maps(rows: Sequence[Row]) -> list[Drawing]:
    """Figure 7: LeNets, channels across and batch sizes upwards; digits by AVD, faces by MSE."""
    drawn = list[Drawing]()
    own = [row for row in rows if row.cell["network"] == "lenet"]
    for data in dict.fromkeys(str(row.cell["data"]) for row in own):
        criterion = FAITHFUL if data == FACES else SEEN
        for kind in (RANDOM, EQUAL):
            panels: dict[str, dict[tuple[int, int], float]] = {}
            for row in own:
                rate = strongest(row, criterion)
                if rate is not None and (row.cell["data"], row.cell["labels"]) == (data, kind):
                    spot = int(row.cell["channels"]), int(row.cell["batch"])
                    panels.setdefault(str(row.cell["loss"]), {})[spot] = rate.value
            if panels:
                title = f"LeNet on {data}, {kind} labels, best attack, {criterion}"
                drawn.append(maps(title, panels, x="channels", y="batch"))
    return drawn


def accuracy_points(rows: Sequence[Row]) -> list[Drawing]:
    """Figures 6 and 8 against 5 and 7: accuracy against the mean recovery rate of all batch sizes beyond 1."""
    drawn = list[Drawing]()
    for name in ("dense", "lenet"):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            cost, rate = row.entries.get(ACCURACY), strongest(row, SEEN)
            if row.cell["network"] == name and isinstance(cost, float) and rate is not None and row.cell["batch"] != 1:
                series.setdefault(f"{row.cell['loss']}, {row.cell['labels']} labels", []).append((rate.value, cost))
        means = {key: [(sum(a for a, _ in own) / len(own), own[0][1])] for key, own in series.items()}
        if means:
            drawn.append(points(f"{name}: accuracy against recovery", means, x=f"rate, {SEEN}", y="accuracy, %"))
    return drawn


def distance_points(rows: Sequence[Row]) -> list[Drawing]:
    """Figure 4 in numbers: MSE against AVD of every trial's best image."""
    drawn = list[Drawing]()
    for data in dict.fromkeys(str(row.cell["data"]) for row in rows):
        series: dict[str, list[tuple[float, float]]] = {name: [] for name in ATTACKS}
        for row in rows:
            for name in ATTACKS:
                entry = row.entries.get(name)
                if isinstance(entry, Outcome) and row.cell["data"] == data:
                    distances, errors = entry.details["avd"], entry.details["mse of avd"]
                    assert isinstance(distances, Sequence)
                    assert isinstance(errors, Sequence)
                    series[name] += zip(distances, errors, strict=True)
        if any(series.values()):
            drawn.append(points(f"{data}: every trial's best image", series, x="AVD", y="MSE"))
    return drawn


def figure(rows: Sequence[Row]) -> str:
    return page([*recovery_bars(rows), *recovery_maps(rows), *accuracy_points(rows), *distance_points(rows)])
