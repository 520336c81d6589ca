"""What words can say about fields that no single number fills. A field's annotation holds one of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, NamedTuple, get_type_hints


@dataclass(frozen=True)
class OneOf:
    """A word for each of several values: `decoder: Annotated[Decoder, OneOf({"midpoint": midpoint})]`.

    In Python the field takes any other value of its type as well.
    """

    words: Mapping[str, Any]

    @property
    def wanted(self) -> str:
        return " or ".join(self.words)

    def read(self, word: str) -> Any:
        if word not in self.words:
            raise ValueError
        return self.words[word]

    def written(self, value: Any) -> str:
        """The word for this value, or for one of the same class; what Python shows if there is none."""
        same = [word for word, option in self.words.items() if option == value]
        alike = [word for word, option in self.words.items() if type(option) is type(value) is not FunctionType]
        return next(iter([*same, *alike]), repr(value))


@dataclass(frozen=True)
class TermsOf:
    """A tuple of terms of an objective: the word of a class of terms is its weight, 0 without it.

    Other fields of a term that is there are set by its word and theirs: `total_variation_magnitude`.
    """

    words: Mapping[str, Any]

    def values(self, terms: tuple[Any, ...]) -> dict[str, tuple[type, Any]]:
        """Name -> (type, value) of everything that can be set."""
        values = dict[str, tuple[type, Any]]()
        for word, kind in self.words.items():
            term = next((term for term in terms if type(term) is kind), None)
            values[word] = float, 0.0 if term is None else term.weight
            if term is not None:
                others = {name: hint for name, hint in get_type_hints(kind).items() if name != "weight"}
                values |= {f"{word}_{name}": (hint, getattr(term, name)) for name, hint in others.items()}
        return values

    def changed(self, terms: tuple[Any, ...], values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The terms with these values of what `values` names."""
        for word, kind in self.words.items():
            weight, others = values.get(word), dict[str, Any]()
            for field in fields(kind):
                if f"{word}_{field.name}" in values:
                    others[field.name] = values[f"{word}_{field.name}"]
            if weight is not None:
                if weight and not any(type(term) is kind for term in terms):
                    terms = (*terms, kind(weight=weight))
                others["weight"] = weight
            terms = tuple(replace(term, **others) if type(term) is kind else term for term in terms)
            terms = tuple(term for term in terms if type(term) is not kind or term.weight)
        return terms


class Numbers(NamedTuple):
    """Tuples of numbers in one word: `0.47,0.15`, and with `nested` several of them: `0.5,0.5/0.2,0.2`."""

    nested: bool

    @property
    def wanted(self) -> str:
        return "numbers such as 0.5,0.5/0.2,0.2" if self.nested else "numbers such as 0.5,0.2"

    def read(self, word: str) -> tuple[Any, ...]:
        parts = tuple(tuple(float(number) for number in part.split(",")) for part in word.split("/"))
        if not all(math.isfinite(number) for part in parts for number in part) or (len(parts) > 1 and not self.nested):
            raise ValueError
        return parts if self.nested else parts[0]

    def written(self, value: tuple[Any, ...] | None) -> str:
        if value is None:
            return str(value)
        return "/".join(",".join(map(str, part)) for part in (value if self.nested else (value,)))
