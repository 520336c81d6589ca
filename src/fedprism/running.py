"""Runs an attack on an observation, handing it only the knowledge it declares."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from fedprism import devices
from fedprism.attacks.base import Attack
from fedprism.attacks.forward import forward_model
from fedprism.errors import BadInput, FedprismError, MissingKnowledge
from fedprism.randomness import generator, seeded_layers
from fedprism.types import Knowledge, Observation, Reconstruction, Round, Update, move


def run(
    attack: Attack, observation: Observation, *, seed: int = 0, device: str | torch.device | None = None
) -> Reconstruction:
    """Run the attack. The observation is not changed; the result lies on the CPU.

    The attack is handed nothing but what it declares in `needs` and `uses`, so `knowledge_used` on the result is true
    by construction. A need that the observation does not grant is a MissingKnowledge.
    """
    missing = attack.needs - observation.granted()
    if missing:
        raise MissingKnowledge(attack.name, min(missing))
    declared = attack.needs | attack.uses
    seen = _placed(observation, declared, devices.pick(device))
    _check_finite(seen)  # in the precision it is attacked in
    rng = generator(seed, "attack")
    with seeded_layers(rng):
        found = attack.run(seen, rng)
    return dataclasses.replace(_to(found, torch.device("cpu")), knowledge_used=declared & observation.granted())


def residual(observation: Observation, reconstruction: Reconstruction) -> float | None:
    """How much of the update the reconstruction leaves unexplained: 0 is all explained, 1 none; None where unknowable.

    It needs no truth: the client's forward model is run on the reconstruction and compared with what was observed.
    """
    inputs, labels = reconstruction.inputs, reconstruction.labels
    if len(observation.rounds) != 1 or inputs is None or labels is None or len(inputs) != len(labels):
        return None
    seen = _placed(observation, frozenset(observation.granted()), torch.device("cpu"))
    try:
        forward = forward_model(seen, seen.rounds[0])
    except FedprismError:
        return None
    explained = forward(inputs, labels, create_graph=False)
    missed = sum(float((e - t).double().square().sum()) for e, t in zip(explained, forward.target, strict=True))
    total = sum(float(t.double().square().sum()) for t in forward.target)
    return (missed / total) ** 0.5 if total > 0 else None


def _check_finite(observation: Observation) -> None:
    for seen in observation.rounds:
        for name, tensor in seen.update.items():
            if not bool(torch.isfinite(tensor).all()):
                raise BadInput(
                    f"expected a finite update, found NaN or infinity in '{name}' of round {seen.index}; "
                    "leave that round out or record it again."
                )


def _placed(observation: Observation, declared: frozenset[str], device: torch.device) -> Observation:
    """A copy with only the declared knowledge, on the device, all floating-point numbers in one precision."""
    double = any(p.dtype == torch.float64 for p in observation.rounds[0].params.values())
    dtype = torch.float64 if double else torch.float32
    model = copy.deepcopy(observation.model) if "model" in declared and observation.model is not None else None
    return dataclasses.replace(
        observation,
        model=model.to(device, dtype) if model is not None else None,
        rounds=_placed_rounds(observation.rounds, device, dtype),
        knowledge=_placed_knowledge(observation.knowledge.restricted_to(declared), device),
        trapdoor=observation.trapdoor if "trapdoor" in declared else None,
    )


def _placed_rounds(rounds: tuple[Round, ...], device: torch.device, dtype: torch.dtype) -> tuple[Round, ...]:
    """Copies of the rounds. What several rounds share, such as the parameters of a frozen model, stays shared."""
    copies: dict[int, Update] = {}

    def moved(update: Update | None) -> Update | None:
        if update is None:
            return None
        if id(update) not in copies:
            copies[id(update)] = move(update, device, dtype)
        return copies[id(update)]

    def placed(seen: Round) -> Round:
        params, update = moved(seen.params), moved(seen.update)
        assert params is not None
        assert update is not None
        before, after = moved(seen.buffers_before), moved(seen.buffers_after)
        return dataclasses.replace(seen, params=params, update=update, buffers_before=before, buffers_after=after)

    return tuple(map(placed, rounds))


def _placed_knowledge(knowledge: Knowledge, device: torch.device) -> Knowledge:
    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return Knowledge(**{name: moved(getattr(knowledge, name)) for name in knowledge.granted()})


def _to(found: Reconstruction, device: torch.device) -> Reconstruction:
    def moved(value: Any) -> Any:
        return value.detach().to(device) if isinstance(value, Tensor) else value

    if found.updates is not None:
        updates = tuple({name: moved(tensor) for name, tensor in update.items()} for update in found.updates)
        found = dataclasses.replace(found, updates=updates)
    return dataclasses.replace(found, **{f.name: moved(getattr(found, f.name)) for f in dataclasses.fields(found)})
