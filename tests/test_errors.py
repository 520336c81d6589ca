"""What errors say: that memory ran out, in whatever words, and where in a user's code something went wrong."""

from __future__ import annotations

import pytest
import torch

from fedprism.errors import first_line, out_of_memory, told, users_place


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
    ],
    ids=["Python", "torch", "CPU", "cuBLAS", "cuSOLVER"],
)
def test_libraries_say_in_many_words_that_memory_ran_out(error: Exception) -> None:
    assert out_of_memory(error)


@pytest.mark.parametrize("error", [ValueError("memory of nothing"), RuntimeError("cusolver error: singular matrix")])
def test_other_errors_are_no_lack_of_memory(error: Exception) -> None:
    assert not out_of_memory(error)


def test_an_error_of_a_users_own_code_is_told_with_its_place() -> None:
    code = compile("def loss(outputs, labels):\n    raise KeyError('nobody')\n", "my_loss.py", "exec")
    own: dict[str, object] = {}
    exec(code, own)
    with pytest.raises(KeyError) as raised:
        own["loss"](None, None)  # type: ignore[operator]
    assert users_place(raised.value) == "my_loss.py, line 2"
    assert told(raised.value) == "KeyError: 'nobody', in my_loss.py, line 2"


def test_only_the_first_line_of_a_library_is_repeated() -> None:
    assert first_line(RuntimeError("no room\nException raised from ...")) == "no room"
    assert first_line(ValueError()) == "ValueError"
