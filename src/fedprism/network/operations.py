"""Watch one forward pass at the level of torch's functions: every operation that uses a parameter, whoever calls it.

Modules are not asked what they are: a layer may be `nn.Linear`, a function called with a parameter of a module of one's
own, or a projection inside `nn.MultiheadAttention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode, resolve_name

from fedprism.network.forward_pass import evaluating
from fedprism.types import Inputs, Update, arguments


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One operation with parameters. `weight` and `bias` are their names, `inputs` and `outputs` copies.

    `number` counts the operations with parameters from the input on. `transposed`: the weight is (inputs, outputs).
    `derived`: what is used was computed from the parameter, such as a resized or a merged one. `settings` are the
    operation's own, such as a stride; `further` names other parameters that it uses.
    """

    kind: Kind
    weight: str
    bias: str | None = None
    inputs: Tensor
    outputs: Tensor
    number: int = 0
    transposed: bool = False
    derived: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    further: tuple[str, ...] = ()
    places: int = 1
    """How often the weight is applied to one sample: positions of a convolution, tokens of a sequence."""

    def rows(self, update: Update) -> Tensor:
        """The weight's entry of an update as a matrix with one row per output."""
        matrix = update[self.weight]
        return matrix.T if self.transposed else matrix.flatten(1)


def operations_of(model: nn.Module, tensors: Update, inputs: Inputs) -> tuple[list[Operation], Any]:
    """The operations with parameters in the order of execution, in evaluation mode, and what the network returns."""
    parameters = {name: tensors[name].detach().clone() for name, _ in model.named_parameters() if name in tensors}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    operations: list[Operation] = []
    samples = len(next(tensors_in(inputs)))
    with torch.no_grad(), evaluating(model), _Watch(parameters, samples, operations):
        args, kwargs = arguments(inputs)
        outputs = functional_call(model, {**buffers, **tensors, **parameters}, args, kwargs)
    return operations, outputs


def at_operation(
    number: int, parameters: Update, intervene: Callable[[Tensor, Callable[[], Any]], Any]
) -> TorchFunctionMode:
    """A context in which `intervene(inputs, usual)` decides what the operation of this number returns."""
    return _Intervention(number, parameters, intervene)


class _ParameterMode(TorchFunctionMode):
    """Sees every torch function that is given a parameter beside something that is computed from the input."""

    def __init__(self, parameters: Update) -> None:
        super().__init__()
        self.names = {_memory(tensor): name for name, tensor in parameters.items() if tensor.numel()}
        self.parameters = parameters
        self.derived: list[Tensor] = []
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}

        def usual() -> Any:
            return func(*args, **kwargs)

        given = list(tensors_in((args, kwargs)))
        parameters = [tensor for tensor in given if _memory(tensor) in self.names]
        if not parameters:
            return usual()
        if len(parameters) == len(given):
            outputs = usual()
            for tensor in tensors_in(outputs):
                if _memory(tensor) not in self.names:  # computed from parameters alone: a merged or resized one
                    self.names[_memory(tensor)] = self.names[_memory(parameters[0])]
                    self.derived.append(tensor)  # kept, so that its memory is not given to another tensor
            return outputs
        call = _Call(func, args, kwargs)
        if call.name in _USES_NO_VALUES:
            return usual()
        self.count += 1
        return self.operation(call, parameters, usual)

    def operation(self, call: _Call, parameters: list[Tensor], usual: Callable[[], Any]) -> Any:
        raise NotImplementedError


class _Watch(_ParameterMode):
    def __init__(self, parameters: Update, samples: int, operations: list[Operation]) -> None:
        super().__init__(parameters)
        self.samples, self.operations = samples, operations

    def operation(self, call: _Call, parameters: list[Tensor], usual: Callable[[], Any]) -> Any:
        inputs = call.data(self.names).detach().clone()  # copies, because an activation may work in place
        outputs = usual()
        returned = next(tensors_in(outputs), None)
        if returned is None:
            return outputs
        kind, weight, bias = call.roles(parameters)
        used = [self.names[_memory(tensor)] for tensor in parameters]
        name = self.names[_memory(weight)]
        whole = self.parameters[name]
        turned = kind is Kind.DENSE and call.turned(weight, whole)
        as_it_is = weight.shape == whole.shape or (turned is not None and weight.shape == whole.T.shape)
        width = returned.shape[1 if kind is Kind.CONVOLUTION else -1] if returned.dim() > 1 else 1
        self.operations.append(
            Operation(
                kind=kind,
                weight=name,
                bias=None if bias is None else self.names[_memory(bias)],
                inputs=inputs,
                outputs=returned.detach().clone(),
                number=self.count,
                transposed=bool(turned),
                derived=not as_it_is or any(weight is tensor for tensor in self.derived),
                settings=call.settings(kind),
                further=tuple(dict.fromkeys(other for other in used if other != name)),
                places=max(1, returned.numel() // (width * self.samples)),
            )
        )
        return outputs


class _Intervention(_ParameterMode):
    def __init__(self, number: int, parameters: Update, intervene: Callable[[Tensor, Callable[[], Any]], Any]) -> None:
        super().__init__(parameters)
        self.number, self.intervene = number, intervene

    def operation(self, call: _Call, parameters: list[Tensor], usual: Callable[[], Any]) -> Any:
        return self.intervene(call.data(self.names), usual) if self.count == self.number else usual()


_USES_NO_VALUES = frozenset({"type_as", "to", "expand_as", "view_as", "reshape_as"})
"""Functions that look at the shape or the type of their second argument only."""
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
_DENSE_PLACES = {"linear": (0, 1, 2), "addmm": (1, 2, 0)}
"""Where the data, the weight and the bias of a product are; elsewhere the data come first, the weight second."""


class _Call:
    """A call of a torch function, and what its arguments mean."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
        self.args, self.kwargs = args, kwargs

    def argument(self, place: int, name: str) -> Any:
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)

    def data(self, parameters: Mapping[int, str]) -> Tensor:
        """What the operation is fed: its first argument that is no parameter."""
        return next(tensor for tensor in tensors_in((self.args, self.kwargs)) if _memory(tensor) not in parameters)

    def roles(self, parameters: list[Tensor]) -> tuple[Kind, Tensor, Tensor | None]:
        """The kind of the operation, its weight and its bias."""
        kind = _KINDS.get(self.name, Kind.OTHER)

        def used(tensor: Any) -> bool:
            return any(tensor is parameter for parameter in parameters)

        weight, bias = parameters[0], None
        if kind is Kind.DENSE:
            _, of_weight, of_bias = _DENSE_PLACES.get(self.name, (0, 1, 9))
            weight, bias = self.argument(of_weight, "weight"), self.argument(of_bias, "bias")
        elif kind is Kind.CONVOLUTION:
            weight, bias = self.argument(1, "weight"), self.argument(2, "bias")
        elif kind is Kind.EMBEDDING:
            weight = self.argument(1, "weight")
        elif kind is Kind.RECURRENT:
            input_weight = next(p for p in parameters if p.dim() == 2)
            weight, bias = input_weight, next((p for p in parameters if p.dim() == 1), None)
        elif kind is Kind.ATTENTION:
            matrices = [p for p in parameters if p.dim() == 2 and p is not self.kwargs.get("out_proj_weight")]
            weight = next((p for p in matrices if p is self.argument(5, "in_proj_weight")), matrices[0])
            bias = self.argument(6, "in_proj_bias")
        if not used(weight):  # the data come second, as in `parameter @ data`
            return Kind.OTHER, parameters[0], None
        return kind, weight, bias if isinstance(bias, Tensor) and used(bias) else None

    def turned(self, weight: Tensor, whole: Tensor) -> bool | None:
        """Whether the rows of a product's matrix are the columns of its parameter; None if it is neither."""
        matrix = weight if self.name == "linear" else weight.T
        if matrix.shape == whole.shape and matrix.stride() == whole.stride():
            return False
        return True if matrix.shape == whole.T.shape and matrix.stride() == whole.T.stride() else None

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


def _memory(tensor: Tensor) -> int:
    """What a tensor shares with its views and with nothing else; 0 for one that stands for many, as inside vmap."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
