"""What an attack on mixed data costs, end to end.

The model of Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning",
NeurIPS 2021 (table 3).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fedprism.checks import shown, whole
from fedprism.errors import BadInput

PAIRED_ENCODINGS = 5_000
"""How many encodings the published time for pairing is about."""


class AttackCost(NamedTuple):
    """GPU hours of each part of an attack on data that was mixed, end to end."""

    inversion: float
    """recovering the private encodings from gradients"""
    examples: float
    """recovering encodings of known images, to learn from what recovered encodings look like"""
    network: float
    """training the network that tells which encodings share an image"""
    pairing: float
    """asking it about every pair of private encodings"""

    @property
    def total(self) -> float:
        return sum(self)


def attack_cost(
    images: int,
    *,
    epochs: int = 50,
    batch_size: int = 128,
    hours_a_batch: float = 0.25,
    examples: int = 10_000,
    network_hours: float = 10.0,
    pairing_hours: float = 1 / 6,
) -> AttackCost:
    """GPU hours until `images` private images that were mixed anew in each of `epochs` epochs are recovered.

    (N T / b) t + (n / b) t + 10 + (N T / 5000)² / 6 hours, the published model with its numbers as defaults: inverting
    a batch of b takes t hours, and pairing 5,000 encodings `pairing_hours`. Fractions of a batch count as such. The
    part that grows with the square of the data is what makes the attack expensive, not the inversion of gradients.
    """
    for name, number in (("images", images), ("epochs", epochs), ("batch_size", batch_size)):
        whole(number, name, 2**53)
    whole(examples, "examples", 2**53, 0)
    hours = {"hours_a_batch": hours_a_batch, "network_hours": network_hours, "pairing_hours": pairing_hours}
    for name, value in hours.items():
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise BadInput(
                f"expected {name} to be a number of at least 0, found {shown(value)}; give the hours it takes."
            )
    encodings = images * epochs
    return AttackCost(
        inversion=encodings / batch_size * hours_a_batch,
        examples=examples / batch_size * hours_a_batch,
        network=network_hours,
        pairing=pairing_hours * (encodings / PAIRED_ENCODINGS) ** 2,
    )
