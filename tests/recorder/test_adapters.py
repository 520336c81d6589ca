"""The adapters that docs/how-to/record.md gives for APPFL and OpenFL, as written there, on hand-built calls."""

from __future__ import annotations

import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedprism as fp

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "record.md").read_text()
LocalTensor = namedtuple("LocalTensor", ["col_name", "tensor", "weight"])


def written(name: str) -> Any:
    """What the page's block defines under this name."""
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f" {name}" in text]
    assert len([line for line in block.splitlines() if line.strip()]) < 20
    names: dict[str, Any] = {}
    exec(compile(block, "docs/how-to/record.md", "exec"), names)
    return names[name]


def network() -> torch.nn.Module:
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)


def moved(state: dict[str, Any], by: float) -> dict[str, Any]:
    return {name: tensor + by for name, tensor in state.items()}


class Aggregator:
    """As APPFL's: called with states by client, and asked for the model that is sent."""

    def __init__(self) -> None:
        self.state = dict(network().state_dict())
        self.client_sample_size = {"site-1": 3, "site-2": 1}

    def get_parameters(self, **_: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def aggregate(self, local_models: dict[str, dict[str, torch.Tensor]], **_: Any) -> dict[str, torch.Tensor]:
        states = list(local_models.values())
        for name in self.state:
            self.state[name] = torch.stack([state[name] for state in states]).mean(0)
        return self.get_parameters()


def test_an_aggregator_of_appfl_is_recorded(tmp_path: Path) -> None:
    aggregator, plain = Aggregator(), Aggregator()
    recorder = fp.record(tmp_path / "run", model=network(), strict=True)
    written("record_appfl")(recorder, aggregator)
    for _ in range(2):
        sent = aggregator.get_parameters()
        answers = {"site-1": moved(sent, 0.25), "site-2": moved(sent, 0.5)}
        after = aggregator.aggregate(local_models=answers)
        assert all(torch.equal(after[name], tensor) for name, tensor in plain.aggregate(answers).items())
    rounds = fp.captures.load(recorder.folder).rounds
    assert [(seen.index, seen.participants, seen.examples) for seen in rounds] == [
        (index, (site,), (size,)) for index in (1, 2) for site, size in (("site-1", 3), ("site-2", 1))
    ]
    for seen, change in zip(rounds, (0.25, 0.5) * 2, strict=True):
        for update in seen.update.values():
            torch.testing.assert_close(update, torch.full_like(update, change))


class Average:
    """As OpenFL's aggregation functions: called once per tensor."""

    def call(self, local_tensors: list[Any], *_: Any) -> np.ndarray[Any, Any]:
        total = sum(each.weight for each in local_tensors)
        return np.asarray(sum(each.tensor * each.weight for each in local_tensors) / total)


def test_a_function_of_openfl_is_recorded(tmp_path: Path) -> None:
    recorder = fp.record(tmp_path / "run", model=network(), strict=True)
    function = written("RecordedAverage")(recorder, Average(), network())
    state = {name: tensor.numpy() for name, tensor in network().state_dict().items()}
    for number in (0, 1):
        means = {}
        for name in ["accuracy", *state]:  # a metric comes the same way
            sent = state.get(name, np.zeros(1, np.float32))
            local = [LocalTensor("a", sent + np.float32(0.25), 0.5), LocalTensor("b", sent + np.float32(0.75), 0.5)]
            means[name] = function.call(local, iter(()), name, number, ("trained",))
            np.testing.assert_allclose(means[name], sent + 0.5, atol=1e-6)
        state = {name: means[name] for name in state}
    rounds = fp.captures.load(recorder.folder).rounds
    assert [(seen.index, *seen.participants) for seen in rounds] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    for seen, change in zip(rounds, (0.25, 0.75) * 2, strict=True):
        for update in seen.update.values():
            torch.testing.assert_close(update, torch.full_like(update, change), atol=1e-6, rtol=0)
