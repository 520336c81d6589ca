"""The command line: one short function a command.

Exit codes: 0 done; 1 a gate of an audit is closed; 2 bad input, missing knowledge or a method that does not apply; 3 an
error of fedprism itself; 130 interrupted. torch is imported inside the commands, so that `fedprism --help` answers at
once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedprism.errors import BadInput, FedprismError, out_of_memory
from fedprism.terminal import complain, console_for, progress_bar

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# The base class of click's errors, reached through typer: whichever click typer brings along is the one that raises.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the results.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Same seed, same answer.")]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu or cuda; the GPU is taken where there is one.")]
Download = Annotated[
    bool, typer.Option("--allow-download", help="Let LPIPS fetch its network; nothing else is fetched.")
]


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
    with progress_bar() as announce:
        outcomes = demo.audit(seed=seed, device=device, announce=announce)
    page = pages.demo(outcomes, seed)
    results.publish(output, {"report.html": page.encode(), "results.json": demo.results_json(outcomes, seed)})
    console = console_for()
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
    allow_download: Download = False,
    output: Output = Path("fedprism-attack"),
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Attack a captured update. The attack's own settings are flags too: `fedprism list attacks` names them."""
    from fedprism import attacking

    siblings = ("--with", "--model", "--truth", "--metrics", "--allow-download", "--output", "--seed", "--device")
    with progress_bar() as announce:
        announce(name)
        lines = attacking.carry_out(
            capture,
            name,
            siblings=siblings,
            model=model,
            truth=truth,
            metrics=[word.strip() for word in metrics.split(",")],
            allow_download=allow_download,
            output=output,
            seed=seed,
            device=device,
        )
    console = console_for()
    for line in lines:
        console.print(line, highlight=False)


@app.command()
def audit(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan; `fedprism plan init` writes one.")],
    output: Output = Path("fedprism-audit"),
    resume: Annotated[bool, typer.Option("--resume", help="Finish an audit that was stopped.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Cells at a time, a process each.")] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster, or local to start one.")] = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=VALUE", help="Exit with 1 if a mean lies above; max-METRIC: if any sample does."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the grid, its time and its memory.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with the data sets; else FEDPRISM_DATA names it.")
    ] = None,
    allow_download: Download = False,
    device: Device = None,
) -> None:
    """Run every cell of a plan: what leaks, to whom, and what defenses change. Killed at any time, --resume goes on."""
    from fedprism.audit import command

    code = command.carry_out(
        plan,
        output,
        console=console_for(),
        errors=console_for(stderr=True),
        resume=resume,
        workers=workers,
        ray=ray,
        fail_above=fail_above or (),
        dry_run=dry_run,
        data_dir=data_dir,
        allow_download=allow_download,
        device=device,
    )
    raise typer.Exit(code)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="The folder of an audit; two with --compare.")],
    compare: Annotated[bool, typer.Option("--compare", help="What changed between two audits.")] = False,
    show_images: Annotated[
        bool | None,
        typer.Option(
            "--show-images/--redact",
            help="Show private samples, or scores alone: the default for captures and for files of your own.",
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page; else in the audit's folder.")
    ] = None,
) -> None:
    """Write the report of an audit as one HTML file, or what changed between two audits."""
    from fedprism import report

    wanted = 2 if compare else 1
    if len(folders) != wanted:
        raise BadInput(f"expected {wanted} folder{'s' if compare else ''} of audits, found {len(folders)}; name them.")
    if compare:
        page = report.write_comparison(*folders, output=output)
    else:
        page = report.write(folders[0], show_images=show_images, output=output)
    console_for().print(f"The report: {page}", soft_wrap=True)
    if open_page:
        typer.launch(page.resolve().as_uri())


plans = typer.Typer(help="Write plans for `fedprism audit`.", no_args_is_help=True)
app.add_typer(plans, name="plan")


@plans.command("init")
def plan_init(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The plan.")] = Path("plan.toml"),
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model of `fedprism list models`, or pkg.module:factory.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="A data set of `fedprism list data`, or your folder, npz or csv.")
    ] = None,
) -> None:
    """Write a commented plan; without a model one on embedded photographs that runs in about a minute."""
    from fedprism.audit import command

    command.write_plan(output, model, data, console_for())


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
    narrow: Annotated[
        bool, typer.Option("--narrow", help="A quarter of ResNet-18's channels, for a CPU (gradattack recipes).")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Parts at a time, where a recipe has such (docs/recipes.md)."),
    ] = None,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Run a table of a paper again, one of `fedprism list recipes`: its numbers beside what is measured here."""
    from fedprism import results
    from fedprism.checks import row
    from fedprism.recipes import RECIPES, Settings, report

    chosen = row(RECIPES, recipe, "recipe")
    if narrow and (quick or not chosen.narrow):
        having = ", ".join(name for name, one in RECIPES.items() if one.narrow)
        found = f"{recipe}{' and --quick' if quick else ''}"
        raise BadInput(f"expected --narrow with {having}, and no --quick, found {found}; leave --narrow out.")
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
        workers=workers,
        narrow=narrow,
    )
    with progress_bar() as announce:
        rows = report.carry_out(chosen, settings, folder, announce)
    console = console_for()
    console.print(report.table(chosen, rows))
    for note in report.notes(chosen, settings, rows):
        console.print(f"- {note}")
    console.print(f"The table with its pictures: {folder / 'table.md'}")


@app.command()
def inspect(
    model_file: Annotated[Path, typer.Argument(metavar="MODEL.safetensors", help="The model that a client was sent.")],
    reference: Annotated[
        Path | None, typer.Option(metavar="REF.safetensors", help="The model of the round before, or a trusted one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="PKG.MODULE:FACTORY", help="Function that returns the model; this imports your code."),
    ] = None,
    batch: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Samples of your own: safetensors with inputs and labels.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with all evidence instead of a table.")] = False,
) -> None:
    """Look for signs of tampering in a model before training on it; exit code 1 where something is serious."""
    from fedprism import factory, inspection
    from fedprism.inspection import files, rendering

    found = inspection.inspect(
        files.tensors(model_file),
        reference=files.tensors(reference) if reference is not None else None,
        model=factory.from_factory(model) if model is not None else None,
        batch=files.batch(batch) if batch is not None else None,
    )
    if json:
        typer.echo(rendering.as_json(found))
    else:
        console = console_for()
        if found.findings:
            console.print(rendering.table(found))
        console.print(rendering.summary(found))
    if found.serious:
        raise typer.Exit(1)


@app.command("list")
def list_table(table: Annotated[Table, typer.Argument(help="What to list.")]) -> None:
    """List what there is, by the names that commands, captures and records use."""
    from fedprism import listing

    console_for().print(listing.TABLES[table]())


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
            return complain(f"expected an attack to run, found that the model ended the program ({error}); correct it.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read our output has seen enough
        return 0
    except CommandLineError as error:
        message = getattr(error, "format_message", error.__str__)()
        return complain(f"{message.rstrip('.')}; see fedprism --help.")
    except FedprismError as error:
        return complain(str(error))
    except OSError as error:
        return complain(f"expected a usable file or folder, found {error}; check its name, permissions and disk.")
    except Exception as error:
        if out_of_memory(error):
            return complain("expected enough memory for this attack, found too little; use a smaller model or batch.")
        if os.environ.get("FEDPRISM_DEBUG") == "1":
            traceback.print_exc()
        return complain(
            f"this is a bug in fedprism, please report it ({type(error).__name__}: {error}); "
            "FEDPRISM_DEBUG=1 shows where.",
            code=3,
        )


def _whole_numbers(text: str) -> tuple[int, ...]:
    """The numbers of "32,64"."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise BadInput(f"expected --sizes as whole numbers like 32,64, found '{text}'; correct it.") from error
