"""How close answers come to private images: PSNR, LPIPS, and the fraction that is hardly to be told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import fedprism as fp
from fedprism.errors import BadInput
from fedprism.metrics import LpipsUnavailable, lpips, psnr
from fedprism.runtime import devices
from fedprism_papers.shared.base import Settings

LPIPS, PSNR, OVER_40_DB, ANSWERED = "LPIPS", "PSNR", "over 40 dB", "answered"
HIGH_PSNR = 40.0
"""Decibels above which an answer is hardly to be told from the image; evaluation/severity.py calls 30 dB faithful."""
SHOWN_IMAGES = 8
"""Of a batch, beside the table."""


class Scores(NamedTuple):
    """A mean of a batch for every metric, and tensors that are kept, such as "originals" and "recovered"."""

    values: dict[str, float]
    tensors: dict[str, Tensor]
    seconds: float = 0.0
    """What was still left to do of the attack."""


def score_images(answer: fp.Reconstruction, truth: fp.Truth, settings: Settings) -> Scores:
    """Means over the images that were given an answer, and the first few; `over 40 dB` is out of all of them."""
    if answer.inputs is None or not len(answer.inputs):
        return Scores({}, {})
    matched = fp.match(answer, truth)
    answered = torch.tensor([row is not None for row in matched.rows])
    ours, theirs = matched.recovered[answered], matched.truth[answered]
    decibels = psnr(ours, theirs)
    values = {
        PSNR: float(decibels.mean()),
        OVER_40_DB: float((decibels > HIGH_PSNR).sum()) / len(answered),
        ANSWERED: float(answered.float().mean()),
    }
    distances = lpips_distances(ours, theirs, settings)
    if distances is not None:
        values[LPIPS] = float(distances.mean())
    return Scores(values, {"originals": matched.truth[:SHOWN_IMAGES], "recovered": matched.recovered[:SHOWN_IMAGES]})


def samples_of(truth: fp.Truth, rows: list[int]) -> fp.Truth:
    """These private samples, in this order."""
    owners = tuple(truth.owners[row] for row in rows)
    return replace(truth, inputs=truth.tensor[rows], labels=truth.labels[rows], owners=owners)


def lpips_distances(recovered: Tensor, originals: Tensor, settings: Settings) -> Tensor | None:
    """LPIPS (VGG) of each pair, on the device; None in a quick run for which its network is not to be had."""
    folder = None if settings.data_dir is None else Path(settings.data_dir, "weights")
    place = devices.pick(settings.device)
    try:
        return lpips(recovered.float().to(place), originals.float().to(place), net="vgg", weights_dir=folder)
    except LpipsUnavailable as reason:
        if not settings.quick:
            raise BadInput(str(reason)) from reason
        return None


def require_lpips(settings: Settings) -> None:
    """Miss its network before hours of computation, not after them."""
    if not settings.quick:
        blank = torch.zeros(1, 3, 64, 64)
        lpips_distances(blank, blank, settings)
