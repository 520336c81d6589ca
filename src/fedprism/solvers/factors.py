"""Gradients of large weights that are never written down: a product of two thin matrices is kept as the two.

The gradient of a weight is left @ right.T with one column for each place at which the weight is used: the samples of a
batch for a dense layer, samples times positions for a convolution. Where these are few, the gradient is far larger than
both, and what matching by cosine asks of it needs only them and the target: <g, t> = <left, t right> and
<g, g> = <left.T left, right.T right>. On a CPU, where writing and reading it is what takes the time, that saves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

MANY_WEIGHTS = 10_000
"""Smaller gradients are as quickly written down."""


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


def worth_it(weight: Tensor, columns: int) -> bool:
    """Whether the factors take less work than what they stand for: a count of the operations of either."""
    outputs, inputs = weight.flatten(1).shape
    return weight.numel() >= MANY_WEIGHTS and 2 * columns * (outputs + inputs) <= outputs * inputs


def uses_of(leaves: Mapping[str, Tensor], outputs: Tensor) -> dict[str, int]:
    """How often each leaf enters the computation of the outputs."""
    nodes, seen, entered = [outputs.grad_fn], set[Node](), Counter[int]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if leaf is None:
                nodes.append(following)
            else:
                entered[id(leaf)] += 1
    return {name: entered[id(leaf)] for name, leaf in leaves.items()}
