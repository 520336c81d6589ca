"""A client mod that keeps what the client trains on, so that the audit of a federation of one's own can be scored."""

from __future__ import annotations

import logging
import os
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context, Message
from torch import Tensor

from fedprism.errors import BadInput, FedprismError
from fedprism.inputs import Inputs
from fedprism.integrations.facts import MOST_NAME
from fedprism.integrations.flower.messages import is_training, round_of
from fedprism.truth import keep_truth
from fedprism.types import Batch

log = logging.getLogger("fedprism")


class _Training(NamedTuple):
    """What is going on while the training function runs."""

    run: str
    client: str
    round: int


_TRAINING: ContextVar[_Training | None] = ContextVar("training", default=None)
"""Not in the mod itself, which simulation engines copy to other processes."""


class TruthMod:
    """Knows which client trains in which round; the training function hands it the batches.

        kept = flower.TruthMod("truth")

        @app.train(mods=[kept])
        def train(message, context):
            ...
            kept.keep(inputs, labels)   # each sample once per round, as the model is fed it

    For federations of test data. Each run has a subfolder, run-NUMBER by Flower's number of the run, on the client's
    machine; collect the files of all clients in one folder and name it beside the capture (`truths` in a plan). Nothing
    of it is sent to the server.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        if not is_training(message):
            return call_next(message, context)
        index = round_of(message)
        if index is None:
            log.warning("the ground truth of a round is not kept: the server's message does not number it")
            return call_next(message, context)
        client, run = str(message.metadata.dst_node_id)[:MOST_NAME], message.metadata.run_id
        before = _TRAINING.set(_Training(f"run-{run}", client, index))
        try:
            return call_next(message, context)
        finally:
            _TRAINING.reset(before)

    def keep(self, inputs: Inputs, labels: Tensor) -> None:
        """Keep a batch of the round that is going on; what cannot be written is a warning, and the training goes on."""
        training = _TRAINING.get()
        if training is None:
            raise BadInput("keep works only in a training function that has this mod. Write @app.train(mods=[...]).")
        try:
            keep_truth(self.folder / training.run, Batch(inputs, labels), client=training.client, round=training.round)
        except (FedprismError, OSError) as error:
            log.warning("the ground truth of round %d is not kept: %s", training.round, error)
