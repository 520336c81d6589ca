"""Values in one line: short however much they hold, and nothing is read from a file for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import pytest
import torch

import fedprism as fp
from fedprism.display.words import ShortRepr, short
from fedprism.experiments import Outcome

LONGEST = 1000
"""Letters of one line: a screen holds it."""


@pytest.fixture(scope="module")
def observed() -> tuple[fp.Scenario, fp.Observation, fp.Truth]:
    digits = fp.data.load("digits", size=16)
    clients = [digits.draw(2, seed=seed, unique_labels=True) for seed in range(6)]
    model = fp.models.build("fc2", input_shape=(1, 16, 16), hidden=8, classes=digits.classes, seed=0)
    scenario = fp.Scenario(model=model, clients=clients)
    return scenario, *fp.simulate(scenario, fp.threats.honest_but_curious.granting("labels"), seed=0)


def test_what_flows_through_fedprism_takes_one_line(observed: tuple[fp.Scenario, fp.Observation, fp.Truth]) -> None:
    scenario, observation, truth = observed
    reconstruction = fp.run(fp.attacks.dense_inversion(), observation, seed=0)
    values = [scenario, observation, truth, reconstruction, scenario.clients[0], *observation.rounds]
    values += [observation.knowledge, fp.score(reconstruction, truth), fp.match(reconstruction, truth)]
    for value in values:
        line = repr(value)
        assert len(line) < LONGEST, type(value)
        assert "\n" not in line
        assert line.startswith(f"{type(value).__name__}(")


def test_it_says_what_is_there(observed: tuple[fp.Scenario, fp.Observation, fp.Truth]) -> None:
    scenario, observation, _ = observed
    assert repr(scenario.clients[0]) == "Batch(inputs=float32 (2, 1, 16, 16), labels=int64 (2,))"
    line = repr(observation)
    assert "rounds=(Round(params=4 tensors, update=4 tensors" in line
    assert "5 more" in line
    assert "loss='cross_entropy'" in line
    assert "trapdoor" not in line, "what nobody gave is left out"


def test_an_outcome_takes_one_line() -> None:
    values = {name: tuple(range(64)) for name in ("mse", "psnr", "ssim", "avd", "avd_floor")}
    record = fp.Record(kind="attack", run=dict.fromkeys("abcdefghij", "word " * 20), scores={"values": values})
    outcome = Outcome(
        key="0" * 16,
        description=record.run,
        state="done",
        record=record,
        baselines={"blank": values},
        tensors=b"0" * 10**6,
    )
    assert len(repr(outcome)) < 3 * LONGEST, "twice ten long words"
    assert "tensors=1000000 bytes" in repr(outcome)


class Unread(Mapping[str, torch.Tensor]):
    """Stands for an open file."""

    def __getitem__(self, name: str) -> torch.Tensor:
        raise AssertionError("read")

    def __iter__(self) -> Iterator[str]:
        return iter(("one", "two"))

    def __len__(self) -> int:
        return 2


def test_tensors_in_a_file_are_not_read() -> None:
    assert repr(fp.Round(params=Unread(), update=Unread())) == "Round(params=2 entries, update=2 entries)"


def test_deep_values_end() -> None:
    @dataclasses.dataclass(repr=False)
    class Box(ShortRepr):
        inside: object

    box = Box(1)
    for _ in range(50):
        box = Box(box)
    assert len(repr(box)) < LONGEST


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (torch.tensor(3), "int64 3"),
        (torch.tensor(True), "bool 1"),
        ((), "()"),
        ((1,), "(1,)"),
        ({"b", "a"}, "{'a', 'b'}"),
        (list(range(10)), "[0, 1, 2, 3, 4, 5, 6, 7, 2 more]"),
        ("x" * 100, repr("x" * 77 + "...")),
        (0.1 + 0.2, "0.3"),
        (torch.nn.Linear(2, 2), "Linear"),
    ],
)
def test_each_kind_in_words(value: object, line: str) -> None:
    assert short(value) == line
