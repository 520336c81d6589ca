"""Follows a run of Flower's older API, whose clients have fit(), through the methods of its strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.common import Code, FitRes, Parameters, parameters_to_ndarrays

from fedprism.errors import BadInput
from fedprism.integrations.arrays import by_place, named, not_numbers, tensor_of
from fedprism.integrations.facts import MOST_NAME, RoundFacts, plain_metrics
from fedprism.integrations.flower.following import central_noise
from fedprism.integrations.flower.messages import MOST_EXAMPLES
from fedprism.integrations.flower.secagg import masks_repeat
from fedprism.integrations.recording import Recording
from fedprism.integrations.updates import Answer
from fedprism.types import Update


class FollowingFit:
    """Is handed what configure_fit returns, then what aggregate_fit is given."""

    def __init__(self, recording: Recording, strategy: object) -> None:
        self.recording = recording
        self.strategy = strategy
        self._sent: dict[str, Update] = {}

    def outgoing(self, instructions: Sequence[tuple[Any, Any]], index: int) -> None:
        """Clients with what each is asked to do."""
        models: dict[int, Update] = {}
        self._sent = {}
        for client, asked in instructions:
            key = id(asked.parameters)  # which the clients of a round share
            if key not in models:
                models[key] = self._model_of(asked.parameters) if self.recording.wants(index) else {}
            self._sent[_name(client)] = models[key]

    def incoming(self, results: Sequence[tuple[Any, FitRes]], failures: Sequence[Any], index: int) -> None:
        """Clients with their answers, and what failed."""
        answered = {_name(client): answer for client, answer in results}
        problems = {
            _name(each[0]): f"{each[1].status.code.name}: {each[1].status.message}"
            for each in failures
            if _is_pair(each)
        }
        problems |= {
            name: f"{answer.status.code.name}: {answer.status.message}"
            for name, answer in answered.items()
            if answer.status.code != Code.OK
        }
        silent = [name for name in self._sent if name not in answered and name not in problems]
        problems |= dict.fromkeys(silent, "no answer")
        sizes = {name: answer.num_examples for name, answer in answered.items()}
        counted = {name: size for name, size in sizes.items() if 1 <= size <= MOST_EXAMPLES}
        # The workflow of SecAgg+ hands every client's answer over with one and the same mean in it.
        secure = len(results) > 1 and len({id(answer.parameters) for answer in answered.values()}) == 1
        answers = self._answers(answered, counted, problems, secure=secure) if self.recording.wants(index) else []
        facts = RoundFacts(
            index=index,
            protocol="secagg+" if secure else "plain",
            sampled=tuple(self._sent),
            replied=tuple(answered),
            examples=counted,
            metrics={name: plain_metrics(answer.metrics or {}) for name, answer in answered.items()},
            problems={name: reason[:MOST_NAME] for name, reason in problems.items()},
            noise=central_noise(self.strategy),
            masks_repeat=secure and masks_repeat(),
        )
        self.recording.add(facts, self._sent, answers)

    def _answers(
        self, answered: dict[str, FitRes], counted: dict[str, int], problems: dict[str, str], *, secure: bool
    ) -> list[Answer]:
        """One of each client, or the one mean of all; what cannot be read goes to the problems."""
        groups = [tuple(answered)] if secure else [(name,) for name in answered if name not in problems]
        answers = []
        for names in groups:
            sizes = tuple(counted[name] for name in names if name in counted)
            try:
                model = self._model_of(answered[names[0]].parameters)
            except BadInput as error:
                problems.update(dict.fromkeys(names, str(error)))
                continue
            reduction: Any = "weighted_mean" if secure else "mean"
            answers.append(Answer(names, model, sizes if len(sizes) == len(names) else None, reduction))
        return answers

    def _model_of(self, parameters: Parameters) -> Update:
        try:
            arrays = parameters_to_ndarrays(parameters)
        except (TypeError, ValueError, EOFError, OSError) as error:
            raise not_numbers(error) from error
        tensors = {place: tensor_of(array) for place, array in by_place(arrays).items()}
        return named(tensors, self.recording.model)


def _name(client: Any) -> str:
    return str(getattr(client, "node_id", None) or client.cid)[:MOST_NAME]


def _is_pair(failure: Any) -> bool:
    return isinstance(failure, tuple) and len(failure) == 2
