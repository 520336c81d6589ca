"""A plan of objects that are there already, instead of one that names them: for `fp.audit`.

The entries of such a plan are called as they would be in a file, and hold the objects. What no file can say stays
possible: models, attacks and defenses of a user's own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from torch import Tensor, nn

from fedprism.attacks import ATTACKS, Attack, Then
from fedprism.audit.entries import AttackEntry, DefenseEntry, Entry, ProtocolEntry, ThreatEntry
from fedprism.audit.materials import Materials, OwnSet, Samples, Setup
from fedprism.audit.plan import DataPart, FederationPart, GridPart, ModelPart, Plan, ScoresPart, UtilityPart
from fedprism.audit.sentences import sentence
from fedprism.client.update import Protocol
from fedprism.defenses import DEFENSES, Defense
from fedprism.errors import BadInput, BadPlan
from fedprism.files.strict import Strict
from fedprism.pixels import Normalization
from fedprism.randomness import generator, seeded_layers
from fedprism.threats import THREATS, ThreatModel
from fedprism.types import Batch

EntryT = TypeVar("EntryT", bound=Entry)
MadeT = TypeVar("MadeT", bound=Strict)
OWN_DATA = "your data"


@dataclass(frozen=True, eq=False, kw_only=True)
class GivenMaterials(Materials):
    """Samples and a model that were handed over."""

    make: Callable[[], nn.Module]

    def new_network(self, seed: int) -> nn.Module:
        with seeded_layers(generator(seed, "weights")):
            model = self.make()
        if not isinstance(model, nn.Module):
            raise BadInput(f"the function must return a torch.nn.Module, not {type(model).__name__}.")
        return model


def setup_of(
    model: nn.Module | Callable[[], nn.Module],
    data: Batch | Samples,
    grid: GridPart,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    normalization: Normalization | None = None,
    scores: Mapping[str, Any],
    utility: bool = False,
    title: str = "",
) -> Setup:
    """The setup of an audit of these objects. A model is copied for each run; a function makes one for each seed."""
    if not isinstance(model, nn.Module) and not callable(model):
        raise BadInput(
            f"the model must be a torch.nn.Module or a function that returns one, not {type(model).__name__}."
        )
    if not isinstance(data, Batch) and not hasattr(data, "batch"):
        raise BadInput(
            f"data cannot be of type {type(data).__name__}. Give fp.Batch(inputs, labels) or a data set "
            "of fp.data.load."
        )
    part = ModelPart.model_construct(training=model.training if isinstance(model, nn.Module) else True)
    materials = GivenMaterials(
        OwnSet(OWN_DATA, data) if isinstance(data, Batch) else data,
        part,
        Path(),
        bounds,
        normalization,
        make=(lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model,
    )
    plan = Plan.model_construct(
        title=title,
        model=part,
        data=DataPart.model_construct(bounds=bounds, normalization=normalization),
        federation=FederationPart(),
        grid=grid,
        scores=_checked(ScoresPart, scores),
        utility=UtilityPart() if utility else None,
    )
    return Setup(plan, Path(), given=materials)


def grid_of(
    *,
    defenses: Sequence[Defense],
    attacks: Sequence[Attack] | None,
    threats: Sequence[ThreatModel] | None,
    protocol: Protocol,
    **varied: Any,
) -> GridPart:
    """The grid of a plan with these objects; every defense is compared with none."""
    entries = {
        "defenses": ((), *(tuple(map(defense_entry, defense.members)) for defense in defenses if defense.members)),
        "attacks": None if attacks is None else tuple(map(attack_entry, attacks)),
        "threats": None if threats is None else tuple(map(threat_entry, threats)),
        "protocols": (_holding(ProtocolEntry, type(protocol).__name__.lower(), _settings(protocol), protocol),),
    }
    return _checked(GridPart, varied).model_copy(update=entries)


def attack_entry(attack: Attack) -> AttackEntry:
    """The entry of an attack, called after the row of the table that it differs least from."""
    if isinstance(attack, Then):
        first, second = attack_entry(attack.reduction), attack_entry(attack.attack)  # type: ignore[arg-type]
        return _with_method(first.model_copy(update={"then": second}), attack)
    alike = {name: row for name, make in ATTACKS.items() if type(row := make()) is type(attack)}
    name = min(alike, key=lambda name: len(_differing(attack, alike[name])), default=attack.name)
    return _holding(AttackEntry, name, _settings(attack, alike.get(name)), attack)


def defense_entry(defense: Defense) -> DefenseEntry:
    name = next((name for name, kind in DEFENSES.items() if kind is type(defense)), type(defense).__name__)
    return _holding(DefenseEntry, name, _settings(defense), defense)


def threat_entry(threat: ThreatModel) -> ThreatEntry:
    base = THREATS.get(threat.name.partition(" ")[0], threat)
    more, less = (tuple(sorted(names)) for names in (threat.grants - base.grants, base.grants - threat.grants))
    entry = ThreatEntry.model_construct(name=base.name, granting=more, withholding=less)
    return _with_method(entry, threat)


def _holding(kind: type[EntryT], name: str, settings: Mapping[str, Any], method: object) -> EntryT:
    return _with_method(kind.model_construct(name=name, settings=dict(settings)), method)


def _with_method(entry: MadeT, method: object) -> MadeT:
    """The entry with the object in the place in which it keeps what it makes of its name and settings."""
    entry.__dict__["method"] = method
    return entry


def _settings(method: object, beside: object | None = None) -> dict[str, Any]:
    """Numbers and words of a method that differ from those of another, or from the defaults: what its name shows."""
    differing = _differing(method, beside).items()
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in differing}
    return {name: value for name, value in plain.items() if isinstance(value, int | float | str)}


def _differing(method: Any, beside: object | None) -> dict[str, Any]:
    """Fields that differ from those of another method, or from the defaults."""
    fields = {field.name: field.default if beside is None else getattr(beside, field.name) for field in _fields(method)}
    values = {name: getattr(method, name) for name in fields}
    return {name: value for name, value in values.items() if isinstance(value, Tensor) or value != fields[name]}


def _fields(method: object) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()


PartT = TypeVar("PartT", GridPart, ScoresPart)


def _checked(part: type[PartT], given: Mapping[str, Any]) -> PartT:
    """A part of a plan, with sequences as tuples."""
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
        for name, value in given.items()
    }
    try:
        return part(**plain)
    except ValidationError as error:
        raise BadPlan(sentence(error, part)) from error
