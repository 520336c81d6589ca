"""Trains the small networks that recipes attack, the same way for the same seed.

As published with the Cocktail Party Attack (Kariyappa et al., ICML 2023): Adam with rate 0.001 and weight decay 0.0005,
batches of 128, 20 epochs, augmented images.

Differs from torchvision's augmentation in: a random crop that would leave the image is cut to it instead of being drawn
again, and is enlarged without smoothing first.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedprism as fp
from fedprism.pixels import Normalization, to_inputs
from fedprism.randomness import generator
from fedprism.runtime import devices, progress
from fedprism.utility import Augmentation

BATCH = 128  # images per step
EPOCHS = 20  # unless a victim says otherwise
RATE = 1e-3  # Adam's learning rate
WEIGHT_DECAY = 5e-4  # Adam's


def train(
    model: nn.Module,
    data: fp.Batch,
    *,
    augment: Augmentation,
    normalization: Normalization,
    epochs: int = EPOCHS,
    seed: int = 0,
    device: str | None = None,
) -> nn.Module:
    """Train the model in place on pixels in [0, 1] and return it, on the CPU."""
    place, rng = devices.pick(device), generator(seed, "training")
    model.to(place).train()
    inputs, labels = data.tensor.to(place), data.labels.to(place)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY)
    for epoch in range(epochs):
        for chosen in torch.split(torch.randperm(len(data), generator=rng).to(place), BATCH):
            shown = to_inputs(augment(inputs[chosen], rng), normalization)
            loss = F.cross_entropy(model(shown), labels[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        progress.report(epoch + 1, epochs)
    model.zero_grad(set_to_none=True)
    return model.cpu()


def accuracy(model: nn.Module, data: fp.Batch, normalization: Normalization, device: str | None = None) -> float:
    """The fraction of images that the model, which is left on the CPU, gets right."""
    place = devices.pick(device)
    model.to(place).eval()
    with torch.no_grad():
        right = [
            (model(to_inputs(inputs.to(place), normalization)).argmax(1).cpu() == labels).float()
            for inputs, labels in zip(torch.split(data.tensor, BATCH), torch.split(data.labels, BATCH), strict=True)
        ]
    model.cpu().train()
    return float(torch.cat(right).mean())


def shifted(images: Tensor, rng: torch.Generator, *, pad: int = 4) -> Tensor:
    """Each image moved by up to `pad` pixels either way, black where it came from, and mirrored half of the time."""
    count, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    down, across = (torch.randint(2 * pad + 1, (count, 1), generator=rng) for _ in range(2))
    rows, columns = (down + torch.arange(height)).to(images.device), (across + torch.arange(width)).to(images.device)
    numbers = torch.arange(count, device=images.device)
    moved = padded[numbers[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # channels last
    return _mirrored(moved.permute(0, 3, 1, 2), rng)


def zoomed(images: Tensor, rng: torch.Generator) -> Tensor:
    """A crop of 8 to 100 % of each image's area, sides 3:4 to 4:3, at its full size, mirrored half of the time."""
    count = len(images)
    area = torch.empty(count).uniform_(0.08, 1.0, generator=rng)
    aspect = torch.empty(count).uniform_(math.log(3 / 4), math.log(4 / 3), generator=rng).exp()
    sides = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], dim=1).clamp(max=1)  # across, down
    centres = (2 * torch.rand(count, 2, generator=rng) - 1) * (1 - sides)
    transform = torch.cat([torch.diag_embed(sides), centres.unsqueeze(2)], dim=2).to(images)
    grid = F.affine_grid(transform, list(images.shape), align_corners=False)
    return _mirrored(F.grid_sample(images, grid, padding_mode="border", align_corners=False), rng)


def _mirrored(images: Tensor, rng: torch.Generator) -> Tensor:
    flip = (torch.rand(len(images), generator=rng) < 0.5).to(images.device)
    return torch.where(flip[:, None, None, None], images.flip(3), images)
