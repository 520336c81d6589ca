"""What is worth testing, where the plan does not say, and why the rest is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from fedprism.attacks import ATTACKS, Attack, Circumstances, Disaggregation, Then
from fedprism.attacks.span_inversion.spanned import network_of
from fedprism.audit.entries import AttackEntry, DefenseEntry, ThreatEntry
from fedprism.audit.materials import Materials
from fedprism.audit.plan import Plan, RecordedPart
from fedprism.errors import FedprismError, NotApplicable
from fedprism.inputs import shape_of, types_of, values_in
from fedprism.network.batchnorm import batchnorm_layers
from fedprism.network.lookups import coded_pass
from fedprism.network.network_map import network_map
from fedprism.network.patches import patch_layer
from fedprism.network.places import placed_layers
from fedprism.runner import check_inputs
from fedprism.runtime import devices
from fedprism.threats import THREATS, ThreatModel
from fedprism.types import Knowledge, Observation, Round

OTHERS = "the plan names other attackers"
MIXING = ("mixup", "instahide")
PICTURE = 3
"""Dimensions of a picture: channels and sides."""
MOST_PRODUCTS = 3e10
"""Products of numbers for one Jacobian of a network by its input up to which a CPU takes a few seconds for it."""
MOST_PRODUCTS_GPU = 3e12
"""The same on a GPU."""
SAYABLE = frozenset({"model", *RecordedPart.model_fields})
"""What a plan can say about captures that do not tell it."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """What is not tested, and why."""

    what: str
    why: str


UNSEEN = Skipped(
    what="the defense of the clients",
    why="a capture on the server cannot show it: noise that clients add, as Flower's LocalDpMod "
    "does, looks like any other update, and the epsilon that is claimed for it is not checked",
)
"""Said of every recording."""


def pointless(
    attack: Attack, name: str, threat: ThreatModel, clients: int, defense: Sequence[DefenseEntry]
) -> Skipped | None:
    """Why a combination is not worth a cell, before anything is simulated."""
    if threat.participates and clients == 1:
        return Skipped(what=threat.name, why="with one client there is no other data to attack")
    if threat.sees == "aggregate" and clients == 1:
        return Skipped(what=f"{threat.name} with one client", why="the aggregate of one client is its own update")
    if "defense" in threat.grants and not defense:
        return Skipped(what=f"{threat.name} without a defense", why="no defense to know")
    sums_only = any(entry.method.sums_only for entry in defense)
    if _takes_sums_apart(attack) and threat.sees == "client" and not sums_only:
        return Skipped(what=f"{name} under {threat.name}", why="it sees every client's own update already")
    tampering = hasattr(attack, "tamper")
    if threat.tampers and not tampering:
        return Skipped(
            what=f"{name} under {threat.name}",
            why="it does not change what clients receive, so honest_but_curious covers it",
        )
    if "defense" in threat.grants and "defense" not in attack.needs | attack.uses:
        return Skipped(what=f"{name} under {threat.name}", why="it does not use knowledge of the defense")
    missing = sorted(attack.needs - threat.grants)
    if missing:
        return Skipped(what=f"{name} under {threat.name}", why=f"it needs to know {' and '.join(missing)}")
    return None


def _takes_sums_apart(attack: Attack) -> bool:
    return isinstance(attack.reduction if isinstance(attack, Then) else attack, Disaggregation)


def repeated(attack: Attack, name: str, threat: ThreatModel, threats: Sequence[ThreatModel]) -> Skipped | None:
    """Whether the attack has the same to go on under another of these threat models, which knows less."""
    for other in threats:
        more = threat.grants - other.grants
        related = threat.name.partition(" ")[0] == other.name and other.grants < threat.grants
        if related and not more & (attack.needs | attack.uses):
            known = " and ".join(sorted(more))
            return Skipped(what=f"{name} under {threat.name}", why=f"it does not use knowledge of {known}")
    return None


def unnamed(plan: Plan) -> list[Skipped]:
    """Attackers and attacks that a plan which names some leaves out."""
    left: list[Skipped] = []
    if plan.grid.threats is not None and plan.captures is None:
        named = {entry.name for entry in plan.grid.threats}
        left.append(Skipped(what=_listed(THREATS, named), why=OTHERS))
    if plan.grid.attacks is not None:
        named = {name for entry in plan.grid.attacks for name in entry.names}
        left.append(Skipped(what=_listed(ATTACKS, named), why="the plan names other attacks"))
    return [each for each in left if each.what]


def _listed(table: Iterable[str], named: Collection[str]) -> str:
    return ", ".join(name for name in table if name not in named)


def default_threats(plan: Plan, probe: Observation, skipped: list[Skipped]) -> tuple[ThreatEntry, ...]:
    """Who is worth testing: the server, honest or not, someone on the line, and where there are sums whoever has them.

    A defense is tested against someone who knows it as well, and batch norm against a server that is sent its running
    statistics along with the model, as most are.
    """
    chosen = [ThreatEntry(name=name) for name in ("honest_but_curious", "eavesdropper", "malicious_server")]
    if any(plan.grid.defenses):
        chosen.append(ThreatEntry(name="honest_but_curious", granting=("defense",)))
    if _normalises(probe):
        chosen.append(ThreatEntry(name="honest_but_curious", granting=("batchnorm_running",)))
    if max(plan.grid.clients) > 1:
        chosen += [ThreatEntry(name="secure_aggregation"), ThreatEntry(name="curious_client")]
    else:
        for name in ("secure_aggregation", "curious_client"):
            skipped.append(Skipped(what=name, why="it needs several clients; set grid.clients"))
    named = {entry.name for entry in chosen}
    for name in THREATS:
        if name not in named and not any(each.what == name for each in skipped):
            skipped.append(Skipped(what=name, why="not tested unless the plan names it"))
    return tuple(chosen)


def default_attacks(
    probe: Observation, plan: Plan, threats: Sequence[ThreatModel], skipped: list[Skipped]
) -> list[AttackEntry]:
    """What may work on this model: closed forms where the input feeds a dense layer, gradient matching elsewhere."""
    reasons = _why_not(probe, plan, tampering=any(threat.tampers for threat in threats))
    for why in dict.fromkeys(filter(None, reasons.values())):
        skipped.append(Skipped(what=", ".join(name for name, reason in reasons.items() if reason == why), why=why))
    chosen = [AttackEntry(name=name) for name, why in reasons.items() if why is None]
    if reasons["dense-inversion"] is None and reasons["disaggregation"] is None:
        chosen.append(AttackEntry(name="disaggregation", then=AttackEntry(name="dense-inversion")))
    return chosen


def _why_not(probe: Observation, plan: Plan, *, tampering: bool) -> dict[str, str | None]:
    """For every attack of the table why it is not chosen; None where it is."""
    circumstances = Circumstances(
        dense_layer_first=_dense_first(probe),
        dense_layer_tells=_dense_first(probe, with_bias=True),
        looks_up=_holds(lambda probe: coded_pass(probe).lookups, probe),
        patches_first=_holds(_patches_first, probe),
        few_places=_holds(_at_few_places, probe),
        few_inner_places=_holds(lambda probe: _spans_tell(probe, _fewest_samples(probe, plan)), probe),
        batchnorm_between=_normalises(probe),
        tampers=tampering,
        mixes=any(entry.name in MIXING for chain in plan.grid.defenses for entry in chain),
        sums_of_rounds=_has_sums(probe, plan),
    )
    reasons: dict[str, str | None] = {}
    for name, make in ATTACKS.items():
        attack = make()
        unknown = probe.model is None or probe.knowledge.input_shape is None  # nobody can say what feeds what
        missing = lacking(attack, probe) if unknown and not isinstance(attack, Disaggregation) else None
        reasons[name] = missing or other_inputs(attack, probe.knowledge) or attack.not_worth(circumstances)
    return reasons


def other_inputs(attack: Attack, known: Knowledge) -> str | None:
    """Why an attack on images is not tried on a model that is fed something else."""
    try:
        check_inputs(attack, known.input_shape, known.input_types)
    except NotApplicable:
        return "the model's input is several tensors, or whole numbers"
    return None


def lacking(attack: Attack, capture: Observation) -> str | None:
    """What an attack needs to know and a capture does not tell, and where that can be said; None where it tells all."""
    missing = sorted(attack.needs - capture.granted())
    if not missing:
        return None
    places = ["model.factory" if name == "model" else "captures.knowledge" for name in missing if name in SAYABLE]
    hint = f"; state it in the plan under {' and '.join(dict.fromkeys(places))}" if len(places) == len(missing) else ""
    return f"the capture does not hold {' and '.join(missing)}{hint}"


def _has_sums(probe: Observation, plan: Plan) -> bool:
    """Whether there are sums of several rounds of one model."""
    federation = plan.federation
    if plan.captures is None:
        several = max(plan.grid.clients) > 1 and federation.rounds > 1
        return several and federation.frozen
    rounds = probe.rounds
    return len(rounds) > 1 and any(round.clients > 1 for round in rounds)


def _normalises(probe: Observation) -> bool:
    """Whether batch norm stands between an update and what is fed to the model."""
    return probe.model is not None and bool(batchnorm_layers(probe.model)) and not _dense_first(probe)


def _at_few_places(probe: Observation) -> bool:
    """Whether the input feeds a trained layer at fewer places than it has units.

    A dense layer with a bias that is fed the input as a whole does not count: dense-inversion reads it.
    """
    first, entries = probe.rounds[0], values_in(probe.knowledge.blank(1))
    for layer in placed_layers(probe):
        operation, places = layer.operation, len(layer.entries)
        divisible = places == 1 and layer.entries.numel() == entries and operation.bias in first.update
        if operation.weight in first.update and not divisible and places <= len(operation.rows(first.params)):
            return True
    return False


def _spans_tell(probe: Observation, samples: int) -> bool:
    """Whether convolutions of a network are fed at so few places that their gradients tell an image, in little time."""
    if _dense_first(probe) or len(probe.knowledge.sample_shape) != PICTURE:
        return False
    values, products = math.prod(probe.knowledge.sample_shape), 0
    equations = 0
    for candidate in network_of(replace(probe, rounds=probe.rounds[:1])).candidates:
        operation = candidate.operation
        rows, features = operation.rows(probe.rounds[0].params).shape
        products += operation.places * rows * features
        if samples * operation.places < min(rows, features):
            equations += operation.places * (features - samples * operation.places)
    most = MOST_PRODUCTS_GPU if devices.pick().type == "cuda" else MOST_PRODUCTS
    return equations > values and values * products <= most


def _fewest_samples(probe: Observation, plan: Plan) -> int:
    """Behind an update; of a capture that does not tell, one."""
    sizes = plan.grid.batch_sizes if plan.captures is None else probe.knowledge.batch_size or 1
    return min(filter(None, sizes), default=1) if isinstance(sizes, tuple) else sizes


def _holds(question: Callable[[Observation], object], probe: Observation) -> bool:
    """Whether the answer is yes; no where the network cannot be looked at."""
    try:
        return bool(question(probe))
    except FedprismError:
        return False


def _dense_first(probe: Observation, *, with_bias: bool = False) -> bool:
    """Whether the input feeds a dense layer that is trained, which closed forms need."""

    def asked(probe: Observation) -> bool:
        update = probe.rounds[0].update
        layer = network_map(probe).fed_by_input(update)
        return layer is not None and (layer.bias in update or not with_bias)

    return _holds(asked, probe)


def _patches_first(probe: Observation) -> bool:
    """Whether the input is cut into patches that a position parameter or an attention layer opens."""
    layer = patch_layer(probe)
    return layer is not None and (layer.position is not None or layer.attention is not None)


def probe_of(materials: Materials) -> Observation:
    """Enough of an observation to look at the network's layers."""
    model = materials.network(0)
    inputs = materials.batch(torch.tensor([0])).inputs
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    sent = {name: torch.zeros_like(tensor) for name, tensor in params.items() if tensor.requires_grad}
    round = Round(params=params, update=sent, buffers_before=buffers or None)
    return Observation(
        model=model, rounds=(round,), knowledge=Knowledge(input_shape=shape_of(inputs), input_types=types_of(inputs))
    )
