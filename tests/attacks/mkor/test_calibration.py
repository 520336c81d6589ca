"""MKOR behind batch norm: channels of unknown gain and offset, set right by what they share."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import fedprism as fp
from fedprism.attacks.mkor.calibration import calibrated
from fedprism.solvers import windows
from fedprism.solvers.windows import Lattice


@pytest.mark.quality
def test_channels_behind_batch_norm_are_calibrated_by_what_they_share() -> None:
    """Windows of four photographs, each channel with a gain and an offset of its own: ends alone are further off."""
    images, rng = fp.data.load("photos", size=32).batch(range(4)).inputs, torch.Generator().manual_seed(0)
    lattice = Lattice(top=0, pitch=1, size=8, height=32, width=32)
    maxima, minima = windows.extremes(images, lattice, (31, 31))  # no whole number of channels down and across
    planted = torch.stack([maxima, 1 - minima], dim=1)
    gain, offset = (torch.rand(2, 3, 4, 4, generator=rng).repeat(1, 1, 8, 8)[..., :31, :31] for _ in range(2))
    maps = (0.5 + gain) * planted + 5 * offset
    own = torch.empty_like(maps)
    for i, j in product(range(4), repeat=2):
        part = maps[..., i::4, j::4]
        low, high = part.amin((0, 3, 4), keepdim=True), part.amax((0, 3, 4), keepdim=True)
        own[..., i::4, j::4] = (part - low) / (high - low)
    decoded = [windows.midpoint(found[:, 0], 1 - found[:, 1], lattice).images for found in (calibrated(maps, 4), own)]
    errors = [float((found - images).square().mean()) for found in decoded]
    assert errors[0] < 0.92 * errors[1]


def test_ends_that_every_channel_has_are_kept() -> None:
    rng = torch.Generator().manual_seed(0)
    planted = torch.rand(40, 2, 1, 8, 8, generator=rng)
    planted[0], planted[1] = 0.0, 1.0
    gain, offset = (torch.rand(2, 1, 2, 2, generator=rng).repeat(1, 1, 4, 4) for _ in range(2))
    assert torch.allclose(calibrated((0.5 + gain) * planted + 5 * offset, 2), planted, atol=1e-5)
