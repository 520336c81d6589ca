"""Many small problems at once: 64 updates of a LeNet matched in one tensor program, beside one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

import fedprism as fp
from fedprism.attacks import LBFGS, GradientMatching, Labels, TotalVariation, joined
from fedprism.metrics import psnr
from fedprism_papers.mixing_gradients.side_by_side import SideBySide
from workloads.base import Comparison, Conditions, matrix_rate, operations, pictures, timed

TRIALS, SIDE = 64, 32
ITERATIONS = {"cpu": 100, "cuda": 500}
RATE = 0.05
"""The length of a quasi-Newton step, that of the recipe `mixing`."""
ALONE = {"cpu": 4, "cuda": 8}
"""How many of the trials are also run one after the other."""


def trials(conditions: Conditions) -> Iterator[Comparison]:
    device, place = conditions.device, str(conditions.device)
    images = pictures(TRIALS, SIDE, torch.device("cpu"))
    model = fp.models.uniform_(fp.models.build("lenet", input_shape=(3, SIDE, SIDE), classes=10), seed=0)
    forward = operations(lambda: model(images))  # with the gradient and its derivative seven times as much
    threat = fp.threats.honest_but_curious.granting("labels")
    parts = []
    for number, image in enumerate(images):
        batch = fp.Batch(image.unsqueeze(0), torch.tensor([number % 10]))
        parts.append(fp.simulate(fp.Scenario(model=model, clients=[batch]), threat, device=place)[0])
    iterations, alone = ITERATIONS[device.type], ALONE[device.type]
    attack = GradientMatching(
        labels=Labels.KNOWN, priors=(TotalVariation(1e-4),), optimizer=LBFGS(inner=1), lr=RATE, iterations=iterations
    )
    together, everything = SideBySide(attack=attack), joined(parts)

    def quality(found: list[fp.Reconstruction]) -> str:
        """Of the trials that both ran."""
        inputs = torch.cat([one.inputs for one in found if one.inputs is not None])[:alone]
        return f"{float(psnr(inputs, images[:alone]).mean()):.1f} dB"

    # Warm up, graphs and libraries.
    fp.run(dataclasses.replace(together, attack=dataclasses.replace(attack, iterations=5)), everything, device=place)
    fp.run(dataclasses.replace(attack, iterations=5), parts[0], device=place)
    ours, found = timed(device, lambda: fp.run(together, everything, device=place))
    part, singles = timed(device, lambda: [fp.run(attack, one, device=place) for one in parts[:alone]])
    yield Comparison(
        workload="many small trials",
        size=f"{TRIALS} x LeNet, batch 1, {iterations} iterations",
        ours=ours,
        quality=quality([found]),
        other="one after the other, same code",
        theirs=part * TRIALS / alone,
        their_quality=quality(singles),
        share_of_limit=7 * forward * iterations / ours / matrix_rate(device),
        extrapolated=True,
        note=f"{alone} run one after the other; PSNR of these; starts differ",
    )
