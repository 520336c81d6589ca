"""Models, data and losses out of a user's own code, `pkg.module:function`. Nothing else imports foreign code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedprism.errors import BadInput, told
from fedprism.types import Batch


def from_factory(text: str, *, beside: Path | None = None, asked_as: str = "--model") -> nn.Module:
    """The model that `pkg.module:factory` returns; the module is looked for in the current folder and in `beside`."""
    model = _returned(text, beside, asked_as, "the model")
    if not isinstance(model, nn.Module):
        raise BadInput(f"{asked_as} {text} must return a torch.nn.Module, not {type(model).__name__}.")
    return model


def data_from(text: str, *, beside: Path | None = None) -> Batch:
    """The samples that `pkg.module:factory` returns: a Batch, or a pair of inputs and labels."""
    returned = _returned(text, beside, "data.factory", "the data")
    data = returned if isinstance(returned, Batch) else None
    if isinstance(returned, tuple | list) and len(returned) == 2 and data is None:
        data = Batch(*returned)
    if data is None or not isinstance(data.labels, Tensor) or not _are_inputs(data):
        raise BadInput(
            f"data.factory {text} must return inputs (a tensor, a tuple or a dict of tensors) and a "
            f"tensor of as many labels, not {type(returned).__name__}. Return fedprism.Batch(inputs, "
            "labels)."
        )
    return data


def function_from(text: str, *, beside: Path | None = None, asked_as: str = "loss") -> Callable[..., Any]:
    """The function that `pkg.module:function` names."""
    function = _imported(text, beside, asked_as, "a function")
    if not callable(function):
        raise BadInput(f"{asked_as} {text} must be a function, not {type(function).__name__}.")
    return function  # type: ignore[no-any-return]


def _are_inputs(data: Batch) -> bool:
    several: object = data.inputs
    several = list(several.values()) if isinstance(several, dict) else several
    tensors = several if isinstance(several, list | tuple) else [several]
    return bool(tensors) and all(isinstance(t, Tensor) and t.dim() and len(t) == len(data.labels) for t in tensors)


def _returned(text: str, beside: Path | None, asked_as: str, what: str) -> Any:
    """What the named function returns when it is called without arguments."""
    return _imported(text, beside, asked_as, f"a function that returns {what} without arguments", call=True)


def _imported(text: str, beside: Path | None, asked_as: str, what: str, *, call: bool = False) -> Any:
    module, _, name = text.partition(":")
    # The console script, unlike `python -m`, does not look in the current folder.
    folders = [os.getcwd(), *([str(beside)] if beside is not None else [])]
    sys.path[:0] = folders
    try:
        named = getattr(importlib.import_module(module), name)
        return named() if call else named
    except (Exception, SystemExit) as error:
        raise BadInput(
            f"{asked_as} '{text}' cannot be used ({told(error)}). It takes "
            f"pkg.module:{'factory' if call else 'function'}, {what}."
        ) from error
    finally:
        for folder in folders:
            sys.path.remove(folder)
