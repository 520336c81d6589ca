"""Labels that are answers of yes or no, or measurements, instead of numbers of classes: the inputs are exact, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedprism as fp

EXACT = "the update recomputed from the inputs points along the observed one"


def net(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, outputs))


def answered(attack: fp.attacks.Attack, labels: torch.Tensor, loss: str) -> tuple[fp.Reconstruction, fp.Scores]:
    inputs = torch.rand(len(labels), 10, generator=torch.Generator().manual_seed(1))
    outputs = labels[0].numel()
    scenario = fp.Scenario(model=net(outputs), clients=[fp.Batch(inputs, labels)], loss=loss)
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    reconstruction = fp.run(attack, observation, seed=0)
    return reconstruction, fp.score(reconstruction, truth)


@pytest.mark.parametrize("attack", [fp.attacks.dense_inversion(), fp.attacks.cocktail_party()], ids=repr)
@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([1.0]),
        torch.tensor([0.0]),
        torch.tensor([1]),
        torch.tensor([[1.0]]),
        torch.tensor([[1, 0, 1, 1, 0]]),
        torch.tensor([[0.0, 0.0, 1.0]]),
    ],
    ids=lambda labels: str(labels.tolist()),
)
def test_inputs_under_binary_cross_entropy_are_exact(attack: fp.attacks.Attack, labels: torch.Tensor) -> None:
    _, scores = answered(attack, labels, "binary_cross_entropy")
    assert min(scores.values["psnr"]) > 80


@pytest.mark.parametrize("labels", [torch.tensor([1.0]), torch.tensor([0]), torch.tensor([[1, 0, 1, 1, 0]])])
def test_answers_of_yes_or_no_are_read_and_checked(labels: torch.Tensor) -> None:
    reconstruction, scores = answered(fp.attacks.dense_inversion(), labels, "binary_cross_entropy")
    assert EXACT in str(reconstruction.status)
    assert scores.labels_match


def test_measurements_are_neither_guessed_nor_compared() -> None:
    reconstruction, scores = answered(fp.attacks.dense_inversion(), torch.tensor([0.37]), "mse")
    assert min(scores.values["psnr"]) > 80
    assert reconstruction.labels is None
    assert scores.labels_match is None
