"""The methods that the Cocktail Party Attack's recipes compare: its baseline, its published objective, and ours.

Kariyappa, Guo, Maeng, Xiong, Suh, Qureshi, Lee, "Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated
Learning using Independent Component Analysis", ICML 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import fedprism as fp
from fedprism.attacks import Attack, CocktailParty, GradientMatching, Labels
from fedprism.runtime import devices
from fedprism.runtime.cuda_graphs import Engine
from fedprism.solvers import Adam, FeatureInversion, TotalVariation
from fedprism_papers.cocktail_party import published_objective as publication
from fedprism_papers.cocktail_party.published_objective import CocktailObjective
from fedprism_papers.shared.base import Entry, Row, Settings
from fedprism_papers.shared.cells import Outcomes
from fedprism_papers.shared.victims import Victim

CITATION = "Kariyappa et al., Cocktail Party Attack, ICML 2023"
ITERATIONS, QUICK_ITERATIONS = 25_000, 300  # of the published objective: the paper's, and of a quick run
MOST_MATCHING = 3_000
"""Iterations of the gradient-matching baseline at most: it is by far the slowest part."""
INVERTED, QUICK_INVERTED = 16, 4  # images per batch that are rendered from their features

RENDERING, DEEP_MATCHING, DEEP_BASELINE = 1_000, 300, 1_000
"""Iterations of feature inversion, of matching the gradient of a convolutional network from its answers on, and of
matching that gradient alone, at most."""

MATCHED_BATCHES = 1
"""Batches a cell of which the gradient of a convolutional network is matched, in its whole: hours for all of them."""

DEEP_SMOOTHNESS = 4.0
"""Weight of total variation where images are rendered from VGG-16's last features, which leave much open: chosen on
eight crops of the embedded photographs. The deeper the features, the more of it is good."""

GMA, PUBLISHED, ICA, OURS = "GMA re-run", "CPA objective re-run", "ours, ICA only", "ours"
PUBLISHED_FIA, OURS_FIA, OURS_FIA_GMA = "CPA objective + FIA re-run", "ours + FIA", "ours + FIA + GMA"
PAPER_COLUMNS = {
    GMA: "GMA, paper",
    PUBLISHED: "CPA, paper",
    PUBLISHED_FIA: "CPA+FIA, paper",
    OURS_FIA_GMA: "CPA+FIA+GMA, paper",
}
"""The paper's column that stands left of each method."""

SCORED = (
    "LPIPS is VGG's, after the best one-to-one assignment of recovered to private images; lower is closer. Sign and "
    "scale are taken from the truth only for methods that leave them open, as the paper does for all."
)
BASELINE = (
    "GMA re-run: cosine distance, total variation 0.001, Adam with rate 0.1, box and free labels as published; the "
    f"rate falls linearly, iterations are at most {MOST_MATCHING:,}, and labels go through a softmax; an update of "
    "several steps is read as minus one gradient, where the published code matches its negative; the best iterate by "
    "the objective is returned."
)
TUNING = (
    "The paper tuned the objective's weights for each data set and batch size on a batch with known truth; the re-run "
    "has the weights it published for one of them. Ours has one setting for all."
)
FEATURES = (
    "cosine: between recovered and true features, whatever its sign, after the best one-to-one assignment; an image "
    "rendered from features is compared with the image that these features were assigned to."
)


def gradient_matching(settings: Settings) -> GradientMatching:
    """The paper's baseline (GMA): matches the gradient of all parameters."""
    return GradientMatching(
        priors=(TotalVariation(1e-3),),
        labels=Labels.JOINT,
        optimizer=Adam(signed=False),
        iterations=min(MOST_MATCHING, settings.iterations_or(ITERATIONS, QUICK_ITERATIONS)),
        unroll=False,
    )


def objective(settings: Settings, weights: CocktailObjective | None = None) -> CocktailObjective:
    """The published objective, for images unless other weights are given."""
    iterations = settings.iterations_or(ITERATIONS, QUICK_ITERATIONS)
    return dataclasses.replace(weights or CocktailObjective(), iterations=iterations)


def ours(**changes: Any) -> CocktailParty:
    """Our attack, with fields changed."""
    return dataclasses.replace(fp.attacks.cocktail_party(), **changes)


def published(objective: CocktailObjective, **changes: Any) -> CocktailParty:
    """The paper's attack: its objective, and no use of the bias gradient, so that sign and scale stay open."""
    return ours(objective=objective, exact=False, bias_scale=False, denoise=False, **changes)


def on_images(settings: Settings) -> dict[str, Attack]:
    """The methods compared on networks whose first layer is dense."""
    return {
        GMA: gradient_matching(settings),
        PUBLISHED: published(objective(settings)),
        ICA: ours(exact=False),
        OURS: ours(),
    }


def on_features(settings: Settings) -> dict[str, Attack]:
    """The methods compared on convolutional networks: features first, then images from them (FIA)."""
    iterations, images = settings.iterations_or(ITERATIONS, QUICK_ITERATIONS), inverted(settings)
    on_gpu = devices.pick(settings.device).type == "cuda"
    smooth = FeatureInversion() if settings.quick else FeatureInversion(total_variation=DEEP_SMOOTHNESS)
    rendering, as_published = (
        dataclasses.replace(inversion, iterations=min(iterations, RENDERING), bfloat16=on_gpu)
        for inversion in (smooth, publication.published_inversion())
    )
    matching = dataclasses.replace(
        gradient_matching(settings), iterations=min(iterations, DEEP_BASELINE), engine=Engine(tf32=True)
    )
    for_features = objective(settings, publication.embedding_objective())
    return {
        GMA: matching,
        PUBLISHED_FIA: published(for_features, inversion=as_published, images=images),
        OURS_FIA: ours(inversion=rendering, images=images),
        OURS_FIA_GMA: ours(inversion=rendering, matching=1.0, matching_iterations=min(iterations, DEEP_MATCHING)),
    }


def rendered(settings: Settings) -> str:
    """How many images are scored, as a note."""
    return (
        f"FIA renders the first {inverted(settings)} images of a batch (the paper: {INVERTED}), the same for every "
        "method, and scores are over these; with GMA, which needs the whole batch, over the whole batch. FIA takes at "
        f"most {RENDERING:,} iterations, matching VGG-16's gradient at most {DEEP_BASELINE:,}, and {DEEP_MATCHING:,} "
        f"where it goes on from FIA's images (the paper: {ITERATIONS:,}), in the first batch of a cell. The re-run "
        "renders as published, pixel by pixel; ours by frequencies. On a GPU the network computes in bfloat16 for FIA, "
        "and in TF32 for GMA."
    )


def effort(settings: Settings) -> str:
    """How long the re-run baselines may take, as a note."""
    iterations = settings.iterations_or(ITERATIONS, QUICK_ITERATIONS)
    return f"Re-runs take {iterations:,} iterations (the paper: {ITERATIONS:,})."


def inverted(settings: Settings) -> int:
    return settings.inverted_or(INVERTED, QUICK_INVERTED)


def by_size(sizes: Sequence[int], numbers: Sequence[float | str], size: int) -> float | str | None:
    """The paper's number for a batch size, None for sizes it does not have."""
    return dict(zip(sizes, numbers, strict=True)).get(size)


def row(
    cell: Mapping[str, str | int],
    victim: Victim,
    outcomes: Outcomes,
    paper: Mapping[str, float | str | None],
    settings: Settings,
    further: Sequence[str] = (),
) -> Row:
    """A line of a table: what was measured and, left of each method in `paper`, the paper's number for it."""
    entries: dict[str, Entry] = {}
    for name, entry in outcomes.entries.items():
        if name in paper:
            entries[PAPER_COLUMNS[name]] = settings.paper(paper[name])
        entries[name] = entry
    return Row(cell=cell, entries=entries, notes=(victim.note, effort(settings), *further, *outcomes.notes))
