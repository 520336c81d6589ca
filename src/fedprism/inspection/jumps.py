"""What changed since a model that the client trusts: training moves all rows a little, tampering replaces some."""

from __future__ import annotations

import torch
from torch import Tensor

from fedprism.inspection.base import Finding, chunks, serious, unit_rows
from fedprism.types import Update

TURNED = 0.3
"""Cosine below which a layer or a row is another one."""
STEADY = 0.9
"""Cosine that the median row keeps where training goes its usual way."""
MOST_TURNED = 0.7
"""Fraction of the rows. One long row that was kept can hide in a layer's cosine that all others were replaced."""
WITHERED = 0.3
"""Length of a row, relative to the median one, below which it may belong to a dead unit."""
EMPTIED = 1e-3
"""What is left of a row's length when it was emptied; decay within a round leaves more."""
FEWEST_VALUES = 64
"""Smaller tensors may turn in one honest round: a bound."""
FEWEST_ROWS = 2
"""Replaced rows among steady ones that it takes: one may be a unit that died."""


def jumps(params: Update, reference: Update) -> list[Finding]:
    """Layers that are there in one model only, have another shape, or have turned away, as a whole or in some rows."""
    one_sided = sorted(params.keys() ^ reference.keys())
    findings = [serious("jumps", name, "it is there in only one of the two models", {}) for name in one_sided]
    for name in params:
        if name not in reference:
            continue
        new, old = params[name], reference[name]
        if new.shape != old.shape:
            sentence = f"it has shape {tuple(new.shape)}, and had {tuple(old.shape)}"
            findings.append(serious("jumps", name, sentence, {}))
        elif new.dim() >= 2 and new.dtype.is_floating_point and old.dtype.is_floating_point:
            findings += _turned(name, new.detach().flatten(1).float(), old.detach().flatten(1).float())
    return findings


def _turned(name: str, new: Tensor, old: Tensor) -> list[Finding]:
    if new.numel() < FEWEST_VALUES or not bool(torch.isfinite(new).all() & torch.isfinite(old).all()):
        return []
    rows = [_compared(*pair) for pair in zip(chunks(new), chunks(old), strict=True)]
    cosines, lengths, old_lengths = (torch.cat(column) for column in zip(*rows, strict=True))
    there = (lengths > 0) & (old_lengths > 0)
    if not bool(there.any()):  # a layer that starts at zero points nowhere
        return []
    scale = torch.linalg.vector_norm(lengths) * torch.linalg.vector_norm(old_lengths)
    whole = float((cosines * lengths * old_lengths).sum() / scale)
    median = float(cosines[there].median())
    away = there & (cosines < TURNED)
    turned, working = int(away.sum()), int((away & _working(lengths) & _working(old_lengths)).sum())
    evidence = {"cosine": whole, "median_row": median, "turned_rows": turned, "rows": len(new)}
    gone = int(((old_lengths > 0) & (lengths <= EMPTIED * old_lengths)).sum())
    if _all_but_few(gone, len(new)):
        sentence = f"{gone} of {len(new)} rows were emptied"
    elif whole < TURNED:
        sentence = f"it has turned away from what it was (cosine {whole:.2f})"
    elif turned > MOST_TURNED * len(new):
        sentence = f"{turned} of {len(new)} rows were replaced"
    elif working >= FEWEST_ROWS and median >= STEADY:
        sentence = f"{working} of {len(new)} rows were replaced, while the others hardly moved"
    else:
        return []
    return [serious("jumps", name, sentence, evidence)]


def _all_but_few(gone: int, rows: int) -> bool:
    """Class fishing leaves one row; pruning of whole units, in one round, leaves more than a quarter."""
    return rows > 1 and rows - max(1, rows // 4) <= gone < rows


def _working(lengths: Tensor) -> Tensor:
    """Rows of a usual length: those of dead units, which weight decay has emptied, point anywhere."""
    return lengths > WITHERED * lengths.median()


def _compared(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines of the rows of two models, and their lengths."""
    (units, lengths), (old_units, old_lengths) = unit_rows(new), unit_rows(old)
    return (units * old_units).sum(1).double(), lengths, old_lengths
