"""Batch-norm statistics of a client: mappings with "LAYER.mean" and "LAYER.var" for every batch-norm layer.

Exact statistics are of what the layers were fed, with the biased variance (over n) that batch norm divides by. Running
statistics are the buffers of the model that was sent, into which PyTorch averages unbiased variances (over n - 1).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from fedprism.inputs import Inputs, outputs_of
from fedprism.network.batchnorm import batchnorm_layers
from fedprism.runtime.moments import Moments, channel_moments
from fedprism.types import Observation, Round, Update


def layer_moments(
    model: nn.Module, params: Update, buffers: Update, inputs: Inputs, *, unbiased: bool = False
) -> dict[str, Moments]:
    """The mean and variance of what each batch-norm layer is fed for `inputs`; no buffer is written to."""
    moments: dict[str, Moments] = {}
    names: dict[nn.Module, str] = {layer: name for name, layer in batchnorm_layers(model).items()}

    def watch(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        moments[names[layer]] = channel_moments(args[0], unbiased=unbiased)

    hooks = [layer.register_forward_pre_hook(watch) for layer in names]
    # In train mode the layers write into the buffers they are given: hand them copies.
    copies = {name: tensor.clone() for name, tensor in buffers.items()}
    try:
        outputs_of(model, {**params, **copies}, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: moments[name] for name in names.values() if name in moments}


def exact_statistics(model: nn.Module, params: Update, buffers: Update, inputs: Inputs) -> dict[str, Tensor]:
    """`Knowledge.batchnorm_exact` of a client that holds `inputs`: the statistics, with the biased variance."""
    return _named(layer_moments(model, params, buffers, inputs).items())


def running_statistics(model: nn.Module, buffers: Update) -> dict[str, Tensor]:
    """`Knowledge.batchnorm_running` of these buffers; layers that keep no running statistics are left out."""
    return _named(
        (name, Moments(buffers[f"{name}.running_mean"], buffers[f"{name}.running_var"]))
        for name in batchnorm_layers(model)
        if f"{name}.running_mean" in buffers
    )


def _named(moments: Iterable[tuple[str, Moments]]) -> dict[str, Tensor]:
    parts = {f"{name}.{part}": tensor for name, pair in moments for part, tensor in pair._asdict().items()}
    return {name: tensor.detach().clone() for name, tensor in parts.items()}


def buffers_of(observation: Observation, round: Round) -> Update:
    """The buffers that the client was sent; those of the model where they were not recorded."""
    recorded = dict(observation.model.named_buffers()) if observation.model is not None else {}
    return {**recorded, **(round.buffers_before or {})}
