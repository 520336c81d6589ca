"""The limits of MKOR: convolutions that shift, disguises, dropout, noise on either side, clipping, DP-SGD, Soteria."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from torch import nn

import fedprism as fp
from fedprism.attacks import Attack, Disguise, Mkor, Reference
from fedprism.defenses import Chain
from fedprism.inspection import changed_shares
from fedprism.randomness import generator
from fedprism_papers.mkor import malicious_server as server
from fedprism_papers.mkor.vgg16 import CIFAR100, vgg16
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings
from fedprism_papers.shared.cells import attack_cell

SIZE, QUICK_SIZE = 50, 6
DUMP, ABSENT = "dump class", "absent class"
READINGS = {DUMP: Mkor(reference=Reference.DUMP_CLASS), ABSENT: Mkor()}
BETAS = (1.0, 2.0, 3.0)
"""Powers of thirteen convolutions: from 3 on, the logits of VGG-16 leave the dump class's bias far behind."""
LETTER = Disguise(beta=3.0, noise=1e-5, untouched=True, own_paths=True)
"""Less noise than elsewhere, because it reaches the rows of all classes through the weights left as they were."""
SMALL_ALONE = (
    "Soteria and DP-SGD are run on the small network alone: one differentiates every feature, the other keeps every "
    "sample's gradient. Soteria on the last dense layer zeroes what MKOR does not read, on the first what it reads."
)
SHARES = "Where there is a disguise: which share of each layer's weights differs from before, with a dump class."


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting: fields of the attack, a defense of this network, dropout of the dense layers.

    readings: those that it applies to. small: it is too costly for VGG-16.
    """

    attack: Mapping[str, Any] = field(default_factory=dict)
    defense: fp.defenses.Defense | Callable[[nn.Module], fp.defenses.Defense] = Chain()  # noqa: RUF009 (frozen)
    dropout: float = 0.0
    readings: tuple[str, ...] = tuple(READINGS)
    small: bool = False


def first_dense(model: nn.Module) -> str:
    name: str = next(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return name


CHANGES: dict[str, Change] = {
    "as it is": Change(),
    **{f"{layers} convolutions shift": Change(attack={"layers": layers}) for layers in (0, 1, 2)},
    **{f"inconspicuous, noise {std}": Change(attack={"disguise": Disguise(noise=std)}) for std in (1e-3, 1e-2, 3e-2)},
    **{
        f"equation 20, beta {beta:g}": Change(
            attack={"disguise": Disguise(beta=beta, untouched=True)}, readings=(DUMP,)
        )
        for beta in BETAS
    },
    "equations 12 and 20, beta 3": Change(attack={"disguise": LETTER}, readings=(DUMP,)),
    "dropout 0.5, one path a class": Change(dropout=0.5, attack={"paths": 1}),
    "dropout 0.5, parallel paths": Change(dropout=0.5),
    **{
        f"gradient noise {noise}": Change(defense=fp.defenses.GaussianNoise(relative=noise))
        for noise in (0.01, 0.1, 0.5)
    },
    **{f"parameter noise {noise}": Change(attack={"parameter_noise": noise}) for noise in (1e-3, 1e-2, 1e-1)},
    "clipped to 0.001": Change(defense=fp.defenses.Clip(1e-3)),
    **{
        f"DP-SGD, clipped to 1, noise {noise:g}": Change(defense=fp.defenses.DpSgd(noise, clip=1.0), small=True)
        for noise in (0.0, 1e-3, 1e-2, 1e-1)
    },
    "Soteria, 0.8 of the last layer": Change(defense=fp.defenses.Soteria(0.8), small=True),
    "Soteria, 0.5 of the first layer": Change(
        defense=lambda model: fp.defenses.Soteria(0.5, layer=first_dense(model)), small=True
    ),
}


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    original = vgg16(CIFAR100, settings)
    for size, (name, change) in product(settings.sizes_or((SIZE,), (QUICK_SIZE,)), CHANGES.items()):
        line: dict[str, str | int] = {"data": original.name, "setting": name, "n": size}
        if (change.small and not settings.quick) or not settings.wants(line):
            continue
        victim = _with_dropout(original, change.dropout)
        cell = server.ChosenParameters(
            victim=victim,
            size=size,
            batches=settings.batches_or(1),
            scenario={"defense": change.defense(victim.model) if callable(change.defense) else change.defense},
        )
        attacks: dict[str, Attack] = {
            reading: replace(READINGS[reading], **change.attack) for reading in change.readings
        }
        entries = attack_cell(cell, attacks, settings, announce, name).entries
        changed = [f"{name} changes {shares(victim.model, attacks[DUMP])}."] if "disguise" in change.attack else []
        notes = (victim.note, *changed)
        yield Row(cell=line, entries=entries, notes=notes)


def shares(model: nn.Module, attack: Attack) -> str:
    """Which share of each layer's weights an attack changes, in words."""
    assert isinstance(attack, Mkor)
    params = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    sent, _ = attack.tamper(model, params, generator(0, "shares"))
    changed = {name: share for name, share in changed_shares(sent, params).items() if params[name].dim() > 1}
    return ", ".join(f"{share:.1%} of {name}" for name, share in changed.items())


def _with_dropout(victim: server.Victim, dropout: float) -> server.Victim:
    """The victim whose network drops that part of the outputs of every hidden dense layer."""
    if not dropout:
        return victim
    model = copy.deepcopy(victim.model)
    dropped = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    for module in dropped:
        module.p = dropout
    if not dropped:
        layers = list(model.children())
        dense = [number for number, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
        for number in reversed(dense[:-1]):
            layers.insert(number + 2, nn.Dropout(dropout))  # behind the activation
        model = nn.Sequential(*layers)
    return replace(victim, model=model)


LIMITS = Recipe(
    name="mkor-limits",
    summary="MKOR: fewer shifting layers, disguises, dropout, noise, clipping, DP-SGD, Soteria",
    citation=f"{server.CITATION}, sections 3.2.3, 3.4.3, 3.5 and 4",
    shown=server.SHOWN,
    run=run,
    options=("sizes", "batches", "only"),
    notes=(SMALL_ALONE, SHARES, server.SCORED),
)
