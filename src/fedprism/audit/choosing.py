"""What is worth testing, where the plan does not say, and why the rest is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedprism.attacks import ATTACKS, Attack, Disaggregation, Then
from fedprism.attacks.structure import trace
from fedprism.audit.entries import AttackEntry, DefenseEntry, ThreatEntry
from fedprism.audit.materials import Materials
from fedprism.audit.plan import Plan
from fedprism.batchnorm import batchnorm_layers
from fedprism.errors import FedprismError
from fedprism.threats import THREATS, ThreatModel
from fedprism.types import Knowledge, Observation, Round


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """What is not tested, and why."""

    what: str
    why: str


def pointless(
    attack: Attack, name: str, threat: ThreatModel, clients: int, defense: Sequence[DefenseEntry]
) -> Skipped | None:
    """Why a combination is not worth a cell, before anything is simulated."""
    if threat.participates and clients == 1:
        return Skipped(what=threat.name, why="with one client there is nobody else whose data it could attack")
    if threat.sees == "aggregate" and clients == 1:
        return Skipped(what=f"{threat.name} with one client", why="the aggregate of one client is its own update")
    if "defense" in threat.grants and not defense:
        return Skipped(what=f"{threat.name} without a defense", why="there is no defense to know")
    sums_only = any(entry.make().sums_only for entry in defense)
    if _takes_sums_apart(attack) and threat.sees == "client" and not sums_only:
        return Skipped(what=f"{name} under {threat.name}", why="it sees every client's own update already")
    tampering = hasattr(attack, "tamper")
    if threat.tampers and not tampering:
        return Skipped(
            what=f"{name} under {threat.name}",
            why="it does not change what clients receive, so honest_but_curious says it all",
        )
    if "defense" in threat.grants and "defense" not in attack.needs | attack.uses:
        return Skipped(what=f"{name} under {threat.name}", why="it makes no use of knowing the defense")
    missing = sorted(attack.needs - threat.grants)
    if missing:
        return Skipped(what=f"{name} under {threat.name}", why=f"it needs to know {' and '.join(missing)}")
    return None


def _takes_sums_apart(attack: Attack) -> bool:
    return isinstance(attack.reduction if isinstance(attack, Then) else attack, Disaggregation)


def default_threats(plan: Plan, skipped: list[Skipped]) -> tuple[ThreatEntry, ...]:
    """Who is worth testing: the server, honest or not, someone on the line, and where there are sums whoever has them.

    A defense is tested against someone who knows it as well.
    """
    chosen = [ThreatEntry(name=name) for name in ("honest_but_curious", "eavesdropper", "malicious_server")]
    if any(plan.grid.defenses):
        chosen.append(ThreatEntry(name="honest_but_curious", granting=("defense",)))
    if max(plan.grid.clients) > 1:
        chosen += [ThreatEntry(name="secure_aggregation"), ThreatEntry(name="curious_client")]
    else:
        for name in ("secure_aggregation", "curious_client"):
            skipped.append(Skipped(what=name, why="it concerns federations of several clients; set grid.clients"))
    taken = {entry.name for entry in chosen}
    for name in THREATS:
        if name not in taken and not any(each.what == name for each in skipped):
            skipped.append(Skipped(what=name, why="not tested unless the plan names it"))
    return tuple(chosen)


def default_attacks(
    probe: Observation, plan: Plan, threats: Sequence[ThreatModel], skipped: list[Skipped]
) -> list[AttackEntry]:
    """What may work on this model: closed forms where the input feeds a dense layer, gradient matching elsewhere."""
    dense, model = _dense_first(probe), probe.model
    federation = plan.federation
    sums = plan.captures is None and max(plan.grid.clients) > 1 and federation.rounds > 1
    tampering = any(threat.tampers for threat in threats)
    no_dense, no_tampering = "the input feeds no dense layer of this model", "nobody in this plan tampers"
    reasons: dict[str, str | None] = dict.fromkeys(ATTACKS, "not tested unless the plan names them")
    reasons["dense-inversion"] = reasons["cocktail-party"] = None if dense else no_dense
    reasons["inverting-gradients"] = (
        "closed forms apply to this model; a plan may name it all the same" if dense else None
    )
    reasons["bn-infer"] = (
        None
        if model is not None and batchnorm_layers(model) and not dense
        else "no batch-norm layer of this model stands in the way"
    )
    reasons["imprint"] = (None if dense else no_dense) if tampering else no_tampering
    reasons["mkor"] = (
        ("imprint applies to this model; a plan may name it all the same" if dense else None)
        if tampering
        else no_tampering
    )
    reasons["disaggregation"] = (
        None
        if sums and federation.frozen and federation.window is not None
        else "it takes apart sums of several rounds of several clients, which the plan lacks"
    )
    for why in dict.fromkeys(filter(None, reasons.values())):
        names = [name for name, reason in reasons.items() if reason == why and name in ATTACKS]
        skipped += [Skipped(what=", ".join(names), why=why)] if names else []
    chosen = [AttackEntry(name=name) for name, why in reasons.items() if why is None and name in ATTACKS]
    if dense and reasons["disaggregation"] is None:
        chosen.append(AttackEntry(name="disaggregation", then=AttackEntry(name="dense-inversion")))
    return chosen


def _dense_first(probe: Observation) -> bool:
    """Whether the input feeds a dense layer, which closed forms need."""
    try:
        return trace(probe).fed_by_input() is not None
    except FedprismError:
        return False


def probe_of(materials: Materials) -> Observation:
    """Enough of an observation to look at the network's layers."""
    model = materials.network(0)
    shape = tuple(materials.batch(torch.tensor([0])).inputs.shape[1:])
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    seen = Round(params=params, update={}, buffers_before=buffers or None)
    return Observation(model=model, rounds=(seen,), knowledge=Knowledge(input_shape=shape))
