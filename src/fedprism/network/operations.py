"""Watch one forward pass at the level of torch's functions: every operation that uses a parameter, whoever calls it.

The types of modules do not matter: a layer may be `nn.Linear`, a function that a user's module calls with a parameter,
or a projection inside `nn.MultiheadAttention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fedprism.errors import NotApplicable
from fedprism.network.forward_pass import evaluating, same
from fedprism.network.torch_calls import Kind, TorchCall, is_marked, mark, marked, memory_of, tensors_in
from fedprism.types import Inputs, Update, arguments


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One operation with parameters. `weight` and `bias` are their names, `inputs` and `outputs` copies."""

    kind: Kind
    weight: str
    shape: tuple[int, ...] = ()
    """That of the weight as the operation uses it."""
    bias: str | None = None
    inputs: Tensor
    outputs: Tensor
    number: int = 0
    """Counts the operations with parameters from the input on."""
    end: int = 0
    """The number of the call that returns the outputs: a later one if the bias is added by a call of its own."""
    transposed: bool = False
    """Whether the weight is (inputs, outputs)."""
    derived: bool = False
    """Whether what is used was computed from the parameter, such as a part, a resized or a merged one."""
    entries: Tensor | None = None
    """Of a parameter that is used in part: which of its entries, numbered as if flattened, in the shape of the part."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The operation's own, such as a stride."""
    further: tuple[str, ...] = ()
    """Names of other parameters that it uses."""
    places: int = 1
    """How often the weight is applied to one sample: positions of a convolution, tokens of a sequence."""

    def rows(self, update: Update) -> Tensor:
        """The weight's entry of an update as a matrix (outputs, inputs): every row combines what the weight was fed."""
        matrix = update[self.weight]
        return matrix.T if self.transposed else matrix.flatten(1)

    def part(self, update: Update) -> Tensor:
        """What an update says of those entries of the weight that the operation uses, in the shape of their use."""
        whole = update[self.weight]
        return whole if self.entries is None else whole.flatten()[self.entries.to(whole.device)]


def operations_of(
    model: nn.Module, tensors: Update, inputs: Inputs, until: Callable[[str], bool] | None = None
) -> tuple[tuple[Operation, ...], Any]:
    """The operations with parameters in the order of execution, in evaluation mode, and what the network returns.

    A product and the vector that is added to it right after are one operation with a bias. `until` is told the name of
    every function of torch before it is called; where it says yes, the pass ends, and the network returns None.
    """
    parameters = {name: tensors[name].detach().clone() for name, _ in model.named_parameters() if name in tensors}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    operations, outputs = list[Operation](), None
    samples = len(next(tensors_in(inputs)))
    try:
        with torch.no_grad(), evaluating(model), suppress(_Ended), _Watch(parameters, samples, operations, until):
            args, kwargs = arguments(marked(inputs))
            outputs = functional_call(model, {**buffers, **tensors, **parameters}, args, kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        shapes = " and ".join(str(tuple(tensor.shape[1:])) for tensor in tensors_in(inputs))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise NotApplicable(f"the model does not accept inputs of shape {shapes}: {reason}.") from error
    return tuple(_with_added_biases(operations)), outputs


def run_with(
    model: nn.Module,
    tensors: Update,
    inputs: Inputs,
    number: int,
    intervene: Callable[[Tensor, Callable[[], Any]], Any],
) -> Any:
    """What the network returns if `intervene(inputs, usual)` decides what the operation of this number returns."""
    parameters = {name: tensors[name] for name, _ in model.named_parameters() if name in tensors}
    with _Intervention(number, parameters, intervene):
        args, kwargs = arguments(marked(inputs))
        return functional_call(model, dict(tensors), args, kwargs)


def fed_to(model: nn.Module, tensors: Update, inputs: Inputs, numbers: Sequence[int]) -> dict[int, Tensor]:
    """What the operations of these numbers are fed, in evaluation mode; the pass ends at the last of them."""
    parameters = {name: tensors[name] for name, _ in model.named_parameters() if name in tensors}
    fed = dict[int, Tensor]()

    def keep(number: int, data: Tensor) -> None:
        if number in numbers:
            fed[number] = data.detach().clone()  # a copy, because an activation may work in place
        if number >= max(numbers):
            raise _Ended

    with torch.no_grad(), evaluating(model), suppress(_Ended), _Feeds(parameters, keep):
        args, kwargs = arguments(marked(inputs))
        functional_call(model, dict(tensors), args, kwargs)
    return fed


def _with_added_biases(operations: list[Operation]) -> Iterator[Operation]:
    """The operations, where a product and the vector that is added to it right after are one with a bias."""
    following = iter(operations)
    operation = next(following, None)
    while operation is not None:
        after = next(following, None)
        if after is not None and _adds_bias(operation, after):
            yield replace(operation, bias=after.weight, outputs=after.outputs, end=after.number)
            after = next(following, None)
        else:
            yield operation
        operation = after


def _adds_bias(product: Operation, addition: Operation) -> bool:
    if product.kind is not Kind.DENSE or product.bias is not None or addition.kind is not Kind.ADDED:
        return False
    return not addition.derived and len(addition.shape) == 1 and same(addition.inputs, product.outputs)


class _Ended(Exception):
    """The pass went as far as it was asked to."""


class _ParameterMode(TorchFunctionMode):
    """Sees every torch function that is given a parameter beside something that is computed from the input.

    Parameters, their views and what is computed from them alone are known by their memory; what is computed from the
    input carries a mark.
    """

    def __init__(self, parameters: Update, until: Callable[[str], bool] | None = None) -> None:
        super().__init__()
        self.until = until
        self.names = {memory_of(tensor): name for name, tensor in parameters.items() if tensor.numel()}
        self.parameters = parameters
        self.derived: list[Tensor] = []
        self.made_of: dict[int, tuple[str, ...]] = {}
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = TorchCall(func, args, kwargs or {})
        if self.until is not None and self.until(call.name):
            raise _Ended
        given = list(tensors_in((args, kwargs or {})))
        parameters = [tensor for tensor in given if memory_of(tensor) in self.names]
        from_input = call.name not in _USES_NO_VALUES and any(map(is_marked, given))
        if parameters and from_input:
            self.count += 1
            outputs = self.operation(call, parameters)
        else:
            outputs = call.run()
        for tensor in tensors_in(outputs):
            if from_input:
                mark(tensor)
            elif parameters and memory_of(tensor) not in self.names:
                self.names[memory_of(tensor)] = self.names[memory_of(parameters[0])]
                self.made_of[memory_of(tensor)] = self.used(parameters)
                self.derived.append(tensor)  # kept, so that its memory is not given to another tensor
                self.derive(call, parameters, tensor)
        return outputs

    def used(self, parameters: list[Tensor]) -> tuple[str, ...]:
        """Names of all parameters that these tensors are, or were computed from."""
        memories = map(memory_of, parameters)
        names = [name for each in memories for name in self.made_of.get(each, (self.names[each],))]
        return tuple(dict.fromkeys(names))

    def operation(self, call: TorchCall, parameters: list[Tensor]) -> Any:
        raise NotImplementedError

    def derive(self, call: TorchCall, parameters: list[Tensor], outputs: Tensor) -> None:
        pass


class _Watch(_ParameterMode):
    def __init__(
        self, parameters: Update, samples: int, operations: list[Operation], until: Callable[[str], bool] | None
    ) -> None:
        super().__init__(parameters, until)
        self.samples, self.operations = samples, operations
        self.entries: dict[int, Tensor] = {}

    def operation(self, call: TorchCall, parameters: list[Tensor]) -> Any:
        inputs = call.data().detach().clone()  # copies, because an activation may work in place
        outputs = call.run()
        returned = next(tensors_in(outputs), None)
        if returned is None:
            return outputs
        kind, weight, bias = call.roles(parameters)
        name = self.names[memory_of(weight)]
        whole = self.parameters[name]
        turned = call.turned(weight, whole) if kind is Kind.DENSE else None
        as_it_is = weight.shape == whole.shape if kind is not Kind.DENSE else turned is not None
        computed = any(memory_of(weight) == memory_of(tensor) for tensor in self.derived)
        width = returned.shape[1 if kind is Kind.CONVOLUTION else -1] if returned.dim() > 1 else 1
        self.operations.append(
            Operation(
                kind=kind,
                weight=name,
                shape=tuple(weight.shape),
                bias=None if bias is None else self.names[memory_of(bias)],
                inputs=inputs,
                outputs=returned.detach().clone(),
                number=self.count,
                end=self.count,
                transposed=bool(turned),
                derived=computed or not as_it_is,
                entries=self._entries(weight) if computed or not as_it_is else None,
                settings=call.settings(kind),
                further=tuple(other for other in self.used(parameters) if other != name),
                places=max(1, returned.numel() // (width * self.samples)),
            )
        )
        return outputs

    def derive(self, call: TorchCall, parameters: list[Tensor], outputs: Tensor) -> None:
        """Note which entries of the parameter were picked, by letting the same function pick from their numbers."""
        name, source = self.names[memory_of(parameters[0])], parameters[0]
        numbers = self._entries(source)
        if numbers is None or any(memory_of(tensor) != memory_of(source) for tensor in parameters):
            return
        picked = call.replaced(source, numbers.to(source)).run()
        if not isinstance(picked, Tensor) or picked.shape != outputs.shape or not torch.equal(picked, picked.round()):
            return
        picked = picked.long()
        whole = self.parameters[name].flatten()
        inside = bool(((picked >= 0) & (picked < whole.numel())).all())
        if inside and torch.equal(whole[picked], outputs.to(whole)):
            self.entries[memory_of(outputs)] = picked.clone()

    def _entries(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a parameter's entries in a view of it, or in what was picked from it; None if not known."""
        whole = self.parameters[self.names[memory_of(tensor)]]
        if memory_of(whole) == memory_of(tensor):
            numbers = torch.arange(whole.numel(), device=whole.device).view(whole.shape)
            if whole.is_contiguous() and whole.storage_offset() == 0:
                return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            return None
        numbers = self.entries.get(memory_of(tensor), torch.empty(0))
        return numbers if numbers.shape == tensor.shape else None


class _Intervention(_ParameterMode):
    def __init__(self, number: int, parameters: Update, intervene: Callable[[Tensor, Callable[[], Any]], Any]) -> None:
        super().__init__(parameters)
        self.number, self.intervene = number, intervene

    def operation(self, call: TorchCall, parameters: list[Tensor]) -> Any:
        return self.intervene(call.data(), call.run) if self.count == self.number else call.run()


class _Feeds(_ParameterMode):
    def __init__(self, parameters: Update, keep: Callable[[int, Tensor], None]) -> None:
        super().__init__(parameters)
        self.keep = keep

    def operation(self, call: TorchCall, parameters: list[Tensor]) -> Any:
        self.keep(self.count, call.data())
        return call.run()


_USES_NO_VALUES = frozenset(
    {"expand_as", "view_as", "reshape_as", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like"}
    | {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "size", "dim", "type_as"}
)
"""Functions that look at nothing but the shape or the type of what they are given beside a parameter."""
