"""Makes the pictures and the figures of README from runs, and writes them into docs/pictures and README.md.

    python docs/pictures.py          # or: make pictures; a minute or two on two cores, and Chromium for the report

`figures.json` beside the pictures keeps what was measured. A test compares README with it and measures the cheap part
again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import fedprism as fp

HERE = Path(__file__).parent
ROOT = HERE.parent
PICTURES, README = HERE / "pictures", ROOT / "README.md"
FIGURES = PICTURES / "figures.json"
RESULTS = ROOT / "benchmarks" / "results"

sys.path.append(str(HERE))

import commands  # noqa: E402
import pages  # noqa: E402

ENLARGED, GAP = 4, 8
"""Pixels of the picture for each pixel of a photograph, and between photographs."""
PAGE = {"width": 1280, "height": 860}
"""The part of the report that the picture shows, in pixels."""


def recovered() -> tuple[dict[str, float], np.ndarray[Any, Any]]:
    """The attack of README's program: what it measures, and originals above recovered photographs."""
    names: dict[str, Any] = {}
    exec(program(), names)
    scores = fp.score(names["reconstruction"], names["truth"], metrics=("psnr",))
    pairs = fp.match(names["reconstruction"], names["truth"])
    values = scores.values["psnr"]
    measured = {"photographs": len(values), "lowest_psnr": round(min(values), 1)}
    return measured, _rows(pairs.truth, pairs.recovered)


def exact() -> np.ndarray[Any, Any]:
    """Originals above the photographs of examples/exact_images.py."""
    names = runpy.run_path(str(ROOT / "examples" / "exact_images.py"))
    pairs = fp.match(names["reconstruction"], names["truth"])
    return _rows(pairs.truth, pairs.recovered, enlarged=3 * ENLARGED)


def program() -> str:
    """The Python of README that is run, without what it prints."""
    (text,) = [each.text for each in pages.blocks(README.read_text()) if each.language == "python" and each.runs]
    return re.sub(r"^print.*$", "", text, flags=re.MULTILINE)


def _rows(*batches: torch.Tensor, enlarged: int = ENLARGED) -> np.ndarray[Any, Any]:
    """One row of photographs per batch."""
    rows = []
    for batch in batches:
        pixels = (batch.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
        large = pixels.repeat(enlarged, 1).repeat(enlarged, 2)
        rows.append(
            np.concatenate([np.pad(each, ((0, GAP), (0, GAP), (0, 0)), constant_values=255) for each in large], 1)
        )
    return np.concatenate(rows)[:-GAP, :-GAP]


def demo(folder: Path) -> list[str]:
    """What `fedprism demo` prints; its results stay in the folder."""
    done = subprocess.run(
        [sys.executable, "-m", "fedprism", "demo", "--quiet"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.rstrip() for line in done.stdout.splitlines() if line.strip()]


def shown(report: Path, picture: Path) -> None:
    """The top of a report as a picture."""
    from playwright.sync_api import sync_playwright

    # As root, as in containers, Chromium refuses its sandbox; the page is our own.
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport=PAGE)
        page.goto(report.as_uri())
        page.screenshot(path=picture)
        browser.close()
    small = Image.open(picture).convert("RGB").quantize(128)
    small.save(picture, optimize=True)


def digest(picture: Path) -> str:
    return hashlib.sha256(picture.read_bytes()).hexdigest()


def filled(readme: str, figures: dict[str, Any]) -> str:
    """README with what the demo printed, and the results of the benchmarks."""
    printed = "\n".join(["```text", *figures["demo"], "```"])
    for name, text in (("demo", printed), ("results", results())):
        begin, end = f"<!-- figures: {name} -->", "<!-- end of figures -->"
        before, _, rest = readme.partition(begin)
        readme = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return readme


def results() -> str:
    """Three results, from what benchmarks/ stored."""

    def stored(name: str) -> Any:
        return json.loads((RESULTS / f"{name}.json").read_text())["rows"]

    (dense,) = [row for row in stored("cocktail_party") if (row["data"], row["what"]) == ("CIFAR-10", "gradient, 128")]
    exact, batches = dense["exact"], dense["batches"]
    patches, sums = stored("patch_inversion")["ViT-B/16, 224 px"], stored("participation")[-1]
    rows = [
        (
            "128 CIFAR-10 images, one gradient of a trained dense network (256 units), labels unknown",
            f"{exact['psnr']:.0f} dB on average; {exact['certified batches']} of {batches} batches certified exact",
            "[cocktail party](research/cocktail-party.md)",
        ),
        (
            "one photograph per update, ViT-B/16 at 224 px, random weights",
            f"{patches['above_60_db']} of {patches['photographs']} above 60 dB",
            "[closed forms](research/closed-forms.md)",
        ),
        (
            f"secure sums of {sums['users']:,} users over {sums['rounds']:,} rounds: who took part when",
            f"every entry right in {sums['trials exact']} trials, {sums['seconds']:.1f} s on two cores",
            "[disaggregation](research/disaggregation.md)",
        ),
    ]
    return commands.table(("measured", "result", "study"), rows)


def main() -> None:
    measured, pixels = recovered()
    Image.fromarray(pixels).save(PICTURES / "recovered.png", optimize=True)
    Image.fromarray(exact()).save(PICTURES / "span-inversion.png", optimize=True)
    with tempfile.TemporaryDirectory() as folder:
        printed = demo(Path(folder))
        shown(Path(folder) / "fedprism-demo" / "report.html", PICTURES / "report.png")
    digests = {picture.name: digest(picture) for picture in sorted(PICTURES.glob("*.png"))}
    figures = {"demo": printed, "recovered": measured, "pictures": digests}
    FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    README.write_text(pages.run(filled(README.read_text(), figures), "README"))


if __name__ == "__main__":
    main()
