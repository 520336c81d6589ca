"""How much is worked on at a time."""

from __future__ import annotations

import pytest

from fedprism.runtime import memory


def test_as_much_as_usual_unless_it_is_limited() -> None:
    assert (memory.together(8), memory.is_limited()) == (8, False)
    with memory.limited_to(1.0):
        assert (memory.together(8), memory.is_limited()) == (8, False)


def test_a_limit_holds_inside_its_block_only_and_never_below_one() -> None:
    with memory.limited_to(0.25):
        assert (memory.together(8), memory.together(2), memory.is_limited()) == (2, 1, True)
        with memory.limited_to(0.5):
            assert memory.together(8) == 4
        assert memory.together(8) == 2
    assert memory.together(8) == 8


@pytest.mark.parametrize(("asked", "divisible"), [((1, 4), False), ((1, 8), True), ((), False)])
def test_what_could_be_divided_further_is_noted(asked: tuple[int, ...], divisible: bool) -> None:
    with memory.limited_to(0.25) as limit:
        for usual in asked:
            memory.together(usual)
    assert limit.divisible is divisible


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
def test_other_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 1"), memory.limited_to(fraction):
        pass
