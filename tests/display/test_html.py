"""Pieces for notebooks: escaped, bounded, without scripts, and pictures that hold the right pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedprism as fp
from fedprism.display import html
from notebook_pages import checked, pictures

HOSTILE = "<script>alert(1)</script>\u202e\"'"


def test_a_batch_shows_its_own_pictures(photos: fp.data.ImageSet) -> None:
    batch = photos.draw(3, seed=0)
    page = batch._repr_html_()
    checked(page)
    shown = np.stack(pictures(page))
    assert np.array_equal(shown, (batch.tensor * 255).round().byte().permute(0, 2, 3, 1).numpy())
    assert "stretched" not in page


def test_inputs_beyond_pixels_are_stretched_and_it_says_so() -> None:
    page = fp.Batch(torch.randn(2, 1, 8, 8), torch.tensor([0, 1]))._repr_html_()
    checked(page)
    assert "stretched" in page
    assert all((shown.min(), shown.max()) == (0, 255) for shown in pictures(page))


def test_large_noise_stays_small() -> None:
    page = fp.Batch(torch.rand(64, 3, 500, 400), torch.arange(64))._repr_html_()
    checked(page)
    shown = pictures(page)
    assert len(shown) == html.MOST_SAMPLES
    assert shown[0].shape == (112, 90, 3)
    assert "The first 8 of 64 samples." in page


@pytest.mark.parametrize(
    "inputs",
    [
        torch.arange(60).view(2, 30),
        torch.rand(2, 5),
        torch.rand(2),
        {"tokens": torch.arange(8).view(2, 4), "image": torch.rand(2, 3, 8, 8)},
        (torch.rand(2, 3), torch.tensor([1, 2])),
        torch.rand(2, 3, 2, 2),
        torch.full((2, 3, 8, 8), torch.nan),
    ],
    ids=["tokens", "rows", "numbers", "named", "several", "tiny", "nan"],
)
def test_inputs_of_every_kind_are_shown(inputs: fp.types.Inputs) -> None:
    page = fp.Batch(inputs, torch.tensor([7, 8]))._repr_html_()
    checked(page)
    assert "<td>7</td>" in page
    if isinstance(inputs, dict):
        assert len(pictures(page)) == 2
        assert "0, 1, 2, 3" in page
    if isinstance(inputs, torch.Tensor) and inputs.shape == (2, 30):
        assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, and 18 more" in page


def test_words_are_escaped() -> None:
    found = fp.Reconstruction(inputs={HOSTILE: torch.rand(1, 2)}, status=HOSTILE * 1000)
    page = found._repr_html_()
    checked(page)
    assert "&lt;script&gt;" in page
    assert "\u202e" not in page


def test_a_reconstruction_without_inputs_says_so() -> None:
    page = fp.Reconstruction(status="nothing")._repr_html_()
    checked(page)
    assert "No inputs." in page


def test_a_verdict_says_what_it_means() -> None:
    from fedprism.evaluation.verdict import MEANING, Verdict

    for verdict in Verdict:
        page = verdict._repr_html_()
        checked(page)
        assert MEANING[verdict] in page
