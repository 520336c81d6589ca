"""What a command leaves behind: records as JSON, tensors, pictures. All of it appears, or nothing does."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor

from fedprism import __version__
from fedprism.errors import BadInput
from fedprism.pixels import to_pixels
from fedprism.types import Observation, Reconstruction, Record

if TYPE_CHECKING:
    from rich.table import Table


def require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written before a long computation, not after it."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise _not_writable(folder, f"'{existing.name}' is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _not_writable(folder, "permission denied")


def publish(folder: Path, files: Mapping[str, bytes], *, stale: Iterable[str] = ()) -> None:
    """Put `files` into the folder, in their order, in place of those of an earlier run that match the patterns `stale`.

    Everything is on disk before the first file gets its name, so that a full disk leaves an earlier run as it was.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fedprism-") as staging:
            for name, content in files.items():
                Path(staging, name).write_bytes(content)
            for old in [path for pattern in stale for path in folder.glob(pattern)]:
                old.unlink()
            for name in files:
                os.replace(Path(staging, name), folder / name)
    except OSError as error:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise _not_writable(folder, error.strerror or str(error)) from error


def _not_writable(folder: Path, reason: str) -> BadInput:
    return BadInput(
        f"expected a folder to write to, found that '{folder}' cannot be written ({reason}); "
        "make room there or choose another one with -o."
    )


def attack_files(observation: Observation, reconstruction: Reconstruction, record: Record) -> dict[str, bytes]:
    """The files of one attack: tensors, updates by their number, a picture a recovered image and, last, the record."""
    tensors = {
        "inputs": reconstruction.inputs,
        "labels": reconstruction.labels,
        "properties": reconstruction.properties,
    }
    pictures = as_pixels(observation, reconstruction) if _shows_images(reconstruction) else ()
    return {
        "reconstruction.safetensors": _saved(tensors),
        **{f"update-{k}.safetensors": _saved(update) for k, update in enumerate(reconstruction.updates or ())},
        **{f"recovered-{number}.png": png(picture) for number, picture in enumerate(pictures)},
        "record.json": as_json(dataclasses.asdict(record)),
    }


def _saved(tensors: Mapping[str, Tensor | None]) -> bytes:
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None})


def summary(record: Record, files: Mapping[str, bytes]) -> Table:
    """What a person wants to know first about an attack that has run."""
    from rich import box  # slow to import, and few who read or write results draw tables
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    residual = "cannot be told" if record.residual is None else f"{record.residual:.3g} of the update left unexplained"
    table.add_row("attack", str(record.cell["settings"]))
    table.add_row("status", record.status)
    table.add_row("residual", residual)
    table.add_row("images", str(sum(name.endswith(".png") for name in files)))
    updates = sum(name.startswith("update-") for name in files)
    if updates:
        table.add_row("updates", str(updates))
    table.add_row("knowledge used", ", ".join(record.knowledge_used))
    return table


def as_pixels(observation: Observation, reconstruction: Reconstruction) -> Tensor:
    """Recovered inputs as pixels in [0, 1], by what is known; an unknown range or scale is stretched to fill it."""
    assert reconstruction.inputs is not None
    knowledge = observation.knowledge
    bounds = None if "scale" in reconstruction.ambiguity else knowledge.bounds
    return to_pixels(reconstruction.inputs, bounds, knowledge.normalization)


def png(pixels: Tensor) -> bytes:
    """An image (1 or 3 channels, height, width) with values in [0, 1] as a PNG file."""
    levels = (pixels.detach().cpu() * 255).round().to(torch.uint8)
    array = levels[0].numpy() if len(levels) == 1 else levels.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(array).save(file, format="PNG")
    return file.getvalue()


def as_json(value: object) -> bytes:
    """JSON that every reader accepts: numbers that are not finite become the words "inf", "-inf" and "nan"."""
    return (json.dumps(_plain(value), indent=1, allow_nan=False) + "\n").encode()


def versions() -> dict[str, str]:
    """What a result depends on beside its inputs."""
    return {"fedprism": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _shows_images(reconstruction: Reconstruction) -> bool:
    inputs = reconstruction.inputs
    return inputs is not None and inputs.dim() == 4 and inputs.shape[1] in (1, 3)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
