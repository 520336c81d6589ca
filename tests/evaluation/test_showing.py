"""A reconstruction beside the truth: aligned as scoring aligns, whatever the inputs are."""

from __future__ import annotations

import numpy as np
import torch

import fedprism as fp
from notebook_pages import checked, pictures


def truth_of(inputs: fp.types.Inputs, count: int) -> fp.Truth:
    return fp.Truth(inputs=inputs, labels=torch.arange(count), owners=("client-0",) * count)


def test_pairs_are_those_of_the_scores(photos: fp.data.ImageSet) -> None:
    originals = photos.draw(3, seed=1).tensor
    order = torch.tensor([2, 0, 1])
    reconstruction = fp.Reconstruction(inputs=originals[order], ambiguity=frozenset({"order"}))
    comparison = fp.show(reconstruction, truth_of(originals, 3))
    shown = pictures(comparison._repr_html_())
    checked(comparison._repr_html_())
    assert len(shown) == 6
    for private, recovered in zip(shown[:3], shown[3:], strict=True):
        assert np.array_equal(private, recovered)
    assert comparison.scores == fp.score(reconstruction, truth_of(originals, 3))
    assert str(comparison) == str(comparison.scores)


def test_an_order_that_is_declared_known_is_not_changed(photos: fp.data.ImageSet) -> None:
    originals = photos.draw(2, seed=1).tensor
    shown = pictures(fp.show(fp.Reconstruction(inputs=originals.flip(0)), truth_of(originals, 2))._repr_html_())
    assert np.array_equal(shown[0], shown[3])
    assert not np.array_equal(shown[0], shown[2])


def test_a_sample_without_an_answer_shows_none(photos: fp.data.ImageSet) -> None:
    originals = photos.draw(2, seed=1).tensor
    page = fp.show(fp.Reconstruction(inputs=originals[:1]), truth_of(originals, 2))._repr_html_()
    checked(page)
    assert page.count("no answer") == 1
    assert len(pictures(page)) == 3


def test_tokens_and_rows_are_shown_as_such() -> None:
    tokens = torch.arange(12).view(2, 6)
    page = fp.show(fp.Reconstruction(inputs=tokens), truth_of(tokens, 2))._repr_html_()
    checked(page)
    assert page.count("6, 7, 8, 9, 10, 11") == 2
    rows = torch.tensor([[0.25, 0.5], [0.75, 1.0]])
    page = fp.show(fp.Reconstruction(inputs=rows), truth_of(rows, 2))._repr_html_()
    checked(page)
    assert page.count("0.25, 0.5") == 2
    both = {"numbers": rows, "tokens": tokens}
    page = fp.show(fp.Reconstruction(inputs=both), truth_of(both, 2))._repr_html_()
    checked(page)
    assert "recovered whole numbers" in page
