"""What a user's own objects tell about a training: the shape of its inputs, its loss, its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.inputs import Inputs, arguments, first_tensor, shape_of, types_of
from fedprism.losses import LOSSES, predictions, resolve
from fedprism.types import LossFn

OF_TORCH: dict[Any, str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    functional.cross_entropy: "cross_entropy",
    nn.MSELoss: "mse",
    functional.mse_loss: "mse",
    nn.BCEWithLogitsLoss: "binary_cross_entropy",
    functional.binary_cross_entropy_with_logits: "binary_cross_entropy",
    nn.L1Loss: "l1",
    functional.l1_loss: "l1",
    nn.HuberLoss: "huber",
    functional.huber_loss: "huber",
}
"""Losses of PyTorch, as classes and as functions, under the names of fedprism's table."""
USUAL_SETTINGS = {"reduction": "mean", "label_smoothing": 0.0, "delta": 1.0, "ignore_index": -100}
"""Settings with which PyTorch's losses are those of the table."""
WEIGHTS = ("weight", "pos_weight")
"""Settings that weigh classes or samples, which the table's losses do not."""
NO_SAMPLE = "give a batch of one as the training feeds it, sample=x[:1]"


def inputs_told(sample: Inputs, model: nn.Module | None) -> dict[str, Any]:
    """Shape and type of what the model is fed. Of the sample nothing else is kept; a BadInput if it does not fit."""
    tensors = [sample] if isinstance(sample, torch.Tensor) else sample
    several = list(tensors.values()) if isinstance(tensors, dict) else list(tensors)
    if not several or not all(isinstance(each, torch.Tensor) and each.dim() > 0 and len(each) for each in several):
        raise BadInput(f"inputs of the model must be tensors, not {shown(type(sample).__name__)}. {NO_SAMPLE}.")
    if model is not None:
        _check_accepted(sample, model)
    return {"input_shape": shape_of(sample), "input_types": types_of(sample)}


def _check_accepted(sample: Inputs, model: nn.Module) -> None:
    """One forward pass of a copy: a sample without the dimension of the batch would be told as another shape."""
    own = copy.deepcopy(model).eval()
    place = next((parameter.device for parameter in own.parameters()), torch.device("cpu"))
    count = len(first_tensor(sample))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            args, kwargs = arguments(sample)
            outputs = predictions(own(*(t.to(place) for t in args), **{n: t.to(place) for n, t in kwargs.items()}))
    except Exception as error:  # whatever a user's model raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadInput(f"the model does not accept the sample: {reason}. {NO_SAMPLE}.") from error
    if outputs.dim() == 0 or len(outputs) != count:
        raise BadInput(
            f"the model returns outputs of shape {tuple(outputs.shape)} for {count} samples, not one per "
            f"sample. {NO_SAMPLE}."
        )


def loss_told(loss: str | LossFn | nn.Module) -> tuple[str | None, LossFn]:
    """The name of a loss, None if the table does not have it, and the loss as a function of outputs and labels."""
    if isinstance(loss, str):
        return loss, resolve(loss)
    name = OF_TORCH.get(type(loss)) or (OF_TORCH.get(loss) if not isinstance(loss, nn.Module) else None)
    if name is None:
        name = next((known for known, function in LOSSES.items() if function is loss), None)
    if (
        name is not None
        and all(getattr(loss, setting, usual) == usual for setting, usual in USUAL_SETTINGS.items())
        and all(getattr(loss, setting, None) is None for setting in WEIGHTS)
    ):
        return name, LOSSES[name]
    return None, _of_outputs(loss)


def _of_outputs(loss: Callable[..., Any]) -> LossFn:
    """A user's own loss, handed the tensor that the model predicts with."""
    return lambda outputs, labels: loss(predictions(outputs), labels)
