"""The figures of the mixing-gradients study, from the rows of its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedprism_papers.mixing_gradients.accuracy import ACCURACY
from fedprism_papers.mixing_gradients.direct import EQUAL, RANDOM
from fedprism_papers.mixing_gradients.trials import ATTACKS, BEATS_BLANK, CLOSE_PIXELS, CRITERIA, FACES, UNIFORM
from fedprism_papers.shared.base import Measured, Row
from fedprism_papers.shared.charts import Drawing, Rate, bars, maps, page, points


def strongest(row: Row, criterion: str) -> Rate | None:
    """That of the strongest of the attacks."""
    measured = [entry for name in ATTACKS if isinstance(entry := row.entries.get(name), Measured)]
    if not measured:
        return None
    best = max(measured, key=lambda entry: entry.mean(criterion))
    intervals = best.details["intervals"]
    assert isinstance(intervals, Mapping)
    return Rate(best.mean(criterion), *intervals[criterion])


def as_published(rows: Sequence[Row]) -> list[Row]:
    """With the paper's weights and its number of steps, which come first: the control is another picture."""
    return [row for row in rows if row.cell["weights"] == UNIFORM and row.cell["effort"] == rows[0].cell["effort"]]


def recovery_bars(rows: Sequence[Row]) -> list[Drawing]:
    """Figure 5: the dense layer, for both thresholds of the paper, where a blank image has to be beaten, and by MSE."""
    dense = [row for row in rows if row.cell["network"] == "dense"]
    drawn = list[Drawing]()
    for data, weights, effort in dict.fromkeys(map(_setting, dense)):
        for criterion in CRITERIA:
            groups: dict[str, dict[str, Rate]] = {}
            for row in dense:
                rate = strongest(row, criterion) if _setting(row) == (data, weights, effort) else None
                if rate is not None:
                    series = f"{row.cell['loss']}, {row.cell['labels']} labels"
                    groups.setdefault(f"batch of {row.cell['batch']}", {})[series] = rate
            title = f"Dense layer on {data}, {weights} weights, best attack, {criterion} ({effort})"
            drawn.append(bars(title, groups))
    return drawn


def _setting(row: Row) -> tuple[object, ...]:
    return tuple(row.cell[name] for name in ("data", "weights", "effort"))


def recovery_maps(rows: Sequence[Row]) -> list[Drawing]:
    """Figure 7: LeNets, channels across and batch sizes upwards; the paper decides digits by AVD and faces by MSE."""
    drawn = list[Drawing]()
    lenets = [row for row in rows if row.cell["network"] == "lenet"]
    for data in dict.fromkeys(str(row.cell["data"]) for row in lenets):
        for criterion in (CLOSE_PIXELS, BEATS_BLANK) if data == FACES else (BEATS_BLANK, CLOSE_PIXELS):
            for kind in (RANDOM, EQUAL):
                panels: dict[str, dict[tuple[int, int], float]] = {}
                for row in lenets:
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
        for criterion in (BEATS_BLANK, CLOSE_PIXELS):
            series: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                if row.cell["network"] != name or row.cell["batch"] == 1:
                    continue
                rates = series.setdefault(f"{row.cell['loss']}, {row.cell['labels']} labels", [])
                cost, rate = row.entries.get(ACCURACY), strongest(row, criterion)
                if isinstance(cost, float) and rate is not None:
                    rates.append((rate.value, cost))
            means = {key: _mean(rates) for key, rates in series.items()}
            if any(means.values()):
                title = f"{name}: accuracy against recovery, {criterion}"
                drawn.append(points(title, means, x=f"rate, {criterion}", y="accuracy, %"))
    return drawn


def _mean(rates: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """One point with the mean rate; none where there is no accuracy."""
    return [(sum(rate for rate, _ in rates) / len(rates), rates[0][1])] if rates else []


def distance_points(rows: Sequence[Row]) -> list[Drawing]:
    """Figure 4 in numbers: MSE against AVD of every trial's best image."""
    drawn = list[Drawing]()
    for data in dict.fromkeys(str(row.cell["data"]) for row in rows):
        series: dict[str, list[tuple[float, float]]] = {name: [] for name in ATTACKS}
        for row in rows:
            for name in ATTACKS:
                entry = row.entries.get(name)
                if isinstance(entry, Measured) and row.cell["data"] == data:
                    distances, errors = entry.details["avd"], entry.details["mse of avd"]
                    assert isinstance(distances, Sequence)
                    assert isinstance(errors, Sequence)
                    series[name] += zip(distances, errors, strict=True)
        if any(series.values()):
            drawn.append(points(f"{data}: every trial's best image", series, x="AVD", y="MSE"))
    return drawn


def figure(rows: Sequence[Row]) -> str:
    main = as_published(rows)
    return page([*recovery_bars(rows), *recovery_maps(main), *accuracy_points(main), *distance_points(main)])
