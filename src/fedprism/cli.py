"""The command line: one short function a command.

Exit codes: 0 done; 2 bad input, missing knowledge or a method that does not apply; 3 an error of fedprism itself; 130
interrupted. torch is imported inside the commands, so that `fedprism --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedprism.errors import BadInput, FedprismError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# The base class of click's errors, reached through typer: whichever click typer brings along is the one that raises.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the results.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Same seed, same answer.")]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu or cuda; the GPU is taken where there is one.")]


class Table(StrEnum):
    """What `fedprism list` can list."""

    ATTACKS = "attacks"
    DEFENSES = "defenses"
    METRICS = "metrics"
    MODELS = "models"
    DATA = "data"
    THREATS = "threats"
    RECIPES = "recipes"


@app.callback(invoke_without_command=True)
def _fedprism(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False,
) -> None:
    """Shows what a federated-learning update gives away about the people behind it, and what a defense really buys."""
    from fedprism import __version__

    if version:
        typer.echo(f"fedprism {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(output: Output = Path("fedprism-demo"), seed: Seed = 0, device: Device = None) -> None:
    """Audit an embedded scenario, about a minute on two cores: a table here and a report in HTML."""
    from fedprism import demo, pages, results

    results.require_writable(output)
    with _progress() as announce:
        outcomes = demo.audit(seed=seed, device=device, announce=announce)
    page = pages.demo(outcomes, seed)
    results.publish(output, {"report.html": page.encode(), "results.json": demo.results_json(outcomes, seed)})
    console = _console()
    console.print(demo.table(outcomes))
    for sentence in demo.headline(outcomes):
        console.print(sentence)
    console.print(f"The report with all pictures: {output / 'report.html'}")


@app.command(context_settings={"ignore_unknown_options": True})
def attack(
    capture: Annotated[
        list[str],
        typer.Argument(metavar="CAPTURE [--FLAG VALUE]...", help="The capture's folder, and settings of the attack."),
    ],
    name: Annotated[str, typer.Option("--with", metavar="NAME", help="An attack of `fedprism list attacks`.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="PKG.MODULE:FACTORY", help="Function that returns the model; this imports your code."),
    ] = None,
    truth: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder with the truth, kept apart from the capture: adds scores.")
    ] = None,
    metrics: Annotated[
        str, typer.Option(metavar="A,B,...", help="Scores to give, out of `fedprism list metrics`.")
    ] = "mse,psnr,ssim,avd",
    allow_download: Annotated[bool, typer.Option("--allow-download", help="Let LPIPS fetch its network.")] = False,
    output: Output = Path("fedprism-attack"),
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Attack a captured update. The attack's own settings are flags too: `fedprism list attacks` names them."""
    from fedprism import flags, io, results, running, scoring
    from fedprism.attacks import ATTACKS
    from fedprism.checks import row
    from fedprism.metrics import METRICS
    from fedprism.types import Record

    results.require_writable(output)
    siblings = ("--with", "--model", "--truth", "--metrics", "--allow-download", "--output", "--seed", "--device")
    chosen, folders = flags.apply(capture, row(ATTACKS, name, "method of attack")(), siblings=siblings)
    if len(folders) != 1:
        raise BadInput(f"expected one capture folder, found {' and '.join(folders) or 'none'}; name one.")
    observation = io.load(folders[0], model=_from_factory(model) if model else None)
    known = scoring.load_truth(truth) if truth else None
    wanted = [word.strip() for word in metrics.split(",")]
    for word in wanted:  # before a long computation, not after it
        row(METRICS, word, "metric")
    with _progress() as announce:
        announce(name)
        found = running.run(chosen, observation, seed=seed, device=device)
    scores = None
    if known is not None and found.inputs is not None:
        scores = scoring.score(found, known, metrics=wanted, allow_download=allow_download)
    record = Record(
        kind="attack",
        cell={
            **{"attack": name, "settings": repr(chosen), "source": observation.source},
            **({"owners": found.owners} if found.owners else {}),
        },
        knowledge_used=tuple(sorted(found.knowledge_used)),
        scores=dataclasses.asdict(scores) if scores else None,
        residual=running.residual(observation, found),
        status=str(found.status),
        seed=seed,
        versions=results.versions(),
    )
    files = results.attack_files(observation, found, record)
    results.publish(output, files, stale=("record.json", "recovered-*.png", "update-*.safetensors"))
    console = _console()
    console.print(results.summary(record, files))
    if scores:
        console.print(str(scores), highlight=False)


@app.command()
def reproduce(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe of `fedprism list recipes`.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Embedded photographs and a small network: under a minute, no data folder.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with the data sets; else FEDPRISM_DATA names it.")
    ] = None,
    batches: Annotated[int | None, typer.Option(min=1, metavar="K", help="Batches a cell; else the paper's.")] = None,
    sizes: Annotated[str | None, typer.Option(metavar="N,N,...", help="Batch sizes; else the paper's.")] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Iterations of the re-run baselines; else the paper's.")
    ] = None,
    inverted: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Images a batch to render from features; else the paper's.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder for the results; else fedprism-RECIPE.")
    ] = None,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Run a table of a paper again, one of `fedprism list recipes`: its numbers beside what is measured here."""
    from fedprism import results
    from fedprism.checks import row
    from fedprism.recipes import RECIPES, Settings, report

    chosen = row(RECIPES, recipe, "recipe")
    folder = output or Path(f"fedprism-{recipe}")
    results.require_writable(folder)
    settings = Settings(
        quick=quick,
        batches=batches,
        sizes=_whole_numbers(sizes) if sizes is not None else None,
        iterations=iterations,
        inverted=inverted,
        seed=seed,
        data_dir=data_dir,
        device=device,
    )
    with _progress() as announce:
        rows = report.carry_out(chosen, settings, folder, announce)
    console = _console()
    console.print(report.table(chosen, rows))
    for note in report.notes(chosen, settings, rows):
        console.print(f"- {note}")
    console.print(f"The table with its pictures: {folder / 'table.md'}")


@app.command("list")
def list_table(table: Annotated[Table, typer.Argument(help="What to list.")]) -> None:
    """List what there is, by the names that commands, captures and records use."""
    from fedprism import listing

    _console().print(listing.TABLES[table]())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; no exception leaves it."""
    try:
        command = typer.main.get_command(app)
        answer = command.main(
            args=None if arguments is None else list(arguments), prog_name="fedprism", standalone_mode=False
        )
        sys.stdout.flush()
        return answer if isinstance(answer, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (BrokenPipeError, SystemExit) as error:
        # click and rich make SystemExit(1) of a closed pipe, but 1 means something else here.
        if not isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
            return _complain(
                f"expected an attack to run, found that the model ended the program ({error}); correct it."
            )
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read our output has seen enough
        return 0
    except CommandLineError as error:
        message = getattr(error, "format_message", error.__str__)()
        return _complain(f"{message.rstrip('.')}; see fedprism --help.")
    except FedprismError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"expected a usable file or folder, found {error}; check its name, permissions and disk.")
    except Exception as error:
        if _out_of_memory(error):
            return _complain("expected enough memory for this attack, found too little; use a smaller model or batch.")
        if os.environ.get("FEDPRISM_DEBUG") == "1":
            traceback.print_exc()
        return _complain(
            f"this is a bug in fedprism, please report it ({type(error).__name__}: {error}); "
            "FEDPRISM_DEBUG=1 shows where.",
            code=3,
        )


def _complain(sentence: str, code: int = 2) -> int:
    """Print one line. File names and captures may hold anything: control characters do not reach the terminal."""
    line = " ".join(sentence.split())
    print("fedprism:", "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    return code


def _out_of_memory(error: Exception) -> bool:
    """torch has a class of its own for GPUs and none for the CPU's memory."""
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in str(error)


def _from_factory(text: str) -> nn.Module:
    """The model that `pkg.module:factory` returns. This imports code, because a person typed its name."""
    import importlib

    from torch import nn

    module, _, factory = text.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)  # the console script, unlike `python -m`, does not look there
    try:
        model = getattr(importlib.import_module(module), factory)()
    except (Exception, SystemExit) as error:
        raise BadInput(
            f"expected --model pkg.module:factory, a function that returns the model without arguments, found '{text}' "
            f"({type(error).__name__}: {error}); correct the name or the function."
        ) from error
    finally:
        sys.path.remove(here)
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"expected --model {text} to return a torch.nn.Module, found {type(model).__name__}; return the model."
        )
    return model


def _whole_numbers(text: str) -> tuple[int, ...]:
    """The numbers of "32,64"."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise BadInput(f"expected --sizes as whole numbers like 32,64, found '{text}'; correct it.") from error


def _console(*, stderr: bool = False) -> Console:
    """Without markup, because captures may hold brackets; what the encoding lacks becomes a question mark."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr where that is a terminal; call what it yields to name what is being done."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from fedprism import progress

    console = _console(stderr=True)
    if not console.is_terminal:
        yield lambda title: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        with progress.listening(lambda done, total: bar.update(task, completed=done, total=total)):
            yield lambda title: bar.reset(task, description=title, total=None)
