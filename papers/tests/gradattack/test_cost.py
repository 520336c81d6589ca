"""What an attack on mixed data costs: the published numbers by hand."""

from __future__ import annotations

import pytest

from fedprism.errors import BadInput
from fedprism_papers.gradattack import attack_cost


def test_the_published_cost_of_an_attack() -> None:
    cost = attack_cost(5_000)
    assert round(cost.total, 2) == 934.48
    # (N T / b) t, (n / b) t, 10 and (N T / 5000)² / 6 by hand.
    assert cost == pytest.approx((488.28125, 19.53125, 10.0, 416.6666667))


def test_pairing_grows_with_the_square_and_inversion_does_not() -> None:
    once, twice = attack_cost(5_000), attack_cost(10_000)
    assert twice.inversion == 2 * once.inversion
    assert twice.pairing == 4 * once.pairing
    assert (twice.examples, twice.network) == (once.examples, once.network)


def test_the_cost_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="images"):
        attack_cost(0)
