"""Figures 5b and 6b: how often users take part in a window, and how much FedAvg updates change from round to round."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import fedprism as fp
from fedprism.pixels import to_inputs
from fedprism.randomness import generator
from fedprism_papers.disaggregation import planted_participation as planted
from fedprism_papers.disaggregation.federation import CENTRED, dealt_out
from fedprism_papers.disaggregation.table_1 import EPOCHS, LEARNING_RATE, QUICK_EPOCHS, VARIANTS, training_images
from fedprism_papers.shared.base import Announce, Measured, Recipe, Row, Settings

WINDOWS = (10, 20, 30, 40, 50)
USERS, ROUNDS, RATE = 100, 600, 0.1
NOISE = "relative noise"
IMAGES, BATCHES = 128, (8, 16, 32)
CLIENTS, REPEATS = 4, 10
"""Clients whose updates are compared, and rounds that each takes part in."""
QUICK_IMAGES, QUICK_BATCHES = 16, (8,)


def figure_5_b(settings: Settings, announce: Announce) -> Iterator[Row]:
    """The share of a window's counts that are 0, 1, 2, ..."""
    for window in WINDOWS:
        announce(f"windows of {window}")
        federation = planted.Federation(users=USERS, rounds=ROUNDS, rate=RATE, window=window)
        counts = planted.plant(federation, generator(settings.seed, "histogram", window), torch.device("cpu")).counts
        shares = torch.bincount(counts.flatten()).double() / counts.numel()
        values = {f"{count} times": (float(share),) for count, share in enumerate(shares) if count < len(SHOWN_COUNTS)}
        yield Row(cell={"window": window}, entries={"share of counts": Measured(values=values, seconds=(0.0,))})


SHOWN_COUNTS = tuple(f"{count} times" for count in range(12))
FIG_5_B = Recipe(
    name="disaggregation-fig-5-b",
    summary="How often users take part in windows of 10 to 50 rounds (participation .1)",
    citation=f"{planted.CITATION}, figure 5b",
    shown=SHOWN_COUNTS,
    run=figure_5_b,
    options=(),
    notes=("100 users, 600 rounds, one trial.",),
)


def figure_6_b(settings: Settings, announce: Announce) -> Iterator[Row]:
    """Variance of clients' updates between rounds, relative to the squared length of their mean."""
    images, batches = (QUICK_IMAGES, QUICK_BATCHES) if settings.quick else (IMAGES, BATCHES)
    data = training_images(settings)
    drawn = data.draw(CLIENTS * images, generator(settings.seed, "users", CLIENTS, images))
    clients = dealt_out(fp.Batch(to_inputs(drawn.tensor, CENTRED), drawn.labels), images)
    shape = tuple(clients[0].tensor.shape[1:])
    model = fp.models.build("lenet5", input_shape=shape, classes=10, seed=settings.seed)
    for variant, (momentum, fraction) in VARIANTS.items():
        for batch in batches:
            for epochs in settings.sizes_or(EPOCHS, QUICK_EPOCHS):
                announce(f"{variant}, batches of {batch}, {epochs} epochs")
                scenario = fp.Scenario(
                    model=model,
                    clients=clients,
                    protocol=fp.FedAvg(lr=LEARNING_RATE, epochs=epochs, batch_size=batch, momentum=momentum),
                    normalization=CENTRED,
                    rounds=REPEATS,
                    frozen=True,
                    fraction=fraction,
                )
                yield Row(
                    cell={"variant": variant, "images": images, "batch": batch, "epochs": epochs},
                    entries={"updates": Measured(values={NOISE: relative_noise(scenario, settings)}, seconds=(0.0,))},
                )


def relative_noise(scenario: fp.Scenario, settings: Settings) -> tuple[float, ...]:
    """For each client the mean squared distance of its updates from their mean, over the mean's squared length."""
    threat = fp.threats.honest_but_curious
    observed, _ = fp.simulate(scenario, threat, seed=settings.seed, device=settings.device)
    by_client: dict[str, list[torch.Tensor]] = {}
    for round_ in observed.rounds:
        (name,) = round_.participants or ("",)
        update = torch.cat([tensor.flatten().double() for tensor in round_.update.values()])
        by_client.setdefault(name, []).append(update)
    noise = []
    for updates in map(torch.stack, by_client.values()):
        mean = updates.mean(0)
        spread = (updates - mean).square().sum() / (len(updates) - 1)
        noise.append(float(spread / mean.square().sum()))
    return tuple(noise)


FIG_6_B = Recipe(
    name="disaggregation-fig-6-b",
    summary="How much FedAvg updates change from round to round: LeNet on CIFAR-10",
    citation=f"{planted.CITATION}, figure 6b",
    shown=(NOISE,),
    run=figure_6_b,
    options=("sizes",),
    notes=(
        f"{CLIENTS} clients, {REPEATS} rounds each with the same model; the paper shows curves without numbers.",
        f"{NOISE}: variance between rounds over the squared length of the mean update.",
    ),
)
