"""What every recorder does, whatever the framework: rounds into a capture, facts and findings beside it, the watch.

Nothing here ends or slows a run: what cannot be recorded becomes a warning and a finding, and a thread writes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from fedprism.captures.growing import CaptureFull, GrowingCapture
from fedprism.captures.layout import with_unsent
from fedprism.captures.untold import in_words, line_to_add, untold
from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.files.publishing import require_writable
from fedprism.integrations.facts import MOST_NAME, RoundFacts
from fedprism.integrations.findings import save_findings
from fedprism.integrations.keeping import GIGABYTE, Keep, size_of
from fedprism.integrations.leakage import LeakageLimit, Watch, length
from fedprism.integrations.updates import HALF_OF_THE_MODEL, UPLINKS, Answer, Sent, Uplink, part_of_model, round_of
from fedprism.types import Knowledge, Round, Update

log = logging.getLogger("fedprism")

MOST_WAITING = 2 * 2**30
"""Bytes of updates that may wait for the disk; a run that is faster than it loses rounds in its recording, not time."""
MOST_TROUBLES = 50
"""Different troubles that are written down; a recorder that fails in each round fails in the same way."""
THREAD = "fedprism-recorder"
NOTHING: Update = {}
"""The model of clients that answer without having been sent any."""
NOT_CHOSEN = "every= or rounds= leaves them out"
FULL = "recording ended before them"
TOO_SLOW = "the disk is slower than the run"


class Recording:
    """A run on its way to disk: a capture, and `findings.json` in its folder.

    model: tells parameters from buffers and names lists of arrays. knowledge: what an attacker on the server knows
    beside the updates. uplink: what clients send back, recognised unless it is stated. keep: which rounds and layers.
    strict: errors of the recorder end the run, and it waits for the disk. Else neither happens. also_known: what an
    audit will be told, though a capture cannot hold it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        knowledge: Knowledge | None = None,
        watch: Watch | None = None,
        source: str = "",
        uplink: Uplink | None = None,
        keep: Keep | None = None,
        strict: bool = False,
        also_known: Collection[str] = (),
    ) -> None:
        if uplink is not None and uplink not in UPLINKS:
            raise BadInput(f"uplink must be {' or '.join(UPLINKS)}, not {shown(uplink)}.")
        self.capture = GrowingCapture(folder, model=model, knowledge=knowledge, source=source)
        self.watch = watch
        self.uplink = uplink
        self.keep = keep or Keep()
        self.strict = strict
        self.troubles: list[str] = []
        self._also_known = frozenset(also_known)
        self._facts: list[RoundFacts] = []
        self._first: int | None = None
        self._over = False
        self._params: Update = dict(model.named_parameters()) if model is not None else {}
        self._buffers = frozenset(dict(model.named_buffers(remove_duplicate=False)) if model is not None else ())
        self._writer: ThreadPoolExecutor | None = None
        self._written: Future[None] | None = None
        self._waiting = 0
        self._lock = threading.Lock()
        try:
            require_writable(Path(folder).absolute().parent)
        except BadInput as error:
            if strict:
                raise
            self.trouble(str(error))
        self._tell_what_is_missing()

    @property
    def model(self) -> nn.Module | None:
        return self.capture.model

    @property
    def missing(self) -> tuple[str, ...]:
        """What attacks will lack, as far as it is known before the run."""
        names = untold(self.capture.knowledge, gradients=self.uplink == "gradient")
        return tuple(name for name in names if name not in self._also_known)

    def _tell_what_is_missing(self) -> None:
        if self.missing:
            log.warning(
                "the capture does not hold %s. If you know it, give the recorder knowledge=, or add under "
                "[captures] in a plan: %s (numbers of examples that clients state are used as batch_size)",
                in_words(self.missing),
                line_to_add(self.missing),
            )

    # --- errors of the recorder ---------------------------------------------------------------------------------------

    @contextmanager
    def guarded(self, doing: str) -> Iterator[None]:
        """Around everything that a recorder does inside a run: an error is noted, and the run goes on.

        Only the limit of the watch, which the user asked for, passes.
        """
        try:
            yield
        except LeakageLimit:
            raise
        except Exception as error:
            if self.strict:
                raise
            self.trouble(f"{doing}: {' '.join(f'{type(error).__name__}: {error}'.split())}")
            if not self._in_thread():  # which writes the findings of its round anyway
                self._submit_job(self._save, "the findings")

    def trouble(self, sentence: str) -> None:
        """Something that could not be recorded: a warning, and a finding in the recording."""
        sentence = sentence[:MOST_NAME]
        with self._lock:
            if sentence in self.troubles or len(self.troubles) >= MOST_TROUBLES:
                return
            self.troubles.append(sentence)
        log.warning("the recorder goes on without something: %s", sentence)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def wants(self, index: int) -> bool:
        """Whether the updates of this round will be looked at: no copies need to be made of others."""
        if self._first is None:
            self._first = index
        return self.watch is not None or (self.keep.wants(index, self._first) and not self._over)

    def add(self, facts: RoundFacts, sent: Mapping[str, Update], answers: Sequence[Answer]) -> None:
        """One round: its facts, the model that each client was sent, and what came back.

        Returns at once; a thread writes. Raises `LeakageLimit` if the watch says so, once all of the round is written.
        """
        with self.guarded(f"round {facts.index}"):
            size = size_of([*sent.values(), *(answer.tensors for answer in answers)])
            why = self._why_not(facts.index, size)
            if why is not None:
                self._submit(facts.model_copy(update={"left_out": why if facts.replied else None}), None, size=0)
                return
            if self.watch is None or not answers:
                self._submit(facts, lambda: self._rounds(facts, sent, answers), size)
                return
            # Not in the thread: attacks draw random numbers and would disturb those of the run.
            watched, rounds = self._rounds(facts, sent, answers)
            leakage = self.watch.look(self._whole(rounds), self.model, self.capture.knowledge)
            watched = watched.model_copy(update={"leakage": leakage})
            self._submit(watched, lambda: (watched, rounds), size)
            if self.watch.stop_above is not None or self.watch.stop_on_findings:
                self.wait()
            self.watch.judge(facts.index, leakage)

    def wait(self) -> None:
        """Until everything is on the disk that was recorded so far."""
        if self._written is not None:
            wait([self._written])  # there is one thread, so that the last is the last

    def _why_not(self, index: int, size: int) -> str | None:
        """Why nothing of this round is looked at; None if it is."""
        if not self.wants(index):
            return FULL if self._over else NOT_CHOSEN
        return TOO_SLOW if not self.strict and 0 < self._waiting > MOST_WAITING - size else None

    def _submit(self, facts: RoundFacts, make: Callable[[], tuple[RoundFacts, list[Round]]] | None, size: int) -> None:
        with self._lock:
            self._waiting += size
        self._submit_job(self._record, facts, make, size)
        if self.strict and self._written is not None:
            self._written.result()

    def _submit_job(self, job: Callable[..., None], *arguments: Any) -> None:
        if self._writer is None:  # made late: whoever imports a server's module starts no thread
            self._writer = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self._written = self._writer.submit(job, *arguments)

    def _in_thread(self) -> bool:
        return threading.current_thread().name.startswith(THREAD)

    def _record(self, facts: RoundFacts, make: Callable[[], tuple[RoundFacts, list[Round]]] | None, size: int) -> None:
        """What the thread does with one round."""
        try:
            with self.guarded(f"round {facts.index}"):
                self.capture.claim()
                if make is not None:
                    facts, rounds = make()
                    facts = facts.model_copy(update=self._write(facts, rounds))
            self._facts.append(facts)
            self._save(f"the findings of round {facts.index}")
        finally:
            with self._lock:
                self._waiting -= size

    def _save(self, doing: str) -> None:
        with self.guarded(doing):
            save_findings(self.capture.claim(), self._facts, self.troubles)

    def _write(self, facts: RoundFacts, rounds: Sequence[Round]) -> dict[str, str]:
        """What the facts say of it. Where a round cannot be written, the recording of updates ends; facts go on."""
        if self._over or not self.keep.wants(facts.index, self._first or 0):  # the watch looks at others, too
            return {"left_out": FULL if self._over else NOT_CHOSEN}
        kept = [dataclasses.replace(round_, update=self.keep.chosen(round_.update)) for round_ in rounds]
        if not all(round_.update for round_ in kept):
            raise BadInput(
                f"no layer of the update is called {' or '.join(self.keep.layers or ())}. They are "
                f"{', '.join(list(rounds[0].update)[:5])} and so on."
            )
        if not kept:
            return {}
        new = size_of([*(round_.params for round_ in kept), *(round_.update for round_ in kept)])
        try:
            if self.capture.bytes + new > self.keep.most_gigabytes * GIGABYTE:
                raise CaptureFull(
                    f"a round takes {new / GIGABYTE:.2g} GB more than the {self.keep.most_gigabytes:g} GB "
                    "allowed. Choose what is kept with every=, rounds= and layers=, or raise most_gigabytes."
                )
            return {"model": self.capture.append(kept)}
        except (CaptureFull, OSError) as error:
            self._over = True
            if self.strict:
                raise
            self.trouble(f"no updates are recorded from round {facts.index} on: {error}")
            return {"left_out": FULL}

    def _rounds(
        self, facts: RoundFacts, sent: Mapping[str, Update], answers: Sequence[Answer]
    ) -> tuple[RoundFacts, list[Round]]:
        """The rounds behind the answers; of those that cannot be recorded the reasons, in the facts."""
        models = {id(state): Sent.of(state, self._buffers) for state in (NOTHING, *sent.values())}
        pairs = [(models[id(sent.get(answer.participants[0], NOTHING))], answer) for answer in answers]
        uplink, problems, rounds = self._recognised(pairs), dict(facts.problems), list[Round]()
        for model, answer in pairs:
            try:
                rounds.append(round_of(model, answer, index=facts.index, uplink=uplink))
            except BadInput as error:
                problems.update(dict.fromkeys(answer.participants, str(error)[:MOST_NAME]))
                name = shown(answer.participants[0])
                log.warning("round %d: the answer of %s is not recorded: %s", facts.index, name, error)
        norms = {r.participants[0]: length(r.update) for r in rounds if r.clients == 1 and r.participants}
        unsent = max((len(self._params.keys() - r.params.keys()) for r in rounds), default=0)
        told = {"uplink": uplink, "problems": problems, "norms": norms, "unsent": unsent}
        return facts.model_copy(update=told), rounds

    def _whole(self, rounds: Sequence[Round]) -> list[Round]:
        """The rounds with those parts of the model that do not travel, which are not written with every round."""
        wholes = {id(r.params): with_unsent(r.params, self._params) for r in rounds}  # one object for all clients
        return [dataclasses.replace(r, params=wholes[id(r.params)]) for r in rounds]

    def _recognised(self, pairs: Sequence[tuple[Sent, Answer]]) -> Uplink:
        """What clients send back, as it was stated or as the first round showed in which it could be told."""
        if self.uplink is None and (part := part_of_model(pairs)) is not None:
            self.uplink = "weights" if part > HALF_OF_THE_MODEL else "difference"
            if self.uplink == "difference":
                log.warning(
                    "clients send differences of weights: %.2f of the model they were sent is in what they "
                    "return, for weights it would be about 1. They are recorded as differences; if this is "
                    'wrong, say uplink="weights"',
                    part,
                )
        return self.uplink or "weights"
