"""Numbers that are not finite: every update computed from them is NaN, and shows which samples met them."""

from __future__ import annotations

import torch

from fedprism.inspection.base import MOST_VALUES, Finding, Severity, is_mask
from fedprism.types import Update


def not_finite(params: Update) -> list[Finding]:
    """NaN, infinity, or values too large for 32 bits, but in masks of attention, which are zeros and minus infinity."""
    found = []
    for name, tensor in params.items():
        if not tensor.dtype.is_floating_point:
            continue
        flat, count = tensor.detach().flatten(), 0
        for start in range(0, len(flat), MOST_VALUES):
            count += int((~torch.isfinite(flat[start : start + MOST_VALUES].float())).sum())
        if count and not is_mask(name, tensor):
            found.append(
                Finding(
                    check="not-finite",
                    severity=Severity.SERIOUS,
                    tensor=name,
                    sentence=f"{count} of {tensor.numel()} values are NaN or infinite",
                    evidence={"values": count, "of": tensor.numel()},
                )
            )
    return found
