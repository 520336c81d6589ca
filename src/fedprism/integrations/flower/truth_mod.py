"""A client mod that keeps what the client trains on, so that the audit of a federation of one's own can be scored."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from torch import Tensor

from fedprism.errors import BadInput, FedprismError
from fedprism.inputs import Inputs
from fedprism.integrations.facts import MOST_NAME
from fedprism.integrations.flower.messages import is_training, round_of
from fedprism.truth import keep_truth
from fedprism.types import Batch

log = logging.getLogger("fedprism")


class TruthMod:
    """Knows which client trains in which round; the training function hands it the batches.

        kept = flower.TruthMod("truth")

        @app.train(mods=[kept])
        def train(message, context):
            ...
            kept.keep(inputs, labels)   # each sample once per round, as the model is fed it

    For federations of test data. The folder is on the client's machine; collect the files of all clients in one folder
    and name it beside the capture (`truths` in a plan). A new folder for each run. Nothing of it is sent to the server.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._training: ContextVar[tuple[str, int] | None] = ContextVar("training", default=None)

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        if not is_training(message):
            return call_next(message, context)
        index = round_of(message)
        if index is None:
            log.warning("the ground truth of this round is not kept: the server's message does not state the round")
            return call_next(message, context)
        with self._in_round(str(message.metadata.dst_node_id)[:MOST_NAME], index):
            return call_next(message, context)

    def keep(self, inputs: Inputs, labels: Tensor) -> None:
        """Keep a batch of the round that is going on; what cannot be written is a warning, and the training goes on."""
        training = self._training.get()
        if training is None:
            raise BadInput("no training function called this with its mod. Write @app.train(mods=[...]).")
        client, index = training
        try:
            keep_truth(self.folder, Batch(inputs, labels), client=client, round=index)
        except (FedprismError, OSError) as error:
            log.warning("the ground truth of round %d is not kept: %s", index, error)

    @contextmanager
    def _in_round(self, client: str, index: int) -> Iterator[None]:
        before = self._training.set((client, index))
        try:
            yield
        finally:
            self._training.reset(before)
