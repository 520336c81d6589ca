"""Losses and labels as defenses against gradient matching: recovery rates, and what they cost in accuracy.

Eloul et al., "Enhancing Privacy against Inversion Attacks in Federated Learning by using Mixing Gradients Strategies",
2022, figures 4 to 8: three attacks on a single dense layer and on LeNets of several widths, over batch sizes.

Differs from the paper in: it does not say what an iteration of L-BFGS is, here it is twenty quasi-Newton steps, as many
as a call of PyTorch's optimiser takes, and for comparison a single one; the weights of total variation and
orthogonality and the threshold on the MSE, which the paper does not give, are ours; AVD is taken before and after
pixels are cut to their range, of which the paper says nothing; beside its thresholds stands whether the image is better
than a blank one; faces are of 158 people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor

from fedprism.metrics import THRESHOLD_STRICT
from fedprism_papers.mixing_gradients import trials
from fedprism_papers.mixing_gradients.accuracy import cost_note, prices
from fedprism_papers.mixing_gradients.direct import LOSSES, RANDOM
from fedprism_papers.mixing_gradients.figures import figure
from fedprism_papers.mixing_gradients.trials import BEATS_BLANK, CLOSE_PIXELS, FACES, LOOSE, MNIST, STRICT, Case
from fedprism_papers.shared.base import Announce, Entry, Measured, Recipe, Row, Settings
from fedprism_papers.shared.sheets import contact_sheet
from fedprism_papers.shared.trials import Finished, finish

SIZES, QUICK_SIZES = (1, 2, 4, 6), (1, 2)  # images per batch
WIDTHS, QUICK_WIDTHS = (2, 4, 8, 12, 16, 24), (4, 8)  # channels of the LeNet
MAP_SIZES = (1, 2, 4, 8)  # images per batch where not all sizes are run
TRIALS, QUICK_TRIALS = 20, 2  # batches per cell
STEPS, QUICK_STEPS = (20, 1), (1,)
"""Quasi-Newton steps of an iteration: those of a call of PyTorch's optimiser, as published, come first."""
PUBLISHED = trials.Effort(iterations=550, lr=0.05)
CONTROL = trials.Effort(iterations=1200, lr=0.025)
CONTROLLED_WIDTH = 12  # channels of the network that other efforts are tried on
QUICK_ITERATIONS = 40  # of a quick attack
BLANK = "a blank image"
READING = (
    f"The fraction of trials in which some image of the batch came back: {STRICT} and {LOOSE} are the paper's two "
    "thresholds, 'uncut' on what the optimiser ended with and otherwise on pixels cut to their range, as an attacker "
    f"would; '{BEATS_BLANK}' asks for {STRICT} and for a smaller AVD than that of a blank image, {CLOSE_PIXELS} is "
    "by pixels (20 dB). Any recovered image may be compared with any private one, as in the paper. "
    f"'{BLANK}': how often a blank image would pass {STRICT}."
)
ATTACKERS = (
    "Labels are optimised jointly, starting from noise; starting images are uniform, and so are weights, on "
    "[-0.5, 0.5], as in the paper, or as PyTorch initialises them. effort: iterations (x quasi-Newton steps of each, "
    "where there are several) x rate. All trials of a cell run in one tensor program."
)
DATA = (
    "MNIST, and faces of LFW at 32 x 32 pixels with one output for each of 158 people; the paper has 5,749. The paper "
    "decides digits by AVD and faces by MSE; both stand for both. Its numbers are in figures only and are left out."
)


def cases(settings: Settings) -> Iterator[Case]:
    """All cases with the paper's steps an iteration before any of them with fewer."""
    iterations = settings.iterations_or(PUBLISHED.iterations, QUICK_ITERATIONS)
    for steps in QUICK_STEPS if settings.quick else STEPS:
        effort, control = replace(PUBLISHED, iterations=iterations, inner=steps), replace(CONTROL, inner=steps)
        yield from _published(settings, effort)
        if not settings.quick:
            yield from _beyond(settings, effort)
            if settings.iterations is None:
                yield from _control(settings, control)


def _published(settings: Settings, effort: trials.Effort) -> Iterator[Case]:
    sizes, few = settings.sizes_or(SIZES, QUICK_SIZES), settings.sizes_or(MAP_SIZES, QUICK_SIZES[:1])
    for size, loss in product(sizes, LOSSES.values()):
        yield Case(data=trials.DIGITS if settings.quick else MNIST, width=None, loss=loss, size=size, effort=effort)
    data, widths = ((trials.DIGITS,), QUICK_WIDTHS) if settings.quick else ((MNIST, FACES), WIDTHS)
    for name, width, size, loss in product(data, widths, few, LOSSES.values()):
        yield Case(data=name, width=width, loss=loss, size=size, effort=effort)


def _beyond(settings: Settings, effort: trials.Effort) -> Iterator[Case]:
    """The dense layer on faces and at PyTorch's weights."""
    for size, loss in product(settings.sizes_or(SIZES, QUICK_SIZES), LOSSES.values()):
        yield Case(data=FACES, width=None, loss=loss, size=size, effort=effort)
        yield Case(data=MNIST, width=None, loss=loss, size=size, effort=effort, weights=trials.ORDINARY)


def _control(settings: Settings, effort: trials.Effort) -> Iterator[Case]:
    for size, loss in product(settings.sizes_or(SIZES, QUICK_SIZES), LOSSES.values()):
        yield Case(data=MNIST, width=None, loss=loss, size=size, effort=effort)
    for data, size, loss in product((MNIST, FACES), settings.sizes_or(MAP_SIZES, QUICK_SIZES), LOSSES.values()):
        yield Case(data=data, width=CONTROLLED_WIDTH, loss=loss, size=size, effort=effort)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    number = settings.batches_or(TRIALS, QUICK_TRIALS)
    costs = dict[tuple[str, int | None, str], dict[str, dict[str, Entry]]]()
    for case in cases(settings):
        if not settings.wants_any(cell(case, kind) for kind in trials.KINDS):
            continue
        trained = (case.data, case.width, case.loss)
        if trained not in costs:
            costs[trained] = prices(*trained, settings, announce)
        result = finish(trials.AttackedCase(case=case, trials=number, settings=settings), announce)
        notes = (cost_note(settings),) if costs[trained] else ()
        yield from (replace(row, notes=notes) for row in rows(case, result, costs[trained]))


def cell(case: Case, kind: str) -> dict[str, str | int]:
    """The first columns of a case's row."""
    return {
        "data": case.data,
        "network": case.network,
        "channels": case.width or "–",
        "loss": trials.loss_name(case.loss),
        "labels": kind,
        "batch": case.size,
        "weights": case.weights,
        "effort": str(case.effort),
    }


def rows(case: Case, result: Finished[trials.AttackedCase], prices: Mapping[str, Mapping[str, Entry]]) -> Iterator[Row]:
    """A line for each kind of labels, with the accuracy where such networks were trained."""
    for kind in (kind for kind in trials.KINDS if kind in result.outcome.values):
        by_attack = result.outcome.values[kind]
        entries: dict[str, Entry] = {name: outcome(scored) for name, scored in by_attack.items()}
        blank = next(iter(by_attack.values()))["blank"]
        entries[BLANK] = sum(value < THRESHOLD_STRICT for value in blank) / len(blank)
        picture, caption = (
            _sorted_by_avd(by_attack, result.tensors) if kind == RANDOM and case.loss == "cross_entropy" else (None, "")
        )
        yield Row(
            cell=cell(case, kind),
            entries={**entries, **prices.get(kind, {})},
            picture=picture,
            caption=caption,
        )


def outcome(scored: Mapping[str, Any]) -> Measured:
    """One value a trial, whether it was recovered, for every criterion; the distances are in the details."""
    rates = {name: trials.recovered(scored, name) for name in trials.CRITERIA}
    return Measured(
        values={
            name: tuple(float(value < threshold) for value in scored[metric])
            for name, (metric, threshold) in trials.MEASURES.items()
        },
        seconds=(scored["seconds"],) * len(scored["avd"]),
        statuses=tuple(scored["statuses"]),
        settings=scored["settings"],
        details={
            "intervals": {name: [rate.low, rate.high] for name, rate in rates.items()},
            **{metric: list(scored[metric]) for metric in ("avd", "uncut", "blank", "mse", "mse of avd")},
        },
    )


def _sorted_by_avd(by_attack: Mapping[str, Any], pictures: Mapping[str, Tensor]) -> tuple[Tensor | None, str]:
    """Figure 4: what each attack made of the first trials, the smallest AVD first, with the MSE beside it."""
    entries: dict[str, Entry] = {}
    words = list[str]()
    for name, scored in by_attack.items():
        pairs = pictures[f"{RANDOM}, {name}"].float() / 255
        order = sorted(range(len(pairs)), key=lambda trial: scored["avd"][trial])
        entries[name] = Measured(values={}, seconds=(), pictures=(pairs[order, 0], pairs[order, 1]))
        told = ", ".join(f"{scored['avd'][trial]:.2f} ({scored['mse of avd'][trial]:.3f})" for trial in order)
        words.append(f"{name}: {told}")
    picture, caption = contact_sheet(entries)
    return picture, f"{caption} The first {trials.SHOWN_TRIALS} trials by AVD (MSE). {'; '.join(words)}."


RECIPE = Recipe(
    name="mixing",
    summary="Losses and labels as defenses: recovery rates of three attacks on a dense layer and on LeNets, accuracy",
    citation="Eloul et al., Mixing Gradients Strategies, 2022, figures 4 to 8",
    shown=trials.CRITERIA,
    run=run,
    options=("sizes", "batches", "iterations", "only"),
    figure=figure,
    notes=(READING, ATTACKERS, DATA),
)
