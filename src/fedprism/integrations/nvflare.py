"""fedprism on an NVFlare server: a filter that records what the server sends and receives into a capture.

    recipe.add_server_output_filter(CaptureFilter("captures/run-1"), tasks=["train"])    # the model that is sent
    recipe.add_server_input_filter(CaptureFilter("captures/run-1"), tasks=["train"])     # what clients send back

It is attached twice because an update is the difference of the two. Nothing that passes through it is changed, and
nothing it does ends the job.
"""

from __future__ import annotations

import threading
from typing import Any

from fedprism.captures.reading import stated_knowledge
from fedprism.errors import BadInput, FedprismError
from fedprism.integrations.arrays import tensors_of
from fedprism.integrations.facts import MOST_NAME, RoundFacts
from fedprism.integrations.recording import Recording
from fedprism.integrations.updates import Answer, check_fits
from fedprism.models.factory import from_factory
from fedprism.types import Update

try:
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.app_constant import AppConstants
except ImportError as missing:
    raise BadInput('NVFlare is not installed. Run: pip install "fedprism[nvflare]"') from missing

SOURCE = "recorded by fedprism on an NVFlare server"
SENT = "fedprism.sent"
"""Under which name the server's context keeps the model that was sent, for the filter on the way back."""


class CaptureFilter(DXOFilter):
    """Writes every client's update as a round of the capture in `folder`; a second job takes a numbered one.

    model: `pkg.module:factory`, to tell buffers from parameters. knowledge: what attacks need to know beside the
    updates, in the words of a plan: `{"input_shape": [1, 28, 28], "loss": "cross_entropy"}`. All are plain values
    because NVFlare writes it into the job's configuration. Weights and differences of weights are recorded.
    """

    def __init__(self, folder: str, model: str | None = None, knowledge: dict[str, Any] | None = None) -> None:
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        self.folder = folder
        self.model = model
        self.knowledge = knowledge
        stated_knowledge(knowledge or {})  # told before the job starts, not in it
        self._recording: Recording | None = None
        self._lock = threading.Lock()  # answers may come at the same time

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> None:
        index = int(shareable.get_header(AppConstants.CURRENT_ROUND) or 0)
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.OUT:
            self._remember(dxo, index, fl_ctx)
            return
        client = str(shareable.get_peer_prop(ReservedKey.IDENTITY_NAME, "unknown"))[:MOST_NAME]
        try:
            with self._lock:
                self._record(dxo, index, client, fl_ctx)
        except Exception as error:  # a filter that fails would block the answer: the run comes first
            self.log_warning(fl_ctx, f"round {index}: the answer of {client} is not recorded: {error}")

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """At the end of the job, wait for the disk: NVFlare ends its processes by force."""
        if event_type == EventType.END_RUN and self._recording is not None:
            self._recording.wait()
        super().handle_event(event_type, fl_ctx)

    def _remember(self, dxo: DXO, index: int, fl_ctx: FLContext) -> None:
        if dxo.data_kind != DataKind.WEIGHTS:
            return
        known = fl_ctx.get_prop(SENT)
        if known is None or known[0] != index:  # the same for all clients of a round
            try:
                tensors = tensors_of(dxo.data)
            except FedprismError as error:
                self.log_warning(fl_ctx, f"round {index}: the model that is sent is not recorded: {error}")
                return
            fl_ctx.set_prop(SENT, (index, tensors), private=True, sticky=True)

    def _record(self, dxo: DXO, index: int, client: str, fl_ctx: FLContext) -> None:
        known_model = fl_ctx.get_prop(SENT)
        if known_model is None or known_model[0] != index:
            raise BadInput(
                f"the model sent in round {index} was not seen. Add the filter to the server's output as well."
            )
        if self._recording is None:
            model = from_factory(self.model, asked_as="model") if self.model is not None else None
            known = stated_knowledge(self.knowledge or {})
            self._recording = Recording(self.folder, model=model, knowledge=known, source=SOURCE)
        before: Update = known_model[1]
        # The two kinds may come in one round, so that the recording is always given weights.
        after: Update = tensors_of(dxo.data)
        if dxo.data_kind == DataKind.WEIGHT_DIFF:
            check_fits(before, after)
            after = {name: before[name].double() + change for name, change in after.items()}
        facts = RoundFacts(index=index, protocol="plain", sampled=(client,), replied=(client,))
        self._recording.add(facts, {client: before}, [Answer((client,), after)])
