"""Table 2: what pruning and mixing cost in accuracy and in time, and what they leave of an attack.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021.

A row is made of parts that are computed by themselves, several at a time where asked for: the networks that are
attacked, trainings to the end, and what an attacker makes of one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fedprism import utility
from fedprism.recipes.base import Announce, Entry, Outcome, Recipe, Row, Settings
from fedprism.recipes.charts import line_chart
from fedprism.recipes.gradattack import (
    CITATION,
    ITERATIONS,
    LPIPS_NOTE,
    NULL,
    PAPER_ITERATIONS,
    PULL,
    QUICK_PULL,
    QUICK_RATE,
    RATE,
    ROUNDING,
    SHOWN,
    STRANGERS,
    Answers,
    Data,
    data_of,
    scored,
    strangers,
)
from fedprism.recipes.gradattack_attackers import (
    ENCODED,
    PAPER_ENCODED,
    QUICK_ENCODED,
    QUICK_ITERATIONS,
    Case,
    leaked,
)
from fedprism.recipes.gradattack_parts import (
    ADAPTIVE,
    NAIVE,
    QUICK_SEEDS,
    SEEDS,
    attacked_images,
    cost,
    parts,
    parts_of,
    seen,
    time_factor,
)
from fedprism.recipes.gradattack_rows import CASES
from fedprism.recipes.measuring import LPIPS, PSNR
from fedprism.recipes.parts import Part, computed
from fedprism.recipes.sheets import contact_sheet
from fedprism.recipes.shelf import Made

SIZES, QUICK_SIZES = (1, 16, 32), (2,)
DRAWN_SIZE = 16
"""The batch size of which the figure is."""

ACCURACY, DROP, MARGIN, TIME = "accuracy, %", "drop", "±", "time factor"

READING = (
    f"{ACCURACY}: mean over the seeds, and {MARGIN} its 95 % interval (Student's t). The paper trains on 49,000 images "
    "for up to 200 epochs, so accuracies do not compare; drops from the undefended network do."
)
TIMING = f"{TIME}: time of a training step over that of one without defense, medians over steps that take turns."
ATTACKERS = (
    f"The attacker is given labels and exact batch-norm statistics. {NAIVE}: it does not know the defense and takes "
    f"what it finds for the image. {ADAPTIVE}: where gradients are pruned, it goes on from there, for as many "
    "iterations again, with pruning inside its own gradients, and keeps what explains the update better. Where images "
    "are mixed, it is told who was mixed with what weights: under MixUp it looks for the images that explain the "
    "gradients of all epochs at once, under InstaHide it decodes the encodings of all epochs. The paper's attacker "
    "decodes in both cases, and does not adapt to pruning: its mixed rows compare with the adaptive one, its others "
    "with the naive."
)
EFFORT = (
    f"All iterations go to one start, with the published steps of the learning rate from {RATE:g} on (quick: "
    f"{QUICK_RATE:g}) and a pull towards the exact statistics of {PULL:g} (quick: {QUICK_PULL:g}). Both were chosen on "
    "test images, which are not attacked, for each of the two networks; for ResNet-18 they are the published ones."
)
MIXED = "Images are mixed with those that are attacked in the same cell (the paper: with all 50)."
COST = (
    f"Without being told the mixing, 5,000 images cost {utility.attack_cost(5_000).total:.2f} GPU hours by the paper's "
    "table 3."
)


def run(settings: Settings, announce: Announce, *, priced: bool = True) -> Iterator[Row]:
    """The table's rows, with what each defense costs where it is `priced`."""
    data, sizes = data_of(settings), settings.sizes_or(SIZES, QUICK_SIZES)
    data.first(max(attacked_images(case, size, settings) for case in CASES for size in sizes))  # before hours of work
    factors: dict[Case, float] = {}
    if priced:
        announce("timing steps under each defense")  # alone, before others use the machine
        factors = {case: time_factor(case, data, settings) for case in CASES}
    made: dict[Part, Made] = {}
    left = [(case, size) for case in CASES for size in sizes]
    for part, one in computed(parts(CASES, sizes, settings, priced=priced), settings, announce):
        made[part] = one
        while left and all(each in made for each in parts_of(*left[0], settings, priced=priced)):
            case, size = left.pop(0)
            entries = leakage(case, size, seen(case, size, made, settings), data, settings)
            # Drops are from the first case, which is there: rows come in their order.
            own, undefended = (
                cost(each, made, factors[each], settings) if priced else None for each in (case, CASES[0])
            )
            yield row(case, size, entries, own, undefended, data, settings)


def leakage(
    case: Case, size: int, answers: Mapping[str, Sequence[Answers]], data: Data, settings: Settings
) -> dict[str, Entry]:
    """The row's scores: of each attacker who has seen something, and of images that nobody attacked."""
    count = attacked_images(case, size, settings)
    images = data.first(count)
    found: dict[str, Entry] = {
        name: leaked(case, answers[name], images, data, settings, adaptive=name == ADAPTIVE)
        if name in answers
        else None
        for name in (NAIVE, ADAPTIVE)
    }
    found[STRANGERS] = scored(strangers(data, count, size, settings), images, data.normalization, settings)
    return found


def row(
    case: Case,
    size: int,
    entries: Mapping[str, Entry],
    cost: utility.Utility | None,
    undefended: utility.Utility | None,
    data: Data,
    settings: Settings,
) -> Row:
    """A row of the table; without `cost` it says what leaks, and no more."""
    picture, caption = contact_sheet({name: entries[name] for name in (NAIVE, ADAPTIVE)})
    known = dict(zip(SIZES, case.paper, strict=True))
    prices: dict[str, Entry] = {}
    if cost is not None and undefended is not None:
        prices = {
            f"{ACCURACY}, paper": settings.paper(case.paper_accuracy),
            ACCURACY: 100 * cost.accuracy,
            MARGIN: _margin(cost),
            f"{DROP}, paper": settings.paper(CASES[0].paper_accuracy - case.paper_accuracy),
            DROP: 100 * (undefended.accuracy - cost.accuracy),
            TIME: cost.time_factor,
        }
    papers = "{:g} / {:g}".format(*known[size]) if size in known else None
    return Row(
        cell={"defense": case.label, "n": size},
        entries={**prices, "LPIPS, average / best, paper": settings.paper(papers), **entries},
        notes=(*((training_effort(data, settings),) if prices else ()), effort(data, settings)),
        picture=picture,
        caption=caption,
    )


def _margin(cost: utility.Utility) -> float | None:
    interval = utility.t_interval(cost.accuracies)
    return None if interval is None else 50 * (interval.high - interval.low)


def training_effort(data: Data, settings: Settings) -> str:
    return (
        f"{data.name}: trained on {len(data.train):,} images for {data.epochs} epochs, seeds: "
        f"{len(QUICK_SEEDS if settings.quick else SEEDS)}, tested on {len(data.test):,} others."
    )


def effort(data: Data, settings: Settings) -> str:
    encoded = QUICK_ENCODED if settings.quick else ENCODED
    return (
        f"{data.name}: the attacked network is trained on {data.attacked_images or len(data.train):,} images, epochs: "
        f"{data.attacked_epochs}. Attacks take {settings.iterations_or(ITERATIONS, QUICK_ITERATIONS):,} iterations "
        f"(the paper: {PAPER_ITERATIONS:,}), on mixed images for each of {encoded} epochs of encodings (the paper: "
        f"{PAPER_ENCODED})."
    )


def figure(rows: Sequence[Row]) -> str:
    """What the better attacker gets of batches of one size against what the defense leaves of accuracy.

    Where the accuracy of fewer than two defenses is known, what each attacker gets against how much is pruned.
    """
    sizes = sorted({int(row.cell["n"]) for row in rows})
    shown = [row for row in rows if row.cell["n"] == (DRAWN_SIZE if DRAWN_SIZE in sizes else min(sizes, default=0))]
    measure = LPIPS if any(math.isfinite(_leak(row, LPIPS)) for row in shown) else PSNR
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in shown:
        accuracy, leak = row.entries.get(ACCURACY), _leak(row, measure)
        if isinstance(accuracy, float) and math.isfinite(leak):
            curves.setdefault(_kind(str(row.cell["defense"])), []).append((accuracy, leak))
    if sum(map(len, curves.values())) < 2:
        return _by_pruning(shown)
    return line_chart(curves, x=f"test {ACCURACY}", y=f"{measure} of the better attacker")


def _by_pruning(rows: Sequence[Row]) -> str:
    pruned = {case.label: 1 - (case.ratio or 0.0) for case in CASES if case.mixing is None}
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name in (NAIVE, ADAPTIVE, STRANGERS):
            if row.cell["defense"] in pruned and isinstance(found := row.entries.get(name), Outcome):
                nines = -math.log10(pruned[str(row.cell["defense"])])
                curves.setdefault(name, []).append((nines, found.mean(PSNR)))
    return line_chart(curves, x="nines of the share that is pruned (3: 0.999)", y="PSNR, dB")


def _kind(label: str) -> str:
    """A row's defense without its strength, short enough to stand beside a plot."""
    mixed = next((name for name in ("MixUp", "InstaHide") if name in label), None)
    if "GradPrune" not in label:
        return mixed or label
    return "GradPrune" if mixed is None else f"pruned {mixed}"


def _leak(row: Row, measure: str) -> float:
    found = [entry.mean(measure) for name in (NAIVE, ADAPTIVE) if isinstance(entry := row.entries[name], Outcome)]
    return (min if measure == LPIPS else max)(found, default=math.nan)


RECIPE = Recipe(
    name="gradattack-table-2",
    summary="Pruning, MixUp and InstaHide: accuracy, time and what leaks, ResNet-18 on CIFAR-10",
    citation=f"{CITATION}, table 2",
    shown=SHOWN,
    run=run,
    figure=figure,
    notes=(READING, TIMING, ATTACKERS, EFFORT, NULL, MIXED, LPIPS_NOTE, ROUNDING, COST),
    narrow=True,
)
