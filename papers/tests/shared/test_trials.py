"""Trials of a recipe: the same whether one or several run at a time, and none of them twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fedprism.errors import BadInput, FedprismError
from fedprism.experiments import Outcome
from fedprism_papers import Recipe, Row, Settings
from fedprism_papers.shared import report, trials
from fedprism_papers.shared.base import Announce
from fedprism_papers.shared.trials import RecipeTrial, finish, finished


@dataclass(frozen=True, kw_only=True)
class Counted(RecipeTrial):
    """Squares its number, and leaves a trace of having been asked."""

    number: int
    traces: Path
    raised_in: str = trials.__file__
    """The file that a number below zero seems to be refused in."""

    @property
    def title(self) -> str:
        return f"number {self.number}"

    def run(self, device: str | None) -> Outcome:
        if self.number < 0:
            exec(compile('raise ValueError("a number below zero")', self.raised_in, "exec"))
        with (self.traces / str(self.number)).open("a") as file:
            file.write("asked\n")
        noise = torch.full((2,), self.settings.seed + 0.5).double()
        return self.done({"square": self.number**2, "infinite": float("inf")}, {"noise": noise})


def counted(numbers: tuple[int, ...], traces: Path, settings: Settings) -> list[Counted]:
    return [Counted(number=number, traces=traces, settings=settings) for number in numbers]


def asked(traces: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in traces.iterdir())


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_every_trial_is_run_and_only_once(workers: int | None, tmp_path: Path) -> None:
    traces, said = tmp_path / "traces", list[str]()
    traces.mkdir()
    settings = Settings(seed=7, workers=workers, finished=tmp_path / "finished")
    three = counted((3, 1, 2), traces, settings)
    first = {result.trial: result for result in finished(three, settings, said.append)}
    assert {trial: result.outcome.values["square"] for trial, result in first.items()} == dict(
        zip(three, (9, 1, 4), strict=True)
    )
    assert {result.outcome.values["infinite"] for result in first.values()} == {float("inf")}
    assert all(torch.equal(result.tensors["noise"], torch.full((2,), 7.5).double()) for result in first.values())
    assert any("number 2" in words for words in said)
    again = {result.trial: result for result in finished(three, settings, said.append)}
    assert {trial: result.outcome for trial, result in again.items()} == {
        trial: result.outcome for trial, result in first.items()
    }
    assert asked(traces) == 3, "what is finished is not computed again"
    (other,) = counted((3,), traces, replace(settings, seed=8))
    assert finish(other, said.append).tensors["noise"][0] == 8.5, "nor is it taken for that of other settings"


@pytest.mark.parametrize(
    ("workers", "raised_in", "error", "words"),
    [
        (2, trials.__file__, FedprismError, "number -1: .*a number below zero"),
        (None, trials.__file__, ValueError, "^a number below zero"),
        (None, "my_model.py", FedprismError, "number -1: your model, .*a number below zero, in my_model.py, line 1"),
    ],
    ids=["in a process", "in this process", "in a user's file"],
)
def test_an_error_that_nobody_expected_names_its_trial_or_ends_the_run(
    workers: int | None, raised_in: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    settings = Settings(workers=workers)
    (trial,) = counted((-1,), tmp_path, settings)
    with pytest.raises(error, match=words):
        list(finished([replace(trial, raised_in=raised_in)], settings, lambda doing: None))


@dataclass(frozen=True, kw_only=True)
class Refused(Counted):
    def run(self, device: str | None) -> Outcome:
        raise BadInput("expected another number, found this one; change it.")


def test_bad_input_is_one_sentence_with_the_trials_title(tmp_path: Path) -> None:
    trial = Refused(number=5, traces=tmp_path, settings=Settings())
    with pytest.raises(FedprismError, match="number 5: expected another number, found this one; change it"):
        finish(trial, lambda doing: None)


def test_a_stopped_run_goes_on_and_a_complete_one_leaves_nothing_to_go_on_from(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()

    def run(settings: Settings, announce: Announce, *, stopping: bool) -> Iterator[Row]:
        for trial, outcome, _ in finished(counted((1, 2), traces, settings), settings, announce):
            if stopping and trial.number == 2:
                raise KeyboardInterrupt
            yield Row(cell={"trial": trial.title}, entries={"square": outcome.values["square"]})

    def recipe(*, stopping: bool) -> Recipe:
        return Recipe(name="r", summary="s", citation="c", shown=(), run=partial(run, stopping=stopping))

    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        report.carry_out(recipe(stopping=True), Settings(), folder, print)
    (folder / "finished" / "mine.txt").write_text("somebody else's")
    for times in (1, 2):
        report.carry_out(recipe(stopping=False), Settings(), folder, print)
        assert [(traces / name).read_text().count("asked") for name in "12"] == [times, times]
    assert [path.name for path in (folder / "finished").iterdir()] == ["mine.txt"]


@dataclass(frozen=True, kw_only=True)
class Large(Counted):
    """Has no room at its first try, which is beside others."""

    error: Exception = field(repr=False)

    def run(self, device: str | None) -> Outcome:
        if not (self.traces / "tried").exists():
            (self.traces / "tried").write_text("")
            raise self.error
        return self.done({"alone": True}, {})


def test_what_has_no_room_beside_others_is_run_alone(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("no room beside others")
    settings = Settings(workers=2)
    both = [Large(number=2, traces=tmp_path, settings=settings, error=error), *counted((1,), tmp_path, settings)]
    results = list(finished(both, settings, lambda doing: None))
    assert [result.trial.number for result in results] == [1, 2]
    assert results[1].outcome.values["alone"] is True


@pytest.mark.parametrize("room", ["records", "samples"])
@pytest.mark.parametrize("damage", [b"", b"neither JSON nor tensors", None])
def test_a_damaged_outcome_is_computed_again(damage: bytes | None, room: str, tmp_path: Path) -> None:
    settings, traces = Settings(finished=tmp_path / "finished"), tmp_path / "traces"
    traces.mkdir()
    (trial,) = counted((4,), traces, settings)
    finish(trial, print)
    (path,) = (tmp_path / "finished" / room).iterdir()
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage)
    result = finish(trial, print)
    assert asked(traces) == 2
    assert result.outcome.values["square"] == 16
    assert torch.equal(result.tensors["noise"], torch.full((2,), 0.5).double())


def test_a_record_whose_tensors_are_gone_is_computed_again(tmp_path: Path) -> None:
    settings, traces = Settings(finished=tmp_path / "finished"), tmp_path / "traces"
    traces.mkdir()
    (trial,) = counted((4,), traces, settings)
    finish(trial, print)
    (path,) = (tmp_path / "finished" / "samples").iterdir()
    path.unlink()
    assert "noise" in finish(trial, print).tensors
    assert asked(traces) == 2
