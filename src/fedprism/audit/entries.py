"""Entries of a plan's grid: methods by name with their settings, checked by building them.

An entry is a word (`"dense-inversion"`) or a table (`{ name = "idlg", iterations = 150 }`). A setting with several
values, `{ name = "prune", ratio = [0.9, 0.99] }`, stands for one entry a value.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fedprism.attacks import flags
from fedprism.checks import arguments, row, shown
from fedprism.errors import BadInput, FedprismError
from fedprism.files.strict import Strict
from fedprism.naming import nearest

if TYPE_CHECKING:
    from fedprism.attacks import Attack
    from fedprism.client.update import Protocol
    from fedprism.defenses import CountRelease, Defense
    from fedprism.optimizers import LocalOptimizer
    from fedprism.threats import ThreatModel

MOST_VALUES = 1000
"""Combinations of settings that one entry may stand for: a bound on what a mistyped plan can ask for."""
NO_DEFENSE = "none"

Word = Annotated[str, Field(min_length=1, max_length=200)]
LARGEST = 2**53
"""The largest number in a plan: up to it every whole number is a float."""


def _plain_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Scalars and lists of scalars. By hand: a union of types would complain about each of them in turn."""
    plain = {}
    for key, value in given.items():
        several = isinstance(value, list | tuple)
        values = tuple(value) if several else (value,)
        if not 1 <= len(values) <= MOST_VALUES:
            raise ValueError(f"{shown(key)} needs 1 to {MOST_VALUES} values, not {len(values)}")
        for each in values:
            # True is 1 here; what is not finite is not within the range either.
            if not (isinstance(each, int | float) and -LARGEST <= each <= LARGEST) and not (
                isinstance(each, str) and 1 <= len(each) <= 200
            ):
                raise ValueError(
                    f"{shown(key)} must be a number, a word, true, false or a list of them, not {shown(each)}"
                )
        plain[key] = values if several else value
    return plain


MethodSettings = Annotated[dict[Word, Any], Field(max_length=50), AfterValidator(_plain_settings)]


class Entry(Strict):
    """A method by name. Whatever else the plan's table says are settings of the method."""

    name: Word = Field(description="the name of a method")
    settings: MethodSettings = Field(default={}, description="numbers, words or lists of them")

    @model_validator(mode="before")
    @classmethod
    def _gathered(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"name": given}
        if not isinstance(given, Mapping):
            raise ValueError(f"give a name or a table with a name, not {shown(given)}")
        fields = set(cls.model_fields) - {"settings"}
        settings = given.get("settings")
        loose = {key: value for key, value in given.items() if key not in fields and key != "settings"}
        if settings is not None and (loose or not isinstance(settings, Mapping)):
            raise ValueError("write the settings beside the name or as a table, not both")
        return {**{key: value for key, value in given.items() if key in fields}, "settings": settings or loose}

    @model_validator(mode="after")
    def _builds(self) -> Self:
        try:
            if self.combinations > MOST_VALUES:
                raise BadInput(f"more than {MOST_VALUES} combinations of settings. Leave some values out.")
            for each in self.variants:
                each.method  # noqa: B018 (made here, and kept)
        except FedprismError as error:
            raise ValueError(str(error)) from error
        except (TypeError, ArithmeticError, ValueError, AttributeError) as error:
            raise ValueError(f"{self.name} does not accept the settings {shown(self.settings)} ({error})") from error
        return self

    @property
    def combinations(self) -> int:
        """How many entries it stands for."""
        return math.prod(len(value) for value in self.settings.values() if isinstance(value, tuple))

    @property
    def variants(self) -> tuple[Self, ...]:
        """One entry for each combination of the settings that have several values."""
        return (self,) if self.combinations == 1 else self._several

    @cached_property
    def _several(self) -> tuple[Self, ...]:
        return self._expanded()

    def _expanded(self) -> tuple[Self, ...]:
        several = {key: value for key, value in self.settings.items() if isinstance(value, tuple)}
        chosen = (dict(zip(several, values, strict=True)) for values in itertools.product(*several.values()))
        return tuple(self._changed(settings={**self.settings, **each}) for each in chosen)

    def _changed(self, **fields: Any) -> Self:
        """A copy with other fields; what was made of this entry is not copied."""
        return self.model_construct(**{**dict(self), **fields})

    @cached_property
    def method(self) -> Any:
        """What an entry without several values stands for; made once."""
        raise NotImplementedError

    @property
    def plain(self) -> dict[str, Any]:
        """The settings of an expanded entry, with underscores as Python writes them."""
        return {key.replace("-", "_"): value for key, value in self.settings.items()}


def in_words(settings: Mapping[str, Any]) -> str:
    """Settings as a call shows them."""
    return ", ".join(f"{key}={value}" for key, value in settings.items())


class AttackEntry(Entry):
    then: AttackEntry | None = Field(default=None, description="the attack on each part that this one splits off")

    @property
    def combinations(self) -> int:
        return super().combinations * (self.then.combinations if self.then is not None else 1)

    def _expanded(self) -> tuple[Self, ...]:
        behind = self.then.variants if self.then is not None else (None,)
        return tuple(first._changed(then=after) for first in super()._expanded() for after in behind)

    @cached_property
    def method(self) -> Attack:
        from fedprism.attacks import ATTACKS, Reduction, then

        attack = configured(row(ATTACKS, self.name, "attack")(), self.plain, self.name)
        if self.then is None:
            return attack
        if not isinstance(attack, Reduction):
            raise BadInput(
                f"{self.name} does not split updates, so no attack can follow it. Use disaggregation, or "
                "leave 'then' out."
            )
        return then(attack, self.then.method)

    @property
    def names(self) -> tuple[str, ...]:
        """Rows of the table that it runs, one after the other."""
        return (self.name, *(self.then.names if self.then is not None else ()))

    @property
    def label(self) -> str:
        """As the plan says it, with every setting: idlg(iterations=150)."""
        label = f"{self.name}({in_words(self.settings)})" if self.settings else self.name
        return label if self.then is None else f"{label} then {self.then.label}"


class DefenseEntry(Entry):
    @cached_property
    def method(self) -> Defense:
        from fedprism.defenses import DEFENSES

        kind = row(DEFENSES, self.name, "defense")
        return _called(kind, self.plain, f"the defense {self.name}")  # type: ignore[no-any-return]


class CountsEntry(Entry):
    """How devices report counts: one way, without lists of values."""

    @cached_property
    def method(self) -> CountRelease:
        from fedprism.defenses import COUNT_RELEASES

        if self.combinations > 1:
            raise BadInput("each setting of counts takes one value. Write one plan for each.")
        kind = row(COUNT_RELEASES, self.name, "release of counts")
        return _called(kind, self.plain, f"the release of counts {self.name}")  # type: ignore[no-any-return]


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
            raise ValueError(f"give a name or a table with a name, not {shown(given)}")
        return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}

    @model_validator(mode="after")
    def _builds(self) -> Self:
        try:
            self.method  # noqa: B018 (made here, and kept)
        except FedprismError as error:
            raise ValueError(str(error)) from error
        return self

    @cached_property
    def method(self) -> ThreatModel:
        from fedprism.threats import THREATS

        threat = row(THREATS, self.name, "threat model")
        threat = threat.granting(*self.granting) if self.granting else threat
        return threat.withholding(*self.withholding) if self.withholding else threat


class OptimizerEntry(Entry):
    @cached_property
    def method(self) -> LocalOptimizer:
        from fedprism.optimizers import OPTIMIZERS

        kind = row(OPTIMIZERS, self.name, "local optimizer")
        return _called(kind, self.plain, f"the optimizer {self.name}")  # type: ignore[no-any-return]


class ProtocolEntry(Entry):
    optimizer: OptimizerEntry | None = Field(default=None, description="what clients step with; fedavg's, else sgd")

    @property
    def combinations(self) -> int:
        return super().combinations * (self.optimizer.combinations if self.optimizer is not None else 1)

    def _expanded(self) -> tuple[Self, ...]:
        steps = self.optimizer.variants if self.optimizer is not None else (None,)
        return tuple(first._changed(optimizer=step) for first in super()._expanded() for step in steps)

    @cached_property
    def method(self) -> Protocol:
        from fedprism.client.update import FedAvg, FedSGD

        kind = row({"fedsgd": FedSGD, "fedavg": FedAvg}, self.name, "protocol")
        made: Protocol = _called(kind, self.plain, f"the protocol {self.name}")
        if self.optimizer is not None:
            if not isinstance(made, FedAvg):
                raise BadInput("fedsgd takes no local steps, so it has no optimizer. Use fedavg.")
            made = dataclasses.replace(made, optimizer=self.optimizer.method)
        if not (isinstance(made.lr, int | float) and 0 < made.lr < math.inf):
            raise BadInput(f"lr must be a number above 0, not {shown(made.lr)}. 0.1 is common.")
        return made


def _as_chain(given: Any) -> Any:
    """ "none" is the empty chain, one defense a chain of one."""
    if given == NO_DEFENSE:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


ChainEntry = Annotated[tuple[DefenseEntry, ...], Field(max_length=20), BeforeValidator(_as_chain)]


def chains(entries: tuple[DefenseEntry, ...]) -> Iterator[tuple[DefenseEntry, ...]]:
    """One chain for each combination of its defenses' strengths."""
    return itertools.product(*(entry.variants for entry in entries))


def made_chain(entries: Iterable[DefenseEntry]) -> Defense:
    from fedprism.defenses import chain

    return chain(*(entry.method for entry in entries))


def configured(attack: Attack, settings: Mapping[str, Any], name: str) -> Attack:
    """The attack with these fields set: those that are flags of `fedprism attack`, no others."""
    attack, others = flags.with_choices(attack, settings)
    kinds = {key: setting.kind for key, setting in flags.settings(attack).items()}
    return flags.configured(attack, _checked(kinds, others, name))


def _checked(kinds: Mapping[str, flags.Kind], settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings in the types that they have."""
    for key in settings:
        if key not in kinds:
            hint = nearest(key, kinds) if kinds else "it has none, so leave it out."
            raise BadInput(f"{name} has no setting {shown(key)}; {hint}")
    return {key: flags.converted(value, key, kinds[key]) for key, value in settings.items()}


def _called(kind: Any, settings: Mapping[str, Any], owner: str) -> Any:
    """A defense or protocol with these settings."""
    return kind(**arguments(kind, _checked(flags.scalars(kind), settings, owner), owner))
