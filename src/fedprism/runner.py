"""Runs an attack on an observation, handing it only the knowledge it declares."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fedprism.attacks import ATTACKS
from fedprism.attacks.base import Attack, UpdateAttack
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.inputs import InputShape, InputTypes, are_floating, blank_inputs, described, is_single
from fedprism.randomness import generator, seeded_layers
from fedprism.runtime import devices
from fedprism.runtime.progress import showing
from fedprism.types import Knowledge, Observation, Reconstruction, Round, Update, move


def run(
    attack: Attack,
    observation: Observation,
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Reconstruction:
    """Run the attack. The observation is not changed; the result lies on the CPU.

    The attack is handed nothing but what it declares in `needs` and `uses`, so `knowledge_used` on the result is true
    by construction. A need that the observation does not grant is a MissingKnowledge. With `progress`, a bar in the
    notebook or on the terminal shows how far the attack is.
    """
    missing = attack.needs - observation.granted()
    if missing:
        raise MissingKnowledge(attack.name, min(missing))
    check_inputs(attack, observation.knowledge.input_shape, observation.knowledge.input_types)
    declared = attack.needs | attack.uses
    local = placed(observation, declared, devices.pick(device))
    _check_finite(local)  # in the precision it is attacked in
    rng = generator(seed, "attack")
    with seeded_layers(rng), showing(attack.name) if progress else nullcontext():
        reconstruction = attack.run(local, rng)
    on_cpu: Reconstruction = _on_cpu(reconstruction, {})
    return dataclasses.replace(on_cpu, knowledge_used=declared & observation.granted())


def check_inputs(attack: Attack, shape: InputShape | None, types: InputTypes | None) -> None:
    """Refuse an attack on images for a model that is fed something else, and name what reads such inputs."""
    if shape is None or attack.reads_any_inputs or (is_single(shape) and are_floating(types)):
        return
    methods = {name: make() for name, make in ATTACKS.items()}
    readers = [name for name, each in methods.items() if each.reads_any_inputs and isinstance(each, UpdateAttack)]
    fed = described(blank_inputs(shape, types, 1))
    raise NotApplicable(
        f"{attack.name} needs a model with one input tensor of floating-point numbers, not {fed}; "
        f"{'use ' + ' or '.join(readers) if readers else 'no method of the table reads such inputs'}."
    )


def _check_finite(observation: Observation) -> None:
    for round in observation.rounds:
        for name, tensor in round.update.items():
            if not bool(torch.isfinite(tensor).all()):
                raise BadInput(
                    f"'{name}' of round {round.index} holds NaN or infinity. Leave that round out or record it again."
                )


def placed(observation: Observation, declared: frozenset[str], device: torch.device) -> Observation:
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

    mappings = ("params", "update", "buffers_before", "buffers_after")
    return tuple(
        dataclasses.replace(round, **{name: moved(getattr(round, name)) for name in mappings})  # type: ignore[arg-type]
        for round in rounds
    )


def _placed_knowledge(knowledge: Knowledge, device: torch.device) -> Knowledge:
    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return dataclasses.replace(knowledge, **{name: moved(getattr(knowledge, name)) for name in knowledge.granted()})


def _on_cpu(value: Any, copies: dict[int, Any]) -> Any:
    """The same with every tensor on the CPU. What is shared stays shared: `copies` holds mappings by id."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if type(value) is tuple:
        return tuple(_on_cpu(entry, copies) for entry in value)
    if type(value) is dict:
        if id(value) not in copies:
            copies[id(value)] = {name: _on_cpu(entry, copies) for name, entry in value.items()}
        return copies[id(value)]
    if isinstance(value, Reconstruction | Observation | Round | Knowledge):
        if isinstance(value, Observation) and value.model is not None:
            value.model.cpu()  # the attack's own copy
        fields = {field.name: _on_cpu(getattr(value, field.name), copies) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
