"""Batch-norm statistics: by which the attacker normalises its guess, and towards which it pulls the guess's own.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021.

Differs from the paper's code in: variances are compared with their like (there a biased one is pulled towards an
unbiased one); the running statistics do not hold a tenth of the private batch, which there had passed through before.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedprism.checks import choice
from fedprism.client.batchnorm import layer_moments
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.naming import EvaluableRepr
from fedprism.network.batchnorm import batchnorm_layers
from fedprism.runtime.moments import Moments
from fedprism.solvers.matching.priors import BatchMoments
from fedprism.types import Knowledge, Update


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


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchNorm(EvaluableRepr):
    """Which statistics the batch-norm layers normalise the guess by, and which ones the guess's own are pulled to.

    pull_weight: of the prior that pulls, the sum over the layers of the l2 distances of means and of variances.
    """

    normalise: Normalise = Normalise.CLIENT
    pull: Pull = Pull.NONE
    pull_weight: float = 1e-3

    def __post_init__(self) -> None:
        object.__setattr__(self, "normalise", Normalise(choice(self.normalise, "normalise", Normalise)))
        object.__setattr__(self, "pull", Pull(choice(self.pull, "pull", Pull)))
        if not self.pull_weight > 0:
            raise BadInput(f'pull_weight must be above 0, not {self.pull_weight}; set pull="none" to do without it.')

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(FIELDS[chosen] for chosen in (self.normalise, self.pull) if chosen in FIELDS)

    @property
    def unbiased(self) -> bool:
        """Whether the guess's variances are divided by n - 1: running averages are of such variances."""
        return self.pull is Pull.RUNNING

    @property
    def note(self) -> str:
        """What is used, in words; empty where nothing was asked for."""
        if self.normalise is Normalise.CLIENT and self.pull is Pull.NONE:
            return ""
        whose = "guess's own" if self.normalise is Normalise.OWN else self.normalise.value
        by = "what the client's mode says" if self.normalise is Normalise.CLIENT else f"the {whose} statistics"
        pulled = "not pulled" if self.pull is Pull.NONE else f"pulled towards the {self.pull.value} statistics"
        return f"batch norm by {by}, {pulled}"


def normalised_model(
    model: nn.Module, params: Update, buffers: Update, knowledge: Knowledge, normalise: Normalise
) -> tuple[nn.Module, Update]:
    """Model and buffers whose batch-norm layers normalise so; the arguments are left as they were."""
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
    model: nn.Module, params: Update, buffers: Update, knowledge: Knowledge, batchnorm: BatchNorm
) -> BatchMoments | None:
    """The prior that pulls the guess's statistics, at the parameters that were sent; None where nothing is pulled."""
    if batchnorm.pull is Pull.NONE:
        return None
    layers = _some_layers(model, f"pull={batchnorm.pull.value}")
    wanted = _given(knowledge, FIELDS[batchnorm.pull], layers, params)

    def moments_of(inputs: Tensor) -> list[Moments]:
        return list(layer_moments(model, params, buffers, inputs, unbiased=batchnorm.unbiased).values())

    return BatchMoments(batchnorm.pull_weight, moments_of, tuple(wanted.values()))


def _some_layers(model: nn.Module, choice: str) -> dict[str, _BatchNorm]:
    layers = batchnorm_layers(model)
    if not layers:
        raise NotApplicable(
            f"{choice} needs a model with batch-norm layers, but {type(model).__name__} has none; "
            "use inverting-gradients, which does without them."
        )
    return layers


def _given(knowledge: Knowledge, field: str, layers: dict[str, _BatchNorm], params: Update) -> dict[str, Moments]:
    """Each layer's statistics from a field of Knowledge, checked and on the parameters' device."""
    statistics: Update | tuple[Update, ...] | None = getattr(knowledge, field)
    if statistics is None:
        raise MissingKnowledge("the attacker's batch norm", field)
    if isinstance(statistics, tuple):
        raise NotApplicable(
            f"{field} must hold the statistics of the one update attacked, not those of {len(statistics)} updates; "
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
        held = "is missing" if tensor is None else f"has the shape {tuple(tensor.shape)}"
        raise BadInput(
            f"{field} must hold a '{name}' of {layer.num_features} channels, but it {held}; "
            "give a mean and a var for every batch-norm layer of the model."
        )
    if name.endswith(".var") and not bool((tensor >= 0).all()):
        raise BadInput(f"'{name}' in {field} must hold variances of at least 0, not {tensor.min():g}.")
    return tensor.detach()
