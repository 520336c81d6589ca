"""Samples out of the row space of first layers of many kinds; what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks.row_space_inversion import RowSpaceStatus
from patch_models import SmallViT

CLASSES = 5


class Recurrent(nn.Module):
    def __init__(self, cells: type[nn.Module] = nn.LSTM, features: int = 6) -> None:
        super().__init__()
        self.cells, self.head = cells(features, 20, batch_first=True), nn.Linear(20, CLASSES)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.cells(steps)[0][:, -1])


class Series(nn.Module):
    def __init__(self, window: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 24, window, stride=2), nn.Conv1d(24, 16, 3)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(series)))).mean(2))


class Siamese(nn.Module):
    """Two inputs by position through one encoder; the second counts twice, so that they can be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(self.encoder(first) - 2 * self.encoder(second))


class Towers(nn.Module):
    """Two inputs by name, each with dense layers of its own."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 24, bias=bias), nn.Linear(5, 16, bias=bias)
        self.head = nn.Linear(40, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.cat([torch.tanh(self.one(left)), torch.tanh(self.other(right))], 1))


class Adapter(nn.Module):
    """LoRA: a frozen layer with two trained factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(10, 16).requires_grad_(False), nn.Linear(16, CLASSES).requires_grad_(False)
        self.down, self.up = nn.Linear(10, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(inputs) + self.up(self.down(inputs))))


def pairs(samples: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 8, generator=rng), torch.randn(samples, 8, generator=rng)


def sides(samples: int, rng: torch.Generator) -> dict[str, Tensor]:
    return {"left": torch.randn(samples, 8, generator=rng), "right": torch.randn(samples, 5, generator=rng)}


def drawn(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda samples, rng: torch.randn(samples, *shape, generator=rng)


CASES = {
    "LSTM": (Recurrent, drawn(4, 6), 1),
    "GRU": (lambda: Recurrent(nn.GRU), drawn(3, 6), 1),
    "series": (Series, drawn(2, 20), 1),
    "Siamese": (Siamese, pairs, 1),
    "towers": (Towers, sides, 1),
    "towers, two samples": (Towers, sides, 2),
    "towers without bias": (lambda: Towers(bias=False), sides, 1),
    "LSTM, two samples": (Recurrent, drawn(1, 6), 2),
    "long steps, two samples": (lambda: Recurrent(features=16), drawn(2, 16), 2),
    "long windows, two samples": (lambda: Series(12), drawn(2, 18), 2),
    "LoRA": (Adapter, drawn(10), 1),
    "LoRA, two samples": (Adapter, drawn(10), 2),
    "dense, three samples": (lambda: nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, CLASSES)), drawn(9), 3),
}


TWO_PICTURES = {
    "patches": (
        lambda: SmallViT((1, 4, 8), patch=4, width=16, depth=1, classes=CLASSES),
        drawn(1, 4, 8),
        2,
    )
}


def attacked(
    name: str, seed: int, starts: int = 8, **settings: object
) -> tuple[fp.Reconstruction, fp.Truth, float | None]:
    kind, inputs, samples = {**CASES, **TWO_PICTURES}[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind()
    rng = torch.Generator().manual_seed(seed)
    batch = fp.Batch(inputs(samples, rng), torch.randint(0, CLASSES, (samples,), generator=rng))
    scenario = fp.Scenario(model=model, clients=[batch], bounds=(-3.0, 3.0), **settings)  # type: ignore[arg-type]
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious.granting("labels"), seed=seed)
    answer = fp.run(fp.attacks.RowSpaceInversion(starts=starts), observation, seed=seed)
    return answer, truth, fp.residual(observation, answer)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_samples_come_out_exactly(name: str, seed: int) -> None:
    answer, truth, residual = attacked(name, seed)
    assert answer.status == RowSpaceStatus.EXACT
    assert residual is not None
    assert residual < 1e-4
    assert all(value is not None and value > 60 for value in fp.score(answer, truth, metrics=("psnr",)).values["psnr"])


def test_two_pictures_of_few_patches_come_out_exactly() -> None:
    answer, truth, _ = attacked("patches", 0)
    assert answer.status == RowSpaceStatus.EXACT
    assert all(value is not None and value > 60 for value in fp.score(answer, truth, metrics=("psnr",)).values["psnr"])


def test_clipping_changes_nothing() -> None:
    answer, _, _ = attacked("series", 0, defense=fp.defenses.Clip(1e-3))
    assert answer.status == RowSpaceStatus.EXACT


def test_noise_is_never_called_exact() -> None:
    try:
        answer, _, residual = attacked("LSTM", 0, 1, defense=fp.defenses.GaussianNoise(0.05))
    except fp.NotApplicable:
        return
    assert answer.status != RowSpaceStatus.EXACT
    assert residual is None or residual > 1e-3


def test_a_layer_at_many_places_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, CLASSES))
    batch = fp.Batch(torch.rand(1, 3, 8, 8), torch.tensor([1]))
    observation, _ = fp.simulate(fp.Scenario(model=model, clients=[batch]), fp.threats.honest_but_curious, seed=0)
    with pytest.raises(fp.NotApplicable, match="fewer places than it has units"):
        fp.run(fp.attacks.row_space_inversion(), observation)


class Twins(nn.Module):
    """Two inputs whose distance is all that counts: which is which cannot be told."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, pair: Tensor) -> Tensor:
        return self.head((self.encoder(pair[:, 0]) - self.encoder(pair[:, 1])).abs())


class Normalised(nn.Module):
    """Batch norm in front of the first layer: the mean and the spread of what it is fed leave no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(self.norm(inputs))


def simulated(kind: Callable[[], nn.Module], batch: fp.Batch, loss: str = "cross_entropy") -> fp.Observation:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind()
    scenario = fp.Scenario(model=model, clients=[batch], loss=loss, bounds=(-3.0, 3.0))
    return fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)[0]


def test_places_that_can_be_exchanged_are_not_called_exact() -> None:
    pair = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0))
    observation = simulated(Twins, fp.Batch(pair, torch.tensor([1])))
    answer = fp.run(fp.attacks.row_space_inversion(), observation)
    assert answer.status == RowSpaceStatus.AMBIGUOUS
    residual = fp.residual(observation, answer)
    assert residual is not None
    assert residual < 1e-4


def test_samples_that_can_be_moved_are_not_called_exact() -> None:
    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    observation = simulated(Normalised, fp.Batch(inputs, torch.tensor([0, 1, 2])))
    answer = fp.run(fp.attacks.row_space_inversion(), observation)
    assert answer.status != RowSpaceStatus.EXACT


def test_labels_that_the_update_does_not_tell_are_asked_for() -> None:
    batch = fp.Batch(torch.randn(3, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, 1.0, 1.0]))
    observation = simulated(
        lambda: nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 1)), batch, "binary_cross_entropy"
    )
    with pytest.raises(fp.NotApplicable, match="grant the labels"):
        fp.run(fp.attacks.row_space_inversion(), observation)


def test_labels_are_inferred_for_models_of_several_inputs() -> None:
    """More samples than half of the classes: the mean prediction for such inputs is not known."""
    observation = simulated(Siamese, fp.Batch(pairs(3, torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2])))
    answer = fp.run(fp.attacks.RowSpaceInversion(starts=1, steps=2), observation)
    assert answer.labels is not None
    assert len(answer.labels) == 3


def test_one_sample_that_does_not_explain_the_rest_is_named_as_such() -> None:
    series = torch.randn(1, 2, 20, generator=torch.Generator().manual_seed(0))
    observation = simulated(Series, fp.Batch(series, torch.tensor([1])))
    update = {**observation.round.update, "head.weight": torch.ones_like(observation.round.update["head.weight"])}
    changed = replace(observation, rounds=(replace(observation.round, update=update),))
    assert fp.run(fp.attacks.row_space_inversion(), changed).status == RowSpaceStatus.CONTRADICTED


def test_a_gradient_of_zeros_is_named() -> None:
    def untouched() -> nn.Module:
        model = Adapter()
        nn.init.zeros_(model.up.weight)
        return model

    observation = simulated(untouched, fp.Batch(torch.randn(1, 10), torch.tensor([1])))
    with pytest.raises(fp.NotApplicable, match=r"'down.weight', but it is all zeros"):
        fp.run(fp.attacks.row_space_inversion(), observation)


def test_labels_of_one_sample_behind_a_frozen_output_layer_are_tried() -> None:
    inputs = torch.randn(1, 10, generator=torch.Generator().manual_seed(0))
    observation = simulated(Adapter, fp.Batch(inputs, torch.tensor([3])))
    answer = fp.run(fp.attacks.row_space_inversion(), observation)
    assert answer.status == RowSpaceStatus.EXACT
    assert answer.labels is not None
    assert answer.labels.tolist() == [3]
