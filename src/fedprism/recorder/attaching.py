"""The recorder of a federation: made of what the user has, attached to the run, and asked for a report."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.inputs import Inputs
from fedprism.integrations.arrays import by_place, named, tensors_of
from fedprism.integrations.facts import MOST_NAME, RoundFacts
from fedprism.integrations.keeping import Keep
from fedprism.integrations.leakage import Watch
from fedprism.integrations.recording import Recording
from fedprism.integrations.updates import Answer, Uplink
from fedprism.optimizers import knowledge_of
from fedprism.recorder.reporting import audited
from fedprism.recorder.told import inputs_told, loss_told
from fedprism.types import Knowledge, LossFn, Update

log = logging.getLogger("fedprism")
Wrapped = TypeVar("Wrapped")

SOURCE = "recorded by fedprism in a loop of the user's own"


def record(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    sample: Inputs | None = None,
    loss: str | LossFn | nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    knowledge: Knowledge | None = None,
    uplink: Uplink | None = None,
    watch: Watch | None = None,
    every: int = 1,
    rounds: Collection[int] | None = None,
    layers: Collection[str] | None = None,
    most_gigabytes: float = 10.0,
    strict: bool = False,
) -> Recorder:
    """A recorder that writes what the server of a federation sees into a capture.

    A folder that exists already is left alone: the run goes into folder-2, folder-3, and so on.

    model, sample, loss, optimizer: what the training has at hand; shape, loss and steps are read off them. Of the
    sample (a batch of one) only shape and type are kept. knowledge: what else is known, or known better.
    uplink: "weights", "difference" or "gradient", as clients send; recognised unless it is stated (gradients are not).
    watch: checks after each round that log a leakage value and may stop the run.
    every, rounds, layers, most_gigabytes: what is kept, as `integrations.keeping.Keep` says.
    strict: end the run on any error of the recorder, and wait for the disk. Else neither happens.
    """
    keep = Keep(every=every, rounds=rounds, layers=layers, most_gigabytes=most_gigabytes)
    told: dict[str, Any] = {}
    own_loss: LossFn | None = None
    if loss is not None:
        name, function = loss_told(loss)
        told["loss"], own_loss = name, None if name is not None else function
    troubles: list[str] = []
    try:
        told |= inputs_told(sample, model) if sample is not None else {}
    except BadInput as error:
        troubles.append(str(error))
    try:
        told |= knowledge_of(optimizer) if optimizer is not None else {}
    except BadInput as error:
        troubles.append(str(error))
    if strict and troubles:
        raise BadInput(troubles[0])
    if knowledge is not None:
        told |= {name: getattr(knowledge, name) for name in knowledge.granted()}
        told |= {"input_types": knowledge.input_types} if knowledge.input_shape is not None else {}
    recording = Recording(
        folder,
        model=model,
        knowledge=Knowledge(**told),
        watch=watch,
        source=SOURCE,
        uplink=uplink,
        keep=keep,
        strict=strict,
        also_known=("loss",) if own_loss is not None else (),
    )
    for trouble in troubles:
        recording.trouble(trouble)
    return Recorder(recording, own_loss)


class Recorder:
    """Records a run that it is attached to, and audits what it recorded. Made by `fp.record`."""

    def __init__(self, recording: Recording, own_loss: LossFn | None = None) -> None:
        self.recording = recording
        self._own_loss = own_loss
        self._index = 0

    @property
    def folder(self) -> Path:
        """The capture: the folder that was asked for or, once the first round is written, its numbered neighbour."""
        self.recording.wait()
        return self.recording.capture.folder

    @property
    def missing(self) -> tuple[str, ...]:
        """What attacks will want to know and nothing tells."""
        return self.recording.missing

    def wrap(self, what: Wrapped, *, strategy: object | None = None) -> Wrapped:
        """A strategy of Flower, of the message API or the older one, that records; or its grid, below any strategy.

        The strategy that is returned is the given one. Wrap the outermost: wrappers for differential privacy clip what
        clients sent. SecAgg+ is recorded by its grid; `strategy` above it is judged by its differential privacy.
        """
        if importlib.util.find_spec("flwr") is None:
            raise BadInput(
                f"{shown(type(what).__name__)} is neither a strategy nor a grid of Flower, and the package "
                'flwr is not installed. Run pip install "fedprism[flower]", or use recorder.round(sent=..., '
                "received=...) in a loop of your own."
            )
        from fedprism.integrations import flower

        self.recording.capture.source = flower.SOURCE
        wrapped: Wrapped = flower.attached(self.recording, what, strategy)
        return wrapped

    def round(
        self,
        *,
        sent: Any,
        received: Mapping[Any, Any],
        index: int | None = None,
        sampled: Collection[Any] | None = None,
    ) -> None:
        """One round of a loop of one's own: the model that was sent, and what each client sent back.

        sent: a state_dict, a model or a list of arrays. received: by client its state or, as a pair, its state and how
        many examples it trained on; None if it did not answer. A key that is a tuple of clients stands for their mean,
        which is all that a secure aggregation shows; with it goes a tuple of examples. index: the round's number, else
        they are counted from 1. sampled: who was asked, if not all of them answered.
        """
        self._index = index if index is not None else self._index + 1
        with self.recording.guarded(f"round {self._index}"):
            self._round(sent, received, sampled)

    def _round(self, sent: Any, received: Mapping[Any, Any], sampled: Collection[Any] | None) -> None:
        secure = any(isinstance(client, tuple) for client in received)
        wanted, answers, problems = self.recording.wants(self._index), list[Answer](), dict[str, str]()
        examples: dict[str, int] = {}
        model = self._state(sent) if wanted else {}
        for client, answer in received.items():
            names = tuple(str(each)[:MOST_NAME] for each in (client if isinstance(client, tuple) else (client,)))
            state, sizes = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
            if state is None:
                problems |= dict.fromkeys(names, "no answer")
                continue
            counted = tuple(map(int, sizes if isinstance(sizes, tuple | list) else () if sizes is None else (sizes,)))
            examples |= dict(zip(names, counted, strict=False)) if len(counted) == len(names) else {}
            try:
                tensors = self._state(state) if wanted else {}
            except BadInput as error:
                problems |= dict.fromkeys(names, str(error)[:MOST_NAME])
                continue
            reduction: Any = "weighted_mean" if len(names) > 1 else "mean"
            answers.append(Answer(names, tensors, counted or None, reduction))
        replied = tuple(name for answer in answers for name in answer.participants)
        asked = (str(each)[:MOST_NAME] for each in sampled or ())
        facts = RoundFacts(
            index=self._index,
            protocol="secagg+" if secure else "plain",
            sampled=tuple(dict.fromkeys((*asked, *replied, *problems))),
            replied=replied,
            examples={name: size for name, size in examples.items() if size > 0},
            problems=problems,
        )
        self.recording.add(facts, dict.fromkeys(replied, model), answers if wanted else [])

    def _state(self, given: Any) -> Update:
        """Copies of the tensors of a model, a state_dict or a list of arrays."""
        state = given.state_dict() if isinstance(given, nn.Module) else given
        if not isinstance(state, Mapping) and not isinstance(state, list | tuple):
            raise BadInput(f"give a state_dict, a model or a list of arrays, not {shown(type(given).__name__)}.")
        arrays = state if isinstance(state, Mapping) else by_place(state)
        return named(tensors_of(arrays), self.recording.model)

    def report(
        self,
        *,
        folder: str | os.PathLike[str] | None = None,
        attacks: Collection[str] | None = None,
        most_updates: int | None = None,
        show_images: bool = False,
        open_page: bool = True,
    ) -> Path:
        """Audit what was recorded so far, write the report, and open it. Returns the page.

        folder: of the audit; else beside the capture. attacks: by name; else those that apply. most_updates: how many
        updates of a long recording are attacked one by one; the report says which and why. show_images: keep what was
        recovered, which may be private samples, and show it.
        """
        return audited(
            self.folder,
            Path(folder) if folder is not None else None,
            model=self.recording.model,
            loss=self._own_loss,
            attacks=attacks,
            most_updates=most_updates,
            pictures=show_images,
            open_page=open_page,
        )

    def close(self) -> None:
        """Wait until everything is on the disk. The end of the program does so, too."""
        self.recording.wait()
