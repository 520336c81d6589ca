"""Texts beside texts: exact ones, secrets, and what a guess would get."""

from __future__ import annotations

import pytest
import torch

import fedprism as fp
from fedprism.evaluation.texts import score_texts

WORDS = ["", "call", "me", "at", "0151", "anna@example.org", "or", "Peter", "Quill"]


def decode(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def scores(recovered: list[list[int]], canaries: tuple[str, ...] = ()) -> fp.TextScores:
    private = torch.tensor([[1, 2, 3, 4, 0, 0], [1, 7, 8, 3, 5, 0]])
    truth = fp.Truth(inputs=private, labels=torch.tensor([0, 1]), owners=("a", "a"))
    answer = fp.Reconstruction(inputs=torch.tensor(recovered), ambiguity=frozenset({"order"}))
    return score_texts(answer, truth, decode, canaries=canaries)


def test_the_same_texts_in_another_order_are_exact() -> None:
    found = scores([[1, 7, 8, 3, 5, 0], [1, 2, 3, 4, 0, 0]], canaries=("Peter Quill", "not there"))
    assert found.exact == found.mean("bleu") == found.mean("rouge_2") == 1.0
    assert found.mean("edit_distance") == 0
    assert found.secrets == {"canaries": (1, 1), "e-mail addresses": (1, 1), "numbers": (1, 1)}
    assert found.frequent == pytest.approx(2 / 9)


def test_a_missing_secret_counts_as_missing() -> None:
    found = scores([[1, 7, 8, 3, 6, 0], [1, 2, 3, 4, 0, 0]], canaries=("Peter Quill",))
    assert found.exact == 0.5
    assert found.secrets == {"canaries": (1, 1), "e-mail addresses": (0, 1), "numbers": (1, 1)}


def test_texts_without_an_answer_count_as_nothing() -> None:
    found = scores([[1, 2, 3, 4, 0, 0]])
    assert [text.exact for text in found.texts] == [True, False]
    assert found.texts[1].tokens == 0
    assert "1 of 2 texts exact" in str(found)


def test_numbers_are_no_texts() -> None:
    truth = fp.Truth(inputs=torch.rand(1, 4), labels=torch.tensor([0]), owners=("a",))
    with pytest.raises(fp.errors.BadInput, match="expected texts"):
        score_texts(fp.Reconstruction(inputs=torch.rand(1, 4)), truth)
