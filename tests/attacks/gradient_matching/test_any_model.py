"""Gradient matching on models and losses of every kind: planted answers that come back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedprism as fp
from fedprism.evaluation.residuals import residual
from fedprism.runtime.twice_differentiable import once_only, second_forms


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def rand(*size: int) -> Tensor:
    return torch.rand(*size, generator=torch.Generator().manual_seed(1))


def answered(
    model: nn.Module, inputs: Tensor, labels: Tensor, loss: Any = "cross_entropy", **settings: Any
) -> tuple[fp.Reconstruction, float, float | None]:
    scenario = fp.Scenario(model=model, clients=[fp.Batch(inputs, labels)], loss=loss)
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    attack = replace(fp.attacks.inverting_gradients(), **{"iterations": 150, **settings})
    answer = fp.run(attack, observation, seed=0)
    return answer, fp.score(answer, truth).mean("psnr"), residual(observation, answer)


class Answering(nn.Module):
    """A dense network whose answer is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 3)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(images.flatten(1)))
        return {"hidden": hidden, "logits": self.last(hidden)}


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.flatten(1).view(-1, 8, 8)
        return self.last(self.attention(rows, rows, rows, need_weights=False)[0].mean(1))


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.last = nn.Linear(64, 16).requires_grad_(False), nn.Linear(16, 3)
        self.down, self.up = nn.Parameter(torch.randn(4, 64) / 8), nn.Parameter(torch.randn(16, 4) / 2)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        return self.last(torch.tanh(self.frozen(flat) + flat @ self.down.T @ self.up.T))


def test_audio_comes_back_and_is_taken_for_smooth() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv1d(1, 4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 28, 2)))
    wave = (1 + torch.sin(torch.linspace(0, 9, 32)))[None, None] / 2
    answer, psnr, _ = answered(model, wave, torch.tensor([1]))
    assert psnr > 30
    assert "no smoothness" not in answer.status


def test_rows_of_a_table_come_back_and_nothing_is_taken_for_smooth() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    answer, psnr, _ = answered(model, rand(1, 8), torch.tensor([1]))
    assert psnr > 30
    assert "no smoothness is assumed" in answer.status


def test_an_answer_in_a_dict_is_read() -> None:
    _, psnr, _ = answered(seeded(Answering), rand(1, 1, 8, 8), torch.tensor([2]))
    assert psnr > 25


def test_adapters_of_frozen_layers_are_matched() -> None:
    answer, _, unexplained = answered(seeded(Adapted), rand(1, 1, 8, 8), torch.tensor([2]))
    assert unexplained is not None
    assert unexplained < 0.2, answer.status


@pytest.mark.parametrize(("labels", "outputs"), [([1.0], 1), ([0.0], 1), ([1.0, 0.0, 1.0], 3)])
def test_a_single_samples_yes_or_no_is_read_off_the_signs(labels: list[float], outputs: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, outputs)))
    answer, psnr, _ = answered(model, rand(1, 1, 8, 8), torch.tensor([labels]), "binary_cross_entropy")
    assert answer.labels is not None
    assert answer.labels.tolist() == [labels]
    assert psnr > 25


def test_labels_that_cannot_be_inferred_are_looked_for_and_the_status_says_so() -> None:
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1)))
    answer, _, unexplained = answered(model, rand(1, 1, 8, 8), torch.tensor([0.7]), "mse", iterations=400)
    assert "optimised jointly, because inferring labels needs softmax cross-entropy, not mse" in answer.status
    assert unexplained is not None
    assert unexplained < 0.1


def hardened(images: Tensor) -> Tensor:
    return F.hardsigmoid(images)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(hardened(self.first(images)).flatten(1))


@pytest.mark.parametrize(
    ("build", "operation"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Hardsigmoid(), nn.Flatten(), nn.Linear(256, 3)),
            "hard",
        ),
        (Functional, "hardsigmoid"),
        (Attending, "attention"),
    ],
    ids=["module", "function", "attention"],
)
def test_operations_without_a_second_derivative_are_put_in_another_form(
    build: Callable[[], nn.Module], operation: str
) -> None:
    answer, _, unexplained = answered(seeded(build), rand(1, 1, 8, 8), torch.tensor([1]))
    assert f"{operation}" in answer.status
    assert "has no second derivative" in answer.status
    assert unexplained is not None
    assert unexplained < 0.5


def test_the_other_forms_compute_the_same() -> None:
    values = torch.linspace(-5, 5, 1001, dtype=torch.float64, requires_grad=True)
    for function in (F.hardsigmoid, F.hardswish):
        plain = function(values)
        (slope,) = torch.autograd.grad(plain.sum(), values)
        with second_forms():
            other = function(values)
            (other_slope,) = torch.autograd.grad(other.sum(), values, create_graph=True)
        torch.testing.assert_close(other, plain)
        inside = (values.detach().abs() - 3).abs() > 1e-9
        torch.testing.assert_close(other_slope[inside], slope[inside])
    assert once_only(RuntimeError("derivative for aten::hardsigmoid_backward is not implemented")) == "hardsigmoid"
    assert once_only(RuntimeError("another problem")) is None


class Rounding(torch.autograd.Function):
    """Has a first derivative and says that it has no second."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("derivative for aten::rounding_backward is not implemented")


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 4), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        return self.last(Rounding.apply(hidden) if images.requires_grad else hidden.square())


def test_an_operation_without_another_form_is_refused_by_name() -> None:
    with pytest.raises(fp.errors.NotApplicable, match="second derivative, but rounding"):
        answered(seeded(Once), rand(1, 1, 8, 8), torch.tensor([1]))


def test_batch_norm_that_refuses_a_single_sample_is_named_with_the_remedy() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 8), nn.BatchNorm1d(8))
    scenario = fp.Scenario(model=model, clients=[fp.Batch(rand(1, 1, 8, 8), torch.tensor([1]))])
    with pytest.raises(fp.errors.BadInput, match=r"batch-norm layer '2'.*GroupNorm"):
        fp.simulate(scenario, fp.threats.honest_but_curious)
    private = fp.Scenario(
        model=model, clients=[fp.Batch(rand(2, 1, 8, 8), torch.tensor([1, 0]))], defense=fp.defenses.DpSgd(1.0)
    )
    with pytest.raises(fp.errors.NotApplicable, match=r"batch-norm layer '2'.*GroupNorm"):
        fp.simulate(private, fp.threats.honest_but_curious)
