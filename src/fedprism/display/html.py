"""Pieces of HTML for notebooks: everything escaped, pictures inside, no scripts, a bounded size."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence

import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor
from torch.nn import functional

MOST_SAMPLES = 8
"""Samples that are shown; a sentence says how many there are."""
MOST_VALUES = 12
"""Numbers of a sample that is no picture."""
MOST_SIDE = 112
"""In pixels: larger pictures are made smaller. One of noise then takes 52 kB, and eight pairs less than 1 MB."""
SHOWN_SIDE = 96
"""In pixels: small pictures are enlarged to it when they are shown."""
MOST_TEXT = 2000
"""Letters of one text: a status may hold a sentence per sample."""


def printable(text: str) -> str:
    """Without characters that cannot be seen or that turn a line around."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def text(value: object) -> Markup:
    """Any value as escaped text."""
    if isinstance(value, Markup):
        return value
    words = printable(str(value))
    return Markup.escape(words if len(words) <= MOST_TEXT else words[: MOST_TEXT - 3] + "...")


def png(pixels: Tensor) -> bytes:
    """An image (1 or 3 channels, height, width) with values in [0, 1] as a PNG file."""
    levels = (pixels.detach().cpu() * 255).round().to(torch.uint8)
    array = levels[0].numpy() if len(levels) == 1 else levels.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(array).save(file, format="PNG")
    return file.getvalue()


def address(pixels: Tensor) -> str:
    """An image (1 or 3 channels, height, width) with values in [0, 1] as a data address of bounded length."""
    pixels = pixels.detach().cpu().double()
    side = max(pixels.shape[1:])
    if side > MOST_SIDE:
        size = [max(1, round(length * MOST_SIDE / side)) for length in pixels.shape[1:]]
        pixels = functional.interpolate(pixels[None], size=size, mode="area")[0]
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def picture(pixels: Tensor, description: str) -> Markup:
    """An image with values in [0, 1]; `description` is read out by screen readers."""
    height, width = pixels.shape[1:]
    shown = round(SHOWN_SIDE * width / max(height, width))
    return Markup('<img src="{}" alt="{}" width="{}" style="image-rendering:pixelated">').format(
        address(pixels), text(description), max(1, shown)
    )


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: object = "") -> Markup:
    """A table; the first cell of each row is its heading."""
    title = Markup('<caption style="text-align:left">{}</caption>').format(text(caption)) if caption else Markup()
    line = Markup().join(Markup('<th scope="col">{}</th>').format(text(cell)) for cell in head)
    body = Markup().join(
        Markup('<tr><th scope="row" style="text-align:left">{}</th>{}</tr>').format(
            text(row[0]), Markup().join(Markup("<td>{}</td>").format(text(cell)) for cell in row[1:])
        )
        for row in rows
    )
    return Markup("<table>{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(title, line, body)


def paragraph(words: object) -> Markup:
    return Markup("<p>{}</p>").format(text(words))


def lines(pieces: Iterable[Markup]) -> str:
    """Pieces one below the other."""
    return str(Markup("<div>{}</div>").format(Markup("\n").join(pieces)))


def are_pictures(tensor: Tensor) -> bool:
    """Whether samples (batch, channels, height, width) can be shown as pictures."""
    return tensor.is_floating_point() and tensor.dim() == 4 and tensor.shape[1] in (1, 3) and min(tensor.shape[2:]) > 2


def values(sample: Tensor) -> str:
    """The first numbers of a sample that is no picture."""
    flat = sample.detach().cpu().reshape(-1)
    shown = [f"{value:.4g}" if flat.is_floating_point() else str(value) for value in flat[:MOST_VALUES].tolist()]
    more = len(flat) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def sample(tensor: Tensor, place: int, name: str) -> object:
    """One sample of a tensor (samples, ...): as a picture, whose values are in [0, 1], or as its first numbers."""
    return picture(tensor[place], f"{name} {place}") if are_pictures(tensor) else values(tensor[place])


def samples(count: int, rows: Sequence[tuple[str, Callable[[int], object]]]) -> Markup:
    """A table with a column for each of the first samples; each row has a name and what it shows of a sample."""
    shown = range(min(count, MOST_SAMPLES))
    more = f"The first {len(shown)} of {count} samples." if count > len(shown) else ""
    return table(["sample", *map(str, shown)], [[name, *map(cell, shown)] for name, cell in rows], more)
