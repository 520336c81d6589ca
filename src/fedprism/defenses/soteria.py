"""Soteria: do not send the classifier's gradient for the features that tell most about the input.

Sun, Li, Wang, Yang, Li, Chen, "Soteria: Provable Defense against Privacy Leakage in Federated Learning from
Representation Perspective", CVPR 2021; broken in Balunović et al., "Bayesian Framework for Gradient
Leakage", ICLR 2022, and by who knows the zeros.

Differs from the published code in: features of either sign count by their magnitude, ties are broken by order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism.checks import probability, shown
from fedprism.defenses.base import Context, Defense
from fedprism.defenses.pruning import KeepSupport
from fedprism.errors import NotApplicable
from fedprism.randomness import seeded_layers
from fedprism.types import Batch, Update

FLOOR = 0.1
"""Added to a feature's magnitude before it divides, as in the published code: features near 0 are not all alike."""
TOGETHER = 32
"""How many features are differentiated at once."""


@dataclass(frozen=True)
class Soteria(Defense):
    """Zeroes the columns of a dense layer's weight gradient for `ratio` of its inputs, the features.

    Those go whose derivative by the input is shortest over their magnitude, summed over the client's own samples.
    layer: the dense layer by its name in the model, such as classifier.0; the last one unless said.
    """

    ratio: float
    layer: str | None = None

    def __post_init__(self) -> None:
        probability(self.ratio, "Soteria's ratio")

    def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
        if context.model is None or context.batch is None:
            raise NotApplicable(
                "Soteria needs the model and the client's data beside the update. Hand on_update a Context with both."
            )
        with seeded_layers(rng):
            layer, scores = feature_scores(context.model, context.params, context.batch, self.layer)
        if layer not in update:
            raise NotApplicable(
                f"Soteria needs the dense layer's weight '{layer}' in the update, but it is frozen. Train it."
            )
        kept = torch.ones_like(scores)
        # A stable order, so that equal scores go from the first on.
        kept[scores.argsort(stable=True)[: int(self.ratio * len(scores))]] = 0.0
        return {**update, layer: update[layer] * kept.to(update[layer])}

    def deterministic(self, observed: Update | None = None) -> Defense:
        # The zeros tell which features were removed; comparing the others needs no derivative of the defense.
        return self if observed is None else KeepSupport({name: tensor != 0 for name, tensor in observed.items()})


def feature_scores(model: nn.Module, params: Update | None, data: Batch, name: str | None = None) -> tuple[str, Tensor]:
    """A dense layer's weight by name, the last one's unless said, and (features,) sum over samples of |df/dx| / (|f| +
    0.1)."""
    names, inputs_of = {module: name for name, module in model.named_modules()}, list[tuple[str, Tensor]]()

    def watch(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs_of.append((f"{names[module]}.weight".lstrip("."), args[0]))

    inputs = data.tensor.detach().clone().requires_grad_()
    # Copies, because batch-norm layers write into the buffers they are given.
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    weights = {name: p.detach() for name, p in (params or dict(model.named_parameters())).items()}
    hooks = [m.register_forward_pre_hook(watch) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        functional_call(model, {**weights, **buffers}, (inputs,))
    finally:
        for hook in hooks:
            hook.remove()
    if not inputs_of or inputs_of[-1][1].dim() != 2:
        raise NotApplicable("Soteria needs a network that ends in a dense layer. Choose another defense.")
    layers = dict(inputs_of)
    layer = inputs_of[-1][0] if name is None else f"{name}.weight".lstrip(".")
    if layer not in layers or layers[layer].dim() != 2:
        known = " or ".join(known.removesuffix(".weight") for known, fed in layers.items() if fed.dim() == 2)
        raise NotApplicable(f"Soteria needs the dense layer {known}, not {shown(name)}.")
    features = layers[layer]
    if features.grad_fn is None:  # the layer is fed by the input itself: each feature is a pixel
        return layer, (1 / (features.detach().abs() + FLOOR)).sum(0)
    parts = torch.split(torch.arange(features.shape[1]), TOGETHER)
    lengths = torch.cat([_lengths(features, inputs, some) for some in parts])
    return layer, (lengths / (features.detach().abs().T + FLOOR)).sum(1)


def _lengths(features: Tensor, inputs: Tensor, some: Tensor) -> Tensor:
    """|df/dx| of some features, (features, samples): the sum over samples is differentiated, whose inputs differ."""
    picked = torch.zeros(len(some), *features.shape, dtype=features.dtype, device=features.device)
    picked[torch.arange(len(some)), :, some] = 1.0
    (slopes,) = torch.autograd.grad(features, inputs, picked, retain_graph=True, is_grads_batched=True)
    lengths: Tensor = torch.linalg.vector_norm(slopes.flatten(2), dim=2)
    return lengths
