"""What a call of a torch function does with a parameter: the kind of operation, its weight and its bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from torch import Tensor
from torch.overrides import resolve_name

from fedprism.types import Inputs


class Kind(StrEnum):
    """What an operation does with its parameter, as `fedprism check` prints it."""

    DENSE = "dense"
    CONVOLUTION = "convolution"
    EMBEDDING = "embedding"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    NORM = "normalisation"
    ADDED = "added"
    JOINED = "joined"
    OTHER = "other"


_KINDS = {
    "linear": Kind.DENSE,
    "addmm": Kind.DENSE,
    "matmul": Kind.DENSE,
    "__matmul__": Kind.DENSE,
    "mm": Kind.DENSE,
    "conv1d": Kind.CONVOLUTION,
    "conv2d": Kind.CONVOLUTION,
    "conv3d": Kind.CONVOLUTION,
    "embedding": Kind.EMBEDDING,
    "embedding_bag": Kind.EMBEDDING,
    "multi_head_attention_forward": Kind.ATTENTION,
    "layer_norm": Kind.NORM,
    "batch_norm": Kind.NORM,
    "group_norm": Kind.NORM,
    "instance_norm": Kind.NORM,
    "rms_norm": Kind.NORM,
    "add": Kind.ADDED,
    "add_": Kind.ADDED,
    "__add__": Kind.ADDED,
    "__radd__": Kind.ADDED,
    "__iadd__": Kind.ADDED,
    "cat": Kind.JOINED,
    "concat": Kind.JOINED,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), Kind.RECURRENT),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), Kind.RECURRENT),
}
"""Functions of torch by the last part of their name."""

_ARGUMENTS = {
    Kind.CONVOLUTION: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    Kind.EMBEDDING: ("input", "weight", "padding_idx"),
}
"""Names of positional arguments whose values are kept as settings."""
_DENSE_PLACES = {"linear": (1, 2), "addmm": (2, 0)}
"""Positions of the weight and the bias of a product; elsewhere the weight comes second and there is no bias."""
_NO_POSITION = 9
"""A position that no argument has."""
_NORM_PLACES = {"layer_norm": (2, 3), "batch_norm": (3, 4), "group_norm": (2, 3), "instance_norm": (3, 4)}
"""Positions of the scale and the shift of a normalisation; others have their scale at position 2."""


class TorchCall:
    """A call of a torch function, and what its arguments mean."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
        self.args, self.kwargs = args, kwargs

    def argument(self, place: int, name: str) -> Any:
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def replaced(self, old: Tensor, new: Tensor) -> TorchCall:
        """The same call with another tensor in the place of one."""
        args = tuple(new if argument is old else argument for argument in self.args)
        kwargs = {name: new if argument is old else argument for name, argument in self.kwargs.items()}
        return TorchCall(self.func, args, kwargs)

    def data(self) -> Tensor:
        """What the operation is fed: its first argument that is computed from the input."""
        return next(tensor for tensor in tensors_in((self.args, self.kwargs)) if is_marked(tensor))

    def roles(self, parameters: list[Tensor]) -> tuple[Kind, Tensor, Tensor | None]:
        """The kind of the operation, its weight and its bias."""
        scaled = self.kwargs.get("alpha", 1) != 1 or self.kwargs.get("beta", 1) != 1
        kind = Kind.OTHER if scaled else _KINDS.get(self.name, Kind.OTHER)

        def used(tensor: Any) -> bool:
            return any(tensor is parameter for parameter in parameters)

        weight, bias = parameters[0], None
        if kind is Kind.DENSE:
            of_weight, of_bias = _DENSE_PLACES.get(self.name, (1, _NO_POSITION))
            weight, bias = self.argument(of_weight, "weight"), self.argument(of_bias, "bias")
        elif kind is Kind.NORM:
            of_weight, of_bias = _NORM_PLACES.get(self.name, (2, _NO_POSITION))
            weight, bias = self.argument(of_weight, "weight"), self.argument(of_bias, "bias")
            weight = bias if weight is None else weight
        elif kind is Kind.CONVOLUTION:
            weight, bias = self.argument(1, "weight"), self.argument(2, "bias")
        elif kind is Kind.EMBEDDING:
            weight = self.argument(1, "weight")
        elif kind is Kind.RECURRENT:
            input_weight = next(p for p in parameters if p.dim() == 2)
            weight, bias = input_weight, next((p for p in parameters if p.dim() == 1), None)
        elif kind is Kind.ATTENTION:
            matrices = [p for p in parameters if p.dim() == 2 and p is not self.argument(11, "out_proj_weight")]
            # One matrix for queries, keys and values, or one for each.
            wanted = self.argument(5, "in_proj_weight"), self.kwargs.get("q_proj_weight")
            weight = next((p for p in matrices if any(p is each for each in wanted)), matrices[0])
            bias = self.argument(6, "in_proj_bias")
        if not used(weight):  # the data come second, as in `parameter @ data`
            return Kind.OTHER, parameters[0], None
        return kind, weight, bias if isinstance(bias, Tensor) and used(bias) else None

    def turned(self, weight: Tensor, whole: Tensor) -> bool | None:
        """Whether the rows of a product's matrix are the columns of its parameter; None if it is neither."""
        matrix = weight if self.name == "linear" or weight.dim() != 2 else weight.T
        if matrix.shape == whole.shape and matrix.stride() == whole.stride():
            return False
        turned = whole.T if whole.dim() == 2 else whole
        return True if matrix.shape == turned.shape and matrix.stride() == turned.stride() else None

    def settings(self, kind: Kind) -> dict[str, Any]:
        names = _ARGUMENTS.get(kind, ())
        values = {name: self.argument(place, name) for place, name in enumerate(names)}
        return {name: value for name, value in values.items() if value is not None and not isinstance(value, Tensor)}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))


def marked(inputs: Inputs) -> Any:
    """The same inputs, marked as such: views, so that the caller's tensors are left as they are."""
    if isinstance(inputs, Tensor):
        return mark(inputs.view_as(inputs))
    if isinstance(inputs, dict):
        return {name: marked(tensor) for name, tensor in inputs.items()}
    return tuple(marked(tensor) for tensor in inputs)


def mark(tensor: Tensor) -> Tensor:
    tensor._from_input = True  # type: ignore[attr-defined]
    return tensor


def is_marked(tensor: Tensor) -> bool:
    return getattr(tensor, "_from_input", False)


def memory_of(tensor: Tensor) -> int:
    """What a tensor shares with its views and with nothing else; 0 for one that stands for many, as inside vmap."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
