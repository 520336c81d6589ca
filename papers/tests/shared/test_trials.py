"""Trials of a recipe: the same whether one or several run at a time, and none of them twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fedprism.errors import FedprismError
from fedprism_papers import Recipe, Row, Settings
from fedprism_papers.shared import report
from fedprism_papers.shared.base import Announce
from fedprism_papers.shared.trials import ResultStore, StoredResult, Trial, run_trials


@dataclass(frozen=True)
class Counted(Trial):
    """Squares its number, and leaves a trace of having been asked."""

    number: int
    traces: Path

    @property
    def title(self) -> str:
        return f"number {self.number}"

    def run(self, settings: Settings) -> StoredResult:
        if self.number < 0:
            raise ValueError("a number below zero")
        with (self.traces / str(self.number)).open("a") as file:
            file.write("asked\n")
        return StoredResult({"square": self.number**2}, {"noise": torch.full((2,), settings.seed + 0.5).double()})


def asked(traces: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in traces.iterdir())


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_every_part_is_made_and_only_once(workers: int | None, tmp_path: Path) -> None:
    traces, said = tmp_path / "traces", list[str]()
    traces.mkdir()
    parts = [Counted(number, traces) for number in (3, 1, 2)]
    settings = Settings(seed=7, workers=workers, finished=tmp_path / "finished")
    first = dict(run_trials(parts, settings, said.append))
    assert {part: made.values["square"] for part, made in first.items()} == dict(zip(parts, (9, 1, 4), strict=True))
    assert all(torch.equal(made.tensors["noise"], torch.full((2,), 7.5).double()) for made in first.values())
    assert any("number 2" in words for words in said)
    again = dict(run_trials(parts, settings, said.append))
    assert {part: made.values for part, made in again.items()} == {part: made.values for part, made in first.items()}
    assert asked(traces) == 3, "what is finished is not computed again"
    assert dict(run_trials(parts, replace(settings, seed=8), said.append))[parts[0]].tensors["noise"][0] == 8.5


def test_a_part_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedprismError, match="number -1: the task raised ValueError: a number below zero"):
        list(run_trials([Counted(-1, tmp_path)], Settings(workers=2), lambda doing: None))


def test_a_stopped_run_goes_on_and_a_complete_one_leaves_nothing_to_go_on_from(tmp_path: Path) -> None:
    parts = [Counted(number, tmp_path) for number in (1, 2)]

    def run(settings: Settings, announce: Announce, *, stopping: bool) -> Iterator[Row]:
        for part, made in run_trials(parts, settings, announce):
            if stopping and part == parts[1]:
                raise KeyboardInterrupt
            yield Row(cell={"part": part.title}, entries={"square": made.values["square"]})

    def recipe(*, stopping: bool) -> Recipe:
        return Recipe(name="r", summary="s", citation="c", shown=(), run=partial(run, stopping=stopping))

    folder, traces = tmp_path / "out", tmp_path
    with pytest.raises(KeyboardInterrupt):
        report.carry_out(recipe(stopping=True), Settings(), folder, print)
    (folder / "finished" / "mine.txt").write_text("somebody else's")
    for times in (1, 2):
        report.carry_out(recipe(stopping=False), Settings(), folder, print)
        assert [(traces / name).read_text().count("asked") for name in "12"] == [times, times]
    assert [path.name for path in (folder / "finished").iterdir()] == ["mine.txt"]


@dataclass(frozen=True)
class Large(Trial):
    """Fits only where nothing else runs."""

    error: Exception

    title = "large"  # type: ignore[assignment]

    def run(self, settings: Settings) -> StoredResult:
        if settings.workers:
            raise self.error
        return StoredResult({"alone": True}, {})


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no room beside others"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
    ],
    ids=["torch", "cuBLAS", "cuSOLVER"],
)
def test_what_has_no_room_beside_others_is_made_alone(error: Exception, tmp_path: Path) -> None:
    parts = [Large(error), Counted(1, tmp_path)]
    found = list(run_trials(parts, Settings(workers=2), lambda doing: None))
    assert [part for part, _ in found] == [parts[1], parts[0]]
    assert found[1][1].values == {"alone": True}


@pytest.mark.parametrize("damage", [b"", b"not a safetensors file", None])
def test_a_damaged_part_is_computed_again(damage: bytes | None, tmp_path: Path) -> None:
    store, calls = ResultStore(tmp_path), list[int]()

    def make() -> StoredResult:
        calls.append(1)
        return StoredResult({"a": [1, "b"]}, {"t": torch.arange(4)})

    store.get({"cell": 1}, make)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage)
    made = store.get({"cell": 1}, make)
    assert len(calls) == 2
    assert made.values == {"a": [1, "b"]}
    assert torch.equal(made.tensors["t"], torch.arange(4))
