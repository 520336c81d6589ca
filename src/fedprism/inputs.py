"""What a model is fed: one tensor, several by position or several by name, each of shape (batch, ...) and of any type.

Everything that has to look inside goes through these functions, so that the rest reads as if there were one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism.errors import NotApplicable

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a model is fed: one tensor, several by position, or several by name; each of shape (batch, ...)."""

InputShape: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...] | dict[str, tuple[int, ...]]
"""The shape of one sample: one tensor's, or one shape for each tensor. `()` is one tensor with a number a sample."""

InputTypes: TypeAlias = torch.dtype | tuple[torch.dtype, ...] | dict[str, torch.dtype]
"""The types of the tensors, in the structure of the inputs."""


def arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """How a model is called on inputs: positional and keyword arguments."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def outputs_of(model: nn.Module, tensors: Mapping[str, Tensor], inputs: Inputs) -> Any:
    """What the model returns for the inputs with these parameters and buffers in place of its own."""
    args, kwargs = arguments(inputs)
    return functional_call(model, dict(tensors), args, kwargs)


def values_in(inputs: Inputs) -> int:
    """How many numbers all the tensors hold."""
    return sum(tensor.numel() for tensor in tensors_of(inputs))


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors in their order: that of the names where they have names, which dicts do not keep on disk."""
    if isinstance(inputs, dict):
        return tuple(inputs[name] for name in sorted(inputs))
    return inputs if isinstance(inputs, tuple) else (inputs,)


def first_tensor(inputs: Inputs) -> Tensor:
    """The first tensor: it says how many samples there are, and on which device."""
    return tensors_of(inputs)[0]


def single_tensor(inputs: Inputs) -> Tensor:
    """The one tensor that a model is fed; where it is fed several, the sentence that says so."""
    if isinstance(inputs, Tensor):
        return inputs
    raise NotApplicable(
        f"this method needs a model with one input tensor; this one takes {described(inputs)}. Use a "
        "method that reads such inputs."
    )


def single_shape(shape: InputShape) -> tuple[int, ...]:
    """The shape of one sample of a model that is fed one tensor."""
    if is_single(shape):
        return tuple(int(size) for size in shape)  # type: ignore[arg-type]
    raise NotApplicable(
        f"this method needs a model with one input tensor; this one takes {len(shape)}. Use a method "
        "that reads such inputs."
    )


def described(inputs: Inputs) -> str:
    """The inputs in a few words, for messages."""
    parts = (f"{name} ({str(each.dtype).removeprefix('torch.')})" for name, each in by_name(inputs).items())
    return " and ".join(parts)


def by_name(inputs: Inputs, name: str = "inputs") -> dict[str, Tensor]:
    """The tensors by name: `name` for one tensor, `name.0`, `name.1` by position, `name.KEY` by name."""
    if isinstance(inputs, Tensor):
        return {name: inputs}
    keyed = inputs if isinstance(inputs, dict) else {str(place): each for place, each in enumerate(inputs)}
    return {f"{name}.{key}": tensor for key, tensor in keyed.items()}


def from_names(tensors: Mapping[str, Tensor], name: str = "inputs") -> Inputs | None:
    """The inputs that `by_name` wrote, among other tensors; None where they are not there.

    Names out of whole numbers from zero on are positions: a model takes no keyword argument that begins with a digit.
    """
    if name in tensors:
        return tensors[name]
    keyed = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
    places = [str(place) for place in range(len(keyed))]
    if set(keyed) == set(places):
        return tuple(keyed[place] for place in places) or None
    return keyed


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The same structure with the function applied to every tensor."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, dict):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return tuple(function(tensor) for tensor in inputs)


def gathered(function: Callable[[list[Tensor]], Tensor], batches: Sequence[Inputs]) -> Inputs:
    """Several inputs of one structure as one: `function` is given the tensors that stand in the same place."""
    columns = [function(list(each)) for each in zip(*map(tensors_of, batches), strict=True)]
    return in_structure_of(batches[0], columns)


def joined(batches: Iterable[Inputs]) -> Inputs:
    """The samples of several batches as one batch."""
    return gathered(torch.cat, list(batches))


def unflattened(values: Tensor, like: Inputs) -> Inputs:
    """Values (samples, all entries of a sample) in the structure, shapes and types of other inputs."""
    tensors, start = [], 0
    for tensor in tensors_of(like):
        size = tensor[0].numel()
        part = values[:, start : start + size].reshape(len(values), *tensor.shape[1:])
        tensors.append(part.to(tensor.device, tensor.dtype))
        start += size
    return in_structure_of(like, tensors)


def stacked(batches: Iterable[Inputs]) -> Inputs:
    """Several batches of one size side by side: (batches, batch, ...)."""
    return gathered(torch.stack, list(batches))


def shape_of(inputs: Inputs) -> InputShape:
    """The shape of one sample."""
    if isinstance(inputs, dict):
        return {name: tuple(tensor.shape[1:]) for name, tensor in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(tuple(tensor.shape[1:]) for tensor in inputs)
    return tuple(inputs.shape[1:])


def types_of(inputs: Inputs) -> InputTypes:
    """The types of the tensors."""
    if isinstance(inputs, dict):
        return {name: tensor.dtype for name, tensor in inputs.items()}
    return tuple(tensor.dtype for tensor in inputs) if isinstance(inputs, tuple) else inputs.dtype


def blank_inputs(shape: InputShape, types: InputTypes | None, batch: int, like: Tensor | None = None) -> Inputs:
    """Zeros of that shape for `batch` samples; floating point where nothing says otherwise, as precise as `like`.

    Zero is a token or a category of every model.
    """
    floating = torch.get_default_dtype() if like is None else like.dtype

    def blank(each: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        dtype = floating if dtype is None or dtype.is_floating_point else dtype
        return torch.zeros(batch, *each, dtype=dtype, device=None if like is None else like.device)

    if isinstance(shape, dict):
        known = types if isinstance(types, dict) else {}
        return {name: blank(each, known.get(name)) for name, each in shape.items()}
    if is_single(shape):
        return blank(shape, types if isinstance(types, torch.dtype) else None)  # type: ignore[arg-type]
    each_type = types if isinstance(types, tuple) else (None,) * len(shape)
    return tuple(blank(each, dtype) for each, dtype in zip(shape, each_type, strict=True))  # type: ignore[arg-type]


def is_single(shape: InputShape) -> bool:
    """Whether the shape is that of one tensor."""
    return isinstance(shape, tuple) and not any(isinstance(size, tuple | list) for size in shape)


def are_floating(types: InputTypes | None) -> bool:
    """Whether all tensors are of floating-point numbers, which is taken to be so where nothing is known."""
    if types is None or isinstance(types, torch.dtype):
        return types is None or types.is_floating_point
    return all(dtype.is_floating_point for dtype in _values(types))


def _values(types: tuple[torch.dtype, ...] | dict[str, torch.dtype]) -> Iterator[torch.dtype]:
    return iter(types.values() if isinstance(types, dict) else types)


def in_structure_of(inputs: Inputs, tensors: Sequence[Tensor]) -> Inputs:
    """Tensors in the order of `tensors_of` as inputs of the same structure."""
    if isinstance(inputs, dict):
        return dict(zip(sorted(inputs), tensors, strict=True))
    return tuple(tensors) if isinstance(inputs, tuple) else tensors[0]
