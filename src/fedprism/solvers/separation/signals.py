"""What the network behind a dense layer sends back to it: each sample's dL/do, and how it may err.

`network` maps pre-activations o (samples, units) to outputs (samples, classes), sample by sample; `loss` is the mean
over samples of a loss on (outputs, labels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.functional import hvp, jvp, vjp
from torch.nn.functional import one_hot

Network: TypeAlias = Callable[[Tensor], Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

FEW_CLASSES = 32
"""Up to so many classes all are looked at; of more, only the likeliest ones."""
LIKELIEST = 12
"""How many of many classes are looked at by their outputs."""
CANDIDATES = 5
"""How many of many classes are looked at by how a column moves their outputs."""


def is_rectified(network: Network, bias: Tensor) -> bool:
    """Whether units below zero pass no signal back and the others do: a ReLU follows the layer."""
    probe = torch.randn(4, len(bias), generator=torch.Generator().manual_seed(0)).to(bias)
    signals = _vector_jacobian(network, probe)[1](torch.ones_like(network(probe)))
    silent = signals[probe < 0]
    return bool((silent == 0).all()) and bool((signals[probe > 0] != 0).any())


def sample_signals(network: Network, loss: Loss, activations: Tensor, labels: Tensor) -> Tensor:
    """dL/do (samples, units) of each sample's own loss."""
    outputs, back = _vector_jacobian(network, activations)
    return back(_output_gradient(loss, outputs, labels))


def candidate_labels(network: Network, loss: Loss, activations: Tensor, entries: Tensor) -> Tensor:
    """The labels (samples,) whose signals point along given columns (samples, units) best."""
    outputs, back = _vector_jacobian(network, activations)
    classes = outputs.shape[1]
    # The class of the label is pushed up: its output falls when moving along the column.
    movement: Tensor = jvp(network, activations, entries)[1]  # type: ignore[no-untyped-call]
    ranked = movement.topk(min(classes, classes if classes <= FEW_CLASSES else CANDIDATES), dim=1, largest=False)
    candidates = (back(_output_gradient(loss, outputs, labels)) for labels in ranked.indices.unbind(1))
    cosines = [(signals * entries).sum(1) / row_lengths(signals) for signals in candidates]
    chosen = torch.stack(cosines, dim=1).argmax(1, keepdim=True)
    return ranked.indices.gather(1, chosen).squeeze(1)


def fitting_labels(network: Network, loss: Loss, activations: Tensor, outside: Tensor) -> Tensor:
    """The labels (samples,) whose signals have least in directions (units, m) outside all columns."""
    outputs, back = _vector_jacobian(network, activations)
    classes = outputs.shape[1]
    ranked = outputs.topk(classes if classes <= FEW_CLASSES else LIKELIEST, dim=1).indices
    candidates = (back(_output_gradient(loss, outputs, labels)) for labels in ranked.unbind(1))
    misfits = [(signals @ outside).norm(dim=1) / row_lengths(signals) for signals in candidates]
    chosen = torch.stack(misfits, dim=1).argmin(1, keepdim=True)
    return ranked.gather(1, chosen).squeeze(1)


def correction_directions(network: Network, loss: Loss, activations: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The signals (samples, units) of samples with these labels, and directions (samples, units, m) they may err in.

    An estimate errs above all in the outputs of the likeliest classes; along the gradient only the size would change.
    """
    outputs, back = _vector_jacobian(network, activations)
    gradient = _output_gradient(loss, outputs, labels)
    classes = outputs.shape[1]
    likely = torch.softmax(outputs, dim=1).scatter(1, labels.unsqueeze(1), -1.0)
    count = max(0, classes - 2 if classes <= FEW_CLASSES else LIKELIEST)
    length = gradient.square().sum(1, keepdim=True).clamp(min=torch.finfo(gradient.dtype).tiny)
    directions = []
    for chosen in likely.topk(count, dim=1).indices.unbind(1):
        turn = _gradient_change(loss, outputs, labels, one_hot(chosen, classes).to(outputs))
        turn = turn - (turn * gradient).sum(1, keepdim=True) / length * gradient
        size = turn.norm(dim=1, keepdim=True)
        turn = torch.where(size > 0, turn / torch.where(size > 0, size, 1), 0)
        directions.append(back(turn))
    stacked = torch.stack(directions, dim=2) if directions else activations.new_zeros(*activations.shape, 0)
    return back(gradient), stacked


def row_lengths(rows: Tensor) -> Tensor:
    """(n,) never zero, so that rows can be divided by them."""
    lengths: Tensor = rows.norm(dim=1)
    return lengths.clamp(min=torch.finfo(rows.dtype).tiny)


def _vector_jacobian(network: Network, activations: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The outputs, and the function that carries a gradient of the outputs back to the activations."""
    leaves = activations.detach().requires_grad_()
    with torch.enable_grad():
        outputs = network(leaves)

    def back(gradient: Tensor) -> Tensor:
        return torch.autograd.grad(outputs, leaves, gradient, retain_graph=True)[0].detach()

    return outputs.detach(), back


def _output_gradient(loss: Loss, outputs: Tensor, labels: Tensor) -> Tensor:
    gradient: Tensor = vjp(lambda leaves: loss(leaves, labels) * len(leaves), outputs)[1]  # type: ignore[no-untyped-call]
    return gradient


def _gradient_change(loss: Loss, outputs: Tensor, labels: Tensor, directions: Tensor) -> Tensor:
    """How the gradient of the loss by the outputs changes when these move along `directions`."""
    change: Tensor = hvp(lambda leaves: loss(leaves, labels) * len(leaves), outputs, directions)[1]  # type: ignore[no-untyped-call]
    return change
