"""Rows of tables out of the gradient of the dense layer behind a concatenation, against autograd."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprism.solvers.closed_form.concatenation import Block, Table, solve_concatenation, span_of
from fedprism.solvers.closed_form.lookups import used_rows

CATEGORIES, WIDTH, NUMBERS, UNITS = (7, 16, 9, 5), 4, 6, 64


class Planted(NamedTuple):
    numbers: Tensor
    categories: Tensor
    gradient: Tensor
    weight: Tensor
    tables: list[Table]
    blocks: list[Block]
    used: list[Tensor]


def planted(seed: int, samples: int, scale: float = 1.0) -> Planted:
    torch.manual_seed(seed)
    tables = [nn.Embedding(count, WIDTH) for count in CATEGORIES]
    first, last = nn.Linear(NUMBERS + WIDTH * len(tables), UNITS), nn.Linear(UNITS, 2)
    numbers = torch.randn(samples, NUMBERS)
    categories = torch.stack([torch.randint(0, count, (samples,)) for count in CATEGORIES], 1)
    fed = torch.cat([numbers, *(table(categories[:, place]) for place, table in enumerate(tables))], 1)
    (scale * F.cross_entropy(last(torch.relu(first(fed))), torch.randint(0, 2, (samples,)))).backward()
    used_tables, blocks, all_used = [], [], []
    for place, table in enumerate(tables):
        assert table.weight.grad is not None
        used = used_rows(table.weight.grad, lookups=samples)
        assert used is not None
        start = NUMBERS + WIDTH * place
        columns = torch.arange(start, start + WIDTH)
        used_tables.append(Table(table.weight[used.rows].detach().double(), used.gradients))
        blocks.append(Block(columns, place))
        all_used.append(used.rows)
    assert first.weight.grad is not None
    assert first.bias.grad is not None
    gradient = torch.cat([first.weight.grad, first.bias.grad[:, None]], 1)
    return Planted(numbers, categories, gradient, first.weight.detach(), used_tables, blocks, all_used)


@pytest.mark.parametrize("samples", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_every_cell_of_a_table_comes_out(seed: int, samples: int, scale: float) -> None:
    case = planted(seed, samples, scale)
    truth = sorted((cells, numbers) for cells, numbers in zip(case.categories.tolist(), case.numbers, strict=True))
    readings = solve_concatenation(case.gradient, case.weight, case.tables, case.blocks, samples)
    assert 1 <= len(readings) <= 4

    def is_right(choices: Tensor, inputs: Tensor) -> bool:
        cells = torch.stack([rows[choices[:, place]] for place, rows in enumerate(case.used)], 1)
        answer = sorted(zip(cells.tolist(), inputs[:, :NUMBERS].float(), strict=True))
        return all(a[0] == b[0] and torch.allclose(a[1], b[1], atol=1e-3) for a, b in zip(answer, truth, strict=True))

    assert any(is_right(*reading) for reading in readings)


def test_the_span_has_as_many_dimensions_as_samples() -> None:
    assert len(span_of(planted(0, 5).gradient)) == 5


def test_noise_instead_of_a_gradient_is_refused() -> None:
    case = planted(0, 4)
    assert solve_concatenation(torch.randn_like(case.gradient), case.weight, case.tables, case.blocks, 4) == []
