"""Losses by name, against torch's own on the shapes that people train with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedprism as fp
from fedprism.losses import LOSSES, cross_entropy, mse, predictions
from planted_inputs import numbers, tokens


def test_cross_entropy_per_token_and_per_pixel_is_torchs() -> None:
    per_token, words = numbers(2, 6, 4), tokens(2, 6, below=4)
    torch.testing.assert_close(cross_entropy(per_token, words), F.cross_entropy(per_token.transpose(1, 2), words))
    pixels, classes = numbers(2, 4, 5, 6), tokens(2, 5, 6, below=4)
    torch.testing.assert_close(cross_entropy(pixels, classes), F.cross_entropy(pixels, classes))
    words[0, 1] = -100
    expected = F.cross_entropy(per_token.transpose(1, 2), words, ignore_index=-100)
    torch.testing.assert_close(cross_entropy(per_token, words), expected)


def test_shapes_that_can_be_read_in_two_ways_are_refused() -> None:
    with pytest.raises(fp.errors.BadInput, match="is that of classes"):
        cross_entropy(numbers(2, 5, 5), tokens(2, 5, below=5))


@pytest.mark.parametrize("outputs", [numbers(4, 1), numbers(4)], ids=["column", "row"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [("binary_cross_entropy", F.binary_cross_entropy_with_logits), ("mse", F.mse_loss), ("l1", F.l1_loss)],
)
def test_one_output_a_sample_is_never_broadcast(name: str, expected: object, outputs: Tensor) -> None:
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert callable(expected)
    for given in (labels, labels.unsqueeze(1)):
        torch.testing.assert_close(LOSSES[name](outputs, given), expected(outputs.flatten(), labels))


def test_squared_error_of_class_numbers_is_that_of_one_hot_rows() -> None:
    outputs, labels = numbers(4, 3), torch.tensor([0, 2, 1, 1])
    torch.testing.assert_close(mse(outputs, labels), F.mse_loss(outputs, F.one_hot(labels, 3).float()))


def test_labels_that_do_not_fit_are_told() -> None:
    with pytest.raises(fp.errors.BadInput, match="do not fit outputs"):
        LOSSES["huber"](numbers(4, 3), numbers(4, 2))


def test_outputs_are_found_in_what_models_return() -> None:
    scores = numbers(2, 3)
    returned = [scores, (scores, "state"), {"logits": scores, "hidden": numbers(1)}, {"anything": scores}]
    assert all(predictions(each) is scores for each in returned)
    with pytest.raises(fp.errors.BadInput, match="first, second"):
        predictions({"first": scores, "second": scores})
