"""Every reconstruction against every source at once: what an assignment between two batches needs.

A distance of all pairs costs about as much as the two batches alone: what belongs to one image (its square, its
features, its local means) is computed once, and pairs meet only in a matrix product. Structural similarity is no such
product; there one blur a pair is left of five.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedprism.metrics.image import SSIM_RADIUS, SSIM_SIGMA
from fedprism.metrics.lpips import Net, network_for, shown
from fedprism.metrics.pairs import CHUNK_PIXELS, require_size

PAIRS_BYTES = 2**28
"""Bytes that the products of one piece of pairs may take: bounds memory."""
FEATURE_BYTES = 2**31
"""Bytes that the features of one piece of a batch may take: bounds memory."""
SSIM_C1 = 1e-4
"""(K1 L)^2 of Wang et al. 2004, with K1 = 0.01 and a data range L of 1."""
SSIM_C2 = 9e-4
"""(K2 L)^2, with K2 = 0.03."""


def lpips_matrix(
    reconstructions: Tensor,
    sources: Tensor,
    net: Net = "vgg",
    weights_dir: str | Path | None = None,
    allow_download: bool = False,
) -> Tensor:
    """LPIPS of all pairs: (N, C, H, W) and (M, C, H, W) with values from 0 to 1 -> (N, M); as `lpips`, pair by pair.

    The distance is a weighted squared one between features of unit length, so that each image passes the network once.
    """
    reconstructions, sources = _comparable(reconstructions, sources)
    network = network_for(sources, net, weights_dir, allow_download)
    if not (len(reconstructions) and len(sources)):
        return reconstructions.new_zeros(len(reconstructions), len(sources))
    with torch.no_grad():
        rows = [
            torch.cat([_squared_distances(ours, theirs) for theirs in _features(network, sources)], dim=1)
            for ours in _features(network, reconstructions)
        ]
    return torch.cat(rows).to(sources.dtype)


def ssim_matrix(reconstructions: Tensor, sources: Tensor) -> Tensor:
    """Structural similarity of all pairs: (N, C, H, W) and (M, C, H, W), from 0 to 1, -> (N, M); as `ssim`."""
    reconstructions, sources = _comparable(reconstructions, sources)
    require_size(sources, 3, "ssim")
    blur = _Blur(min(SSIM_RADIUS, (min(sources.shape[-2:]) - 1) // 2), sources)
    mean_a, mean_b = blur(reconstructions), blur(sources)
    square_a, square_b = blur(reconstructions.square()) - mean_a.square(), blur(sources.square()) - mean_b.square()
    rows = max(1, PAIRS_BYTES // max(1, sources.numel() * sources.element_size()))
    values = []
    for start in range(0, len(reconstructions), rows):
        few = slice(start, start + rows)
        images = reconstructions[few, None] * sources  # (few, M, C, H, W)
        covariance = blur(images)
        means = mean_a[few, None] * mean_b
        covariance -= means
        luminance = (2 * means + SSIM_C1) / (mean_a[few, None].square() + mean_b.square() + SSIM_C1)
        structure = (2 * covariance + SSIM_C2) / (square_a[few, None] + square_b + SSIM_C2)
        values.append((luminance * structure).mean((2, 3, 4)))
    return torch.cat(values) if values else reconstructions.new_zeros(0, len(sources))


class _Blur:
    """The Gaussian window of `ssim`, at all places where it lies inside the image, as one matrix a direction.

    A product with a matrix that is mostly zeros is still faster than a convolution of single planes.
    """

    def __init__(self, radius: int, like: Tensor) -> None:
        steps = torch.arange(-radius, radius + 1, dtype=like.dtype, device=like.device)
        window = (-0.5 * (steps / (SSIM_SIGMA * radius / SSIM_RADIUS)).square()).exp()
        window = window / window.sum()
        self._down, self._across = (_sliding(window, side) for side in like.shape[-2:])

    def __call__(self, images: Tensor) -> Tensor:
        return self._down @ images @ self._across.T


def _sliding(window: Tensor, side: int) -> Tensor:
    """(places, side): row i holds the window from entry i on."""
    places = side - len(window) + 1
    rows = window.new_zeros(places, side)
    for place in range(places):
        rows[place, place : place + len(window)] = window
    return rows


def _comparable(reconstructions: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one floating type, or a ValueError where images of the one cannot be compared with those of the other."""
    if reconstructions.ndim != 4 or sources.ndim != 4 or reconstructions.shape[1:] != sources.shape[1:]:
        raise ValueError(
            "expected two batches of images of one size, (images, channels, height, width), "
            f"found {tuple(reconstructions.shape)} and {tuple(sources.shape)}; reshape them."
        )
    dtype = torch.promote_types(torch.promote_types(reconstructions.dtype, sources.dtype), torch.float32)
    return reconstructions.to(dtype), sources.to(dtype)


def _features(network: nn.Module, images: Tensor) -> Iterator[list[Tensor]]:
    """For as many images at a time as memory allows, and for every layer: (images, features).

    They are scaled so that a squared difference is the layer's distance.
    """
    size = max(1, CHUNK_PIXELS // (images.shape[-2] * images.shape[-1]))
    kept: list[list[Tensor]] = []
    for piece in torch.split(images, size):
        kept.append(_layers(network, piece))
        if sum(layer.numel() * layer.element_size() for layers in kept for layer in layers) > FEATURE_BYTES:
            yield [torch.cat(layer) for layer in zip(*kept, strict=True)]
            kept = []
    if kept:
        yield [torch.cat(layer) for layer in zip(*kept, strict=True)]


def _layers(network: Any, images: Tensor) -> list[Tensor]:
    from torchmetrics.functional.image.lpips import _normalize_tensor

    layers = []
    for head, layer in zip(network.lins, network.net(network.scaling_layer(shown(images))), strict=True):
        weights = head.model[-1].weight  # (1, channels, 1, 1), none of them negative
        places = layer.shape[-2] * layer.shape[-1]
        layers.append((_normalize_tensor(layer) * (weights / places).sqrt()).flatten(1))
    return layers


def _squared_distances(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    """(N, M), summed over the layers."""
    total = ours[0].new_zeros(len(ours[0]), len(theirs[0]))
    for a, b in zip(ours, theirs, strict=True):
        squares = a.square().sum(1)[:, None] + b.square().sum(1)
        total += (squares - 2 * a @ b.T).clamp(min=0)
    return total
