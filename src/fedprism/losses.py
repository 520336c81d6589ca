"""The losses clients train with, by name. Each is the mean over the batch and takes whole or soft labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprism.errors import BadInput
from fedprism.types import LossFn, is_soft


def one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """Labels as rows of class weights, in the shape and dtype of the outputs `like`."""
    if is_soft(labels):
        return labels.to(like.dtype)
    # Not F.one_hot: it looks at the values, which vmap over examples does not allow.
    return (labels.unsqueeze(-1) == torch.arange(like.shape[-1], device=labels.device)).to(like.dtype)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Softmax cross-entropy."""
    return F.cross_entropy(outputs, labels)


def mse(outputs: Tensor, labels: Tensor) -> Tensor:
    """Squared error of the raw outputs against one-hot labels, mean over batch and classes."""
    return F.mse_loss(outputs, one_hot(labels, outputs))


def softmax_mse(outputs: Tensor, labels: Tensor) -> Tensor:
    """Squared error of the softmax against one-hot labels, mean over batch and classes."""
    return F.mse_loss(torch.softmax(outputs, dim=-1), one_hot(labels, outputs))


LOSSES: dict[str, LossFn] = {"cross_entropy": cross_entropy, "mse": mse, "softmax_mse": softmax_mse}


def resolve(loss: str | LossFn) -> LossFn:
    """A loss from its name; a function is returned as it is."""
    if not isinstance(loss, str):
        return loss
    if loss not in LOSSES:
        raise BadInput(f"expected a loss out of {', '.join(LOSSES)}, found '{loss}'; name one of these.")
    return LOSSES[loss]


def is_cross_entropy(loss: str | LossFn | None) -> bool:
    """Whether the loss is known to be cross-entropy."""
    return loss is not None and name_of(loss) == "cross_entropy"


def name_of(loss: str | LossFn) -> str | None:
    """The table name of a loss, or None for a function that is not in the table."""
    if isinstance(loss, str):
        return loss
    return next((name for name, known in LOSSES.items() if known is loss), None)
