"""Where independent tasks run: in this process, in processes beside it, or on a Ray cluster.

One interface for all three, so that what wants many things computed (integer programs, the cells of an audit) does not
care where. Outcomes come as they are ready, and a task that raises or takes its process down is a `Failure` of that
task and of no other.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeAlias, TypeVar

from fedprism.errors import BadInput
from fedprism.naming import EvaluableRepr

Task = TypeVar("Task")
Result = TypeVar("Result")
LAST_WORDS = 10.0
"""Seconds that a process which closed its pipe has to end by itself, so that its exit code can be told."""


@dataclass(frozen=True)
class Failure:
    """What became of a task that gave no result, in a sentence."""

    reason: str
    too_long: bool = False
    """Whether it was stopped because its time was over."""


Outcomes: TypeAlias = Generator[tuple[int, Result | Failure], None, None]


class Executor(Protocol):
    """Runs a function on each task and yields (index of the task, result or `Failure`), in order of completion.

    Closing the generator stops what is still running.
    """

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[tuple[int, Result | Failure]]:
        """Outcomes of `function(task)` for every task."""
        ...


@dataclass(frozen=True, kw_only=True, repr=False)
class Serial(EvaluableRepr):
    """One task after the other in this process: only exceptions become failures, a crash is one of the process."""

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Outcomes[Result]:
        for index, task in enumerate(tasks):
            yield index, _attempt(function, task)


@dataclass(frozen=True, kw_only=True, repr=False)
class Processes(EvaluableRepr):
    """Processes on this machine with one thread each; as many as there are cores unless said otherwise.

    Function, tasks and results must be picklable, and a script that uses this needs `if __name__ == "__main__":`.
    Tasks are taken from the iterable as processes become free. `timeout`: seconds after which a task is given up; the
    first task of a process includes its start.
    """

    workers: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise BadInput(f"workers must be at least 1, not {self.workers}. Leave it out for one per core.")
        if self.timeout is not None and not self.timeout > 0:
            raise BadInput(f"timeout must be above 0 seconds, not {self.timeout}. Leave it out for none.")

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Outcomes[Result]:
        size, limit, queue = self.workers or _cores(), self.timeout or math.inf, enumerate(tasks)
        idle: list[_Worker] = []
        busy: list[_Worker] = []
        try:
            while True:
                # All are started before any is written to: a large task is only read once its process is up.
                chosen = [(idle.pop() if idle else _Worker(), *item) for item in islice(queue, size - len(busy))]
                busy += [worker for worker, _, _ in chosen]
                for worker, index, task in chosen:
                    worker.begin(function, index, task, limit)
                if not busy:
                    return
                patience = min(worker.deadline for worker in busy) - time.monotonic()
                ready = wait([worker.pipe for worker in busy], None if limit == math.inf else max(0.0, patience))
                for worker in [w for w in busy if w.pipe in ready or w.deadline <= time.monotonic()]:
                    outcome = worker.answer() if worker.pipe in ready else worker.give_up(limit)
                    busy.remove(worker)
                    if _is_damaged(outcome):
                        worker.stop()
                    idle += [worker] if worker.process.is_alive() else []
                    yield worker.index, outcome
        finally:
            for worker in idle + busy:
                worker.stop()


@dataclass(frozen=True, kw_only=True, repr=False)
class RayCluster(EvaluableRepr):
    """A Ray cluster whose machines have fedprism installed; without an address a local one for the time of the run.

    A cluster that this process is connected to already is used as it is, and stays connected. `gpus`: how much of a GPU
    each task asks for; a task that asks for none sees none.
    """

    address: str | None = None
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.gpus < math.inf:
            raise BadInput(f"gpus must be a number of at least 0, not {self.gpus}. 1 is a whole one.")

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Outcomes[Result]:
        try:
            import ray
        except ImportError as missing:
            raise BadInput('Ray is not installed. Run pip install "fedprism[ray]", or use Processes().') from missing
        connected = ray.is_initialized()
        if not connected:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # an audit tells nobody that it runs
            dashboard = None if self.address else False
            try:
                ray.init(
                    self.address or "local",
                    include_dashboard=dashboard,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise BadInput(
                    f"no Ray cluster at {self.address or 'this machine'} ({_one_line(error)}). Start one there, "
                    "or use Processes()."
                ) from error
        waiting: dict[Any, int] = {}
        try:
            remote: Any = ray.remote(max_retries=0, num_gpus=self.gpus)(_attempt)
            waiting = {remote.remote(function, task): index for index, task in enumerate(tasks)}
            while waiting:
                reference = ray.wait(list(waiting))[0][0]
                try:
                    outcome = ray.get(reference)
                except Exception as crash:  # whatever Ray says of a process or a machine that is gone
                    outcome = Failure(f"the task's process on the cluster ended: {_one_line(crash)}")
                yield waiting.pop(reference), outcome
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)
            if not connected:
                ray.shutdown()


class _Worker:
    """A process that answers one task at a time, and the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(far_end,), daemon=True)
        with _one_thread():
            self.process.start()
        far_end.close()  # only the process holds it now, so that its death ends the pipe
        self.index, self.deadline = -1, math.inf

    def begin(self, function: Callable[[Any], Any], index: int, task: Any, limit: float) -> None:
        self.index, self.deadline = index, time.monotonic() + limit
        try:
            message = pickle.dumps((function, task))
        except Exception as error:
            message = pickle.dumps((Failure, f"the task cannot be sent to a process: {_one_line(error)}"))
        with suppress(OSError):  # a process that is gone already: the end of the pipe will tell
            self.pipe.send_bytes(message)

    def answer(self) -> Any:
        """The outcome that has come in, or the failure that the process ended."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(LAST_WORDS)
            code = self.process.exitcode
            self.stop()
            return Failure(f"the task's process ended {_how(code)} before it gave an answer")
        except Exception as error:
            return Failure(f"the task's result cannot be read: {_one_line(error)}")

    def give_up(self, limit: float) -> Failure:
        self.stop()
        return Failure(f"the task was stopped after {limit:g} seconds", too_long=True)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    """What a worker process does until it is killed or its parent is gone.

    Plain pickles: a connection's own would hand tensors over in memory that vanishes with the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; stopping this one is the parent's task
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            answer = pickle.dumps(_attempt(*pickle.loads(message)))
        except Exception as error:
            answer = pickle.dumps(Failure(f"the task or its result cannot be pickled: {_one_line(error)}"))
        try:
            pipe.send_bytes(answer)
        except OSError:  # whoever asked is gone
            return


def _attempt(function: Callable[[Task], Result], task: Task) -> Result | Failure:
    try:
        return function(task)
    except Exception as error:
        return Failure(f"the task raised {_one_line(error)}")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _is_damaged(outcome: object) -> bool:
    """Whether the process that gave it is of no more use: an error of its GPU meets every task after it."""
    return isinstance(outcome, Failure) and "CUDA error" in outcome.reason


def _how(code: int | None) -> str:
    """In words, the exit code of a process: negative where a signal ended it."""
    if code is None or code >= 0:
        return f"with exit code {code}"
    hint = " (out of memory, perhaps)" if -code == signal.SIGKILL else ""
    return f"by {signal.Signals(-code).name}{hint}"


def _cores() -> int:
    """How many cores this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processes started inside the block do linear algebra with one thread: together they use all cores anyway."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
