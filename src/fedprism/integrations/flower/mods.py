"""Client mods: what a client does to its update before it leaves, and to a model before it trains on it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.common.constant import ErrorCode
from torch import nn

from fedprism.defenses.base import Context as Where
from fedprism.defenses.base import Defense
from fedprism.errors import BadInput, FedprismError
from fedprism.inspection import inspect
from fedprism.integrations.about_recording import REFUSAL
from fedprism.integrations.flower.messages import array_of, is_training, model_in, ordered, round_of, tensors_in
from fedprism.integrations.updates import check_fits
from fedprism.randomness import generator
from fedprism.types import Update

log = logging.getLogger("fedprism")

REFERENCE = "fedprism.reference"
"""Where a client's state keeps the model of the round before."""

OTHER_STAGES = ("on_draw", "on_batch", "on_loss", "on_examples", "on_aggregate")


class DefenseMod:
    """Applies a defense to the update that leaves the client: clipping, noise, pruning, quantization, or a chain.

    Give `model` if batch-norm statistics are sent along: they are left as they are. `seed` is for tests only: who knows
    it can subtract the noise.
    """

    def __init__(self, defense: Defense, *, model: nn.Module | None = None, seed: int | None = None) -> None:
        for member in defense.members:
            stages = [name for name in OTHER_STAGES if member.overrides(name)]
            if stages:
                raise BadInput(
                    f"{member!r} acts in {' and '.join(stages)}, not on the update alone. Apply it in the "
                    "client's training."
                )
        self.defense = defense
        self.model = model
        self.seed = seed

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        if not is_training(message) or not message.content.array_records:
            return call_next(message, context)
        try:
            before = model_in(message, self.model)  # first: the app may work in place
        except FedprismError as error:
            return _refusal(message, str(error))
        reply = call_next(message, context)
        if reply.has_error() or not reply.content.array_records:
            return reply
        try:
            after = model_in(reply, self.model)
            check_fits(before, after)
            sent = self._defended(before, after, message)
        except FedprismError as error:
            return _refusal(message, str(error))
        records = reply.content.array_records
        # Places and names agree: tensors are named in the order of the arrays.
        places = [(key, n) for key, record in ordered(records) for n, array in record.items() if array.numpy().size]
        changed = {place: array_of(sent[name]) for name, place in zip(after, places, strict=True) if name in sent}
        for key, record in list(records.items()):
            records[key] = ArrayRecord({n: changed.get((key, n), array) for n, array in record.items()})
        return reply

    def _defended(self, before: Update, after: Update, message: Message) -> Update:
        """What is sent of each tensor that the defense works on."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False)) if self.model is not None else {}
        names = [name for name in after if name not in buffers and after[name].dtype.is_floating_point]
        client, index = str(message.metadata.dst_node_id), round_of(message)
        if self.seed is None:
            rng = torch.Generator()
            rng.seed()
        else:
            rng = generator(self.seed, "flower", client, index)
        update = {name: after[name] - before[name].to(after[name]) for name in names}
        where = Where(model=self.model, params=before, client=client, round=index)
        changed = self.defense.on_update(update, where, rng)
        return {name: before[name].to(after[name]) + changed[name] for name in names}


class InspectionMod:
    """Inspects the model that the client was sent, and refuses to train on one with something serious about it.

    remember: compare with the model of the round before. The server is told which checks refused, nothing else.
    """

    def __init__(self, *, model: nn.Module | None = None, remember: bool = False) -> None:
        self.model = model
        self.remember = remember

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        if not is_training(message) or not message.content.array_records:
            return call_next(message, context)
        try:
            params = model_in(message, self.model)
            inspection = inspect(params, reference=self._reference(context))
        except FedprismError as error:
            return _refusal(message, str(error))
        if inspection.serious:
            for finding in inspection.serious:
                log.warning("refused to train: in %s, %s", finding.tensor or "the model", finding.sentence)
            checks = ", ".join(dict.fromkeys(finding.check for finding in inspection.serious))
            return _refusal(message, REFUSAL.format(checks=checks))
        if self.remember:
            kept = {name: array_of(tensor) for name, tensor in params.items()}
            context.state.array_records[REFERENCE] = ArrayRecord(kept)
        return call_next(message, context)

    def _reference(self, context: Context) -> Update | None:
        record = context.state.array_records.get(REFERENCE) if self.remember else None
        return tensors_in(record) if record else None


def _refusal(message: Message, reason: str) -> Message:
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=message)
