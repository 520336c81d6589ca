"""Attaches a recording to a Flower server: to a strategy of either API, or to the grid below everything."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import flwr
from flwr.app import Message
from flwr.server.strategy import Strategy as OlderStrategy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.integrations.flower.following import Following
from fedprism.integrations.flower.following_fit import FollowingFit
from fedprism.integrations.flower.messages import is_training
from fedprism.integrations.recording import Recording

SOURCE = f"recorded by fedprism on a Flower server (flwr {flwr.__version__})"


def attached(recording: Recording, what: Any, strategy: object | None = None) -> Any:
    """The same strategy, which records from now on, or a grid around the given one.

    strategy: the one that runs above a grid, whose differential privacy is judged.
    """
    if isinstance(what, Grid):
        return RecordingGrid(what, Following(recording, strategy))
    if isinstance(what, Strategy | OlderStrategy):
        _attach(recording, what)
        return what
    raise BadInput(
        f"{shown(type(what).__name__)} is neither a strategy nor a grid of Flower. In a loop of your "
        "own use recorder.round(sent=..., received=...)."
    )


def _attach(recording: Recording, strategy: Any) -> None:
    """Its two methods around a round are replaced in this one object; all else stays, whatever its class overrides."""
    of_messages = isinstance(strategy, Strategy)
    ask, take = ("configure_train", "aggregate_train") if of_messages else ("configure_fit", "aggregate_fit")
    asks, takes = getattr(strategy, ask), getattr(strategy, take)
    if hasattr(asks, "asked_without_recorder"):
        raise BadInput("this strategy is already recorded. Wrap it once.")
    following: Any = (Following if of_messages else FollowingFit)(recording, strategy)

    @functools.wraps(asks)
    def asked(server_round: int, *rest: Any, **named: Any) -> list[Any]:
        instructions = list(asks(server_round, *rest, **named))
        with recording.guarded(f"what was sent in round {server_round}"):
            following.outgoing(instructions, server_round)
        return instructions

    # Recorded before the strategy gets to it: wrappers for differential privacy clip the answers in place.
    @functools.wraps(takes)
    def taken(server_round: int, replies: Iterable[Message], *rest: Any, **named: Any) -> Any:
        received = list(replies)
        with recording.guarded(f"the answers of round {server_round}"):
            following.incoming(received)
        return takes(server_round, received, *rest, **named)

    @functools.wraps(takes)
    def taken_of_fit(server_round: int, results: Any, failures: Any, *rest: Any, **named: Any) -> Any:
        with recording.guarded(f"the answers of round {server_round}"):
            following.incoming(results, failures, server_round)
        return takes(server_round, results, failures, *rest, **named)

    def started(*rest: Any, **named: Any) -> Any:
        try:
            return starts(*rest, **named)
        finally:
            recording.wait()  # Flower ends its processes by force a few seconds later

    if of_messages:
        starts = strategy.start
        strategy.start = functools.wraps(starts)(started)
    asked.asked_without_recorder = asks  # type: ignore[attr-defined]
    setattr(strategy, ask, asked)
    setattr(strategy, take, taken if of_messages else taken_of_fit)


@Grid.register
class RecordingGrid:
    """Passes everything on to a grid, and records training rounds: below any strategy or workflow, SecAgg+ included."""

    def __init__(self, grid: Grid, following: Following) -> None:
        self.grid = grid
        self.following = following

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        outgoing = list(messages)
        self._goes_out(outgoing)
        replies = list(self.grid.send_and_receive(outgoing, timeout=timeout))
        if any(map(is_training, outgoing)):
            self._comes_back(replies)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        outgoing = list(messages)
        self._goes_out(outgoing)
        return self.grid.push_messages(outgoing)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(self.grid.pull_messages(message_ids))
        if any(map(is_training, replies)):
            self._comes_back(replies)
        return replies

    def _goes_out(self, messages: list[Message]) -> None:
        with self.following.recording.guarded("what was sent"):
            self.following.outgoing(messages)

    def _comes_back(self, replies: list[Message]) -> None:
        with self.following.recording.guarded("the answers"):
            self.following.incoming(replies)

    def __getattr__(self, name: str) -> Any:
        if name == "grid":  # not set yet: an error in the constructor must not become a recursion
            raise AttributeError(name)
        return getattr(self.grid, name)
