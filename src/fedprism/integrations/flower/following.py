"""Follows a run of Flower's message API, SecAgg+ included: what is sent, what comes back, the round that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from flwr.app import Message
from flwr.server.strategy import Strategy as OlderStrategy
from flwr.serverapp.strategy import Strategy

from fedprism.errors import BadInput
from fedprism.integrations.arrays import by_place, named
from fedprism.integrations.facts import MOST_NAME, CentralNoise, RoundFacts
from fedprism.integrations.flower.messages import (
    MODEL_RECORD,
    carried_by,
    examples_of,
    is_training,
    metrics_of,
    round_of,
)
from fedprism.integrations.flower.secagg import SecureRound, Stage, masks_repeat, stage_of
from fedprism.integrations.recording import Recording
from fedprism.integrations.updates import Answer
from fedprism.types import Update


class Following:
    """Whichever wrapper sees them, it hands over the messages of a round: first those that go out, then the replies."""

    def __init__(self, recording: Recording, strategy: object | None = None) -> None:
        self.recording = recording
        self.strategy = strategy
        innermost = wrapped_strategies(strategy)[-1]
        self._weighted_by: str | None = getattr(innermost, "weighted_by_key", None)
        self._model_record: str = getattr(innermost, "arrayrecord_key", MODEL_RECORD)
        self._sent: dict[int, Update] = {}
        """The model that each client was sent in this round; empty where the round is not kept."""
        self._others: dict[str, int] = {}
        """Records beside the model, and how many tensors each holds."""
        self._index = 0
        self._secure: SecureRound | None = None

    def outgoing(self, messages: Sequence[Message], index: int | None = None) -> None:
        """What the server sends; `index` is the number of the round, where it is known."""
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
            self._sent, self._others = {}, {}
        if self._secure is not None:
            self._secure.outgoing(training)
            training = training[:1] if stage == Stage.COLLECT_MASKED_VECTORS else []  # all are sent the same model
        wanted, models = self.recording.wants(self._index), dict[tuple[int, ...], Update]()
        for message in training:
            records = tuple(map(id, message.content.array_records.values()))  # which the messages of a round share
            if records not in models:
                models[records] = self._model_of(message) if wanted else {}
            self._sent[message.metadata.dst_node_id] = models[records]

    def incoming(self, replies: Sequence[Message]) -> None:
        """What comes back."""
        training = [reply for reply in replies if is_training(reply)]
        if self._secure is None:
            if training or self._sent:
                self._finish_plain(training)
            return
        self._secure.incoming(training)
        if self._secure.over:
            self._finish_secure(self._secure)
            self._secure = None

    def _model_of(self, message: Message) -> Update:
        carried = carried_by(message, self.recording.model, self._model_record)
        self._others |= carried.others
        return carried.model

    def _finish_plain(self, replies: Sequence[Message]) -> None:
        sent = {str(node): model for node, model in self._sent.items()}
        answered = {str(reply.metadata.src_node_id): reply for reply in replies}
        good = {name: reply for name, reply in answered.items() if not reply.has_error()}
        broken = {name: reply.error.reason for name, reply in answered.items() if reply.has_error()}
        problems = {name: str(reason or "an error without a reason") for name, reason in broken.items()}
        answers: list[Answer] = []
        for name, reply in good.items() if self.recording.wants(self._index) else ():
            size = examples_of(reply, self._weighted_by)
            try:
                answers.append(Answer((name,), self._model_of(reply), (size,) if size is not None else None))
            except BadInput as error:
                problems[name] = str(error)
        facts = self._facts("plain", tuple(sent), good, problems)
        self.recording.add(facts, sent, answers)

    def _finish_secure(self, secure: SecureRound) -> None:
        answered = {str(node): reply for node, reply in secure.masked.items()}
        gone = [str(node) for node in secure.sampled if node not in secure.masked]
        problems = dict.fromkeys(gone, "dropped out of secure aggregation")
        sizes = [size for reply in answered.values() if (size := examples_of(reply)) is not None]
        mean, answers = secure.mean(), list[Answer]()
        if mean is None:
            problems.update(dict.fromkeys(answered, "its mask did not come off: too few key shares"))
        elif self.recording.wants(self._index):
            arrays = {place: torch.from_numpy(array) for place, array in by_place(mean).items()}
            counted = tuple(sizes) if len(sizes) == len(answered) else None
            try:
                model = named(arrays, self.recording.model)
                answers.append(Answer(tuple(answered), model, counted, reduction="weighted_mean"))
            except BadInput as error:
                problems.update(dict.fromkeys(answered, str(error)))
        facts = self._facts("secagg+", tuple(map(str, secure.sampled)), answered, problems)
        sent = dict.fromkeys(answered, next(iter(self._sent.values()), {}))
        self.recording.add(facts, sent, answers)

    def _facts(
        self, protocol: Any, sampled: tuple[str, ...], answered: Mapping[str, Message], problems: Mapping[str, str]
    ) -> RoundFacts:
        sizes = {name: examples_of(reply, self._weighted_by) for name, reply in answered.items()}
        return RoundFacts(
            index=self._index,
            protocol=protocol,
            sampled=sampled,
            replied=tuple(answered),
            examples={name: size for name, size in sizes.items() if size is not None},
            metrics={name: metrics_of(reply) for name, reply in answered.items()},
            problems={name: reason[:MOST_NAME] for name, reason in problems.items()},
            noise=central_noise(self.strategy),
            masks_repeat=protocol == "secagg+" and masks_repeat(),
            passed_by=self._others,
        )


def wrapped_strategies(strategy: object) -> list[Any]:
    """A strategy, of either API, and those that it wraps, from the outside in."""
    wrappers = [strategy]
    while isinstance(inner := getattr(wrappers[-1], "strategy", None), Strategy | OlderStrategy):
        wrappers.append(inner)
    return wrappers


def central_noise(strategy: object | None) -> CentralNoise | None:
    """How Flower's wrappers for differential privacy, of either API, are set before a round is aggregated."""
    for wrapper in wrapped_strategies(strategy):
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
