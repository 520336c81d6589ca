"""An audit of texts: sentences side by side, recovered tokens marked, and nothing of them unless asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedprism as fp
from fedprism.data.texts import TextSet
from fedprism.report.sentences import sentence
from text_models import decoder, texts


def test_tokens_in_their_places_are_marked() -> None:
    shown = sentence(torch.tensor([1, 2, 3]), torch.tensor([1, 9, 3]), {1: "a", 2: "<b>"})
    assert shown == '<span class="right">a</span>&lt;b&gt;<span class="right"> &lt;3&gt;</span>'


def test_tokens_without_words_are_numbers() -> None:
    assert sentence(torch.tensor([7, 8]), None, {}) == " 7 8"


@pytest.mark.parametrize("shown", [True, False])
def test_a_report_shows_texts_only_on_purpose(tmp_path: Path, shown: bool) -> None:
    tokens, labels = texts([6, 8, 5, 7])
    words = {int(token): f" word{int(token)}" for token in tokens.unique()}
    data = TextSet("notes", tokens, labels, {**words, 0: ""}, 0)
    report = fp.audit(
        decoder(),
        data,
        attacks=[fp.attacks.token_inversion()],
        threats=[fp.threats.honest_but_curious],
        batch_sizes=(1,),
        seeds=(0,),
        ceiling=False,
        folder=tmp_path,
        show_images=shown,
        progress=False,
    )
    page = report.path.read_text()
    private = [word for word in words.values() if f">{word}<" in page or f"{word} word" in page]
    assert bool(private) == shown
    assert all(word not in (tmp_path / "results.json").read_text() for word in words.values() if len(word) > 7)
