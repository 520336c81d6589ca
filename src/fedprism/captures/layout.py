"""How the tensors of a capture fit a model: names, shapes, and parts of the model that never travelled."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from fedprism.checks import shown
from fedprism.errors import BadCapture
from fedprism.files.tensors import TensorFile
from fedprism.types import Update


class Layout(NamedTuple):
    """Which tensors the model has. None: no model is given, and nothing is known."""

    params: Update
    buffers: Update
    others: Update
    """Second names of parameters (tied weights), which a state dict holds as well."""
    state: tuple[str, ...]
    """The names of the state dict in its order, by which software that sends lists of arrays goes."""
    weights_known: bool
    """Whether its weights are those of the run, so that they stand in for parts that were never sent."""

    @classmethod
    def of(cls, model: nn.Module | None, *, weights_known: bool) -> Layout | None:
        if model is None:
            return None
        params, buffers = dict(model.named_parameters()), dict(model.named_buffers(remove_duplicate=False))
        every = dict(model.named_parameters(remove_duplicate=False))
        others = {name: tensor for name, tensor in every.items() if name not in params}
        return cls(params, buffers, others, tuple(model.state_dict()), weights_known)

    def all(self) -> Update:
        return {**self.params, **self.buffers, **self.others}

    def name_places(self, file: TensorFile) -> TensorFile:
        """Give tensors that were recorded from a list, and are called 0, 1, ..., the model's names."""
        tensors = self.all()
        if all(name in tensors for name in file) or not all(name.isdecimal() for name in file):
            return file
        for order in (self.state, tuple(self.params)):
            names = {place: order[int(place)] for place in file if int(place) < len(order)}
            if len(names) == len(file) and all(file.shape(p) == tuple(tensors[n].shape) for p, n in names.items()):
                file.rename(names)
                return file
        return file


def with_unsent(sent: Update, params: Update) -> Update:
    """All parameters of a model of which only a part travels, such as adapters: the others stay as the model has them.

    An update has none of those others: they are frozen.
    """
    unsent = {name: tensor.detach().clone() for name, tensor in params.items() if name not in sent}
    return ChainMap(sent, unsent) if unsent else sent  # type: ignore[arg-type]  # which is only read


def check_names(file: TensorFile, wanted: Iterable[str], allowed: Iterable[str], what: str) -> None:
    known = set(allowed)
    missing = next((f"no {shown(name)}" for name in wanted if name not in file), None)
    extra = next((shown(name) for name in file if name not in known), None)
    if missing or extra:
        raise BadCapture(
            f"{file.name} must hold {what} and nothing else, but has {missing or extra}. Give the model "
            "that was trained, or record the round again."
        )


def check_tensor(file: TensorFile, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The shape must be this one. Real numbers must be floating-point; a counter may have been averaged to be so."""
    if file.shape(name) != shape:
        raise BadCapture(
            f"{shown(name)} in {file.name} has shape {shown(file.shape(name))}, not {shown(shape)}. Give "
            "the model that was trained, or record the round again."
        )
    stated = file.dtype(name)
    if (dtype.is_floating_point and not stated.is_floating_point) or (dtype == torch.bool) != (stated == torch.bool):
        raise BadCapture(f"{shown(name)} in {file.name} is {stated}, not {dtype}. Convert it.")
