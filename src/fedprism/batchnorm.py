"""Batch-norm statistics: by which the attacker normalises its guess, and towards which it pulls the guess's own.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021:
who is given the statistics of the private batch (BN_exact) sees far more than who has only the running ones (BN_proxy,
BN_infer). Statistics are mappings with "LAYER.mean" and "LAYER.var" for every batch-norm layer.

- Exact statistics are those of what the client's layers were fed, mixtures where a defense mixes samples. Their
  variance is the biased one (divided by the number of values n), because that is what batch norm divides by: the
  private batch has them exactly.
- Running statistics are the buffers of the model that was sent. PyTorch averages unbiased variances (n - 1) into them,
  and that is what the guess's are compared with.

Differs from the paper's code in: variances are compared with their like (there a biased one is pulled towards an
unbiased one); the running statistics do not hold a tenth of the private batch, which there had passed through before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from enum import StrEnum

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.solvers.priors import BatchMoments, Moments, channel_moments
from fedprism.types import Knowledge, Observation, Round, Update


class Normalise(StrEnum):
    """By which statistics the batch-norm layers normalise the attacker's guess."""

    CLIENT = "client"
    """As the client's model does, in train or evaluation mode."""
    OWN = "own"
    """Those of the guess itself: what a client in train mode does with its batch."""
    EXACT = "exact"
    """The client's, held fixed. Even the true batch then lacks the part of the gradient that goes through them."""
    RUNNING = "running"
    """The running ones, held fixed: what a client in evaluation mode does."""

    def __repr__(self) -> str:
        return f"Normalise.{self.name}"


class Pull(StrEnum):
    """Towards which statistics the guess's own are pulled."""

    NONE = "none"
    EXACT = "exact"
    RUNNING = "running"

    def __repr__(self) -> str:
        return f"Pull.{self.name}"


FIELDS = {"exact": "batchnorm_exact", "running": "batchnorm_running"}
"""Which field of Knowledge a choice needs, of Normalise as of Pull; the others need none."""


def batchnorm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every batch-norm layer by its name, in the order of the model."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


def layer_moments(
    model: nn.Module, params: Update, buffers: Update, inputs: Tensor, *, unbiased: bool = False
) -> dict[str, Moments]:
    """The mean and variance of what each batch-norm layer is fed for `inputs`; no buffer is written to."""
    found: dict[str, Moments] = {}
    names: dict[nn.Module, str] = {layer: name for name, layer in batchnorm_layers(model).items()}

    def watch(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        found[names[layer]] = channel_moments(args[0], unbiased=unbiased)

    hooks = [layer.register_forward_pre_hook(watch) for layer in names]
    # In train mode the layers write into the buffers they are given: hand them copies.
    copies = {name: tensor.clone() for name, tensor in buffers.items()}
    try:
        functional_call(model, {**params, **copies}, (inputs,))
    finally:
        for hook in hooks:
            hook.remove()
    return {name: found[name] for name in names.values() if name in found}


def exact_statistics(model: nn.Module, params: Update, buffers: Update, inputs: Tensor) -> dict[str, Tensor]:
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


def normalised(
    model: nn.Module, params: Update, buffers: Update, knowledge: Knowledge, normalise: Normalise
) -> tuple[nn.Module, Update]:
    """A model and buffers whose batch-norm layers normalise as told; the arguments are left as they were."""
    if normalise is Normalise.CLIENT:
        return model, buffers
    model = copy.deepcopy(model)
    layers = _some_layers(model, f"normalise={normalise.value}")
    if normalise is Normalise.OWN:
        for layer in layers.values():
            layer.train()
        return model, buffers
    fixed = dict(buffers)
    for name, moments in _given(knowledge, FIELDS[normalise], layers, params).items():
        layers[name].eval()
        if layers[name].running_mean is None:  # such a layer uses the batch's own in evaluation mode too
            layers[name].running_mean, layers[name].running_var = moments
        fixed[f"{name}.running_mean"], fixed[f"{name}.running_var"] = moments
    return model, fixed


def pull_prior(
    model: nn.Module, params: Update, buffers: Update, knowledge: Knowledge, pull: Pull, weight: float
) -> BatchMoments | None:
    """The prior that draws the guess's statistics towards the wanted ones; None where nothing is wanted.

    It looks at the whole guess with the parameters that were sent, whatever the local steps.
    """
    if pull is Pull.NONE:
        return None
    layers = _some_layers(model, f"pull={pull.value}")
    wanted = _given(knowledge, FIELDS[pull], layers, params)

    def moments_of(inputs: Tensor) -> list[Moments]:
        found = layer_moments(model, params, buffers, inputs, unbiased=pull is Pull.RUNNING)
        return [found[name] for name in wanted]

    return BatchMoments(weight, moments_of, tuple(wanted.values()))


def buffers_of(observation: Observation, seen: Round) -> Update:
    """The buffers that the client was sent; those of the model where they were not recorded."""
    recorded = dict(observation.model.named_buffers()) if observation.model is not None else {}
    return {**recorded, **(seen.buffers_before or {})}


def _some_layers(model: nn.Module, choice: str) -> dict[str, _BatchNorm]:
    layers = batchnorm_layers(model)
    if not layers:
        raise NotApplicable(
            f"{choice} expects a model with batch-norm layers, found none in {type(model).__name__}; "
            "use inverting-gradients, which does without them."
        )
    return layers


def _given(knowledge: Knowledge, field: str, layers: dict[str, _BatchNorm], params: Update) -> dict[str, Moments]:
    """Each layer's statistics out of a field of Knowledge, where the parameters lie, once they are seen to fit."""
    statistics: Update | tuple[Update, ...] | None = getattr(knowledge, field)
    if statistics is None:
        raise MissingKnowledge("the attacker's batch norm", field)
    if isinstance(statistics, tuple):
        raise NotApplicable(
            f"an attack on one update expects its statistics in {field}, found those of {len(statistics)} updates; "
            "hand it one update with its own."
        )
    like = next(iter(params.values()))
    return {
        name: Moments(*(_checked(statistics, f"{name}.{part}", field, layer).to(like) for part in Moments._fields))
        for name, layer in layers.items()
    }


def _checked(statistics: Update, name: str, field: str, layer: _BatchNorm) -> Tensor:
    tensor = statistics.get(name)
    if tensor is None or tensor.shape != (layer.num_features,):
        shape = "none" if tensor is None else f"one of shape {tuple(tensor.shape)}"
        raise BadInput(
            f"expected a '{name}' of {layer.num_features} channels in {field}, found {shape}; "
            "give a mean and a var for every batch-norm layer of the model."
        )
    if name.endswith(".var") and not bool((tensor >= 0).all()):
        raise BadInput(f"expected a variance in {field}, found {tensor.min():g} in '{name}'; give none below zero.")
    return tensor.detach()
