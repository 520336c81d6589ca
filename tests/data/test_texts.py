"""Texts as tokens: padded, cut, labelled with the next token, and written as text again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import fedprism as fp
from fedprism.data.texts import TextSet, read_texts, text_set

TEXTS = ["call anna today please", "the cat sat", "one"]


class Splitting:
    """A tokenizer whose tokens are the words that it meets."""

    def __init__(self) -> None:
        self.words = ["<end>"]

    def encode(self, text: str) -> list[int]:
        self.words += [word for word in dict.fromkeys(text.split()) if word not in self.words]
        return [self.words.index(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


def made(places: int = 5) -> TextSet:
    return text_set("notes", TEXTS, Splitting(), places=places, end=0)


def test_each_label_is_the_next_token() -> None:
    data = made()
    assert data.tokens.tolist() == [[1, 2, 3, 4, 0], [5, 6, 7, 0, 0]]
    assert data.labels.tolist() == [[2, 3, 4, 0, -100], [6, 7, 0, -100, -100]]
    assert data.batch([1]).tensor.tolist() == [[5, 6, 7, 0, 0]]


def test_long_texts_are_cut() -> None:
    assert made(3).tokens.tolist() == [[1, 2, 3], [5, 6, 7]]


def test_tokens_are_written_as_text_again() -> None:
    data = made()
    assert data.decode([5, 6, 99]) == "the cat <99>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as a model brings it along: every word of the texts, split at spaces."""
    pytest.importorskip("tokenizers", reason="reading tokenizer.json needs the extra text")
    words = {word: number for number, word in enumerate(["<eos>", *" ".join(TEXTS).split()])}
    kind = {"type": "WordLevel", "vocab": words, "unk_token": "<eos>"}
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "model": kind, "pre_tokenizer": {"type": "Whitespace"}}))
    return path


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("notes.txt", "\n".join(TEXTS), None),
        ("notes.csv", "id,note\n" + "\n".join(f"{n},{text}" for n, text in enumerate(TEXTS)), "note"),
        ("notes.jsonl", "\n".join(json.dumps({"note": text}) for text in TEXTS), "note"),
    ],
)
def test_files_give_the_same_texts(
    tmp_path: Path, tokenizer: Path, name: str, content: str, column: str | None
) -> None:
    (tmp_path / name).write_text(content)
    data = read_texts(tmp_path / name, tokenizer.parent, column=column, places=5)
    assert len(data) == 2
    assert data.decode(data.tokens[0].tolist()) == TEXTS[0]
    assert int(data.tokens[0, -1]) == data.end == 0


@pytest.mark.parametrize(("name", "column"), [("notes.txt", "note"), ("notes.csv", None), ("none.txt", None)])
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, column: str | None) -> None:
    if name != "none.txt":
        (tmp_path / name).write_text("id\n1")
    with pytest.raises(fp.errors.BadInput, match=r"not a file of texts|needs a column"):
        read_texts(tmp_path / name, tmp_path, column=column)


def test_texts_without_tokens_are_refused() -> None:
    with pytest.raises(fp.errors.BadInput, match="at least two tokens"):
        text_set("notes", ["one", ""], Splitting(), places=4, end=0)
