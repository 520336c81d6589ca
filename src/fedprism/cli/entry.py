"""The command line: one file per command.

Exit codes: 0 done; 1 a check of an audit failed; 2 bad input, missing knowledge, a method that does not apply, or an
audit in which no attack ran to its end; 3 an error of fedprism itself; 130 interrupted; 143 told to end (SIGTERM).
torch is imported inside the commands: `fedprism --help` answers at once.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from fedprism.cli.attack import AttackCommand, attack
from fedprism.cli.audit import audit
from fedprism.cli.check import check
from fedprism.cli.command import HELP_FLAGS, Command
from fedprism.cli.compare import compare
from fedprism.cli.demo import demo
from fedprism.cli.init import init
from fedprism.cli.inspect import inspect
from fedprism.cli.list import list_table
from fedprism.cli.report import report
from fedprism.cli.reproduce import reproduce
from fedprism.cli.show import show
from fedprism.cli.terminal import complain
from fedprism.errors import FedprismError, out_of_memory, told, users_place

app = typer.Typer(pretty_exceptions_enable=False, context_settings=HELP_FLAGS)

# The base class of click's errors, reached through typer: whichever click typer brings along is the one that raises.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


@app.callback(invoke_without_command=True)
def _fedprism(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False,
) -> None:
    """Audit how much private data federated-learning updates leak, and which defenses prevent it."""
    from fedprism import __version__

    if version:
        typer.echo(f"fedprism {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


MODELS, UPDATES, NAMES, PAPERS = "Audit a model", "Recorded updates and received models", "Look up names", "Papers"
"""The groups of the help."""

app.command(cls=Command, rich_help_panel=MODELS)(demo)
app.command(cls=Command, rich_help_panel=MODELS)(init)
app.command(cls=Command, rich_help_panel=MODELS)(check)
app.command(cls=Command, rich_help_panel=MODELS)(audit)
app.command(cls=Command, rich_help_panel=MODELS)(report)
app.command(cls=Command, rich_help_panel=MODELS)(compare)
app.command(cls=AttackCommand, rich_help_panel=UPDATES, context_settings={"ignore_unknown_options": True})(attack)
app.command(cls=Command, rich_help_panel=UPDATES)(inspect)
app.command("list", cls=Command, rich_help_panel=NAMES)(list_table)
app.command(cls=Command, rich_help_panel=NAMES)(show)
app.command(cls=Command, rich_help_panel=PAPERS)(reproduce)


class Terminated(BaseException):
    """The system asked the process to end."""


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """On SIGTERM end as on Ctrl-C: worker processes are stopped before their pipes break."""

    def end(*_: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; no exception leaves it."""
    try:
        command = typer.main.get_command(app)
        with _ends_in_order():
            answer = _answer(command, None if arguments is None else list(arguments))
        sys.stdout.flush()
        return answer if isinstance(answer, int) else 0
    except KeyboardInterrupt:
        return 130
    except Terminated:
        return 143
    except (BrokenPipeError, SystemExit) as error:
        # click and rich make SystemExit(1) of a closed pipe, but 1 means something else here.
        if not isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
            return complain(f"your model ended the program ({error}).")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read our output has seen enough
        return 0
    except CommandLineError as error:
        return complain(_misused(error))
    except FedprismError as error:
        return complain(str(error))
    except OSError as error:
        return complain(f"{error}. Check the name, the permissions and the free disk space.")
    except Exception as error:
        if out_of_memory(error):
            return complain("not enough memory for this attack. Use a smaller model or batch.")
        if os.environ.get("FEDPRISM_DEBUG") == "1":
            traceback.print_exc()
        if users_place(error):
            return complain(f"your model, loss or data raised an error: {told(error)}.")
        return complain(
            f"this is a bug in fedprism, please report it ({type(error).__name__}: {error}); "
            "FEDPRISM_DEBUG=1 shows where.",
            code=3,
        )


def _answer(command: Any, arguments: list[str] | None) -> Any:
    """What the command returns. An EOFError is an error like others, of which click makes an interrupt."""
    try:
        return command.main(args=arguments, prog_name="fedprism", standalone_mode=False)
    except typer.Abort as abort:
        raise abort.__cause__ or KeyboardInterrupt from None


def _misused(error: Exception) -> str:
    """What is wrong with the words of a command line, and whose help says more."""
    message = getattr(error, "format_message", error.__str__)().rstrip(".")
    # click 8.5 and typer before 0.21 both add the same suggestion.
    message = re.sub(r"( Did you mean [^?]*\?)\1", r"\1", message)
    context = getattr(error, "ctx", None)
    return (
        f"{message}{'' if message.endswith('?') else '.'} See {context.command_path if context else 'fedprism'} --help"
    )
