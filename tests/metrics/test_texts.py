"""Measures of texts against torchmetrics, which computes them independently."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.text import bleu_score
from torchmetrics.functional.text import edit_distance as reference_distance

from fedprism.metrics.texts import bleu, edit_distance, rouge, rouge_l

WORDS = st.lists(st.sampled_from(["a", "bee", "cat", "dog", "eel"]), min_size=1, max_size=12)


@given(WORDS, WORDS)
@settings(max_examples=60, deadline=None)
def test_bleu_of_long_texts_is_torchmetrics(first: list[str], second: list[str]) -> None:
    if min(len(first), len(second)) >= 4:
        reference = float(bleu_score([" ".join(first)], [[" ".join(second)]]))
        assert bleu(first, second) == pytest.approx(reference, abs=1e-5)


@given(WORDS, WORDS)
@settings(max_examples=60, deadline=None)
def test_edit_distance_is_torchmetrics(first: list[str], second: list[str]) -> None:
    a, b = " ".join(first), " ".join(second)
    assert edit_distance(a, b) == int(reference_distance([a], [b], reduction="sum"))


def test_rouge_of_worked_examples() -> None:
    ours, theirs = ["the", "cat", "was", "found", "under", "the", "bed"], ["the", "cat", "was", "under", "the", "bed"]
    assert rouge(ours, theirs, 1) == pytest.approx(12 / 13)  # 6 of 7 and 6 of 6
    assert rouge(ours, theirs, 2) == pytest.approx(8 / 11)  # 4 of 6 and 4 of 5
    assert rouge_l(ours, theirs) == pytest.approx(12 / 13)
    assert rouge_l(["police", "kill", "the", "gunman"], ["police", "killed", "the", "gunman"]) == pytest.approx(0.75)
    assert rouge_l(["the", "gunman", "kill", "police"], ["police", "killed", "the", "gunman"]) == pytest.approx(0.5)


@given(WORDS, WORDS)
@settings(max_examples=60, deadline=None)
def test_only_equal_texts_score_one(first: list[str], second: list[str]) -> None:
    for score in (bleu(first, second), rouge_l(first, second)):
        assert 0 <= score <= 1 + 1e-12
        assert (score > 1 - 1e-12) == (first == second)
    assert (edit_distance(first, second) == 0) == (first == second)
