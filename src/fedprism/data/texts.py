"""Texts as tokens, with the next token at each place as the label: lines of a file, or a column of a table."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.losses import IGNORED_LABEL
from fedprism.types import Batch

MOST_TEXTS = 2**20
"""Texts of a file: bounds memory."""
MOST_BYTES = 2**28
"""Size of a file of texts: bounds memory."""
USUAL_PLACES = 32
"""Tokens of a text, unless it is said; longer texts are cut."""


class Tokenizer(Protocol):
    """What turns text into tokens and back; those of transformers do."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, eq=False)
class TextSet:
    """Texts as tokens (count, places), padded with `end`, which is also the label behind the last token."""

    name: str
    tokens: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    words: dict[int, str] = field(repr=False)
    """The tokens that occur, as they are written."""
    end: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def classes(self) -> int:
        return int(self.tokens.max()) + 1

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        """The texts with these indices."""
        chosen = torch.as_tensor(indices)
        return Batch(self.tokens[chosen], self.labels[chosen])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; those that no text of the set holds are written as numbers."""
        return "".join(self.words.get(int(token), f" <{token}>") for token in tokens).strip()


def text_set(name: str, texts: Sequence[str], tokenizer: Tokenizer, *, places: int = USUAL_PLACES, end: int) -> TextSet:
    """Texts with at least two tokens, cut after `places` of them; behind a text comes the token `end`."""
    rows = [whole[:places] for text in texts if len(whole := list(tokenizer.encode(text))) > 1]
    if not rows:
        raise BadInput(f"{name} holds no texts of at least two tokens. Check the file and the column.")
    tokens = torch.full((len(rows), places), end)
    labels = torch.full((len(rows), places), IGNORED_LABEL)
    for number, whole in enumerate(rows):
        tokens[number, : len(whole)] = torch.tensor(whole)
        labels[number, : len(whole)] = torch.tensor([*whole[1:], end])
    words = {int(token): _written(tokenizer, int(token)) for token in torch.unique(tokens)}
    return TextSet(name, tokens, labels, {**words, end: ""}, end)


def read_texts(
    path: str | os.PathLike[str], tokenizer: str | os.PathLike[str], *, column: str | None = None, places: int = 32
) -> TextSet:
    """Texts of a file: its lines, or a column of a .csv or .jsonl file; tokens by a `tokenizer.json` beside a model."""
    path = Path(path)
    texts = [text for text in _texts_of(path, column) if text.strip()][:MOST_TEXTS]
    loaded = load_tokenizer(tokenizer)
    return text_set(path.name, texts, loaded, places=places, end=loaded.end)


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer of the tokenizers library, without special tokens around each text."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int


END_NAMES = ("<|endoftext|>", "<|im_end|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]", "[PAD]", "<pad>")
"""What tokenizers call the token that ends a text, or that fills what is behind it."""


def load_tokenizer(path: str | os.PathLike[str]) -> LoadedTokenizer:
    """A `tokenizer.json`, which is data: nothing in it is executed."""
    try:
        from tokenizers import Tokenizer as Fast
    except ImportError as error:
        raise BadInput("the tokenizers library is not installed. Run: pip install fedprism[text]") from error
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        fast = Fast.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise BadInput(f"{shown(str(file))} is not a tokenizer.json that can be read.") from error
    ends = [fast.token_to_id(name) for name in END_NAMES]
    return LoadedTokenizer(
        encode=lambda text: list(fast.encode(text, add_special_tokens=False).ids),
        decode=lambda tokens: str(fast.decode(list(tokens), skip_special_tokens=False)),
        end=next((end for end in ends if end is not None), 0),
    )


def _written(tokenizer: Tokenizer, token: int) -> str:
    """A token as it is written inside a text, with the space in front of it if it has one."""
    alone, doubled = tokenizer.decode([token]), tokenizer.decode([token, token])
    return doubled[len(alone) :] if doubled.startswith(alone) and len(doubled) > len(alone) else alone


def _texts_of(path: Path, column: str | None) -> Iterator[str]:
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise BadInput(f"{shown(str(path))} is not a file of texts of at most {MOST_BYTES >> 20} MiB.")
    kind = path.suffix.lower()
    if (column is None) != (kind not in (".csv", ".jsonl")):
        raise BadInput(f"a .csv or .jsonl file needs a column and other files take none, not {shown(column)}.")
    with path.open(encoding="utf-8", errors="replace", newline="" if kind == ".csv" else None) as file:
        if column is None:
            yield from file
        elif kind == ".csv":
            table = csv.DictReader(file)
            if column not in (table.fieldnames or ()):
                raise BadInput(f"{path.name} has no column {shown(column)}, but {table.fieldnames}.")
            yield from (row[column] or "" for row in table)
        else:
            yield from (_entry(line, column, path) for line in file if line.strip())


def _entry(line: str, column: str, path: Path) -> str:
    try:
        return str(json.loads(line)[column])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(f"a line of {path.name} has no {shown(column)}.") from error
