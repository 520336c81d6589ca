"""Table 2: what pruning and mixing cost in accuracy and in time, and what they leave of an attack.

A row is made of trials, several at a time where asked for: the networks that are attacked, trainings to the end, and
what an attacker makes of one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from fedprism import utility
from fedprism.defenses import InstaHide, MixUp
from fedprism_papers.gradattack import inversion
from fedprism_papers.gradattack import table_2_trials as trials
from fedprism_papers.gradattack.attackers import PAPER_ENCODED, QUICK_ITERATIONS, Case, encoded, leaked
from fedprism_papers.gradattack.table_2_trials import ADAPTIVE, NAIVE, QUICK_SEEDS, SEEDS
from fedprism_papers.shared.base import Announce, Entry, Measured, Recipe, Row, Settings
from fedprism_papers.shared.charts import line_chart
from fedprism_papers.shared.measuring import LPIPS, PSNR
from fedprism_papers.shared.trials import Finished, RecipeTrial, finished

SIZES, QUICK_SIZES = (1, 16, 32), (2,)  # images per batch: the paper's, and of a quick run
CASES = (
    Case(93.37, ((0.19, 0.02), (0.45, 0.18), (0.45, 0.18))),
    Case(93.19, ((0.19, 0.02), (0.46, 0.19), (0.46, 0.18)), ratio=0.5),
    Case(93.01, ((0.22, 0.05), (0.47, 0.19), (0.48, 0.22)), ratio=0.7),
    Case(90.57, ((0.35, 0.14), (0.51, 0.31), (0.52, 0.31)), ratio=0.9),
    Case(89.92, ((0.42, 0.22), (0.55, 0.43), (0.54, 0.43)), ratio=0.95),
    Case(88.61, ((0.52, 0.32), (0.58, 0.47), (0.58, 0.48)), ratio=0.99),
    Case(83.58, ((0.52, 0.36), (0.61, 0.51), (0.63, 0.54)), ratio=0.999),
    Case(92.31, ((0.34, 0.12), (0.34, 0.11), (0.50, 0.31)), mixing=MixUp(4)),
    Case(90.41, ((0.46, 0.25), (0.31, 0.13), (0.49, 0.28)), mixing=MixUp(6)),
    Case(90.04, ((0.58, 0.41), (0.62, 0.41), (0.69, 0.56)), mixing=InstaHide(4)),
    Case(88.20, ((0.61, 0.42), (0.63, 0.44), (0.69, 0.56)), mixing=InstaHide(6)),
    Case(91.37, ((0.41, 0.21), (0.46, 0.22), (0.62, 0.37)), ratio=0.9, mixing=MixUp(4)),
    Case(86.10, ((0.60, 0.43), (0.68, 0.54), (0.73, 0.65)), ratio=0.9, mixing=InstaHide(4)),
)
"""The paper's defenses, with its test accuracies and its average and best LPIPS for batches of 1, 16 and 32."""
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
    f"All iterations go to one start, with the published steps of the learning rate from {inversion.RATE:g} on (quick: "
    f"{inversion.QUICK_RATE:g}) and a pull towards the exact statistics of {inversion.PULL:g} (quick: "
    f"{inversion.QUICK_PULL:g}). Both were chosen on test images, which are not attacked, for each of the two "
    "networks; for ResNet-18 they are the published ones."
)
MIXED = "Images are mixed with those that are attacked in the same cell (the paper: with all 50)."
COST = "What finding out the mixing costs is the recipe gradattack-table-3."


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    data, sizes = inversion.data_of(settings), settings.sizes_or(SIZES, QUICK_SIZES)
    left = [(case, size) for case in CASES for size in sizes if settings.wants({"defense": case.label, "n": size})]
    if not left:
        return
    # Too few of them end the run before hours of work.
    data.first(max(trials.attacked_images(case, size, settings) for case, size in left))
    cases = dict.fromkeys(case for case, _ in left)
    announce("timing steps under each defense")  # alone, before others use the machine
    factors = {case: trials.time_factor(case, data, settings) for case in cases}
    undefended = trials.trainings(CASES[0], settings)
    everything = dict.fromkeys(
        [*undefended, *(t for case, size in left for t in trials.trials_of(case, size, settings))]
    )
    results: dict[RecipeTrial, Finished[RecipeTrial]] = {}
    for result in finished(everything, settings, announce):
        results[result.trial] = result
        while left and all(needed in results for needed in (*undefended, *trials.trials_of(*left[0], settings))):
            case, size = left.pop(0)
            defended, plain = (
                [float(results[trial].outcome.values["accuracy"]) for trial in each]
                for each in (trials.trainings(case, settings), undefended)
            )
            answers = {name: trials.answers_of(case, size, name, results, settings) for name in trials.attackers(case)}
            entries = leakage(case, size, answers, data, settings)
            yield row(case, size, {**prices(case, defended, plain, factors[case], settings), **entries}, data, settings)


def leakage(
    case: Case, size: int, answers: Mapping[str, Sequence[inversion.Answers]], data: inversion.Data, settings: Settings
) -> dict[str, Entry]:
    """The row's scores: of each attacker, and of images that nobody attacked."""
    images = data.first(trials.attacked_images(case, size, settings))
    entries: dict[str, Entry] = {NAIVE: None, ADAPTIVE: None}
    for name, by_epoch in answers.items():
        entries[name] = leaked(case, by_epoch, images, data, settings, adaptive=name == ADAPTIVE)
    entries[inversion.STRANGERS] = inversion.scored_strangers(data, images, size, settings)
    return {"LPIPS, average / best, paper": settings.paper(paper_lpips(case, size)), **entries}


def paper_lpips(case: Case, size: int) -> str | None:
    known = dict(zip(SIZES, case.paper, strict=True))
    return "{:g} / {:g}".format(*known[size]) if size in known else None


def prices(
    case: Case, accuracies: Sequence[float], undefended: Sequence[float], factor: float, settings: Settings
) -> dict[str, Entry]:
    """What the defense costs in accuracy, over all seeds, and in time."""
    mean, interval = fmean(accuracies), utility.t_interval(tuple(accuracies))
    return {
        f"{ACCURACY}, paper": settings.paper(case.paper_accuracy),
        ACCURACY: 100 * mean,
        MARGIN: None if interval is None else 50 * (interval.high - interval.low),
        f"{DROP}, paper": settings.paper(CASES[0].paper_accuracy - case.paper_accuracy),
        DROP: 100 * (fmean(undefended) - mean),
        f"{TIME}, paper": settings.paper(case.paper_time),
        TIME: factor,
    }


def row(case: Case, size: int, entries: Mapping[str, Entry], data: inversion.Data, settings: Settings) -> Row:
    trained = (
        f"{data.name}: trained on {len(data.train):,} images for {data.epochs} epochs, seeds: "
        f"{len(QUICK_SEEDS if settings.quick else SEEDS)}, tested on {len(data.test):,} others."
    )
    iterations = settings.iterations_or(inversion.ITERATIONS, QUICK_ITERATIONS)
    attacking = (
        f"{data.name}: the attacked network is trained on {len(data.train):,} images, epochs: {data.attacked_epochs}. "
        f"Attacks take {iterations:,} iterations (the paper: {inversion.PAPER_ITERATIONS:,}), on mixed images for each "
        f"of {encoded(settings)} epochs of encodings (the paper: {PAPER_ENCODED})."
    )
    return Row(cell={"defense": case.label, "n": size}, entries=entries, notes=(trained, attacking))


def figure(rows: Sequence[Row]) -> str:
    """What the better attacker gets of batches of one size against what the defense leaves of accuracy."""
    sizes = sorted({int(row.cell["n"]) for row in rows})
    shown = [row for row in rows if row.cell["n"] == (DRAWN_SIZE if DRAWN_SIZE in sizes else min(sizes, default=0))]
    measure = LPIPS if any(math.isfinite(_leak(row, LPIPS)) for row in shown) else PSNR
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in shown:
        accuracy, leak = row.entries.get(ACCURACY), _leak(row, measure)
        if isinstance(accuracy, float) and math.isfinite(leak):
            curves.setdefault(_kind(str(row.cell["defense"])), []).append((accuracy, leak))
    return line_chart(curves, x=f"test {ACCURACY}", y=f"{measure} of the better attacker")


def _kind(label: str) -> str:
    """A row's defense without its strength, short enough to stand beside a plot."""
    mixed = next((name for name in ("MixUp", "InstaHide") if name in label), None)
    if "GradPrune" not in label:
        return mixed or label
    return "GradPrune" if mixed is None else f"pruned {mixed}"


def _leak(row: Row, measure: str) -> float:
    means = [entry.mean(measure) for name in (NAIVE, ADAPTIVE) if isinstance(entry := row.entries[name], Measured)]
    return (min if measure == LPIPS else max)(means, default=math.nan)


RECIPE = Recipe(
    name="gradattack-table-2",
    summary="Pruning, MixUp and InstaHide: accuracy, time and what leaks, ResNet-18 on CIFAR-10",
    citation=f"{inversion.CITATION}, table 2",
    shown=inversion.SHOWN,
    run=run,
    options=("sizes", "batches", "iterations", "encodings", "workers", "only"),
    figure=figure,
    notes=(READING, TIMING, ATTACKERS, EFFORT, inversion.NULL, MIXED, inversion.LPIPS_NOTE, inversion.ROUNDING, COST),
)
