"""Recorders for a Flower server: around a strategy, or below everything around the grid."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import flwr
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.server.strategy import Strategy as OlderStrategy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from fedprism.errors import BadInput
from fedprism.integrations.facts import MOST_NAME, CentralNoise, RoundFacts
from fedprism.integrations.flower.messages import examples_of, is_training, metrics_of, round_of, tensors_of
from fedprism.integrations.flower.secagg import SecureRound, Stage, masks_repeat, stage_of
from fedprism.integrations.leakage import Watch
from fedprism.integrations.recording import Recording, named
from fedprism.types import Knowledge, Round, Update

log = logging.getLogger("fedprism")

SOURCE = f"recorded by fedprism on a Flower server (flwr {flwr.__version__})"


class _Recorder:
    """Follows what is sent and what comes back, whichever wrapper sees it."""

    def __init__(self, recording: Recording, weighted_by: str | None = None) -> None:
        self.recording = recording
        self.weighted_by = weighted_by
        self._sent: dict[int, Update] = {}
        """The model that each client was sent in this round."""
        self._index = 0
        self._secure: SecureRound | None = None

    def outgoing(self, messages: Sequence[Message], index: int | None = None) -> None:
        training = [message for message in messages if is_training(message)]
        if not training:
            if index is not None:
                self._sent = {}  # a round without training
            return
        stage = stage_of(training[0])
        if stage is None or stage == Stage.SETUP:
            if self._secure is not None:
                self._finish_secure(self._secure)  # the round before was given up on the way
            stated = index if index is not None else round_of(training[0])
            self._index = stated if stated is not None else self._index + 1
            self._secure = SecureRound() if stage is not None else None
            self._sent = {}
        if self._secure is not None:
            self._secure.outgoing(training)
            training = training[:1] if stage == Stage.COLLECT_MASKED_VECTORS else []  # all are sent the same model
        models: dict[tuple[int, ...], Update] = {}
        for message in training:
            records = tuple(map(id, message.content.array_records.values()))  # which the messages of a round share
            if records not in models:
                models[records] = tensors_of(message, self.recording.model)
            self._sent[message.metadata.dst_node_id] = models[records]

    def incoming(self, replies: Sequence[Message], noise: CentralNoise | None = None) -> None:
        training = [reply for reply in replies if is_training(reply)]
        if self._secure is None:
            if training or self._sent:
                self._finish_plain(training, noise)
            return
        self._secure.incoming(training)
        if self._secure.over:
            self._finish_secure(self._secure, noise)
            self._secure = None

    def _finish_plain(self, replies: Sequence[Message], noise: CentralNoise | None) -> None:
        answers = {str(reply.metadata.src_node_id): reply for reply in replies}
        good = {name: reply for name, reply in answers.items() if not reply.has_error()}
        broken = {name: reply.error.reason for name, reply in answers.items() if reply.has_error()}
        problems = {name: str(reason or "an error without a reason") for name, reason in broken.items()}
        rounds: list[Round] = []
        for name, reply in good.items():
            size = examples_of(reply, self.weighted_by)
            sizes = (size,) if size is not None else None
            before = self._sent.get(reply.metadata.src_node_id, {})
            try:
                after = tensors_of(reply, self.recording.model)
                rounds.append(
                    self.recording.update_of(before, after, index=self._index, participants=(name,), examples=sizes)
                )
            except BadInput as error:
                problems[name] = str(error)
                log.warning("round %d: the answer of %s is not recorded: %s", self._index, name, error)
        self.recording.add(self._facts("plain", tuple(map(str, self._sent)), good, problems, noise), rounds)

    def _finish_secure(self, secure: SecureRound, noise: CentralNoise | None = None) -> None:
        answers = {str(node): reply for node, reply in secure.masked.items()}
        gone = [str(node) for node in secure.sampled if node not in secure.masked]
        problems = dict.fromkeys(gone, "dropped out of secure aggregation")
        sizes = [examples_of(reply) for reply in answers.values()]
        mean, rounds = secure.mean(), list[Round]()
        if mean is None:
            problems.update(dict.fromkeys(answers, "its mask did not come off: too few key shares"))
        else:
            arrays = {str(place): torch.from_numpy(array) for place, array in enumerate(mean)}
            try:
                round_ = self.recording.update_of(
                    next(iter(self._sent.values())),
                    named(arrays, self.recording.model),
                    index=self._index,
                    participants=tuple(answers),
                    examples=[size for size in sizes if size is not None] if None not in sizes else None,
                    reduction="weighted_mean",
                )
                rounds.append(round_)
            except BadInput as error:
                problems.update({name: str(error) for name in answers})
                log.warning("round %d: the mean is not recorded: %s", self._index, error)
        sampled = tuple(map(str, secure.sampled))
        self.recording.add(self._facts("secagg+", sampled, answers, problems, noise), rounds)

    def _facts(
        self,
        protocol: Any,
        sampled: tuple[str, ...],
        answers: dict[str, Message],
        problems: dict[str, str],
        noise: CentralNoise | None,
    ) -> RoundFacts:
        sizes = {name: examples_of(reply, self.weighted_by) for name, reply in answers.items()}
        return RoundFacts(
            index=self._index,
            protocol=protocol,
            sampled=sampled,
            replied=tuple(answers),
            examples={name: size for name, size in sizes.items() if size is not None},
            metrics={name: metrics_of(reply) for name, reply in answers.items()},
            problems={name: reason[:MOST_NAME] for name, reason in problems.items()},
            noise=noise,
            masks_repeat=protocol == "secagg+" and masks_repeat(),
        )


class RecordingStrategy(Strategy):
    """Does what `strategy` does, and records what the server sent and received.

    Put it around all other wrappers: those for differential privacy clip the answers in place. knowledge: what else is
    known on the server. watch: checks after each round that log a leakage value and may stop the run.
    """

    def __init__(
        self,
        strategy: Strategy,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        knowledge: Knowledge | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__()
        self.strategy = strategy
        recording = Recording(folder, model=model, knowledge=knowledge, watch=watch, source=SOURCE)
        self._recorder = _Recorder(recording, getattr(_chain(strategy)[-1], "weighted_by_key", None))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._recorder.outgoing(messages, server_round)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        received = list(replies)
        self._recorder.incoming(received, _central_noise(self.strategy))
        return self.strategy.aggregate_train(server_round, received)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # not set yet: an error in the constructor must not become a recursion
            raise AttributeError(name)
        return getattr(self.strategy, name)


@Grid.register
class RecordingGrid:
    """Passes everything on to `grid`, and records training rounds: below any strategy or workflow, SecAgg+ included.

    Clients with fit() send lists of arrays: give `model`, whose state_dict names them. strategy: of the older API
    (`flwr.server.strategy`), whose differential privacy is judged. See `RecordingStrategy` for the rest.
    """

    def __init__(
        self,
        grid: Grid,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        knowledge: Knowledge | None = None,
        watch: Watch | None = None,
        strategy: object | None = None,
    ) -> None:
        self.grid = grid
        self.strategy = strategy
        self._recorder = _Recorder(Recording(folder, model=model, knowledge=knowledge, watch=watch, source=SOURCE))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        outgoing = list(messages)
        self._recorder.outgoing(outgoing)
        replies = list(self.grid.send_and_receive(outgoing, timeout=timeout))
        if any(map(is_training, outgoing)):
            self._recorder.incoming(replies, _central_noise(self.strategy))
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        outgoing = list(messages)
        self._recorder.outgoing(outgoing)
        return self.grid.push_messages(outgoing)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(self.grid.pull_messages(message_ids))
        if any(map(is_training, replies)):
            self._recorder.incoming(replies, _central_noise(self.strategy))
        return replies

    def __getattr__(self, name: str) -> Any:
        if name == "grid":
            raise AttributeError(name)
        return getattr(self.grid, name)


def _chain(strategy: object) -> list[Any]:
    """A strategy, of either API, and those that it wraps, from the outside in."""
    wrappers = [strategy]
    while isinstance(inner := getattr(wrappers[-1], "strategy", None), Strategy | OlderStrategy):
        wrappers.append(inner)
    return wrappers


def _central_noise(strategy: object | None) -> CentralNoise | None:
    """How Flower's wrappers for differential privacy, of either API, are set before a round is aggregated."""
    for wrapper in _chain(strategy):
        deprecated = hasattr(wrapper, "clip_norm")
        norm = "clip_norm" if deprecated else "clipping_norm"
        if all(hasattr(wrapper, name) for name in (norm, "noise_multiplier", "num_sampled_clients")):
            return CentralNoise(
                clipped_by="server" if "ServerSide" in type(wrapper).__name__ else "client",
                clipping_norm=float(getattr(wrapper, norm)),
                noise_multiplier=float(wrapper.noise_multiplier),
                clients=int(wrapper.num_sampled_clients),
                added_to="updates" if deprecated else "mean",
            )
    return None
