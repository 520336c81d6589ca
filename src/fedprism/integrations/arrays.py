"""Arrays of any framework as tensors of one's own, under the names of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedprism.errors import BadInput

MOST_REASON = 200
"""Characters of another library's error message that are passed on."""


def tensor_of(array: Any, stated: str = "") -> Tensor:
    """A copy on the CPU of a tensor or of anything that NumPy takes for an array.

    stated: the type by the framework's word; NumPy by itself does not know bfloat16 and returns its plain bytes.
    """
    if isinstance(array, Tensor):
        return array.detach().to("cpu", copy=True)
    try:
        values = np.array(array, order="C")
        if "bfloat16" in (stated, values.dtype.name) and values.dtype.itemsize == 2:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)
    except (TypeError, ValueError) as error:
        raise not_numbers(error) from error


def not_numbers(error: Exception) -> BadInput:
    reason = " ".join(str(error).split())[:MOST_REASON]
    return BadInput(f"an array does not hold numbers ({reason}). Leave it out.")


def tensors_of(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of all arrays that hold anything."""
    tensors = {str(name): tensor_of(array) for name, array in arrays.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def by_place(arrays: Any) -> dict[str, Any]:
    """A list of arrays, which have only places, as a mapping."""
    return {str(place): array for place, array in enumerate(arrays)}


def named(arrays: Mapping[str, Tensor], model: nn.Module | None) -> dict[str, Tensor]:
    """Non-empty tensors under their state_dict names; lists of arrays, which have only places, get a model's names."""
    tensors = dict(arrays)
    if model is not None and list(tensors) == [str(place) for place in range(len(tensors))]:
        state = model.state_dict()
        parameters = {name: tensor for name, tensor in state.items() if name in dict(model.named_parameters())}
        shapes = [tensor.shape for tensor in tensors.values()]
        fitting = next((like for like in (state, parameters) if [t.shape for t in like.values()] == shapes), None)
        if fitting is None:
            raise BadInput(
                f"{len(tensors)} arrays do not match the {len(state)} tensors of the model's state_dict. Give "
                "the recorder the model that is trained."
            )
        tensors = dict(zip(fitting, tensors.values(), strict=True))
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}
