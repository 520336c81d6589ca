"""Secure aggregation as a defense: sums of rounded contributions are all that is seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fedprism as fp
from federations import (
    batch,
    federation,
    flat,
    seen,
)
from fedprism.defenses import Context


def test_under_secure_aggregation_the_server_sees_sums() -> None:
    secured = federation(defense=fp.chain(fp.defenses.Clip(1.0), fp.defenses.SecureAggregation()))
    for threat in (fp.threats.honest_but_curious, fp.threats.malicious_server):
        observation, truth = seen(secured, threat)
        assert len(observation.rounds) == 5
        assert all(part.participants is None and part.reduction == "sum" for part in observation.rounds)
        assert truth.updates is not None
    plain = seen(federation(defense=fp.defenses.Clip(1.0)), fp.threats.secure_aggregation)[0]
    step = 16 / 2**22
    for masked, clear in zip(observation.rounds, plain.rounds, strict=True):
        error = (flat(masked.update) - flat(clear.update)).abs().max()
        assert error <= clear.clients * step + 1e-6
    assert any(
        not torch.equal(flat(a.update), flat(b.update)) for a, b in zip(observation.rounds, plain.rounds, strict=True)
    )


def test_contributions_are_rounded_to_steps_without_bias() -> None:
    defense = fp.defenses.SecureAggregation(clip=1.0, bits=4)
    values = torch.tensor([0.0, 0.3, -0.55, 1.0, -1.0, 7.0, -7.0], dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    draws = torch.stack([defense.on_update({"w": values}, Context(), rng)["w"] for _ in range(4000)])
    step = 2 / 2**4
    torch.testing.assert_close(draws / step, (draws / step).round())
    assert bool(((draws - values.clamp(-1, 1)).abs() < step).all())
    # The mean of 4000 draws is within five standard errors, of at most step / 2 each.
    assert bool(((draws.mean(0) - values.clamp(-1, 1)).abs() <= 5 * step / 2 / math.sqrt(4000)).all())
    assert bool((draws[:, [0, 3, 4, 5, 6]] == torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0])).all())


def test_a_weight_is_put_on_before_rounding_and_taken_off_after() -> None:
    defense = fp.defenses.SecureAggregation(clip=1.0, bits=8, max_weight=10.0)
    update = {"w": torch.linspace(-1, 1, 101, dtype=torch.float64), "n": torch.tensor(3)}
    context = Context(batch=batch(2, 0))
    found = defense.on_update(update, context, torch.Generator().manual_seed(0))
    steps = found["w"] * 0.2 / (2 / 2**8)
    torch.testing.assert_close(steps, steps.round())
    assert (found["w"] - update["w"]).abs().max() < 5 * 2 / 2**8
    assert (found["w"] - update["w"]).abs().max() > 2 / 2**8, "a light client has coarser steps"
    assert torch.equal(found["n"], update["n"])


@pytest.mark.parametrize(
    "settings", [{"clip": 0.0}, {"clip": math.nan}, {"clip": True}, {"bits": 0}, {"bits": 33}, {"max_weight": -1.0}]
)
def test_strengths_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(fp.errors.BadInput, match=f"SecureAggregation's {next(iter(settings))}"):
        fp.defenses.SecureAggregation(**settings)
