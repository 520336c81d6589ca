"""Table 2: images from gradients of a small network, behind sums over more and more users."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

import fedprism as fp
from fedprism.attacks import Attack
from fedprism.randomness import generator, seeded_layers
from fedprism_papers.disaggregation import federation as federations
from fedprism_papers.disaggregation.federation import CENTRED, Federation
from fedprism_papers.shared.base import Announce, Entry, Recipe, Row, Settings
from fedprism_papers.shared.measuring import OVER_40_DB, PSNR

USERS, QUICK_USERS = (1, 2, 4, 32), (1, 4)
REPEATS = 5
ATTACKED, QUICK_ATTACKED = 8, 2
"""Users whose images are looked for after disaggregation, of those in the sum."""
WIDTH = 64
ITERATIONS, QUICK_ITERATIONS = 300, 40

# PSNR by the number of users in the sum.
PAPER = {1: 36.5, 2: 18.8, 4: 13.9, 32: 6.1}

SUM, OURS_SUM = "DLG on the sum", "cocktail party on the sum"
APART, OURS_APART = "DLG, disaggregated", "dense inversion, disaggregated"
NETWORK = (
    f"Each user holds one image. The network has {WIDTH} hidden units and a sigmoid, and is not trained; it need not "
    "be the paper's. Half of the users take part in every round."
)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    data = federations.images("cifar100", settings)
    model = mlp(data, settings)
    dlg = dataclasses.replace(fp.attacks.dlg(), iterations=settings.iterations_or(ITERATIONS, QUICK_ITERATIONS))
    on_sum: dict[str, Attack] = {SUM: dlg, OURS_SUM: fp.attacks.cocktail_party()}
    on_users: dict[str, Attack] = {APART: dlg, OURS_APART: fp.attacks.dense_inversion()}
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
            attacked=min(cohort, settings.inverted_or(ATTACKED, QUICK_ATTACKED)),
            repeats=settings.batches_or(REPEATS),
        )
        paper: dict[str, Entry] = {"DLG on the sum, paper": settings.paper(PAPER.get(cohort))}
        yield Row(
            cell={"data": data.name, "users in the sum": cohort, "users": users, "rounds": federation.rounds},
            entries={**paper, **entries},
        )


def mlp(data: fp.data.ImageSet, settings: Settings) -> nn.Module:
    """Two dense layers with a sigmoid between them, because DLG needs the gradient to be smooth; not trained."""
    features = data.images[0].numel()
    with seeded_layers(generator(settings.seed, "network")):
        return nn.Sequential(nn.Flatten(), nn.Linear(features, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, data.classes))


RECIPE = Recipe(
    name="disaggregation-table-2",
    summary="DLG on sums of gradients, with and without disaggregation, two dense layers on CIFAR-100",
    citation=f"{federations.CITATION}, table 2",
    shown=(PSNR, OVER_40_DB),
    run=run,
    notes=(
        federations.SUMS,
        NETWORK,
        federations.SCORED,
        "Our DLG has a line search, without which L-BFGS diverges from many starts.",
    ),
)
