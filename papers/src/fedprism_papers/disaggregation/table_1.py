"""Table 1: participation recovered from sums of real FedAvg updates, which differ from round to round."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import fedprism as fp
from fedprism.client.update import Protocol
from fedprism.pixels import to_inputs
from fedprism.randomness import generator
from fedprism.runtime import devices
from fedprism_papers.disaggregation import planted_participation as planted
from fedprism_papers.disaggregation.federation import CENTRED, dealt_out
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings

USERS, ROUNDS, RATE, WINDOW, LEARNING_RATE = 100, 200, 0.1, 10, 0.01
QUICK_USERS, QUICK_ROUNDS = 12, 50  # of a quick federation
EPOCHS, QUICK_EPOCHS = (1, 2, 4, 8, 16, 32, 64), (1, 4)  # of local training
VARIANTS = {"plain": (0.0, 1.0), "momentum .9": (0.9, 1.0), "fraction .9": (0.0, 0.9)}
"""Name -> momentum and the part of its data that a user trains on in a round."""
METRICS = (planted.COLUMNS, planted.ENTRIES, planted.SURE, planted.SURE_WRONG, planted.NOISE)
SAMPLES = ((64, 8), (64, 16), (64, 32), (128, 8), (128, 16), (128, 32))
"""Images a user holds, and local batch size."""

# The fraction of users whose column was recovered, where it is not 1: (variant, images, batch) -> by number of epochs.
PAPER = {
    ("momentum .9", 64, 8): {1: 0.99},
    ("momentum .9", 128, 8): {64: 0.96},
    ("fraction .9", 64, 8): {1: 0.06, 2: 0.66, 4: 0.97, 8: 0.99, 16: 0.98, 32: 0.99, 64: 0.85},
    ("fraction .9", 64, 16): {64: 0.99},
    ("fraction .9", 128, 8): {64: 0.90},
    ("fraction .9", 128, 16): {1: 0.59, 2: 0.96, 64: 0.99},
}


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    users, rounds = (QUICK_USERS, QUICK_ROUNDS) if settings.quick else (USERS, ROUNDS)
    samples = ((8, 4),) if settings.quick else SAMPLES
    data = training_images(settings)
    recover = partial(planted.recover, time_limit=0.0, seed=settings.seed)
    for variant, (momentum, fraction) in VARIANTS.items():
        for images, batch in samples:
            for epochs in settings.sizes_or(EPOCHS, QUICK_EPOCHS):
                announce(f"{variant}, {images} images, batches of {batch}, {epochs} epochs")
                protocol = fp.FedAvg(lr=LEARNING_RATE, epochs=epochs, batch_size=batch, momentum=momentum)
                federation = _federation(data, users, rounds, images, settings, fraction, protocol)
                paper = PAPER.get((variant, images, batch), {}).get(epochs, 1.0)
                yield Row(
                    cell={"variant": variant, "images": images, "batch": batch, "epochs": epochs},
                    entries={
                        "paper": settings.paper(paper),
                        "cohorts known": recover(federation, METRICS, cohort_sizes=federation.matrix.sum(1)),
                        "cohorts unknown": recover(federation, METRICS, cohort_sizes=None),
                    },
                )


def training_images(settings: Settings) -> fp.data.ImageSet:
    """All images of the folder: the test images alone are too few for 100 users. Photographs for a quick run."""
    if settings.quick:
        return fp.data.load("photos", size=32)
    parts = [fp.data.load("cifar10", split=split, data_dir=settings.data_dir) for split in ("test", "train")]
    images, labels = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    return fp.data.ImageSet("cifar10", images, labels, parts[0].class_names)


def _federation(
    data: fp.data.ImageSet,
    users: int,
    rounds: int,
    images: int,
    settings: Settings,
    fraction: float,
    protocol: Protocol,
) -> planted.Planted:
    """What the server sees of all rounds, and who took part."""
    drawn = data.draw(users * images, generator(settings.seed, "users", users, images))
    private = fp.Batch(to_inputs(drawn.tensor, CENTRED), drawn.labels)
    scenario = fp.Scenario(
        model=fp.models.build("lenet5", input_shape=tuple(private.tensor.shape[1:]), classes=10, seed=settings.seed),
        clients=dealt_out(private, images),
        protocol=protocol,
        aggregation="sum",
        normalization=CENTRED,
        rounds=rounds,
        participation=RATE,
        frozen=True,
        window=WINDOW,
        fraction=fraction,
    )
    observed, truth = fp.simulate(scenario, fp.threats.secure_aggregation, seed=settings.seed, device=settings.device)
    sums = torch.stack([torch.cat([tensor.flatten() for tensor in r.update.values()]) for r in observed.rounds])
    known = observed.knowledge
    assert known.windows is not None
    assert known.counts is not None
    assert truth.participation is not None
    nothing = sums[:0]  # single updates: nobody asks for them here
    return planted.Planted(
        sums.to(devices.pick(settings.device)), known.windows, known.counts, truth.participation, nothing
    )


RECIPE = Recipe(
    name="disaggregation-table-1",
    summary="Participation recovered from sums of FedAvg updates: LeNet on CIFAR-10, 100 users, 200 rounds",
    citation=f"{planted.CITATION}, table 1",
    shown=(planted.COLUMNS, planted.SURE, planted.SURE_WRONG),
    run=run,
    options=("sizes",),
    notes=(
        "The paper's number is the fraction of users whose column is right, within 600 s of Gurobi a user.",
        "Updates differ from round to round: batches are shuffled; 'fraction .9' draws that part of the images anew.",
        planted.SAID,
    ),
)
