"""Executors: every task has an outcome, and what goes wrong in one stays there.

Nothing heavy is imported here: every process that a test starts imports this file.
"""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_tasks import leave_a_mark_and_sleep, mischief, square, threads
from fedprism.errors import BadInput
from fedprism.runtime.executors import Executor, Failure, Processes, RayCluster, Serial


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def outcomes(executor: Executor, function: Any, tasks: Any) -> dict[int, Any]:
    seen: dict[int, Any] = {}
    for index, outcome in executor.run(function, tasks):
        assert index not in seen, "a task was answered twice"
        seen[index] = outcome
    return seen


@pytest.mark.parametrize("executor", [Serial(), Processes(workers=2)], ids=repr)
def test_an_exception_is_the_failure_of_its_task(executor: Executor) -> None:
    assert outcomes(executor, square, [3, -1, 4]) == {
        0: 9,
        1: Failure("the task raised ValueError: -1 is negative"),
        2: 16,
    }
    assert outcomes(executor, square, []) == {}


def test_a_process_that_dies_loses_its_own_task_only() -> None:
    tasks = ["a", "exit", "b", "segfault", "raise", "killed", "unpicklable", "c", "d"]
    seen = outcomes(Processes(workers=2), mischief, tasks)
    assert {index for index, outcome in seen.items() if outcome == tasks[index]} == {0, 2, 7, 8}
    reasons = {tasks[index]: outcome.reason for index, outcome in seen.items() if isinstance(outcome, Failure)}
    assert reasons["exit"] == "the task's process ended with exit code 3 before it gave an answer"
    assert "SIGSEGV" in reasons["segfault"]
    assert "SIGKILL (out of memory, perhaps)" in reasons["killed"]
    assert reasons["raise"] == "the task raised RuntimeError: planned"
    assert "cannot be pickled" in reasons["unpicklable"]
    assert set(reasons) == {"exit", "segfault", "killed", "raise", "unpicklable"}


def test_after_an_error_of_its_gpu_a_process_is_replaced() -> None:
    before, failed, after, again = outcomes(Processes(workers=1), mischief, ["who", "gpu", "who", "who"]).values()
    assert "CUDA error" in failed.reason
    assert before != after == again


def test_a_task_that_cannot_be_sent_is_a_failure_too() -> None:
    seen = outcomes(Processes(workers=1), mischief, ["a", (lambda: None), "b"])
    assert (seen[0], seen[2]) == ("a", "b")
    assert "cannot be sent" in seen[1].reason


def test_large_tasks_pass_and_processes_use_one_thread() -> None:
    large = ["x" * 3_000_000, "y" * 3_000_000]
    assert outcomes(Processes(workers=2), mischief, large) == dict(enumerate(large))
    before = dict(os.environ)
    assert outcomes(Processes(workers=1), threads, [0]) == {0: (1, "1")}
    assert dict(os.environ) == before


def test_a_task_that_takes_too_long_is_given_up() -> None:
    seen = outcomes(Processes(workers=2, timeout=4.0), mischief, ["sleep", "a", "b"])
    assert seen == {0: Failure("the task was stopped after 4 seconds", too_long=True), 1: "a", 2: "b"}


def test_closing_stops_the_processes_and_keeps_what_was_yielded(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def tasks() -> Iterator[str]:
        yield "quick"
        yield "sleep"
        raise AssertionError("asked for a task that nobody is free for")

    running = Processes(workers=1).run(mischief, tasks())
    assert next(running) == (0, "quick")
    running.close()

    sleeping = Processes(workers=2).run(leave_a_mark_and_sleep, [str(mark), str(tmp_path / "missing" / "folder")])
    index, outcome = next(sleeping)
    assert (index, isinstance(outcome, Failure)) == (1, True)
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)
    assert is_running(int(mark.read_text()))
    sleeping.close()
    assert not is_running(int(mark.read_text()))


def test_an_interrupt_stops_the_processes(tmp_path: Path) -> None:
    mark, script = tmp_path / "mark", tmp_path / "script.py"
    script.write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a test run in the background may ignore it
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from fedprism.runtime.executors import Processes\nfrom executor_tasks import leave_a_mark_and_sleep\n"
        "if __name__ == '__main__':\n"
        f"    list(Processes(workers=1).run(leave_a_mark_and_sleep, [{str(mark)!r}]))\n"
    )
    started = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    while started.poll() is None and (not mark.exists() or not mark.read_text()):
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    _, complaint = started.communicate()
    assert "KeyboardInterrupt" in complaint
    assert not is_running(int(mark.read_text()))


def test_a_process_whose_parent_is_gone_ends_without_a_word(tmp_path: Path) -> None:
    """The parent is killed before the answer is there: the pipe is broken when the process wants to give it."""
    mark, script = tmp_path / "mark", tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from fedprism.runtime.executors import Processes\nfrom executor_tasks import leave_a_mark_and_wait\n"
        "if __name__ == '__main__':\n"
        f"    list(Processes(workers=1).run(leave_a_mark_and_wait, [{str(mark)!r}]))\n"
    )
    started = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    while started.poll() is None and (not mark.exists() or not mark.read_text()):
        time.sleep(0.01)
    started.kill()
    (tmp_path / "go on").touch()
    _, complaint = started.communicate()  # waits for the process, too, which holds the same pipe
    assert complaint == ""


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"timeout": 0.0}, {"timeout": -1.0}])
def test_senseless_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="must be"):
        Processes(**wrong)


@pytest.mark.parametrize(
    "executor", [Serial(), Processes(), Processes(workers=3, timeout=2.5), RayCluster(), RayCluster(address="auto")]
)
def test_the_repr_evaluates_back(executor: Executor) -> None:
    assert eval(repr(executor)) == executor


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_ray(name: str, *rest: Any) -> Any:
        if name == "ray":
            raise ImportError("no ray")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(BadInput, match=r"fedprism\[ray\]"):
        list(RayCluster().run(square, [1]))


def test_a_cluster_that_is_not_there_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def nobody(*_: Any, **__: Any) -> None:
        raise ConnectionError("could not\nconnect")

    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(BadInput, match=r"no Ray cluster at 10\.0\.0\.1:6379 \(ConnectionError: could not conn"):
        list(RayCluster(address="10.0.0.1:6379").run(square, [1]))


# Ray leaves files and pipes of its own open when it is shut down.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ray_cluster_keeps_failures_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # where its processes find the functions
    tasks = ["a", "exit", "raise", "b", "segfault", "c"]
    seen = outcomes(RayCluster(), mischief, tasks)
    assert {index for index, outcome in seen.items() if outcome == tasks[index]} == {0, 3, 5}
    assert all(isinstance(seen[index], Failure) for index in (1, 2, 4))
    assert seen[2] == Failure("the task raised RuntimeError: planned")
    assert not ray.is_initialized()
