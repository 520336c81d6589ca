"""One iteration as one CUDA graph, so that a GPU does not wait for Python.

A step that is to be captured reads and writes only tensors that exist before it, in place, and asks for no value: what
changes between iterations (a learning rate, a counter) lies in tensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch

from fedprism.errors import BadInput

WARM_UP = 3
"""Iterations before the capture, in which libraries choose their algorithms and allocate memory."""


class Stepping(StrEnum):
    GRAPH = "every iteration is one CUDA graph"
    PLAIN = "step by step, as asked"
    NO_GPU = "step by step, because there is no GPU"
    REFUSED = "step by step, because the iteration cannot be captured as a CUDA graph"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How iterations are run, never what they compute, but for `tf32` and, in the last digits, `differences`, `memory`.

    graph: one CUDA graph for each iteration where there is a GPU.
    autotune: cuDNN times its algorithms first; then two runs may take different ones and differ by rounding.
    channels_last: images and kernels lie in memory with the channels last.
    tf32: convolutions and products with 10 bits of mantissa, which costs quality where objectives get small.
    differences: steps along signs follow a difference of two gradients where there is no kink that cannot be held
    (`matching.differences`); off, the gradient is differentiated.
    memory: how many bytes may be used, as far as one can tell; 70 % of a GPU's where nothing is said. A batch that
    needs more is worked on in parts, where its gradient is the mean of theirs, for 1.2 to 1.4 times the time.
    """

    graph: bool = True
    autotune: bool = False
    channels_last: bool = False
    tf32: bool = False
    differences: bool = True
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 1:
            raise BadInput(f"memory must be at least one byte, not {self.memory}. Leave it out to use what is there.")

    @contextmanager
    def settings(self) -> Iterator[None]:
        """PyTorch's switches set as asked, and put back afterwards."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = self.autotune, self.tf32, self.tf32
        try:
            yield
        finally:
            cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


class Repeated:
    """Calls `step` again and again; on a GPU by replaying it as a CUDA graph after a few calls.

    `stepping` says how the step is called, `reason` why it could not be captured.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, *, graph: bool = True) -> None:
        self.step = step
        self.calls = 0
        self.reason = ""
        self.stepping = Stepping.GRAPH if graph else Stepping.PLAIN
        if graph and device.type != "cuda":
            self.stepping = Stepping.NO_GPU
        # Work before the capture has to be on a separate stream, and so has the capture.
        self._stream = torch.cuda.Stream(device) if self.stepping is Stepping.GRAPH else None  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._stream is not None and self._graph is None and self.calls == WARM_UP:
            self._capture(self._stream)
        self.calls += 1
        if self._graph is not None:
            self._graph.replay()
        elif self._stream is not None:
            self._beside(self._stream)
        else:
            self.step()

    def __str__(self) -> str:
        return f"{self.stepping} ({self.reason})" if self.reason else str(self.stepping)

    def _beside(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _capture(self, stream: torch.cuda.Stream) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the GPU meanwhile.
            with (
                torch.cuda.device(stream.device),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                self.step()
        except RuntimeError as error:
            cause = error.__context__ or error  # ending a capture that failed raises another error
            self.reason = (str(cause).splitlines() or [type(cause).__name__])[0].rstrip(".")
            self.stepping, self._stream = Stepping.REFUSED, None
            torch.cuda.synchronize(stream.device)
        else:
            self._graph = graph
