"""What a check is handed and what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fedprism.checks import shown
from fedprism.errors import FedprismError
from fedprism.types import Update

MOST_VALUES = 2**22
"""Values of a layer that are worked on at a time: 16 MiB of float32."""


class Severity(StrEnum):
    """NOTE: worth knowing, and honest models have it too. SERIOUS: not to be trained on before it is explained."""

    NOTE = "note"
    SERIOUS = "serious"


class Suspicious(FedprismError):
    """The model that a client was sent has something serious about it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a check found. `tensor` is where, empty for the whole model; `evidence` are the numbers."""

    check: str
    severity: Severity
    sentence: str
    tensor: str = ""
    evidence: Mapping[str, float] = field(default_factory=dict)


def serious(check: str, tensor: str, sentence: str, evidence: Mapping[str, float]) -> Finding:
    return Finding(check=check, severity=Severity.SERIOUS, tensor=tensor, sentence=sentence, evidence=evidence)


def note(check: str, tensor: str, sentence: str, evidence: Mapping[str, float]) -> Finding:
    return Finding(check=check, severity=Severity.NOTE, tensor=tensor, sentence=sentence, evidence=evidence)


def serious_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.severity is not Severity.SERIOUS))


@dataclass(frozen=True)
class Inspection:
    """All findings on one model, the serious ones first."""

    findings: tuple[Finding, ...]

    @property
    def serious(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity is Severity.SERIOUS)

    def require_clean(self) -> None:
        """Raise `Suspicious` where something is serious: one line in a client's code, before it trains."""
        if self.serious:
            first = self.serious[0]
            where = shown(first.tensor) if first.tensor else "it"
            more = f" (and {len(self.serious) - 1} more findings)" if len(self.serious) > 1 else ""
            raise Suspicious(
                f"signs of tampering in {where}: {first.sentence}{more}. Do not train on this model until the "
                "server has explained that."
            )


class Layer(NamedTuple):
    """A weight as one row an output: (outputs, inputs) of a dense layer, a convolution's with its kernels flattened."""

    name: str
    rows: Tensor
    convolution: bool
    bias_name: str
    bias: Tensor | None
    """(outputs,), where the layer has one."""
    last: bool
    """Whether no dense layer takes as many inputs as this one has outputs: then these are the classes."""

    def lengths(self) -> Tensor:
        return torch.cat([unit_rows(chunk)[1] for chunk in chunks(self.rows)])


def layers(params: Update) -> Iterator[Layer]:
    """The layers of a model, one after the other: of a file that is read lazily, one is in memory at a time.

    Masks, and layers with values that are not finite, are left out; what torch's pruning keeps apart is one layer.
    """
    # A convolution that takes 3 takes the image, and no three classes.
    widths = {tensor.shape[1] for tensor in params.values() if tensor.dim() == 2}
    for name, tensor in _as_used(params):
        if tensor.dim() < 2 or not (tensor.dtype.is_floating_point or tensor.dtype == torch.int8) or not tensor.numel():
            continue
        if is_mask(name, tensor):
            continue
        rows = tensor.detach().flatten(1).float()
        if not all(bool(torch.isfinite(chunk).all()) for chunk in chunks(rows)):
            continue
        bias_name = f"{name.removesuffix('weight')}bias" if name.endswith("weight") else ""
        bias = params.get(bias_name) if bias_name else None
        fits = bias is not None and bias.shape == (len(rows),) and bias.dtype.is_floating_point
        yield Layer(
            name=name,
            rows=rows,
            convolution=tensor.dim() > 2,
            bias_name=bias_name,
            bias=bias.detach().float() if bias is not None and fits and bool(torch.isfinite(bias).all()) else None,
            last=tensor.dim() == 2 and len(rows) not in widths,
        )


def _as_used(params: Update) -> Iterator[tuple[str, Tensor]]:
    """Tensors as the model uses them: torch's pruning stores a weight as `weight_orig` beside `weight_mask`."""
    for name, tensor in params.items():
        stem = name.removesuffix("_orig").removesuffix("_mask")
        original, mask = params.get(f"{stem}_orig"), params.get(f"{stem}_mask")
        if stem == name or original is None or mask is None or original.shape != mask.shape:
            yield name, tensor
        elif name.endswith("_orig"):
            yield stem, original.detach().float() * mask.float()


def is_mask(name: str, tensor: Tensor) -> bool:
    """Whether it says which entries count, of attention for example: zeros and ones, or zeros and minus infinity."""
    if name.endswith("weight") or tensor.dim() < 2:
        return False
    marks = torch.tensor([0.0, 1.0, -torch.inf], device=tensor.device)
    column = tensor.detach().reshape(-1, 1)
    return all(bool(torch.isin(chunk.float(), marks).all()) for chunk in chunks(column))


def chunks(rows: Tensor) -> Iterator[Tensor]:
    """The rows, some at a time: what is computed from a large layer needs little memory beside it."""
    size = max(1, MOST_VALUES // max(1, rows.shape[1]))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows at length 1 and their lengths; rows of zeros stay zeros. Safe for the largest and smallest numbers."""
    largest = rows.abs().amax(1, keepdim=True)
    scaled = rows / largest.clamp(min=torch.finfo(rows.dtype).tiny)
    lengths = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / lengths.clamp(min=1), (lengths.double() * largest).flatten()


def spread_entries(units: Tensor) -> Tensor:
    """Over how many entries each row of length 1 is spread: its participation number, 1 for a row of one entry."""
    return 1 / units.square().square().sum(1).clamp(min=1e-30)
