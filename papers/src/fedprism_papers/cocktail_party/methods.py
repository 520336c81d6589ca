"""The methods that the Cocktail Party Attack's recipes compare: its baseline, its published objective, and ours.

Kariyappa, Guo, Maeng, Xiong, Suh, Qureshi, Lee, "Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated
Learning using Independent Component Analysis", ICML 2023.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import fedprism as fp
from fedprism.attacks import Attack, CocktailParty, GradientMatching, Labels
from fedprism.runtime import devices
from fedprism.runtime.cuda_graphs import Engine
from fedprism.solvers import Adam, FeatureInversion, TotalVariation
from fedprism_papers.cocktail_party import published_objective as publication
from fedprism_papers.cocktail_party.gradients import COSINE, VictimBatches
from fedprism_papers.cocktail_party.published_objective import CocktailObjective
from fedprism_papers.shared.base import Announce, Entry, Row, Settings
from fedprism_papers.shared.cells import AttackTrial, Outcomes
from fedprism_papers.shared.measuring import LPIPS, PSNR
from fedprism_papers.shared.tuning import Range, Tuning, search
from fedprism_papers.shared.victims import Victim

CITATION = "Kariyappa et al., Cocktail Party Attack, ICML 2023"
ITERATIONS, QUICK_ITERATIONS = 25_000, 300  # of the published objective: the paper's, and of a quick run
MATCHING = 3_000
"""Iterations of the gradient-matching baseline, unless told otherwise: it is by far the slowest part."""
INVERTED, QUICK_INVERTED = 16, 4  # images per batch that are rendered from their features

RENDERING, DEEP_MATCHING, DEEP_BASELINE = 1_000, 300, 1_000
"""Iterations of feature inversion, of matching the gradient of a convolutional network from its answers on, and of
matching that gradient alone, unless told otherwise."""

MATCHED_BATCHES = 1
"""Batches per cell of which a convolutional network's whole gradient is matched, unless told otherwise."""

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
    "GMA re-run: cosine distance, total variation, Adam with rate 0.1, box and free labels as published; the rate "
    "falls linearly, and labels go through a softmax; an update of several steps is read as minus one gradient, "
    "where the published code matches its negative; the best iterate by the objective is returned."
)
TUNING = (
    "The paper tuned the objective's weights for each data set and batch size on a batch with known truth. --tune does "
    "so for the re-run and for GMA on a batch that is not attacked; without it they have the weights published for one "
    "data set. Ours has one setting for all."
)
FEATURES = (
    "cosine: between recovered and true features, whatever its sign, after the best one-to-one assignment; an image "
    "rendered from features is compared with the image that these features were assigned to."
)


def gradient_matching(settings: Settings, iterations: int = MATCHING) -> GradientMatching:
    """The paper's baseline (GMA): matches the gradient of all parameters."""
    return GradientMatching(
        priors=(TotalVariation(VARIATION),),
        labels=Labels.JOINT,
        optimizer=Adam(signed=False),
        iterations=settings.iterations_or(iterations, QUICK_ITERATIONS),
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
    images, on_gpu = inverted(settings), devices.pick(settings.device).type == "cuda"
    smooth = FeatureInversion() if settings.quick else FeatureInversion(total_variation=DEEP_SMOOTHNESS)
    steps = settings.iterations_or(RENDERING, QUICK_ITERATIONS)
    rendering, as_published = (
        dataclasses.replace(inversion, iterations=steps, bfloat16=on_gpu)
        for inversion in (smooth, publication.published_inversion())
    )
    further = settings.iterations_or(DEEP_MATCHING, QUICK_ITERATIONS)
    return {
        GMA: dataclasses.replace(gradient_matching(settings, DEEP_BASELINE), engine=Engine(tf32=True)),
        PUBLISHED_FIA: published(
            objective(settings, publication.embedding_objective()), inversion=as_published, images=images
        ),
        OURS_FIA: ours(inversion=rendering, images=images),
        OURS_FIA_GMA: ours(inversion=rendering, matching=1.0, matching_iterations=further),
    }


def rendered(settings: Settings) -> str:
    """How many images are scored, as a note."""
    return (
        f"FIA renders the first {inverted(settings)} images of a batch (the paper: {INVERTED}), the same for every "
        "method, and scores are over these; with GMA, which needs the whole batch, over the whole batch. The re-run "
        "renders as published, pixel by pixel; ours by frequencies. On a GPU the network computes in bfloat16 for FIA, "
        "and in TF32 for GMA."
    )


def effort(methods: Mapping[str, Attack], *, rendered: bool = False) -> str:
    """How many iterations each of these takes, as a note."""
    taken = [f"{name} {words}" for name, attack in methods.items() if (words := _iterations(attack, rendered))]
    return f"Iterations (the paper: {ITERATIONS:,}): {'; '.join(taken)}." if taken else "No method here is iterated."


def _iterations(attack: Attack, rendered: bool) -> str:
    """Those of an attack's parts, in words; our separation and its exact stage stop by themselves."""
    if isinstance(attack, GradientMatching):
        return f"{attack.iterations:,}"
    assert isinstance(attack, CocktailParty)
    parts = [f"{attack.objective.iterations:,}"] if isinstance(attack.objective, CocktailObjective) else []
    parts += [f"{attack.inversion.iterations:,} to render"] if rendered else []
    return ", ".join([*parts, *([f"{attack.matching_iterations:,} to match"] if attack.matching else [])])


# --- weights of the baselines, chosen as the paper chose them ---------------------------------------------------------

VARIATION = 1e-3
"""GMA's weight of total variation: the published one."""
SPACES = {
    GMA: {"total_variation": Range(1e-5, 1.0)},
    PUBLISHED: {
        "independence": Range(1e-2, 10.0),
        "temperature": Range(1.0, 20.0),
        "total_variation": Range(0.1, 10.0),
    },
    PUBLISHED_FIA: {
        "independence": Range(1e-2, 10.0),
        "temperature": Range(1.0, 20.0),
        "sparsity": Range(0.1, 10.0),
        "sign": Range(1e-2, 10.0),
    },
}
"""Where each baseline's weights are looked for; the paper's sweep went from 1e-5 to 10."""

LOOSE = {"independence": 0.1}
"""Less decorrelation than published is tried second: few inputs are correlated by chance, however independent."""


def tuned(
    methods: Mapping[str, Attack], attacked: VictimBatches, settings: Settings, announce: Announce
) -> tuple[dict[str, Attack], tuple[str, ...]]:
    """The methods with the weights with which each baseline did best in a rehearsal, and what was chosen, as notes."""
    chosen, notes = dict(methods), list[str]()
    for name in methods if settings.tune else ():
        if name in SPACES:
            announce(f"{attacked.victim.name}, {attacked.size} images: rehearsing {name}")
            best = rehearse(methods[name], SPACES[name], attacked, settings)
            chosen[name] = weighted(methods[name], best.values)
            weights = ", ".join(f"{weight} {value:.3g}" for weight, value in best.values.items())
            about = f"{attacked.victim.name}, {attacked.protocol!r}, {attacked.size} images"
            notes.append(f"{about}: {name} has {weights}, the best of {settings.tune} rehearsals.")
    return chosen, tuple(notes)


def rehearse(attack: Attack, space: Mapping[str, Range], attacked: VictimBatches, settings: Settings) -> Tuning:
    """Search weights on a batch that is not attacked: by LPIPS or else PSNR, for features by their cosine."""
    rehearsal = attacked.rehearsal(settings)
    if isinstance(attack, CocktailParty):
        attack = dataclasses.replace(attack, images=0)

    def judged(weights: Mapping[str, float]) -> float:
        trial = AttackTrial(settings, rehearsal, 0, 0, "rehearsal", weighted(attack, weights), "rehearsal")
        record = trial.run(settings.device).record
        means = record.scores["means"] if record is not None and record.scores is not None else {}
        return -float(means[LPIPS]) if LPIPS in means else float(means.get(COSINE, means.get(PSNR, math.nan)))

    first = {
        name: getattr(attack.objective, name) if isinstance(attack, CocktailParty) else VARIATION for name in space
    }
    second = first | LOOSE if "independence" in first else None
    return search(judged, space, first=first, second=second, trials=settings.tune or 1, seed=settings.seed)


def weighted(attack: Attack, weights: Mapping[str, float]) -> Attack:
    """The attack with these weights in its objective."""
    if isinstance(attack, GradientMatching):
        return dataclasses.replace(attack, priors=(TotalVariation(weights["total_variation"]),))
    assert isinstance(attack, CocktailParty)
    assert isinstance(attack.objective, CocktailObjective)
    return dataclasses.replace(attack, objective=dataclasses.replace(attack.objective, **dict[str, Any](weights)))


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
    further: Sequence[str],
) -> Row:
    """A line of a table: what was measured and, left of each method in `paper`, the paper's number for it."""
    entries: dict[str, Entry] = {}
    for name, entry in outcomes.entries.items():
        if name in paper:
            entries[PAPER_COLUMNS[name]] = settings.paper(paper[name])
        entries[name] = entry
    return Row(cell=cell, entries=entries, notes=(victim.note, *further, *outcomes.notes))
