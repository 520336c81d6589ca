"""Inputs of several tensors: by name and back, flat and back, and blank ones of a shape."""

from __future__ import annotations

import pytest
import torch

from fedprism.errors import NotApplicable
from fedprism.inputs import (
    Inputs,
    are_floating,
    blank_inputs,
    by_name,
    from_names,
    is_single,
    joined,
    shape_of,
    single_tensor,
    tensors_of,
    types_of,
    unflattened,
)

IMAGES, TOKENS = torch.arange(24.0).view(2, 3, 4), torch.tensor([[3, 1], [2, 0]])
KINDS: dict[str, Inputs] = {
    "one tensor": IMAGES,
    "by position": (TOKENS, IMAGES),
    "by name": {"tokens": TOKENS, "image": IMAGES},
}


def same(first: Inputs | None, second: Inputs) -> bool:
    assert first is not None
    assert type(first) is type(second)
    return all(map(torch.equal, tensors_of(first), tensors_of(second)))


@pytest.mark.parametrize("inputs", KINDS.values(), ids=KINDS)
def test_names_lead_back_to_the_inputs(inputs: Inputs) -> None:
    others = {"labels": torch.zeros(2), "inputs_of_another": torch.zeros(1)}
    assert same(from_names({**others, **by_name(inputs)}), inputs)


def test_without_such_names_there_are_no_inputs() -> None:
    assert from_names({"labels": torch.zeros(2)}) is None


@pytest.mark.parametrize("inputs", KINDS.values(), ids=KINDS)
def test_flat_values_get_their_structure_shapes_and_types_back(inputs: Inputs) -> None:
    flat = torch.cat([tensor.flatten(1).double() for tensor in tensors_of(inputs)], dim=1)
    assert same(unflattened(flat, inputs), inputs)


@pytest.mark.parametrize("inputs", KINDS.values(), ids=KINDS)
def test_batches_are_joined_tensor_by_tensor(inputs: Inputs) -> None:
    twice = joined([inputs, inputs])
    assert [len(tensor) for tensor in tensors_of(twice)] == [4] * len(tensors_of(inputs))
    assert shape_of(twice) == shape_of(inputs)


@pytest.mark.parametrize("inputs", KINDS.values(), ids=KINDS)
def test_blank_inputs_have_the_shape_and_the_types_that_were_stated(inputs: Inputs) -> None:
    blank = blank_inputs(shape_of(inputs), types_of(inputs), 5, torch.zeros(1, dtype=torch.float64))
    assert shape_of(blank) == shape_of(inputs)
    assert {len(tensor) for tensor in tensors_of(blank)} == {5}
    # Floating-point numbers are as precise as the model; whole numbers stay what they are.
    expected = [torch.float64 if t.is_floating_point() else t.dtype for t in tensors_of(inputs)]
    assert [tensor.dtype for tensor in tensors_of(blank)] == expected


def test_one_tensor_is_told_from_several() -> None:
    assert [is_single(shape_of(inputs)) for inputs in KINDS.values()] == [True, False, False]
    assert [are_floating(types_of(inputs)) for inputs in KINDS.values()] == [True, False, False]
    assert is_single(())
    with pytest.raises(NotApplicable, match=r"one input tensor; this one takes .*tokens \(int64\)"):
        single_tensor(KINDS["by name"])
