"""Pages for people: one HTML file with everything inside, nothing fetched from anywhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from fedprism import demo as audit
from fedprism import results


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An original and what was recovered of it, as data addresses."""

    name: str
    original: str
    recovered: str
    psnr: str
    reading: audit.Reading


@dataclass(frozen=True, kw_only=True)
class Section:
    """A case as the page shows it; `anchor` is where links to it lead."""

    anchor: str
    outcome: audit.Outcome
    pictures: tuple[Picture, ...]
    verdict: str


def demo(outcomes: Sequence[audit.Outcome], seed: int) -> str:
    """The report of `fedprism demo`."""
    sections = [
        Section(
            anchor=f"case-{number}",
            outcome=outcome,
            pictures=_pictures(outcome),
            verdict=audit.verdict(outcome, outcomes),
        )
        for number, outcome in enumerate(outcomes, start=1)
    ]
    groups = [(title, list(group)) for title, group in groupby(sections, key=lambda s: s.outcome.case.target.title)]
    page: str = (
        environment()
        .get_template("demo.html.j2")
        .render(
            headline=audit.headline(outcomes),
            groups=groups,
            seed=seed,
            versions=results.versions(),
            faithful_psnr=audit.FAITHFUL_PSNR,
            recognisable_ssim=audit.RECOGNISABLE_SSIM,
            traces_ssim=audit.TRACES_SSIM,
            traces_avd=audit.TRACES_AVD,
        )
    )
    return page


def environment() -> Environment:
    """What every page is made with."""
    # Autoescape for every template: names of attacks, captures and classes are text, never markup.
    return Environment(
        loader=PackageLoader("fedprism"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )


def _printable(value: object) -> object:
    """Characters that turn a line around or cannot be seen do not reach a page."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in value)


def _pictures(outcome: audit.Outcome) -> tuple[Picture, ...]:
    rows = zip(
        outcome.names,
        outcome.originals,
        outcome.recovered,
        outcome.scores.values["psnr"],
        outcome.readings,
        strict=True,
    )
    return tuple(
        Picture(
            name=name,
            original=_address(original),
            recovered=_address(recovered),
            psnr="none" if psnr is None else f"{psnr:.1f} dB",
            reading=reading,
        )
        for name, original, recovered, psnr, reading in rows
    )


def _address(pixels: Tensor) -> str:
    return "data:image/png;base64," + base64.b64encode(results.png(pixels)).decode()
