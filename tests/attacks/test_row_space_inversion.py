"""Samples out of the row space of first layers of many kinds; what must be refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks.row_space_inversion import RowSpaceStatus

CLASSES = 5


class Recurrent(nn.Module):
    def __init__(self, cells: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.cells, self.head = cells(6, 20, batch_first=True), nn.Linear(20, CLASSES)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.cells(steps)[0][:, -1])


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 24, 6, stride=2), nn.Conv1d(24, 16, 3)
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


def drawn(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda samples, rng: torch.randn(samples, *shape, generator=rng)


CASES = {
    "LSTM": (Recurrent, drawn(4, 6), 1),
    "GRU": (lambda: Recurrent(nn.GRU), drawn(3, 6), 1),
    "series": (Series, drawn(2, 20), 1),
    "Siamese": (Siamese, pairs, 1),
    "LoRA": (Adapter, drawn(10), 1),
    "LoRA, two samples": (Adapter, drawn(10), 2),
    "dense, three samples": (lambda: nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, CLASSES)), drawn(9), 3),
}


def attacked(
    name: str, seed: int, starts: int = 8, **settings: object
) -> tuple[fp.Reconstruction, fp.Truth, float | None]:
    kind, inputs, samples = CASES[name]
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
