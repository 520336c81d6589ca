"""What every recorder does, whatever the framework: rounds into a capture, facts and findings beside it, the watch."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fedprism.captures.growing import CaptureFull, GrowingCapture
from fedprism.checks import shown
from fedprism.errors import BadInput
from fedprism.integrations.facts import RoundFacts
from fedprism.integrations.findings import save_findings
from fedprism.integrations.leakage import Watch, length
from fedprism.types import Knowledge, Reduction, Round, Update

log = logging.getLogger("fedprism")


class Recording:
    """A run on its way to disk: a capture, and `findings.json` in its folder.

    model: tells parameters from buffers. knowledge: what an attacker on the server knows beside the updates.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        knowledge: Knowledge | None = None,
        watch: Watch | None = None,
        source: str = "",
    ) -> None:
        self.capture = GrowingCapture(folder, model=model, knowledge=knowledge, source=source)
        untold = [name for name in ("input_shape", "loss") if getattr(self.capture.knowledge, name) is None]
        if untold:
            log.warning(
                "what is recorded does not tell %s, which attacks need: give knowledge=Knowledge(...) here, or "
                "captures.knowledge in the plan of an audit",
                " and ".join(untold),
            )
        self.watch = watch
        self._facts: list[RoundFacts] = []
        self._full = False
        self._buffers = frozenset(dict(model.named_buffers(remove_duplicate=False)) if model is not None else ())
        self._split: tuple[Update, Update, Update | None] | None = None

    @property
    def model(self) -> nn.Module | None:
        return self.capture.model

    def add(self, facts: RoundFacts, rounds: Sequence[Round]) -> None:
        """One round: its facts and its updates. Raises `LeakageLimit` once all of it is written."""
        changes: dict[str, object] = {}
        if rounds:
            changes["model"] = self._write(rounds)
            changes["norms"] = {
                r.participants[0]: length(r.update) for r in rounds if r.clients == 1 and r.participants
            }
        if self.watch is not None and rounds:
            changes["leakage"] = self.watch.look(rounds, self.model, self.capture.knowledge)
        facts = facts.model_copy(update=changes)
        self._facts.append(facts)
        if self.capture.folder.is_dir() and not self._full:
            try:
                save_findings(self.capture.folder, self._facts)
            except OSError as error:
                log.warning("round %d: the findings are not written: %s", facts.index, error)
        if self.watch is not None and facts.leakage is not None:
            self.watch.judge(facts.index, facts.leakage)

    def _write(self, rounds: Sequence[Round]) -> str | None:
        """The first round must be written; if a later one cannot be, the run goes on and recording ends."""
        if self._full:
            return None
        try:
            return self.capture.append(rounds)
        except (CaptureFull, OSError) as error:
            self._full = True
            log.warning("nothing more is recorded: %s", error)
            return None

    def update_of(
        self,
        before: Update,
        after: Update,
        *,
        index: int,
        participants: Sequence[str],
        examples: Sequence[int] | None = None,
        reduction: Reduction = "mean",
    ) -> Round:
        """The round behind a model before and after; what cannot be recorded is a BadInput."""
        check_fits(before, after)
        trained = [name for name in after if name not in self._buffers]
        buffers_after = {
            name: tensor.to(precision(before[name], tensor)) for name, tensor in after.items() if name in self._buffers
        }
        if not trained:
            raise BadInput("expected the update of at least one parameter, found none; send the trained ones.")
        params, buffers = self._parts(before)
        return Round(
            index=index,
            params=params,
            update={name: difference(after[name], before[name]) for name in trained},
            kind="delta",
            reduction=reduction,
            clients=len(participants),
            participants=tuple(participants),
            examples=tuple(examples) if examples is not None and all(n > 0 for n in examples) else None,
            buffers_before=buffers,
            buffers_after=buffers_after or None,
        )

    def _parts(self, sent: Update) -> tuple[Update, Update | None]:
        """Parameters and buffers of a model that was sent; the same objects for every client that it was sent to."""
        if self._split is None or self._split[0] is not sent:
            buffers = {name: tensor for name, tensor in sent.items() if name in self._buffers}
            params = {name: tensor for name, tensor in sent.items() if name not in self._buffers}
            self._split = sent, params, buffers or None
        return self._split[1:]


def check_fits(before: Update, after: Update) -> None:
    """Whether `after` holds tensors of the model that was sent, in finite numbers."""
    for name, tensor in after.items():
        if name not in before or before[name].shape != tensor.shape:
            problem = f"shape {tuple(tensor.shape)}" if name in before else "no such tensor in it"
            raise BadInput(
                f"expected tensors of the model that was sent, found {problem} for {shown(name)}; leave this one out."
            )
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            raise BadInput(f"expected finite numbers, found NaN or infinity in {shown(name)}; leave this one out.")


def precision(sent: torch.Tensor, received: torch.Tensor) -> torch.dtype:
    """The precision of the model for real numbers; counters stay as they came, averaged ones are no whole numbers."""
    return sent.dtype if sent.dtype.is_floating_point else received.dtype


def difference(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """After minus before, rounded once to the precision of the model."""
    if not before.dtype.is_floating_point:
        return after.to(before.dtype) - before if before.dtype != torch.bool else after.to(before.dtype) ^ before
    return (after.double() - before.double()).to(before.dtype)


def named(arrays: Mapping[str, torch.Tensor], model: nn.Module | None) -> dict[str, torch.Tensor]:
    """Non-empty tensors under their state_dict names; lists of arrays, which have only places, get a model's names."""
    tensors = dict(arrays)
    if list(tensors) == [str(place) for place in range(len(tensors))] and model is not None:
        state = model.state_dict()
        parameters = {name: tensor for name, tensor in state.items() if name in dict(model.named_parameters())}
        shapes = [tensor.shape for tensor in tensors.values()]
        fitting = next((like for like in (state, parameters) if [t.shape for t in like.values()] == shapes), None)
        if fitting is None:
            raise BadInput(
                f"expected the {len(state)} tensors of the model's state_dict in their order, found {len(tensors)} "
                "others; give the recorder the model that is trained."
            )
        tensors = dict(zip(fitting, tensors.values(), strict=True))
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}
