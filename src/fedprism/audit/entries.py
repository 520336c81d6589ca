"""Entries of a plan's grid: methods by name with their settings, checked by building them.

An entry is a word (`"dense-inversion"`) or a table (`{ name = "idlg", iterations = 150 }`). A setting with several
values, `{ name = "prune", ratio = [0.9, 0.99] }`, stands for one entry a value.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedprism import flags
from fedprism.checks import arguments, row, shown
from fedprism.errors import BadInput, FedprismError
from fedprism.naming import nearest

if TYPE_CHECKING:
    from fedprism.attacks import Attack
    from fedprism.client import Protocol
    from fedprism.defenses import Defense
    from fedprism.threats import ThreatModel

MOST_VALUES = 1000
NO_DEFENSE = "none"

Word = Annotated[str, Field(min_length=1, max_length=200)]
LARGEST = 2**53


def _plain_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Scalars and lists of scalars. By hand: a union of types would complain about each of them in turn."""
    found = {}
    for key, value in given.items():
        several = isinstance(value, list | tuple)
        values = tuple(value) if several else (value,)
        if not 1 <= len(values) <= MOST_VALUES:
            raise ValueError(f"1 to {MOST_VALUES} values of {shown(key)}, found {len(values)}")
        for each in values:
            # True is 1 here; what is not finite is not within the range either.
            if not (isinstance(each, int | float) and -LARGEST <= each <= LARGEST) and not (
                isinstance(each, str) and 1 <= len(each) <= 200
            ):
                raise ValueError(
                    f"{shown(key)} to be a number, a word, true, false or a list of them, found {shown(each)}"
                )
        found[key] = values if several else value
    return found


Settings = Annotated[dict[Word, Any], Field(max_length=50), AfterValidator(_plain_settings)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Entry(Strict):
    """A method by name. Whatever else the plan's table says are settings of the method."""

    name: Word = Field(description="the name of a method")
    settings: Settings = Field(default={}, description="numbers, words or lists of them")

    @model_validator(mode="before")
    @classmethod
    def _gathered(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"name": given}
        if not isinstance(given, Mapping):
            raise ValueError(f"a name or a table with a name, found {shown(given)}")
        own = set(cls.model_fields) - {"settings"}
        settings = given.get("settings")
        loose = {key: value for key, value in given.items() if key not in own and key != "settings"}
        if settings is not None and (loose or not isinstance(settings, Mapping)):
            raise ValueError("settings beside the name, found a table of settings too")
        return {**{key: value for key, value in given.items() if key in own}, "settings": settings or loose}

    @model_validator(mode="after")
    def _builds(self) -> Self:
        try:
            if self.combinations > MOST_VALUES:
                raise BadInput(f"expected at most {MOST_VALUES} combinations of settings, found more; leave some out.")
            for each in self.expanded():
                each.make()
        except FedprismError as error:
            raise ValueError(str(error)) from error
        except (TypeError, ArithmeticError, ValueError, AttributeError) as error:
            raise ValueError(f"settings that {self.name} accepts, found {shown(self.settings)} ({error})") from error
        return self

    @property
    def combinations(self) -> int:
        """How many entries it stands for."""
        return math.prod(len(value) for value in self.settings.values() if isinstance(value, tuple))

    def expanded(self) -> Iterator[Self]:
        """One entry for each combination of the settings that have several values."""
        several = {key: value for key, value in self.settings.items() if isinstance(value, tuple)}
        for values in itertools.product(*several.values()):
            chosen = {**self.settings, **dict(zip(several, values, strict=True))}
            yield self.model_copy(update={"settings": chosen})

    def make(self) -> Any:
        raise NotImplementedError

    @property
    def plain(self) -> dict[str, Any]:
        """The settings of an expanded entry, with underscores as Python writes them."""
        return {key.replace("-", "_"): value for key, value in self.settings.items()}


class AttackEntry(Entry):
    then: AttackEntry | None = Field(default=None, description="the attack on each part that this one splits off")

    @property
    def combinations(self) -> int:
        return super().combinations * (self.then.combinations if self.then is not None else 1)

    def expanded(self) -> Iterator[Self]:
        for own in super().expanded():
            for after in self.then.expanded() if self.then is not None else (None,):
                yield own.model_copy(update={"then": after})

    def make(self) -> Attack:
        from fedprism.attacks import ATTACKS, Reduction, then

        attack = configured(row(ATTACKS, self.name, "method of attack")(), self.plain, self.name)
        if self.then is None:
            return attack
        if not isinstance(attack, Reduction):
            raise BadInput(
                f"expected an attack that splits updates before 'then', found {self.name}; use disaggregation, or "
                "leave 'then' out."
            )
        return then(attack, self.then.make())

    @property
    def names(self) -> tuple[str, ...]:
        """Rows of the table that it runs, one after the other."""
        return (self.name, *(self.then.names if self.then is not None else ()))

    @property
    def label(self) -> str:
        return self.name if self.then is None else f"{self.name} then {self.then.label}"


class DefenseEntry(Entry):
    def make(self) -> Defense:
        from fedprism.defenses import DEFENSES

        kind = row(DEFENSES, self.name, "defense")
        return _called(kind, self.plain, f"the defense {self.name}")  # type: ignore[no-any-return]


class ThreatEntry(Strict):
    """A threat model; `granting` and `withholding` change what it knows."""

    name: Word = Field(description="a threat model of `fedprism list threats`")
    granting: tuple[Word, ...] = Field(default=(), description="knowledge that it has as well, such as labels")
    withholding: tuple[Word, ...] = Field(default=(), description="knowledge that it lacks")

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"name": given}
        if not isinstance(given, Mapping):
            raise ValueError(f"a name or a table with a name, found {shown(given)}")
        return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}

    @model_validator(mode="after")
    def _builds(self) -> Self:
        try:
            self.make()
        except FedprismError as error:
            raise ValueError(str(error)) from error
        return self

    def make(self) -> ThreatModel:
        from fedprism.threats import THREATS

        threat = row(THREATS, self.name, "threat model")
        threat = threat.granting(*self.granting) if self.granting else threat
        return threat.withholding(*self.withholding) if self.withholding else threat


class ProtocolEntry(Entry):
    def make(self) -> Protocol:
        from fedprism.client import FedAvg, FedSGD

        kind = row({"fedsgd": FedSGD, "fedavg": FedAvg}, self.name, "protocol")
        made: Protocol = _called(kind, self.plain, f"the protocol {self.name}")
        if not (isinstance(made.lr, int | float) and 0 < made.lr < math.inf):
            raise BadInput(f"expected lr to be a number above 0, found {shown(made.lr)}; 0.1 is common.")
        return made


def _as_chain(given: Any) -> Any:
    """ "none" is the empty chain, one defense a chain of one."""
    if given == NO_DEFENSE:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


ChainEntry = Annotated[tuple[DefenseEntry, ...], Field(max_length=20), BeforeValidator(_as_chain)]


def chains(entries: tuple[DefenseEntry, ...]) -> Iterator[tuple[DefenseEntry, ...]]:
    """One chain for each combination of its defenses' strengths."""
    return itertools.product(*(list(entry.expanded()) for entry in entries))


def made_chain(entries: Iterable[DefenseEntry]) -> Defense:
    from fedprism.defenses import chain

    return chain(*(entry.make() for entry in entries))


def configured(attack: Attack, settings: Mapping[str, Any], name: str) -> Attack:
    """The attack with these fields set: those that are flags of `fedprism attack`, no others."""
    return dataclasses.replace(attack, **_checked(attack, settings, name))  # type: ignore[type-var]


def _checked(method: Any, settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings in the types of the method's scalar fields."""
    kinds = {flag.replace("-", "_"): kind for flag, kind in flags.kinds(method).items()}
    for key in settings:
        if key not in kinds:
            hint = nearest(key, kinds) if kinds else "it has none, so leave it out."
            raise BadInput(f"expected a setting of {name}, found {shown(key)}; {hint}")
    return {key: _converted(value, key, kinds[key]) for key, value in settings.items()}


def _converted(value: Any, key: str, kind: Any) -> Any:
    if issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            words = " or ".join(str(member.value) for member in kind)
            raise BadInput(f"expected {key} to be {words}, found {shown(value)}; use one of these.") from None
    wanted = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        words = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a word")
        raise BadInput(f"expected {key} to be {words}, found {shown(value)}; correct it.")
    return kind(value)


def _called(kind: Any, settings: Mapping[str, Any], owner: str) -> Any:
    """A defense or protocol with these settings; its class alone, not yet an object, tells which there are."""
    bare = kind.__new__(kind)
    return kind(**arguments(kind, _checked(bare, settings, owner), owner))
