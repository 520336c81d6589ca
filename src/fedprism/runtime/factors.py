"""Gradients of large weights kept as their two thin factors, which saves writing and reading them on a CPU.

The gradient of a weight is left @ right.T with one column per use of the weight: samples for a dense layer, samples
times positions for a convolution. Matching by cosine needs only the factors and the target:
<g, t> = <left, t right> and <g, g> = <left.T left, right.T right>.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

MANY_WEIGHTS = 10_000
"""Entries of a gradient below which it is written down as quickly as its factors."""


class Factors(NamedTuple):
    """A gradient as left @ right.T: (out, columns) and (in, columns)."""

    left: Tensor
    right: Tensor

    def written(self, like: Tensor) -> Tensor:
        """The gradient itself, in the shape of the weight."""
        return (self.left @ self.right.T).view(like.shape)

    def along(self, target: Tensor) -> Tensor:
        """The inner product with the target, of the weight's shape."""
        return (self.left * (target.flatten(1) @ self.right)).sum()

    def square(self) -> Tensor:
        """The sum of all squared entries."""
        return ((self.left.T @ self.left) * (self.right.T @ self.right)).sum()


def factors_are_cheaper(weight: Tensor, columns: int) -> bool:
    """Whether the factors take fewer operations than the gradient."""
    outputs, inputs = weight.flatten(1).shape
    return weight.numel() >= MANY_WEIGHTS and 2 * columns * (outputs + inputs) <= outputs * inputs


def use_counts(leaves: Mapping[str, Tensor], outputs: Tensor) -> dict[str, int]:
    """How often each leaf enters the computation of the outputs."""
    steps = (step for node in graph_nodes(outputs) for step, _ in node.next_functions)
    counts = Counter(id(getattr(step, "variable", None)) for step in steps)
    return {name: counts[id(leaf)] for name, leaf in leaves.items()}


def graph_nodes(outputs: Tensor) -> Iterator[Node]:
    """Every step of autograd's graph behind the outputs, once each."""
    nodes, visited = [outputs.grad_fn], set[Node]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            nodes.extend(following for following, _ in node.next_functions)
