"""Samples of which many entries are looked up in one table: texts."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedprism.attacks.embedding_inversion.answer import UNKNOWN, Answer, LookupStatus
from fedprism.network.lookups import Coded, Lookup
from fedprism.network.network_map import NetworkMap
from fedprism.network.torch_calls import Kind
from fedprism.solvers.closed_form.lookups import Used, counts_of_samples, places_of_rows
from fedprism.types import Observation, Update

UNEXPLAINED = 1e-2
"""Part of the table's gradient that places may leave unexplained: above the rounding of half precision."""


class _Tokens(NamedTuple):
    rows: Tensor
    """(samples, places) numbers of the table's rows."""
    status: LookupStatus
    unknown: tuple[Literal["places", "counts", "samples"], ...] = ()


def read_text(
    observation: Observation, gradient: Update, coded: Coded, lookup: Lookup, used: Used, *, summed: bool
) -> list[Answer]:
    """The tokens, in their places where the gradient of the positions tells them; several readings of other entries.

    summed: whether a row that was used several times has the sum of their gradients, which is what counting needs.
    """
    size, places = observation.knowledge.batch_size, len(lookup.entries)
    samples = size if isinstance(size, int) else None
    tokens = (
        _in_order(gradient, coded.network, lookup, used)
        or (_counted(lookup, used, samples) if summed else None)
        or _unordered(lookup, used, samples)
    )
    known = tokens.rows != UNKNOWN
    return [
        Answer(
            _placed(tokens.rows, lookup, others),
            tokens.status,
            frozenset({"order", *tokens.unknown}),
            (lookup.operation.weight,),
        )
        for others in _other_entries(known, coded.values.shape[1] - places)
    ]


def _padding(lookup: Lookup) -> int:
    """The row that stands where there is no token: it never has a gradient."""
    padding = lookup.operation.settings.get("padding_idx")
    return UNKNOWN if padding is None else int(padding)


def _in_order(gradient: Update, network: NetworkMap, lookup: Lookup, used: Used) -> _Tokens | None:
    """One sample in front of which positions are added: their gradient is the error at every place."""
    added = next(
        (o for o in network.operations if o.kind is Kind.ADDED and network.feeder(o) is lookup.operation), None
    )
    if added is None or added.weight not in gradient:
        return None
    errors = added.part(gradient).flatten(0, -2)
    read = places_of_rows(used.gradients, errors) if len(errors) == len(lookup.entries) else None
    if read is None or read[1] > UNEXPLAINED:
        return None
    rows = used.rows[read[0].clamp_min(0)].where(read[0] >= 0, _padding(lookup))
    return _Tokens(rows[None], LookupStatus.PLACED)


def _counted(lookup: Lookup, used: Used, samples: int | None) -> _Tokens | None:
    """Samples whose places all get the same error."""
    places, padding = len(lookup.entries), _padding(lookup)
    counts = counts_of_samples(used.gradients, places if padding == UNKNOWN else None, samples, used.rounding)
    if counts is None or int(counts.sum(1).max()) > places:
        return None
    texts = [used.rows.repeat_interleave(each) for each in counts]
    rows = torch.stack([pad(text, (0, places - len(text)), value=padding) for text in texts])
    return _Tokens(rows, LookupStatus.COUNTED, ("places",))


def _unordered(lookup: Lookup, used: Used, samples: int | None) -> _Tokens:
    """All tokens in any order; the places that are left over hold padding, where there is such, or repeats."""
    places = len(lookup.entries)
    size = samples or -(-len(used.rows) // places)
    rows = pad(used.rows, (0, size * places - len(used.rows)), value=_padding(lookup))
    return _Tokens(rows.view(size, places), LookupStatus.SET, ("places", "counts", *(("samples",) if size > 1 else ())))


def _placed(rows: Tensor, lookup: Lookup, others: Tensor) -> Tensor:
    """Whole samples: the tokens in their entries, `others` in the rest."""
    samples = torch.empty(len(rows), rows.shape[1] + others.shape[1], dtype=torch.float64)
    rest = torch.ones(samples.shape[1], dtype=torch.bool)
    rest[lookup.entries] = False
    samples[:, lookup.entries] = (rows - lookup.offsets).where(rows != UNKNOWN, UNKNOWN).double()
    samples[:, rest] = others
    return samples


def _other_entries(known: Tensor, count: int) -> list[Tensor]:
    """What may stand in entries that no table reads: a mask of the tokens, ones (a mask, too) or zeros (a segment)."""
    ones = torch.ones(len(known), count, dtype=torch.float64)
    if count == 0:
        return [ones]
    masks = [known.double()] if count == known.shape[1] and not bool(known.all()) else []
    return [*masks, ones, 0 * ones]
