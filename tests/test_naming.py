"""Reprs that evaluate back, and hints for misspelt words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fedprism.naming import EvaluableRepr, nearest

WORDS = ("honest_but_curious", "eavesdropper", "malicious_server")


def halved(value: float) -> float:
    return value / 2


@dataclass(frozen=True, kw_only=True, repr=False)
class Method(EvaluableRepr):
    rate: float = 0.1
    change: Callable[[float], float] | None = None
    sizes: tuple[object, ...] = ()


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (Method(), "Method()"),
        (Method(rate=0.5), "Method(rate=0.5)"),
        (Method(change=halved, sizes=(halved,)), "Method(change=halved, sizes=(halved,))"),
        (Method(sizes=(1, "two")), "Method(sizes=(1, 'two',))"),
    ],
)
def test_a_repr_shows_what_was_changed_and_evaluates_back(method: Method, text: str) -> None:
    assert repr(method) == text
    assert eval(text) == method


def test_a_misspelt_word_is_told_from_others() -> None:
    assert nearest("eavesdroper", WORDS) == "did you mean eavesdropper?"
    assert nearest("psrn", ["psnr", "ssim"]) == "did you mean psnr?"


def test_where_nothing_is_close_every_word_is_listed() -> None:
    assert nearest("zzz", WORDS) == "use one of eavesdropper, honest_but_curious, malicious_server."
