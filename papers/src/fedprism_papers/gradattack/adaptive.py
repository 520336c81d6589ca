"""Who knows the defense and who does not, for every defense whose work on an update can be repeated.

The paper measures defenses by attackers who do not know them. Table 2 has the same two attackers for its defenses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import fedprism as fp
from fedprism.defenses import Cast, Clip, Defense, Prune, Quantize, SignCompression, Soteria
from fedprism_papers.gradattack import inversion
from fedprism_papers.shared.base import Announce, Entry, Recipe, Row, Settings
from fedprism_papers.shared.measuring import LPIPS, PSNR

SIZES, QUICK_SIZES = (16,), (2,)  # images per batch
QUICK_ITERATIONS = 150  # of a quick attack
NAIVE, ADAPTIVE = "naive", "adaptive"

DEFENSES: tuple[Defense, ...] = (
    fp.chain(),
    Prune(0.9),
    Prune(0.99),
    Soteria(0.5),
    Soteria(0.9),
    Clip(0.1),
    Cast("bfloat16"),
    Quantize(4),
    Quantize(2),
    SignCompression(),
    fp.chain(Prune(0.9), SignCompression()),
)

WHO = (
    f"Both attackers are given labels and exact batch-norm statistics. {NAIVE}: it does not know the defense. "
    f"{ADAPTIVE}: what can be repeated of the defense is inside its own gradients. Pruning is followed from the naive "
    "answer on, for as many iterations again; Soteria's zeros are left out of the comparison; clipping is repeated. "
    "Rounding is not, because it is flat almost everywhere: what was sent is compared before the rounding, so that the "
    "two attackers are one. Of pruned signs it uses how many were sent: it cuts its own gradient where as many entries "
    "are larger."
)


def run(settings: Settings, announce: Announce) -> Iterator[Row]:
    data, sizes = inversion.data_of(settings), settings.sizes_or(SIZES, QUICK_SIZES)
    data.first(max(sizes) * settings.batches_or(1))  # before anything is trained
    target: inversion.Target | None = None
    for defense in DEFENSES:
        for size in sizes:
            if not settings.wants({"defense": repr(defense), "n": size}):
                continue
            target = target or inversion.trained_target(data, settings, announce)
            yield row(replace(target, defense=defense), size, data, settings, announce)


def row(target: inversion.Target, size: int, data: inversion.Data, settings: Settings, announce: Announce) -> Row:
    """One defense before both attackers; without a defense there is nothing to adapt to."""
    images = data.first(size * settings.batches_or(1))
    entries: dict[str, Entry] = {NAIVE: None, ADAPTIVE: None}
    method = inversion.exact_statistics(settings, QUICK_ITERATIONS)
    for name in (NAIVE,) if target.defense == fp.chain() else (NAIVE, ADAPTIVE):
        announce(f"{target.defense!r}, batches of {size}: {name}")
        threat = fp.threats.honest_but_curious.granting("labels", "batchnorm_exact")
        threat = threat.granting("defense") if name == ADAPTIVE else threat
        answers = inversion.invert(method, target, inversion.in_batches(images, size), threat, settings)
        entries[name] = inversion.scored(answers, images, data.normalization, settings, method=method)
    entries[inversion.STRANGERS] = inversion.scored_strangers(data, images, size, settings)
    note = inversion.effort(data, settings, f"{method.iterations:,} iterations")
    return Row(cell={"defense": repr(target.defense), "n": size}, entries=entries, notes=(note,))


RECIPE = Recipe(
    name="gradattack-adaptive",
    summary="Naive and adaptive attackers side by side, for every defense that can be repeated",
    citation=f"{inversion.CITATION}; a study in its form",
    shown=(LPIPS, PSNR),
    run=run,
    options=("sizes", "batches", "iterations", "only"),
    notes=(WHO, inversion.NULL, inversion.LPIPS_NOTE, inversion.ROUNDING),
)
