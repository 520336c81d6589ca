"""What helps and what stops MKOR: convolutions that shift, disguise, dropout, noise on either side, Soteria."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

import fedprism as fp
from fedprism.attacks import Attack, Disguise, Mkor, Reference
from fedprism_papers.mkor import malicious_server as server
from fedprism_papers.mkor.tables_3_and_4 import cifar100_vgg16
from fedprism_papers.shared.base import Announce, Recipe, Row, Settings
from fedprism_papers.shared.cells import attack_cell

SIZE, QUICK_SIZE = 50, 6
DUMPED, QUIET = Mkor(reference=Reference.DUMP_CLASS), Mkor()
READINGS: dict[str, Attack] = {"dump class": DUMPED, "absent class": QUIET}
SOTERIA = (
    "Soteria zeroes gradients of the last dense layer, which MKOR does not read; it is run on the small network alone, "
    "because it differentiates every feature."
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One setting. `change`: fields of the attack; `dropout`: of the dense layers; noises as in `ChosenParameters`."""

    change: Mapping[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    noise: float = 0.0
    parameter_noise: float = 0.0
    scenario: Mapping[str, Any] = field(default_factory=dict)


LINES: dict[str, Line] = {
    "as it is": Line(),
    **{f"{layers} convolutions shift": Line(change={"layers": layers}) for layers in (0, 1, 2)},
    **{
        f"inconspicuous, noise {noise}": Line(change={"disguise": Disguise(noise=noise)})
        for noise in (1e-3, 1e-2, 3e-2)
    },
    "dropout 0.5, one path a class": Line(dropout=0.5, change={"paths": 1}),
    "dropout 0.5, parallel paths": Line(dropout=0.5),
    **{f"gradient noise {noise}": Line(noise=noise) for noise in (0.01, 0.1, 0.5)},
    **{f"parameter noise {noise}": Line(parameter_noise=noise) for noise in (1e-3, 1e-2, 1e-1)},
    "Soteria, 0.8 removed": Line(scenario={"defense": fp.defenses.Soteria(0.8)}),
}


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    victim = server.small_chain(settings) if settings.quick else cifar100_vgg16(settings)
    for name, line in LINES.items():
        if line.scenario and not settings.quick:
            continue
        cell = server.ChosenParameters(
            victim=_with_dropout(victim, line.dropout),
            size=settings.sizes_or((SIZE,), (QUICK_SIZE,))[0],
            batches=settings.batches_or(1),
            noise=line.noise,
            parameter_noise=line.parameter_noise,
            scenario=line.scenario,
        )
        attacks: dict[str, Attack] = {
            reading: replace(attack, **line.change) for reading, attack in READINGS.items() if isinstance(attack, Mkor)
        }
        entries = attack_cell(cell, attacks, settings, announce, name).entries
        yield Row(cell={"data": victim.name, "setting": name, "n": cell.size}, entries=entries, notes=(victim.note,))


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


RECIPE = Recipe(
    name="mkor-limits",
    summary="MKOR: fewer shifting layers, disguise, dropout, noise on gradient and parameters, Soteria",
    citation=f"{server.CITATION}, sections 4.4 and 5",
    shown=server.SHOWN,
    run=run,
    notes=(SOTERIA, server.SCORED),
)
