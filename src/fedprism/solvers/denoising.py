"""Removes white noise of known strength from images, by averaging places whose surroundings look alike.

Buades, Coll, Morel, "A Non-Local Algorithm for Image Denoising", CVPR 2005.

Differs from the paper in: the noise's own contribution is subtracted from the distance of two patches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

REACH = 7
"""How far away, in pixels, look-alikes are searched."""
PATCH = 3
"""Side, in pixels, of the patches that are compared."""
STRENGTH = 0.6
"""Distance of patches, in standard deviations of the noise, at which a look-alike's weight has fallen to 1/e."""


def nonlocal_means(images: Tensor, noise: Tensor) -> Tensor:
    """Images (n, channels, height, width) less white noise of standard deviation `noise` (n,)."""
    (height, width), margin = images.shape[2:], (PATCH // 2,) * 4
    variance = noise.to(images).square().clamp(min=torch.finfo(images.dtype).tiny).view(-1, 1, 1, 1)
    reach = min(REACH, height - 1, width - 1)
    padded = pad(images, (reach,) * 4, mode="reflect")
    total, weights = torch.zeros_like(images), images.new_zeros(len(images), 1, height, width)
    for down in range(2 * reach + 1):
        for across in range(2 * reach + 1):
            other = padded[:, :, down : down + height, across : across + width]
            distance = (images - other).square().mean(1, keepdim=True)
            distance = avg_pool2d(pad(distance, margin, mode="replicate"), PATCH, stride=1)
            weight = torch.exp(-(distance - 2 * variance).clamp(min=0) / (STRENGTH**2 * variance))
            total, weights = total + weight * other, weights + weight
    return total / weights
