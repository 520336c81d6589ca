"""What fits a model and its data, before an audit: layers, what reads them, what nothing reads, what each costs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from fedprism.attacks import ATTACKS, Attack, inverting_gradients
from fedprism.attacks.embedding_inversion.tables import fed_side_by_side
from fedprism.audit import template
from fedprism.audit.choosing import OTHERS, other_inputs, probe_of
from fedprism.audit.entries import ThreatEntry
from fedprism.audit.estimate import duration, prices
from fedprism.audit.grid import AttackCell, lay_out
from fedprism.audit.materials import Setup
from fedprism.audit.plan import parse_plan
from fedprism.errors import BadInput, FedprismError
from fedprism.inputs import described
from fedprism.network.lookups import coded_pass
from fedprism.network.network_map import NetworkMap, network_map
from fedprism.network.patches import patch_layer
from fedprism.network.places import placed_layers
from fedprism.types import Observation


@dataclass(frozen=True, kw_only=True)
class Layer:
    """An operation with parameters. `readers`: methods that read the input off its gradient, without any search."""

    weight: str
    kind: str
    shape: tuple[int, ...]
    trained: bool
    readers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits. `attacks` and `left_out` pair a name with its cost, or with why it is not tried."""

    inputs: str
    outputs: tuple[int, ...]
    layers: tuple[Layer, ...]
    attacks: tuple[tuple[str, str], ...]
    left_out: tuple[tuple[str, str], ...]
    searched: bool
    """Whether gradient matching, which looks at all trained layers at once, applies to these inputs."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Trained layers whose gradients no method looks at."""
        left = (layer.weight for layer in self.layers if layer.trained and not layer.readers)
        return () if self.searched else tuple(left)


def setup_for(model: str, data: str | None, *, loss: str) -> Setup:
    """The plan that is looked at: one client with one sample, an honest but curious server, no defense."""
    from fedprism.audit import prepare

    if data is None and ":" in model:
        raise BadInput("a model of your own needs data of your own. Add --data, such as --data images.")
    plan = parse_plan(template.text(model, data))
    server = (ThreatEntry(name="honest_but_curious"),)
    only = {"batch_sizes": (1,), "seeds": (0,), "defenses": ((),), "threats": server, "losses": (loss,)}
    grid = plan.grid.model_copy(update=only)
    scores = plan.scores.model_copy(update={"ceiling": False})
    return prepare(plan.model_copy(update={"grid": grid, "utility": None, "scores": scores}))


def check(setup: Setup, *, device: str | None = None) -> Fit:
    """One forward pass to find the layers, and a shortened run of each attack to tell its cost."""
    grid = lay_out(setup, allow_empty=True)
    probe = probe_of(setup.materials())
    network = network_map(probe)
    cells = [cell for cell in grid.cells if isinstance(cell, AttackCell)]
    attacks, left_out = list[tuple[str, str]](), [(each.what, each.why) for each in grid.skipped if each.why != OTHERS]
    for cell, price in zip(cells, prices(setup, cells, device), strict=True):
        if price is not None and price.refused:
            left_out.append((cell.attack.label, price.refused))
        else:
            cost = "too long to measure" if price is None else f"about {duration(price.seconds)}"
            attacks.append((cell.attack.label, f"{cost} for a batch of 1"))
    return Fit(
        inputs=described(setup.materials().batch(torch.tensor([0])).inputs),
        outputs=tuple(network.outputs.shape[1:]),
        layers=_layers(network, probe, {label for label, _ in attacks}),
        attacks=tuple(attacks),
        left_out=tuple(left_out),
        searched=_fits(inverting_gradients(), probe),
    )


def _layers(network: NetworkMap, probe: Observation, fitting: Collection[str]) -> tuple[Layer, ...]:
    """The layers, read by those of the fitting attacks that look for them."""
    assert probe.model is not None
    parameters = dict(probe.model.named_parameters())
    readers = _readers(network, probe)
    weights = dict.fromkeys(operation.weight for operation in network.operations)
    kinds = {operation.weight: operation.kind.value for operation in reversed(network.operations)}
    return tuple(
        Layer(
            weight=name,
            kind=kinds[name],
            shape=tuple(parameters[name].shape),
            trained=parameters[name].requires_grad,
            readers=tuple(reader for reader, read in readers.items() if reader in fitting and name in read),
        )
        for name in weights
        if name in parameters
    )


def _readers(network: NetworkMap, probe: Observation) -> dict[str, Collection[str]]:
    """For each method without a search, the weights whose gradients it reads the input off."""
    first = network.fed_by_input()
    dense = {first.weight} if first is not None else set()
    read: dict[str, Callable[[], set[str]]] = {
        "dense-inversion": lambda: dense,
        "cocktail-party": lambda: dense,
        "row-space-inversion": lambda: {layer.operation.weight for layer in placed_layers(probe)},
        "embedding-inversion": lambda: _looked_up(probe),
        "patch-inversion": lambda: {layer.weight for layer in [patch_layer(probe)] if layer is not None},
    }
    return {name: _tried(look) for name, look in read.items() if _fits(ATTACKS[name](), probe)}


def _looked_up(probe: Observation) -> set[str]:
    """Tables, and the layers that are fed what is looked up in them: they tell the numbers beside it."""
    coded = coded_pass(probe)
    beside = fed_side_by_side(coded, coded.lookups)
    return {operation.weight for operation in (*(each.operation for each in coded.lookups), *beside)}


def _fits(attack: Attack, probe: Observation) -> bool:
    """Whether an attack reads models that are fed such inputs at all."""
    return other_inputs(attack, probe.knowledge) is None


def _tried(look: Callable[[], set[str]]) -> set[str]:
    try:
        return look()
    except FedprismError:
        return set()
