"""The losses clients train with, by name. Each is a mean over the batch (and over tokens or pixels).

A model may return its outputs as a tensor, in a tuple (then the first is meant) or in a dict (then "logits" or "out").
A loss of a user's own is any function (outputs, labels) -> scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprism.errors import BadInput
from fedprism.types import LossFn, is_soft

IGNORED_LABEL = -100
"""The label of tokens and pixels that torch's cross-entropy leaves out."""
OUTPUT_NAMES = ("logits", "out", "output", "prediction")
"""Names under which models return what the loss is for: those of transformers, torchvision's segmentation, others."""


IGNORED_LABEL = -100
"""The label of tokens and pixels that torch's cross-entropy leaves out."""


def one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """Labels as rows of class weights, in the shape and dtype of the outputs `like`."""
    if is_soft(labels):
        return labels.to(like.dtype)
    # Not F.one_hot: it looks at the values, which vmap over examples does not allow.
    return (labels.unsqueeze(-1) == torch.arange(like.shape[-1], device=labels.device)).to(like.dtype)


def predictions(outputs: Any) -> Tensor:
    """The tensor that a loss is for, out of what a model returns."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        name = next((name for name in OUTPUT_NAMES if name in outputs), None)
        if name is None and len(outputs) == 1:
            (name,) = outputs
        if name is not None:
            return predictions(outputs[name])
    elif isinstance(outputs, tuple | list) and outputs:
        return predictions(outputs[0])
    names = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else type(outputs).__name__
    raise BadInput(
        "the model must return a tensor, a tuple that begins with one or a dict with "
        f"{OUTPUT_NAMES[0]!r}, not {names}. Give the loss as a function of what the model returns."
    )


def cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    """Softmax cross-entropy, also per token or per pixel; classes are in the second dimension, or else in the last."""
    scores = predictions(outputs)
    if scores.dim() > 2 and _classes_last(scores, labels):
        scores = scores.movedim(-1, 1)
        labels = labels.movedim(-1, 1) if labels.dim() == scores.dim() else labels
    return F.cross_entropy(scores, labels)


def mse(outputs: Any, labels: Tensor) -> Tensor:
    """Squared error of the raw outputs, mean over all of them: against one-hot labels, or numbers to be predicted."""
    scores = predictions(outputs)
    return F.mse_loss(scores, _targets(labels, scores))


def softmax_mse(outputs: Any, labels: Tensor) -> Tensor:
    """Squared error of the softmax against one-hot labels, mean over batch and classes."""
    scores = predictions(outputs)
    return F.mse_loss(torch.softmax(scores, dim=-1), one_hot(labels, scores))


def l1(outputs: Any, labels: Tensor) -> Tensor:
    """Absolute error of the numbers to be predicted."""
    scores = predictions(outputs)
    return F.l1_loss(scores, _numbers(labels, scores))


def huber(outputs: Any, labels: Tensor) -> Tensor:
    """Huber's error of the numbers to be predicted, which changes from squared to absolute at 1."""
    scores = predictions(outputs)
    return F.huber_loss(scores, _numbers(labels, scores))


def binary_cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    """Sigmoid cross-entropy: one logit a sample, several labels a sample, or one logit a pixel."""
    scores = predictions(outputs)
    return F.binary_cross_entropy_with_logits(scores, _numbers(labels, scores))


LOSSES: dict[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "mse": mse,
    "softmax_mse": softmax_mse,
    "binary_cross_entropy": binary_cross_entropy,
    "l1": l1,
    "huber": huber,
}

OF_CLASSES = (cross_entropy, mse, softmax_mse)
"""Losses that take whole-number labels for class numbers."""


def resolve(loss: str | LossFn) -> LossFn:
    """A loss from its name; a function is returned as it is."""
    if not isinstance(loss, str):
        return loss
    if loss not in LOSSES:
        raise BadInput(
            f"no loss is called '{loss}'. Use one of {', '.join(LOSSES)}, or a function of outputs and "
            'labels (in a plan: loss = "pkg.module:function").'
        )
    return LOSSES[loss]


def takes_class_numbers(loss: str | LossFn, classes: int) -> bool:
    """Whether a loss takes whole numbers for so many classes, found out by trying it on two samples."""
    if classes < 2:
        return False
    try:
        value: object = resolve(loss)(torch.zeros(2, classes), torch.tensor([0, classes - 1]))
    except Exception:  # a loss of a user's own may raise anything where it is given labels of another kind
        return False
    return isinstance(value, Tensor) and value.numel() == 1


def is_cross_entropy(loss: str | LossFn | None) -> bool:
    """Whether the loss is known to be cross-entropy."""
    return loss is not None and name_of(loss) == "cross_entropy"


def name_of(loss: str | LossFn) -> str | None:
    """The table name of a loss, or None for a function that is not in the table."""
    if isinstance(loss, str):
        return loss
    return next((name for name, known in LOSSES.items() if known is loss), None)


def classes_of(outputs: Tensor, labels: Tensor) -> int:
    """How many classes scores tell apart, for labels as `cross_entropy` takes them."""
    return outputs.shape[class_dimension(outputs, labels)]


def class_dimension(outputs: Tensor, labels: Tensor) -> int:
    """In which dimension of scores the classes are, for labels as `cross_entropy` takes them."""
    return outputs.dim() - 1 if outputs.dim() == 2 or _classes_last(outputs, labels) else 1


def _classes_last(scores: Tensor, labels: Tensor) -> bool:
    """Whether the classes of scores for tokens or pixels are in their last dimension, not in the second."""
    if labels.is_floating_point():  # class weights, in the shape of the scores
        return False
    second = (scores.shape[0], *scores.shape[2:]) == tuple(labels.shape)
    last = tuple(scores.shape[:-1]) == tuple(labels.shape)
    if second and last:
        raise BadInput(
            f"it is unclear which dimension of the outputs {tuple(scores.shape)} is that of classes, for "
            f"labels {tuple(labels.shape)}. Give the loss as a function of both."
        )
    return last


def _targets(labels: Tensor, scores: Tensor) -> Tensor:
    """What outputs are compared with: the numbers themselves, or class numbers as rows of class weights."""
    whole_classes = not labels.is_floating_point() and labels.shape == scores.shape[:-1] and scores.shape[-1] > 1
    return one_hot(labels, scores) if whole_classes else _numbers(labels, scores)


def _numbers(labels: Tensor, scores: Tensor) -> Tensor:
    """Labels in the shape of the outputs: (batch,) and (batch, 1) mean the same, and nothing is broadcast."""
    if labels.shape == scores.shape:
        return labels.to(scores.dtype)
    if labels.shape[:1] == scores.shape[:1] and _without_ones(labels) == _without_ones(scores):
        return labels.reshape(scores.shape).to(scores.dtype)
    raise BadInput(
        f"labels of shape {tuple(labels.shape)} do not fit outputs of shape {tuple(scores.shape)}. "
        "Change the labels, the model or the loss."
    )


def _without_ones(tensor: Tensor) -> tuple[int, ...]:
    return tuple(size for size in tensor.shape[1:] if size != 1)
