"""Tokens and how often they were used, out of gradients of tables computed by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedprism.solvers.closed_form.lookups import counts_of_samples, places_of_rows, used_rows

TOKENS, WIDTH, LENGTH, CLASSES = 200, 32, 12, 4


def tokens(samples: int, length: int = LENGTH) -> Tensor:
    drawn = torch.randint(0, TOKENS, (samples, length))
    drawn[:, 3] = drawn[:, 5]  # some token stands there twice
    return drawn


def bag_gradient(batch: Tensor) -> Tensor:
    """The table's gradient where a sample is the mean of its rows."""
    table, head = nn.EmbeddingBag(TOKENS, WIDTH), nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    F.cross_entropy(head(table(batch)), torch.randint(0, CLASSES, (len(batch),))).backward()
    assert table.weight.grad is not None
    return table.weight.grad


def text_gradients(batch: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the tables of tokens and of positions in front of a transformer."""
    table, position = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.randn(batch.shape[1], WIDTH))
    encoder, head = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True), nn.Linear(WIDTH, CLASSES)
    F.cross_entropy(head(encoder(table(batch) + position).mean(1)), torch.zeros(len(batch)).long()).backward()
    assert table.weight.grad is not None
    assert position.grad is not None
    return table.weight.grad, position.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_order_comes_out_of_the_gradient_of_the_positions(seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    batch = tokens(1)
    table, position = text_gradients(batch)
    used = used_rows(scale * table)
    assert used is not None
    read = places_of_rows(used.gradients, scale * position)
    assert read is not None
    places, missed = read
    assert missed < 1e-5
    assert torch.equal(used.rows[places], batch[0])


def test_order_is_refused_where_several_samples_share_the_positions() -> None:
    torch.manual_seed(0)
    table, position = text_gradients(tokens(3))
    used = used_rows(table)
    assert used is not None
    read = places_of_rows(used.gradients, position)
    assert read is None or read[1] > 0.01


def test_order_is_refused_where_there_are_more_places_than_numbers_in_a_row() -> None:
    assert places_of_rows(torch.rand(5, 4), torch.rand(6, 4)) is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("samples", [1, 2, 8])
def test_how_often_each_sample_used_each_row(seed: int, samples: int) -> None:
    torch.manual_seed(seed)
    batch = tokens(samples)
    used = used_rows(bag_gradient(batch))
    assert used is not None
    counts = counts_of_samples(used.gradients, LENGTH)
    assert counts is not None
    truth = [torch.bincount(sample, minlength=TOKENS)[used.rows].tolist() for sample in batch]
    assert sorted(counts.tolist()) == sorted(truth)


def test_counts_are_refused_for_noise() -> None:
    torch.manual_seed(0)
    assert counts_of_samples(torch.randn(20, 8), 20) is None


def test_weight_decay_is_taken_out() -> None:
    torch.manual_seed(0)
    parameter, batch = torch.randn(TOKENS, WIDTH), tokens(2)
    gradient = bag_gradient(batch)
    used = used_rows(gradient + 1e-2 * parameter, parameter)
    assert used is not None
    assert torch.equal(used.rows, batch.unique())


@pytest.mark.parametrize("seed", range(3))
def test_what_a_tied_output_layer_adds_is_taken_out(seed: int) -> None:
    torch.manual_seed(seed)
    batch = tokens(1)
    table = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
    encoder = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True)
    outputs = encoder(F.embedding(batch[:, :-1], table)) @ table.T
    F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten()).backward()
    assert table.grad is not None
    used = used_rows(table.grad)
    assert used is not None
    assert torch.equal(used.rows, batch[:, :-1].unique())


def test_noise_in_every_row_is_refused() -> None:
    torch.manual_seed(0)
    gradient = bag_gradient(tokens(2))
    assert used_rows(gradient + gradient.norm() * torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)) is None
    assert used_rows(torch.randn(TOKENS, WIDTH), lookups=24) is None


def tied_gradient(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a table that is the output layer, too, the table, and the rows that were looked up."""
    table, body = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
    outputs = torch.tanh(body(table(batch).mean(1))) @ table.weight.T
    F.cross_entropy(outputs, torch.randint(0, TOKENS, (len(batch),))).backward()
    assert table.weight.grad is not None
    return table.weight.grad, table.weight.detach(), batch.unique()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("short", [torch.float16, torch.bfloat16])
def test_short_floats_leave_the_rows_of_a_tied_table(seed: int, samples: int, short: torch.dtype) -> None:
    torch.manual_seed(seed)
    gradient, table, truth = tied_gradient(tokens(samples))
    used = used_rows((gradient / gradient.abs().max()).to(short).float(), table, samples * LENGTH)
    assert used is not None
    assert torch.equal(used.rows, truth)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("scale", [1e-6, 1.0, -1.0, 1e6])
def test_differences_of_parameters_leave_the_rows_of_a_tied_table(seed: int, samples: int, scale: float) -> None:
    torch.manual_seed(seed)
    gradient, table, truth = tied_gradient(tokens(samples))
    moved = scale * ((table - 0.1 * gradient) - table)
    used = used_rows(moved, table, samples * LENGTH, difference=True)
    assert used is not None
    assert torch.equal(used.rows, truth)


@pytest.mark.parametrize("difference", [False, True])
def test_noise_in_all_rows_is_refused(difference: bool) -> None:
    torch.manual_seed(0)
    assert used_rows(torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH), LENGTH, difference=difference) is None


def test_rows_of_equally_large_entries_tell_no_counts() -> None:
    torch.manual_seed(0)
    used = used_rows(bag_gradient(tokens(1)))
    assert used is not None
    assert counts_of_samples(used.gradients, samples=1) is not None
    assert counts_of_samples(used.gradients.sign(), samples=1) is None


@pytest.mark.parametrize("seed", range(3))
def test_words_that_two_samples_share_do_not_hide_whose_the_others_are(seed: int) -> None:
    """Of each pair of samples, more words are both's than either's own."""
    torch.manual_seed(seed)
    words = torch.randperm(TOKENS)[:80].view(10, 8)
    shared, own = words[:, :6].repeat_interleave(2, 0), words[:, 6:].reshape(20, 1)
    batch = torch.cat([shared, own, own], 1)
    used = used_rows(bag_gradient(batch))
    assert used is not None
    counts = counts_of_samples(used.gradients, batch.shape[1], samples=20)
    assert counts is not None
    truth = [torch.bincount(sample, minlength=TOKENS)[used.rows].tolist() for sample in batch]
    assert sorted(counts.tolist()) == sorted(truth)
