"""Forms with a second derivative, put in place of functions that torch can differentiate only once.

Matching a gradient differentiates the gradient itself. Nothing is replaced unless that failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_NO_DERIVATIVE = re.compile(r"derivative for (?:aten::)?(\w+?)(?:_backward)? is not implemented")
HARD_EDGE = 3.0
"""Where torch's hard sigmoid reaches 0 and 1."""


def once_only(error: BaseException) -> str | None:
    """The operation that has no second derivative, where that is what an error says."""
    named = _NO_DERIVATIVE.search(str(error)) if isinstance(error, RuntimeError) else None
    return named[1].strip("_") if named else None


@contextmanager
def second_forms() -> Iterator[None]:
    """Inside the block, attention, recurrent layers and hard sigmoids are computed in forms that have one."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False), _SecondForms():
        yield


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return F.relu6(input + HARD_EDGE) / (2 * HARD_EDGE)


def _hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    return input * _hardsigmoid(input)


_FORMS: dict[Callable[..., Any], Callable[..., Tensor]] = {F.hardsigmoid: _hardsigmoid, F.hardswish: _hardswish}


class _SecondForms(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        form: Callable[..., Any] = _FORMS.get(func, func)
        return form(*args, **(kwargs or {}))
