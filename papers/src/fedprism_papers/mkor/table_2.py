"""Table 2: MNIST through LeNet-5, a hundred images a batch, beside gradient matching and class fishing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

import fedprism as fp
from fedprism.attacks import Attack, Mkor, Reference
from fedprism.randomness import generator, seeded_layers
from fedprism_papers.mkor import malicious_server as server
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings
from fedprism_papers.shared.cells import attack_cell

SIZES, QUICK_SIZES = (100,), (12,)  # images per batch
BATCHES = 10  # per cell
ITERATIONS, QUICK_ITERATIONS = 1000, 20  # of the attack beside MKOR
SIDE = 28  # pixels
ORIGINAL, STRIDES = "LeNet-5", "strides in place of pools"
PAPER = {
    ORIGINAL: {
        "DLG": ".13, .02, 2.00 dB, .52 dB",
        "iDLG": ".11, .03, 1.28 dB, .18 dB",
        "inverting gradients": ".30, .13, 15.64 dB, 11.44 dB",
        "class fishing": ".21, 14.63 dB (best)",
        "MKOR": ".54, .27, 17.06 dB, 12.79 dB",
    },
    STRIDES: {
        "DLG": ".08, .01, 1.21 dB, .20 dB",
        "iDLG": ".14, .04, 1.29 dB, .26 dB",
        "inverting gradients": ".41, .18, 15.96 dB, 11.48 dB",
        "class fishing": ".42, 15.95 dB (best)",
        "MKOR": ".69, .38, 18.72 dB, 13.53 dB",
    },
}
BORDER = (
    "The windows of LeNet-5's features leave out a border of the image; there each pixel has the value of the nearest "
    "window, where the paper's code knows that MNIST's border is black."
)
MODIFIED = (
    f"'{STRIDES}' has LeNet-5's convolutions with a stride of 2, padded, and no pools, so that nothing is averaged; "
    "the paper's modified network is described as such, its code has no strides and one dense layer."
)
LABELS = (
    "Inverting gradients is given the labels, as in its paper; iDLG counts them. Total variation has the weight of its "
    f"library, {server.VARIATION}: with a hundredth of it, thousands of iterations do not lose the noise of the start "
    "without pools."
)


def lenets(settings: Settings) -> dict[str, server.Victim]:
    name, source = ("digits", {"size": SIDE}) if settings.quick else ("MNIST", {"split": "test"})
    images = fp.data.load(name.lower(), data_dir=settings.data_dir, **source)
    options = {"activation": "sigmoid", "pool": "average", "padding": 2}
    original = fp.models.build("lenet5", input_shape=(1, SIDE, SIDE), classes=10, seed=settings.seed, **options)
    with seeded_layers(generator(settings.seed, "strides")):
        strides = nn.Sequential(
            *(nn.Conv2d(1, 6, 5, stride=2, padding=2), nn.Sigmoid()),
            *(nn.Conv2d(6, 16, 5, stride=2, padding=2), nn.Sigmoid()),
            *(nn.Flatten(), nn.Linear(16 * 49, 120), nn.Sigmoid()),
            *(nn.Linear(120, 84), nn.Sigmoid(), nn.Linear(84, 10)),
        )
    note = (
        f"LeNet-5 with sigmoids, average pools and zero padding, parameters drawn as DLG's authors draw them; "
        f"{len(images):,} images of {name}."
    )
    # From torch's own initialisation, sigmoids let hardly any of a gradient through: DLG ends where it starts.
    return {
        network: server.Victim(
            name=name, model=fp.models.uniform_(model, seed=settings.seed), images=images, side=SIDE, note=note
        )
        for network, model in ((ORIGINAL, original), (STRIDES, strides))
    }


def methods(settings: Settings) -> dict[str, Attack]:
    iterations = settings.iterations_or(ITERATIONS, QUICK_ITERATIONS)
    dlg, idlg = (replace(make(), iterations=dlg_iterations(settings)) for make in (fp.attacks.dlg, fp.attacks.idlg))
    dumped = Mkor(reference=Reference.DUMP_CLASS)
    return {
        "DLG": dlg,
        "iDLG": idlg,
        **server.gradient_matching(iterations),
        "MKOR": dumped,
        "MKOR, smoothest": replace(dumped, decoder=server.smoothest(settings)),
    }


def dlg_iterations(settings: Settings) -> int:
    """Its library's number, unless told otherwise."""
    return settings.iterations_or(fp.attacks.dlg().iterations, QUICK_ITERATIONS)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    for network, victim in lenets(settings).items():
        for size in settings.sizes_or(SIZES, QUICK_SIZES):
            batches = settings.batches_or(BATCHES)
            line: dict[str, str | int] = {"network": network, "data": victim.name, "n": size, "batches": batches}
            if not settings.wants(line):
                continue
            cell = server.ChosenParameters(victim=victim, size=size, batches=batches, unique=False)
            effort = settings.iterations_or(ITERATIONS, QUICK_ITERATIONS)
            entries = attack_cell(cell, methods(settings), settings, announce, f"{network}, {size} images").entries
            paper = {
                f"{name}, paper": settings.paper(text if size == 100 else None) for name, text in PAPER[network].items()
            }
            yield Row(
                cell=line,
                entries={**paper, **entries},
                notes=(
                    victim.note,
                    f"Iterations: DLG and iDLG {dlg_iterations(settings):,}, the other baselines {effort:,}.",
                ),
            )


RECIPE = Recipe(
    name="mkor-table-2",
    summary="MKOR, LeNet-5 on MNIST, beside DLG, iDLG, inverting gradients and class fishing",
    citation=f"{server.CITATION}, table 2",
    shown=server.SHOWN,
    run=run,
    options=("sizes", "batches", "iterations", "only"),
    notes=(
        f"The paper's numbers: {server.ORDER}.",
        BORDER,
        MODIFIED,
        server.FISHED,
        LABELS,
        server.LOSS,
        server.SCORED,
    ),
)
