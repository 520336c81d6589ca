"""What the recipes of MKOR share: how they count, compare and add noise."""

from __future__ import annotations

import pytest
import torch

import fedprism as fp
from fedprism.recipes import mkor as recipe


def test_equation_three_is_the_papers_and_that_of_drawn_batches(rng: torch.Generator) -> None:
    assert recipe.alone(100, 100) == pytest.approx(36.97, abs=0.01)
    drawn = torch.randint(10, (4000, 8), generator=rng)
    single = [(torch.bincount(labels, minlength=10) == 1).sum().item() for labels in drawn]
    assert sum(single) / len(single) == pytest.approx(recipe.alone(8, 10), rel=0.03)


def test_answers_are_compared_within_their_class_only() -> None:
    black, white = torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4)
    truth = fp.Truth(inputs=torch.cat([white, black, white]), labels=torch.tensor([0, 1, 1]), owners=("client-0",) * 3)
    found = fp.Reconstruction(
        inputs=torch.cat([black, white]), labels=torch.tensor([0, 1]), ambiguity=frozenset({"order"})
    )
    ours, theirs, rows = recipe.by_class(found, truth)
    assert rows == [0, 2]
    assert torch.equal(ours, torch.cat([black, white]))
    assert torch.equal(theirs, torch.cat([white, white]))


def test_noise_is_relative_to_each_tensor(rng: torch.Generator) -> None:
    update = {"small": torch.randn(10_000, generator=rng), "large": 100 * torch.randn(10_000, generator=rng)}
    seen = fp.Observation(model=None, rounds=(fp.Round(params=update, update=update),))
    after = recipe.noised(seen, 0.1, rng).rounds[0].update
    for name, tensor in update.items():
        assert float((after[name] - tensor).std() / tensor.std()) == pytest.approx(0.1, rel=0.05)
