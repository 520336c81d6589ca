"""What clients' networks were fed, step by step: a defense that does what another does, and writes that down."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fedprism.client.batchnorm import exact_statistics
from fedprism.defenses.base import Chain, Context, Defense
from fedprism.defenses.mixup import Mixing, MixUp
from fedprism.errors import BadInput
from fedprism.inputs import map_tensors, outputs_of
from fedprism.types import Batch, Update


class Step(NamedTuple):
    """One local step of a client, on the device it trained on."""

    params: Update
    """Those that the step started from."""
    fed: Batch
    """What the network was fed, in the order of its rows."""
    mixing: Mixing | None
    """Which of the samples of the client's round, or of all it holds, were mixed; None where none were."""
    layers: Tensor
    """The state from which random layers (dropout) draw in this step."""


ClientRound: TypeAlias = tuple[str | None, int | None]
"""A client by name, and a round."""


@dataclass(frozen=True)
class RecordingDefense(Chain):
    """Does what `defenses` do, and with `keeps` keeps the steps of each (client, round).

    sizes: how many of its samples each client draws for a round, by name, if it mixes these with all that it holds.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    keeps: bool = True
    steps: dict[ClientRound, list[Step]] = field(default_factory=dict, compare=False)
    _drawn: dict[ClientRound, tuple[Batch, Tensor]] = field(default_factory=dict, compare=False)

    def on_draw(self, dataset: Batch, context: Context, rng: torch.Generator) -> Tensor:
        size = self.sizes.get(context.client or "")
        if size is None:
            return super().on_draw(dataset, context, rng)
        part = torch.randperm(len(dataset), generator=rng)[:size].sort().values
        chosen = part[super().on_draw(dataset[part], context, rng)]
        self._drawn[context.client, context.round] = dataset, chosen
        return chosen

    def on_batch(self, batch: Batch, context: Context, rng: torch.Generator) -> Batch:
        before, client_round = rng.get_state(), (context.client, context.round)
        if client_round in self._drawn and context.indices is not None:
            drawn, chosen = self._drawn[client_round]
            everything = drawn.to(batch.labels.device)
            context = replace(context, batch=everything, indices=chosen[context.indices.cpu()])
        fed = super().on_batch(batch, context, rng)
        if not self.keeps:
            return fed
        mixing, layers = self._mixing(context, before), _layer_state(fed.labels.device)
        current = {name: tensor.detach() for name, tensor in (context.params or {}).items()}
        step = Step(current, Batch(map_tensors(Tensor.detach, fed.inputs), fed.labels.detach()), mixing, layers)
        self.steps.setdefault(client_round, []).append(step)
        return fed

    def overrides(self, *stages: str) -> bool:
        return not {"on_draw", "on_batch"}.isdisjoint(stages) or super().overrides(*stages)

    def _mixing(self, context: Context, before: Tensor) -> Mixing | None:
        """What was mixed, drawn once more: it is the first thing that is drawn for a batch."""
        defense = mixes(self)
        if defense is None or context.batch is None or context.indices is None:
            return None
        again = torch.Generator()
        again.set_state(before)
        return defense.mixing(len(context.batch), again, context.indices.cpu())


def mixes(defense: Defense) -> MixUp | None:
    """The part of a defense that mixes samples, if there is one."""
    return next((part for part in defense.members if isinstance(part, MixUp)), None)


def check_mixes_once(defense: Defense) -> None:
    """Whether what is fed to the network is one mixture of the client's own samples, and nothing else."""
    if mixes(defense) is None:
        return
    changing = [part for part in defense.members if part.overrides("on_batch")]
    mixing = [part for part in changing if isinstance(part, MixUp)]
    public = getattr(mixing[0], "cross", None) is not None
    if len(mixing) > 1 or changing[0] is not mixing[0] or public:
        problem = "public samples in the mixtures" if public else f"{len(changing)} defenses that change batches"
        raise BadInput(
            "to grant the mixing, a client needs one MixUp or InstaHide of its own samples, before all "
            f"else that changes batches; there is {problem}. Change the defense, or do not grant it."
        )


def step_statistics(model: nn.Module, buffers: Update, step: Step) -> Update:
    """`Knowledge.batchnorm_exact` of one step: the statistics of what its batch-norm layers were fed, on the CPU."""
    place = step.fed.labels.device
    local = copy.deepcopy(model).to(place)
    with torch.no_grad(), _replayed_layers(step):
        statistics = exact_statistics(local, step.params, {n: b.to(place) for n, b in buffers.items()}, step.fed.inputs)
    return {name: tensor.cpu() for name, tensor in statistics.items()}


def buffers_after(model: nn.Module, buffers: Update, steps: Sequence[Step]) -> Update:
    """A client's buffers after its steps, from those it was sent, on the CPU: each step's forward pass once more."""
    place = steps[0].fed.labels.device
    local = copy.deepcopy(model).to(place)
    copies = {name: tensor.detach().to(place, copy=True) for name, tensor in buffers.items()}
    with torch.no_grad():
        for step in steps:
            with _replayed_layers(step):
                outputs_of(local, {**step.params, **copies}, step.fed.inputs)
    return {name: tensor.cpu() for name, tensor in copies.items()}


def _layer_state(place: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(place) if place.type == "cuda" else torch.get_rng_state()


@contextmanager
def _replayed_layers(step: Step) -> Iterator[None]:
    """Random layers draw what they drew in this step; torch's global state is as it was afterwards."""
    place = step.fed.labels.device
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        if place.type == "cuda":
            torch.cuda.set_rng_state(step.layers, place)
        else:
            torch.set_rng_state(step.layers)
        yield
