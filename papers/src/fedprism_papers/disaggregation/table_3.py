"""Table 3: images from federated-averaging updates, of one user, of a sum, and of users after disaggregation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import fedprism as fp
from fedprism.attacks import Attack, Labels
from fedprism.solvers import TotalVariation
from fedprism_papers.disaggregation import federation as federations
from fedprism_papers.disaggregation.federation import CENTRED, Federation
from fedprism_papers.shared.base import Announce, Entry, Recipe, Row, Settings
from fedprism_papers.shared.measuring import OVER_40_DB, PSNR

COHORTS, QUICK_COHORTS = (10,), (3,)
SHARE, QUICK_SHARE = 10, 4
"""Users for each one who takes part in a round."""
REPEATS = 3
ATTACKED, QUICK_ATTACKED = 4, 1
IMAGES, QUICK_IMAGES = 64, 8
WIDTH, QUICK_WIDTH = 256, 64
FEDAVG, QUICK_FEDAVG = fp.FedAvg(lr=1e-2, epochs=4, batch_size=16), fp.FedAvg(lr=1e-2, epochs=2, batch_size=4)
ITERATIONS, QUICK_ITERATIONS = 4_800, 60
VARIATION = 0.1
"""The weight of total variation: of 0.001 to 0.5, the best on images of the training split, which are not attacked."""

ALONE, TOGETHER, APART = "one user", "sum", "disaggregated"
PAPER = {ALONE: 16.0, TOGETHER: 13.3, APART: 18.6}
"""PSNR for one user, a sum over 10, and 100 users disaggregated."""
MATCHING, OURS = "inverting gradients re-run", "cocktail party"
TRAINING = (
    f"FC-2 of width {WIDTH}, not trained; {IMAGES} images a user, {FEDAVG.epochs} epochs of SGD with rate {FEDAVG.lr}, "
    f"batches of {FEDAVG.batch_size}, shuffled anew in every round; quick: width {QUICK_WIDTH}, {QUICK_IMAGES} images, "
    f"{QUICK_FEDAVG.epochs} epochs, batches of {QUICK_FEDAVG.batch_size}."
)
AVERAGED = (
    "Disaggregation returns the mean of a user's updates over its rounds, in which the order of the batches is "
    "averaged out."
)
UNROLLED = (
    "Inverting gradients reads an update as minus one gradient, because a sum over users cannot be unrolled. It counts "
    "the labels from the update of the last layer's bias; nobody grants them."
)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    data = federations.images("cifar10", settings)
    shape = tuple(data.images.shape[1:])
    width = QUICK_WIDTH if settings.quick else WIDTH
    model = fp.models.build("fc2", input_shape=shape, hidden=width, classes=data.classes, seed=settings.seed)
    for cohort in (1, *settings.sizes_or(COHORTS, QUICK_COHORTS)):
        users = cohort * (QUICK_SHARE if settings.quick else SHARE)
        federation = Federation(
            model=model,
            data=data,
            users=users if cohort > 1 else 1,
            cohort=cohort,
            rounds=federations.enough_rounds(users, cohort),
            images=QUICK_IMAGES if settings.quick else IMAGES,
            protocol=QUICK_FEDAVG if settings.quick else FEDAVG,
            normalization=CENTRED,
        )
        yield from _rows(federation, settings, announce)


def _rows(federation: Federation, settings: Settings, announce: Announce) -> Iterator[Row]:
    """The sum of one round and, where it is a sum, what disaggregation makes of all rounds."""
    kinds = (ALONE,) if federation.cohort == 1 else (TOGETHER, APART)
    attacks = methods(settings)
    entries = federations.attack_federation(
        federation,
        {f"{name}, {kinds[0]}": attack for name, attack in attacks.items()},
        {f"{name}, {APART}": attack for name, attack in attacks.items()} if APART in kinds else {},
        settings,
        announce,
        attacked=settings.inverted_or(ATTACKED, QUICK_ATTACKED),
        repeats=settings.batches_or(REPEATS),
    )
    for kind in kinds:
        measured = {name: entries[f"{name}, {kind}"] for name in attacks}
        published = federation.cohort in (1, *COHORTS)
        paper: dict[str, Entry] = {"paper": settings.paper(PAPER[kind]) if published else None}
        yield Row(
            cell={
                "update": kind,
                "users": federation.users if kind == APART else federation.cohort,
                "rounds": federation.rounds if kind == APART else 1,
                "images a user": federation.images,
            },
            entries={**paper, **measured},
        )


def methods(settings: Settings) -> dict[str, Attack]:
    """The published attack and ours."""
    matching = dataclasses.replace(
        fp.attacks.inverting_gradients(),
        labels=Labels.INFERRED,
        priors=(TotalVariation(VARIATION),),
        iterations=settings.iterations_or(ITERATIONS, QUICK_ITERATIONS),
        unroll=False,
    )
    return {MATCHING: matching, OURS: fp.attacks.cocktail_party()}


RECIPE = Recipe(
    name="disaggregation-table-3",
    summary="Inverting gradients on FedAvg updates, with and without disaggregation, two dense layers on CIFAR-10",
    citation=f"{federations.CITATION}, table 3",
    shown=(PSNR, OVER_40_DB),
    run=run,
    notes=(federations.SUMS, TRAINING, AVERAGED, UNROLLED, federations.SCORED),
)
