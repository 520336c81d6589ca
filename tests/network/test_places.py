"""Which entries of the input feed a layer, place by place, and which layers are fed anything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedprism.network.places import PlacedLayer, placed_layers
from fedprism.types import Knowledge, Observation, Round


def layers_of(model: nn.Module, shape: Any, types: Any = None) -> list[PlacedLayer]:
    round = Round(params=dict(model.named_parameters()), update={})
    return placed_layers(
        Observation(model=model, rounds=(round,), knowledge=Knowledge(input_shape=shape, input_types=types))
    )


class Table(nn.Module):
    """A category in front of a dense layer, and numbers in front of another."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.of_rows, self.of_numbers = nn.Embedding(5, 3), nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, numbers: Tensor, category: Tensor) -> Tensor:
        return self.of_rows(self.table(category)) + self.of_numbers(1 - 2 * numbers)


def test_windows_of_a_series_are_its_entries() -> None:
    (layer,) = layers_of(nn.Conv1d(2, 8, 3, stride=2), (2, 7))
    windows = torch.arange(14).view(2, 7).unfold(1, 3, 2).movedim(1, 0).flatten(1)
    assert torch.equal(layer.entries, windows)
    assert torch.allclose(layer.slope, torch.ones(3, 6).double())


def test_padding_is_constant() -> None:
    (layer,) = layers_of(nn.Conv1d(1, 8, 3, padding=1), (1, 4))
    assert layer.slope[0].tolist() == [0, 1, 1]
    assert layer.slope[3].tolist() == [1, 1, 0]


def test_only_what_is_fed_numbers_is_placed_and_their_scale_is_known() -> None:
    (layer,) = layers_of(Table(), ((2,), ()), (torch.float32, torch.long))
    assert layer.operation.weight == "of_numbers.weight"
    assert layer.slope.tolist() == [[-2, -2]]
    assert layer.offset.tolist() == [[1, 1]]


def test_layers_behind_a_table_are_fed_no_entries() -> None:
    assert layers_of(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), (5,), torch.long) == []
