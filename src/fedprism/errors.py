"""Every error a user can cause. Each message is one sentence: what was expected, what was found, what to do."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path


class FedprismError(Exception):
    """Base of all errors that are the input's fault; the command line turns it into one sentence and exit code 2."""


class NotApplicable(FedprismError):
    """The method cannot work on this model, update or protocol."""


class MissingKnowledge(FedprismError):
    """The threat model does not grant a piece of knowledge that the attack needs."""

    def __init__(self, attack: str, field: str) -> None:
        self.field = field
        remedy = (
            "name it with --model or io.load(model=...)" if field == "model" else "use a threat model that grants it"
        )
        super().__init__(
            f"{attack} needs to know '{field}', which this observation does not grant; "
            f"{remedy} or use an attack that does without it."
        )


class BadCapture(FedprismError):
    """A capture on disk is malformed, hostile or incomplete."""


class BadPlan(FedprismError):
    """The plan of an audit is malformed, or asks for what cannot be."""


class BadInput(FedprismError):
    """Another argument, file or data set is not what was expected."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch has a class of its own for GPUs and none for the CPU's memory."""
    return isinstance(error, MemoryError) or about_memory(f"{type(error).__name__}: {error}")


def about_memory(reason: str) -> bool:
    """Whether an error says that memory ran out, however it is written: libraries have words of their own for it.

    cuSOLVER calls it an internal error if there is no room for its handle; Ray names a class of errors.
    """
    words = reason.lower().replace(" ", "")
    return any(sign in words for sign in ("outofmemory", "allocatememory", "alloc_failed", "cusolverdncreate"))


def first_line(error: BaseException) -> str:
    """What an error says, without the traces that libraries add; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def told(error: BaseException) -> str:
    """What an error of a user's model, loss or data says and, where it can be told, in which file and line."""
    place = users_place(error)
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    return f"{kind}{first_line(error)}{f', in {place}' if place else ''}"


def users_place(error: BaseException) -> str | None:
    """The file and line of a user's own code that raised an error; None for an error of fedprism or of a library.

    The innermost frame decides that is of no library; what only watches over torch's functions is passed over.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if frame.name == _WATCHING:
            continue
        if _OF_FEDPRISM.intersection(path.parts) and (path.is_relative_to(_HERE) or _PAPERS in path.parts):
            return None
        if not (path.name.startswith("<") or _INSTALLED.intersection(path.parts) or path.is_relative_to(_STANDARD)):
            return f"{path.name}, line {frame.lineno}"
    return None


_HERE = Path(__file__).resolve().parent
_PAPERS = "fedprism_papers"
_WATCHING = "__torch_function__"
"""The method that torch calls in place of each of its functions, in fedprism's map of a network."""
_OF_FEDPRISM = {"fedprism", _PAPERS}
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
