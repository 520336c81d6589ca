"""What a training guarantees each example, where an accountant holds for it."""

from __future__ import annotations

from typing import NamedTuple

from fedprism.defenses import (
    Cast,
    Clip,
    Defense,
    DpSgd,
    GaussianNoise,
    LaplaceNoise,
    MseLoss,
    Prune,
    Quantize,
    SecureAggregation,
    SignCompression,
)

AFTER_THE_NOISE = frozenset(
    {Cast, Clip, GaussianNoise, LaplaceNoise, MseLoss, Prune, Quantize, SecureAggregation, SignCompression}
)
"""Defenses that see no data but through the noised mean, whatever their place in a chain; losses are the same for every
example. A subclass may look at more, and is not one of these."""


class Guarantee(NamedTuple):
    """(epsilon, delta)-differential privacy of single examples."""

    run: float
    """epsilon of the whole training"""
    release: float
    """epsilon of one release: what whoever sees a single update is bound by"""
    delta: float


def guarantee(defense: Defense, epochs: int, delta: float) -> Guarantee | None:
    """What DP-SGD guarantees each example over a training whose batches are shuffled; None where nothing is claimed.

    An example is in one batch an epoch: that makes `epochs` releases. Only what works on the noised mean alone leaves
    the guarantee as it is: MixUp puts an example behind several gradients, Soteria and EqualLabels look at it again.
    """
    private = [part for part in defense.members if type(part) is DpSgd]
    others = [part for part in defense.members if type(part) is not DpSgd]
    if len(private) != 1 or private[0].noise == 0 or not all(type(part) in AFTER_THE_NOISE for part in others):
        return None
    return Guarantee(private[0].epsilon(delta=delta, steps=epochs), private[0].epsilon(delta=delta), delta)
