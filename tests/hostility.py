"""Valid captures to spoil, and what must hold whatever was done to them. Shared by the tests of hostile captures."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedprism as fp
from fedprism.attacks import GradientMatching, Labels
from fedprism.errors import FedprismError

Mutation = Callable[[Path], None]

SHAPE, CLASSES = (1, 4, 4), 3
SECONDS = 60
MOST_MEMORY = 8 * 2**30
"""Address space a test may take on top of what it starts with; a hostile claim beyond it fails loudly."""

ATTACKS = (
    fp.attacks.dense_inversion(),
    GradientMatching(iterations=2),
    GradientMatching(iterations=2, labels=Labels.JOINT),
    GradientMatching(iterations=2, labels=Labels.KNOWN, unroll=False),
    GradientMatching(iterations=2, labels=Labels.KNOWN),
)


# --- valid captures to start from ------------------------------------------------------------------------------------


def batch(size: int = 2, seed: int = 0) -> fp.Batch:
    rng = torch.Generator().manual_seed(seed)
    return fp.Batch(torch.rand(size, *SHAPE, generator=rng), torch.randperm(CLASSES, generator=rng)[:size])


def fc2() -> nn.Module:
    return fp.models.build("fc2", input_shape=SHAPE, hidden=5, classes=CLASSES, seed=1)


def lenet() -> nn.Module:
    return fp.models.build("lenet", input_shape=SHAPE, classes=CLASSES, width=2, seed=1)


def normalised() -> nn.Module:
    """A network with batch-norm buffers that no table names."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, CLASSES))


def captured(folder: Path, threat: fp.ThreatModel, **changes: Any) -> None:
    scenario = fp.Scenario(**{"model": fc2(), "clients": [batch()], **changes})
    fp.captures.save(fp.simulate(scenario, threat)[0], folder)


KNOWING = fp.threats.honest_but_curious.granting("labels", "defense")
STARTS: dict[str, Callable[[Path], None]] = {
    "fc2": lambda folder: captured(folder, KNOWING, normalization=((0.5,), (0.5,)), defense=fp.defenses.Prune(0.1)),
    "lenet": lambda folder: captured(folder, KNOWING, model=lenet(), training=False),
    "averaging": lambda folder: captured(folder, KNOWING, protocol=fp.FedAvg(epochs=2, batch_size=1)),
    "clients": lambda folder: captured(folder, KNOWING, clients=[batch(1), batch(2)]),
    "aggregate": lambda folder: captured(
        folder,
        fp.threats.secure_aggregation.granting("participation", "examples", "public_data"),
        clients=[batch(1), batch(2)],
        aggregation="sum",
    ),
    "normalised": lambda folder: captured(folder, KNOWING, model=normalised()),
}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One valid capture a name in STARTS, each with a trapdoor."""
    root = tmp_path_factory.mktemp("starts")
    for name, write in STARTS.items():
        write(root / name)
        save_file({"bins": torch.rand(3)}, root / name / "trapdoor.safetensors")
    return root


@pytest.fixture
def capture(starts: Path, tmp_path: Path) -> Path:
    """A valid fc2 capture to be spoilt, beside a safetensors file that is none of its business."""
    save_file(fc2().state_dict(), tmp_path / "secret.safetensors")
    return Path(shutil.copytree(starts / "fc2", tmp_path / "capture"))


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Turn a huge allocation into an error, and one that no test expects."""
    if sys.platform != "linux":
        yield
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


# --- what must hold --------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, tuple[int, object]]:
    """Everything below a folder: kind, and what is in it or where it leads."""
    found: dict[str, tuple[int, object]] = {}
    for path in sorted(folder.rglob("*")):
        kind = stat.S_IFMT(path.lstat().st_mode)
        inside = path.read_bytes() if stat.S_ISREG(kind) else os.readlink(path) if stat.S_ISLNK(kind) else None
        found[str(path.relative_to(folder))] = (kind, inside)
    return found


def assert_sentence(error: FedprismError) -> None:
    text = str(error)
    assert text.strip()
    assert len(text.splitlines()) == 1, text
    assert text.isprintable(), text
    assert len(text) < 1000, text


def attacked(folder: Path, model: nn.Module | None = None) -> None:
    """Load the capture and attack it: each step may refuse in one sentence and may do nothing else."""
    try:
        observation = fp.captures.load(folder, model=model)
    except FedprismError as error:
        assert_sentence(error)
        return
    for attack in ATTACKS:
        try:
            found = fp.run(attack, observation)
            assert found.status
            assert "\n" not in found.status
            assert found.inputs is None or bool(torch.isfinite(found.inputs).all()), found.status
            fp.residual(observation, found)
        except FedprismError as error:
            assert_sentence(error)


def assert_harmless(folder: Path, model: nn.Module | None = None) -> None:
    def too_slow(*_: object) -> None:
        raise AssertionError(f"not done after {SECONDS} seconds")

    before = contents(folder.parent)
    previous = signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(SECONDS)
    try:
        attacked(folder, model)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert contents(folder.parent) == before


# --- mutations of files ----------------------------------------------------------------------------------------------


def a_file(folder: Path, place: int) -> Path:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return files[place % len(files)] if files else folder / "capture.json"


def edit_bytes(place: int, change: Callable[[bytes], bytes], folder: Path) -> None:
    file = a_file(folder, place)
    if file.is_file():
        file.write_bytes(change(file.read_bytes()))


def flipped(positions: list[tuple[float, int]], content: bytes) -> bytes:
    changed = bytearray(content)
    for where, mask in positions:
        if changed:
            changed[int(where * (len(changed) - 1))] ^= mask
    return bytes(changed)


def with_header(change: Callable[[dict[str, Any]], None], content: bytes) -> bytes:
    """A safetensors file with another header before the same data."""
    try:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        change(header)
    except (ValueError, RecursionError, LookupError, TypeError, ZeroDivisionError):
        return content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def claim(place: int, key: str, value: object, header: dict[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    header[names[place % len(names)]][key] = value


def replace_file(kind: str, place: int, folder: Path) -> None:
    file = a_file(folder, place)
    if not file.is_file():
        return
    content = file.read_bytes()
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "dangling":
        file.symlink_to("nowhere")
    elif kind == "out":
        file.symlink_to(folder.parent / "secret.safetensors")
    elif kind == "sibling":
        file.symlink_to(f"moved-{file.name}")
        (folder / f"moved-{file.name}").write_bytes(content)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        assert kind == "missing"
