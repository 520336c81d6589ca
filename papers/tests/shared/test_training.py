"""The training that recipes share: it depends on its seed alone, and what it shows are images, moved."""

from __future__ import annotations

import torch
from torch import nn

import fedprism as fp
from fedprism_papers.shared import training
from fedprism_papers.shared.victims import IMAGENET


def test_training_depends_on_the_seed_alone_and_learns(photos: fp.data.ImageSet) -> None:
    data = photos.batch(range(128))

    def trained(seed: int) -> nn.Module:
        torch.rand(1)  # the global generator plays no part
        model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=32, classes=8, seed=0)
        return training.train(
            model, data, augment=training.shifted, normalization=IMAGENET, epochs=15, seed=seed, device="cpu"
        )

    first, second, other = trained(0), trained(0), trained(1)
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    untrained = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=32, classes=8, seed=0)
    assert training.accuracy(first, data, IMAGENET, "cpu") > training.accuracy(untrained, data, IMAGENET, "cpu") + 0.3


def test_shifted_images_are_shifted_and_mirrored_ones(rng: torch.Generator) -> None:
    image = torch.arange(1.0, 51.0).view(1, 2, 5, 5)
    padded = nn.functional.pad(image, (1, 1, 1, 1))
    crops = [padded[0, :, y : y + 5, x : x + 5] for y in range(3) for x in range(3)]
    allowed = {tuple(shown.flatten().tolist()) for crop in crops for shown in (crop, crop.flip(2))}
    seen = {tuple(shown.flatten().tolist()) for shown in training.shifted(image.repeat(300, 1, 1, 1), rng, pad=1)}
    assert seen == allowed


def test_zoomed_images_are_enlarged_parts(rng: torch.Generator) -> None:
    across, down = torch.meshgrid(torch.linspace(0, 1, 64), torch.linspace(0, 1, 64), indexing="xy")
    ramp = torch.stack([across, down]).unsqueeze(0).repeat(200, 1, 1, 1)
    shown = training.zoomed(ramp, rng)
    assert shown.shape == ramp.shape
    assert float(shown.min()) >= 0
    assert float(shown.max()) <= 1
    width = (shown[:, 0, 32, -2] - shown[:, 0, 32, 1]).abs()  # how much of the image is left, across and down
    height = shown[:, 1, -2, 32] - shown[:, 1, 1, 32]
    area = width * height
    assert 0.05 < float(area.min()) < 0.15
    assert 0.75 < float(area.max()) <= 1.0
    assert bool(((width / height > 0.7) & (width / height < 1.45)).all())
    assert float(shown.diff(n=2, dim=3).abs()[..., 2:-2].max()) < 1e-4  # a part of a ramp is a ramp
    mirrored = (shown[:, 0, 32, -1] < shown[:, 0, 32, 0]).float().mean()
    assert 0.35 < float(mirrored) < 0.65
