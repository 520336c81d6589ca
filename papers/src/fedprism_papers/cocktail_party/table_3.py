"""Table 3: noise on the gradient, in the two ways that the paper's text and its code mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import fedprism as fp
from fedprism.defenses import Clip, Defense, DpSgd, GaussianNoise
from fedprism_papers.cocktail_party import methods as cpa
from fedprism_papers.cocktail_party.gradients import VictimBatches
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings
from fedprism_papers.shared.cells import attack_cell
from fedprism_papers.shared.measuring import LPIPS, OVER_40_DB, PSNR
from fedprism_papers.shared.victims import fc2_photos, fc2_tiny_imagenet

SIZE, BATCHES = 8, 5
CLIP, DELTA = 1.0, 1e-5

# LPIPS by the noise's standard deviation.
PAPER = {
    0.0: {cpa.GMA: 0.182, cpa.PUBLISHED: 0.0082},
    1e-4: {cpa.GMA: 0.426, cpa.PUBLISHED: 0.474},
    1e-3: {cpa.GMA: 0.728, cpa.PUBLISHED: 0.721},
    1e-2: {cpa.GMA: 0.701, cpa.PUBLISHED: 0.723},
}

EPSILON = (
    f"Epsilon is the paper's: sqrt(2 ln(1.25 / delta)) * (clip / n) / sigma with delta = {DELTA:g}, clip = {CLIP:g}, "
    "for one step. That formula holds only for epsilon below 1, so none of these values is a guarantee; and without "
    "clipping of single examples, as in the rows on the unit-norm gradient, there is none at all."
)


def unit_norm(sigma: float, size: int) -> Defense:
    """The text: the gradient is scaled to length one, then noise is added to every entry."""
    return fp.chain(Clip(1.0, always=True), GaussianNoise(sigma))


def clipped_examples(sigma: float, size: int) -> Defense:
    """The code: every example's gradient is clipped, then noise is added to every entry of their mean."""
    return DpSgd(noise=sigma * size / CLIP, clip=CLIP)


NOISES: dict[str, Callable[[float, int], Defense]] = {
    "unit-norm gradient (text)": unit_norm,
    "mean of clipped examples (code)": clipped_examples,
}


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    announce("training the network")
    victim = fc2_photos(settings) if settings.quick else fc2_tiny_imagenet(settings)
    for size in settings.sizes_or((SIZE,), (SIZE,)):
        for noise, make in NOISES.items():
            for sigma, paper in PAPER.items():
                batches = settings.batches_or(BATCHES)
                attacked = VictimBatches(victim=victim, size=size, batches=batches, defense=make(sigma, size))
                title = f"{noise}, sigma {sigma:g}"
                outcomes = attack_cell(attacked, cpa.on_images(settings), settings, announce, title)
                known = {name: value if size == SIZE else None for name, value in paper.items()}
                budget = f"{epsilon(sigma, size):.4g}"
                cell: dict[str, str | int] = {"noise on": noise, "n": size, "sigma": f"{sigma:g}", "epsilon": budget}
                yield cpa.row(cell, victim, outcomes, known, settings)


def epsilon(sigma: float, size: int) -> float:
    """As the paper states it: the classical Gaussian mechanism, once, with sensitivity clip / size."""
    return math.sqrt(2 * math.log(1.25 / DELTA)) * CLIP / size / sigma if sigma else math.inf


RECIPE = Recipe(
    name="cpa-table-3",
    summary="Cocktail Party Attack under noise, FC-2 on Tiny-ImageNet, batch of 8",
    citation=f"{cpa.CITATION}, table 3",
    shown=(LPIPS, PSNR, OVER_40_DB),
    run=run,
    notes=(
        EPSILON,
        "The paper gives one number for each sigma; it stands beside both readings.",
        "The attacker does not know the defense.",
        cpa.SCORED,
        cpa.BASELINE,
        cpa.TUNING,
    ),
)
