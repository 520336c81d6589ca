"""Tables 2 and 3: images of a sum over users and of users after disaggregation, from gradients and FedAvg updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

import fedprism as fp
from fedprism.attacks import Attack, Labels
from fedprism.randomness import generator, seeded_layers
from fedprism.solvers import TotalVariation
from fedprism_papers.disaggregation import federation as federations
from fedprism_papers.disaggregation.federation import CENTRED, Federation
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings
from fedprism_papers.shared.measuring import OVER_40_DB, PSNR

# --- table 2: gradients of a small network, behind sums over more and more users -------------------------------------

USERS, QUICK_USERS = (1, 2, 4, 32), (1, 4)  # in a sum
GRADIENT_REPEATS = 5  # repetitions per number of users
OF_A_SUM, QUICK_OF_A_SUM = 8, 2
"""Users whose images are looked for after disaggregation, of those in the sum."""
HIDDEN = 64  # units
DLG_ITERATIONS, QUICK_DLG_ITERATIONS = 300, 40  # of an attack

PAPER_2 = {1: 36.5, 2: 18.8, 4: 13.9, 32: 6.1}
"""PSNR by the number of users in the sum."""
SUM, OURS_SUM = "DLG on the sum", "cocktail party on the sum"
DLG_APART, OURS_APART = "DLG, disaggregated", "dense inversion, disaggregated"
NETWORK = (
    f"Each user holds one image. The network has {HIDDEN} hidden units and a sigmoid, and is not trained; it need not "
    "be the paper's. Half of the users take part in every round."
)


def table_2(settings: Settings, announce: Announce) -> Iterator[Row]:
    data = federations.images("cifar100", settings)
    model = mlp(data, settings)
    dlg = dataclasses.replace(fp.attacks.dlg(), iterations=settings.iterations_or(DLG_ITERATIONS, QUICK_DLG_ITERATIONS))
    on_sum: dict[str, Attack] = {SUM: dlg, OURS_SUM: fp.attacks.cocktail_party()}
    on_users: dict[str, Attack] = {DLG_APART: dlg, OURS_APART: fp.attacks.dense_inversion()}
    for cohort in settings.sizes_or(USERS, QUICK_USERS):
        users = 2 * cohort
        federation = Federation(
            model=model,
            data=data,
            users=users,
            cohort=cohort,
            rounds=federations.enough_rounds(users, cohort),
            images=1,
            protocol=fp.FedSGD(),
            normalization=CENTRED,
        )
        entries = federations.attack_federation(
            federation,
            on_sum,
            on_users,
            settings,
            announce,
            attacked=min(cohort, settings.inverted_or(OF_A_SUM, QUICK_OF_A_SUM)),
            repeats=settings.batches_or(GRADIENT_REPEATS),
        )
        yield Row(
            cell={"data": data.name, "users in the sum": cohort, "users": users, "rounds": federation.rounds},
            entries={"DLG on the sum, paper": settings.paper(PAPER_2.get(cohort)), **entries},
        )


def mlp(data: fp.data.ImageSet, settings: Settings) -> nn.Module:
    """Two dense layers with a sigmoid between them, because DLG needs the gradient to be smooth; not trained."""
    features = data.images[0].numel()
    with seeded_layers(generator(settings.seed, "network")):
        return nn.Sequential(nn.Flatten(), nn.Linear(features, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, data.classes))


TABLE_2 = Recipe(
    name="disaggregation-table-2",
    summary="DLG on sums of gradients, with and without disaggregation, two dense layers on CIFAR-100",
    citation=f"{federations.CITATION}, table 2",
    shown=(PSNR, OVER_40_DB),
    run=table_2,
    options=("sizes", "batches", "iterations", "inverted"),
    notes=(
        federations.SUMS,
        NETWORK,
        federations.SCORED,
        "Our DLG has a line search, without which L-BFGS diverges from many starts.",
    ),
)

# --- table 3: federated averaging, of one user, of a sum, and of users after disaggregation --------------------------

COHORTS, QUICK_COHORTS = (10,), (3,)  # users in a sum
SHARE, QUICK_SHARE = 10, 4
"""Users for each one who takes part in a round."""
REPEATS = 3  # repetitions per cohort size
ATTACKED, QUICK_ATTACKED = 4, 1  # users whose images are looked for
IMAGES, QUICK_IMAGES = 64, 8  # per user
WIDTH, QUICK_WIDTH = 256, 64  # units of the hidden layer
FEDAVG, QUICK_FEDAVG = fp.FedAvg(lr=1e-2, epochs=4, batch_size=16), fp.FedAvg(lr=1e-2, epochs=2, batch_size=4)
ITERATIONS, QUICK_ITERATIONS = 4_800, 60  # of an attack
VARIATION = 0.1
"""The weight of total variation: of 0.001 to 0.5, the best on images of the training split, which are not attacked."""

ALONE, TOGETHER, APART = "one user", "sum", "disaggregated"
PAPER_3 = {ALONE: 16.0, TOGETHER: 13.3, APART: 18.6}
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


def table_3(settings: Settings, announce: Announce) -> Iterator[Row]:
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
        paper = settings.paper(PAPER_3[kind]) if published else None
        yield Row(
            cell={
                "update": kind,
                "users": federation.users if kind == APART else federation.cohort,
                "rounds": federation.rounds if kind == APART else 1,
                "images a user": federation.images,
            },
            entries={"paper": paper, **measured},
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


TABLE_3 = Recipe(
    name="disaggregation-table-3",
    summary="Inverting gradients on FedAvg updates, with and without disaggregation, two dense layers on CIFAR-10",
    citation=f"{federations.CITATION}, table 3",
    shown=(PSNR, OVER_40_DB),
    run=table_3,
    options=("sizes", "batches", "iterations", "inverted"),
    notes=(federations.SUMS, TRAINING, AVERAGED, UNROLLED, federations.SCORED),
)
