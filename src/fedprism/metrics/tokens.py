"""How many of a sample's whole numbers (tokens, categories) came back, in their places or wherever they stand."""

from __future__ import annotations

import torch
from torch import Tensor


def tokens_in_place(reconstruction: Tensor, source: Tensor) -> Tensor:
    """The share of entries that are right where they stand: (N, ...) and (N, ...) -> (N,)."""
    return (reconstruction.flatten(1) == source.flatten(1)).double().mean(1)


def tokens_anywhere(reconstruction: Tensor, source: Tensor) -> Tensor:
    """The share of entries that came back, each as often as it is there, whatever their order: -> (N,)."""
    pairs = zip(reconstruction, source, strict=True)
    shares = [overlap(ours[None], theirs[None])[0, 0] for ours, theirs in pairs]
    return torch.stack(shares) if shares else torch.zeros(0, dtype=torch.float64)


def overlap(reconstructions: Tensor, sources: Tensor) -> Tensor:
    """The share of each source's entries that each reconstruction holds: (N, ...) and (M, ...) -> (N, M)."""
    first, second = reconstructions.flatten(1), sources.flatten(1)
    values, places = torch.unique(torch.cat([first.flatten(), second.flatten()]), return_inverse=True)
    ours, theirs = places[: first.numel()].view(first.shape), places[first.numel() :].view(second.shape)
    in_ours, in_theirs = (_counts(each, len(values)) for each in (ours, theirs))
    common = [torch.minimum(row, in_theirs).sum(1) for row in in_ours]
    empty = torch.zeros(0, len(second), dtype=torch.float64)
    return torch.stack(common).double() / max(1, second.shape[1]) if common else empty


def in_place_matrix(reconstructions: Tensor, sources: Tensor) -> Tensor:
    """The share of entries that are right where they stand: (N, ...) and (M, ...) -> (N, M)."""
    first, second = reconstructions.flatten(1), sources.flatten(1)
    rows = [(row == second).double().mean(1) for row in first]
    return torch.stack(rows) if rows else torch.zeros(0, len(second), dtype=torch.float64)


def _counts(entries: Tensor, values: int) -> Tensor:
    """How often each value is in each row: (N, K) -> (N, values)."""
    return torch.zeros(len(entries), values, dtype=torch.long).scatter_add_(1, entries, torch.ones_like(entries))
