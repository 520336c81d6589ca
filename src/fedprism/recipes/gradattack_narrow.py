"""Table 2 again on a network of which more comes back, and which two cores of a CPU attack within the hour.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fedprism.recipes import gradattack_table_2 as table
from fedprism.recipes.base import Announce, Recipe, Row, Settings
from fedprism.recipes.gradattack import CITATION, LPIPS_NOTE, NARROW, NARROW_STEPS, NULL, SHOWN
from fedprism.recipes.gradattack_attackers import QUICK_ITERATIONS

SIZES, ITERATIONS = (16,), 200

NETWORK = (
    f"ResNet-18 with {NARROW} channels in the first stage in place of 64, after {NARROW_STEPS} steps of training; so "
    "many were chosen by what comes back of these images without a defense. What defenses cost is not asked here."
)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    chosen = replace(
        settings,
        narrow=True,
        sizes=settings.sizes_or(SIZES, table.QUICK_SIZES),
        iterations=settings.iterations_or(ITERATIONS, QUICK_ITERATIONS),
    )
    return table.run(chosen, announce, priced=False)


RECIPE = Recipe(
    name="gradattack-narrow",
    summary="What pruning, MixUp and InstaHide leave of an attack on a quarter of ResNet-18's width, on a CPU",
    citation=f"{CITATION}, table 2",
    shown=SHOWN,
    run=run,
    figure=table.figure,
    notes=(NETWORK, table.ATTACKERS, NULL, table.MIXED, LPIPS_NOTE),
)
