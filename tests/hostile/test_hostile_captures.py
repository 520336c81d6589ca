"""A capture is hostile until checked: random mutations of valid captures look for what nobody thought of."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

import fedprism as fp
from capture_literals import LITERALS, PLACE, places
from fedprism.attacks import GradientMatching
from hostility import (
    CLASSES,
    STARTS,
    Mutation,
    assert_harmless,
    bounded_memory,
    claim,
    edit_bytes,
    fc2,
    flipped,
    normalised,
    replace_file,
    starts,
    with_header,
)

# --- mutations of capture.json ---------------------------------------------------------------------------------------

KEYS = [*("kwargs", "seed", "hidden", "labels", "batch_size", "local_lr", "buffers_before", "examples", "index", "x")]


def edit_json(folder: Path, place: int, change: Callable[[Any, Any], None], literal: str = "null") -> None:
    """Apply `change(parent, key)` to a value of capture.json; the word MUTATED then becomes the raw literal."""
    file = folder / "capture.json"
    try:
        document = json.loads(file.read_bytes()) if stat.S_ISREG(file.lstat().st_mode) else None
    except (OSError, ValueError, RecursionError):
        return  # an earlier mutation has already broken it
    found = [path for path in places(document) if path]
    if not found:
        return
    *parents, key = found[place % len(found)]
    parent = document
    for step in parents:
        parent = parent[step]
    change(parent, key)
    file.write_bytes(json.dumps(document).replace('"MUTATED"', literal).encode(errors="surrogatepass"))


def replace_value(literal: str, place: int, folder: Path) -> None:
    edit_json(folder, place, lambda parent, key: parent.__setitem__(key, "MUTATED"), literal)


def delete_value(place: int, folder: Path) -> None:
    edit_json(folder, place, lambda parent, key: parent.pop(key))


def rename_key(name: str, place: int, folder: Path) -> None:
    def rename(parent: Any, key: Any) -> None:
        if isinstance(parent, dict):
            parent[name] = parent.pop(key)

    edit_json(folder, place, rename)


def add_key(name: str, literal: str, place: int, folder: Path) -> None:
    def add(parent: Any, key: Any) -> None:
        target = parent[key] if isinstance(parent[key], dict) else parent
        target.append("MUTATED") if isinstance(target, list) else target.__setitem__(name, "MUTATED")

    edit_json(folder, place, add, literal)


def repeat_value(place: int, folder: Path) -> None:
    """A list with an element twice, or an object with the key "kind" twice."""

    def repeat(parent: Any, key: Any) -> None:
        parent.append(parent[key]) if isinstance(parent, list) else parent.__setitem__("MUTATED", parent[key])

    edit_json(folder, place, repeat, '"kind"')


# --- mutations of tensors --------------------------------------------------------------------------------------------


def edit_tensors(place: int, change: Callable[[dict[str, Tensor], str], None], folder: Path) -> None:
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file() and not path.is_symlink())
    if not files:
        return
    file = files[place % len(files)]
    try:
        tensors = load_tensors(file.read_bytes())
    except (SafetensorError, ValueError, RuntimeError, TypeError):
        return  # an earlier mutation has already broken it
    if tensors:
        change(tensors, sorted(tensors)[place // 7 % len(tensors)])
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file)


def drop(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def keep_only(tensors: dict[str, Tensor], name: str) -> None:
    for other in set(tensors) - {name}:
        del tensors[other]


def rename(new: str, tensors: dict[str, Tensor], name: str) -> None:
    tensors[new] = tensors.pop(name)


def add(new: str, tensors: dict[str, Tensor], name: str) -> None:
    tensors[new] = tensors[name]


def reshape(how: Callable[[Tensor], Tensor], tensors: dict[str, Tensor], name: str) -> None:
    if tensors[name].numel():
        tensors[name] = how(tensors[name])


def cast(dtype: torch.dtype, tensors: dict[str, Tensor], name: str) -> None:
    if not tensors[name].is_complex():
        tensors[name] = tensors[name].to(dtype)


def fill(value: float, everywhere: bool, tensors: dict[str, Tensor], name: str) -> None:
    for key in tensors if everywhere else [name]:
        if tensors[key].dtype.is_floating_point:
            tensors[key] = torch.full(tensors[key].shape, value)


def scale(factor: float, tensors: dict[str, Tensor], name: str) -> None:
    for key in tensors:
        if tensors[key].dtype.is_floating_point:
            tensors[key] = tensors[key].double() * factor


def poison(value: float, tensors: dict[str, Tensor], name: str) -> None:
    if tensors[name].dtype.is_floating_point and tensors[name].numel():
        tensors[name].view(-1)[-1] = value


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT if t.dim() > 1 else t.unsqueeze(0),
    "flat": lambda t: t.flatten(),
    "nested": lambda t: t.view(1, *t.shape),
    "scalar": lambda t: t.flatten()[0],
    "empty": lambda t: t.flatten()[:0],
    "empty and wide": lambda t: t.new_empty(0, 2**40),
    "many dimensions": lambda t: t.flatten()[:1].view(*[1] * 70),
    "doubled": lambda t: torch.cat([t.view(1, *t.shape)] * 2).flatten(0, 1) if t.dim() else t,
}
DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
]
NUMBERS = [0.0, 1.0, -1.0, 1e-30, 1e-45, 6e4, 1e30, 3e38, -3e38, torch.nan, torch.inf, -torch.inf]
FACTORS = [-1.0, 1e3, 1e-3, 1e20, 1e-20, 1e300, 1e-300, 1e308]
NAMES = ["", "x", "a\nb", "\0", "x" * 10_000, "é\u2028", "labels", "labels.0", "labels.7", "counts", "windows"]
NAMES += ["public_data.labels", "mixing.x", "1.bias", "1.running_mean", "../x", "__class__"]

json_mutations = st.one_of(
    st.builds(partial, st.just(replace_value), st.sampled_from(LITERALS), PLACE),
    st.builds(partial, st.just(replace_value), st.integers(-3, 40).map(str), PLACE),
    st.builds(partial, st.just(replace_value), st.floats(-10, 10).map(repr), PLACE),
    st.builds(partial, st.just(replace_value), st.text(max_size=20).map(json.dumps), PLACE),
    st.builds(partial, st.just(delete_value), PLACE),
    st.builds(partial, st.just(rename_key), st.sampled_from(KEYS) | st.text(max_size=5), PLACE),
    st.builds(partial, st.just(add_key), st.sampled_from(KEYS), st.sampled_from(LITERALS), PLACE),
    st.builds(partial, st.just(repeat_value), PLACE),
)
byte_changes = st.one_of(
    st.floats(0, 1).map(lambda part: lambda content: content[: int(part * len(content))]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=5).map(
        lambda positions: partial(flipped, positions)
    ),
    st.binary(min_size=1, max_size=100).map(lambda extra: lambda content: content + extra),
    st.binary(max_size=300).map(lambda junk: lambda content: junk),
    st.sampled_from([2**63, 2**64 - 1, 10**8, 0, 1, 7]).map(
        lambda size: lambda content: struct.pack("<Q", size) + content[8:]
    ),
    st.just(lambda content: pickle.dumps({"weights": [1.0]})),
    st.builds(
        lambda *words: partial(with_header, partial(claim, *words)),
        PLACE,
        st.sampled_from(["shape", "dtype", "data_offsets", "x"]),
        st.sampled_from(
            [
                *([2**62, 8], [0, 2**63], [2**40], [], [1] * 70, [-1], [1.5], None, "F64", "F8_E4M3", "C64", "I64"),
                *("F16", "BOOL", "U8", "object", [0, 0], [0, 2**64], [8, 0], [0, 4], {}, "x" * 1000),
            ]
        ),
    ),
)
file_mutations = st.one_of(
    st.builds(partial, st.just(edit_bytes), PLACE, byte_changes),
    st.builds(
        partial,
        st.just(replace_file),
        st.sampled_from(["folder", "fifo", "loop", "dangling", "out", "sibling", "device", "missing"]),
        PLACE,
    ),
)
tensor_changes = st.one_of(
    st.just(drop),
    st.just(keep_only),
    st.builds(partial, st.just(rename), st.sampled_from(NAMES)),
    st.builds(partial, st.just(add), st.sampled_from(NAMES)),
    st.builds(partial, st.just(reshape), st.sampled_from(list(SHAPES.values()))),
    st.builds(partial, st.just(cast), st.sampled_from(DTYPES)),
    st.builds(partial, st.just(fill), st.sampled_from(NUMBERS), st.booleans()),
    st.builds(partial, st.just(poison), st.sampled_from(NUMBERS)),
    st.builds(partial, st.just(scale), st.sampled_from(FACTORS)),
)
tensor_mutations = st.builds(partial, st.just(edit_tensors), PLACE, tensor_changes)

PROFILE = settings(
    max_examples=int(os.environ.get("FEDPRISM_EXAMPLES", "130")),
    deadline=None,
    derandomize="FEDPRISM_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def mutated(starts: Path, start: str, mutations: list[Mutation]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "capture"
        shutil.copytree(starts / start, folder)
        save_file(fc2().state_dict(), Path(place) / "secret.safetensors")
        for mutate in mutations:
            mutate(folder)
        assert_harmless(folder, normalised() if start == "normalised" else None)


START = st.sampled_from(sorted(STARTS))


@PROFILE
@given(start=START, mutations=st.lists(json_mutations, min_size=1, max_size=3))
def test_mutated_words(starts: Path, start: str, mutations: list[Mutation]) -> None:
    mutated(starts, start, mutations)


@PROFILE
@given(start=START, mutations=st.lists(file_mutations, min_size=1, max_size=2))
def test_mutated_files(starts: Path, start: str, mutations: list[Mutation]) -> None:
    mutated(starts, start, mutations)


@PROFILE
@given(start=START, mutations=st.lists(tensor_mutations, min_size=1, max_size=3))
def test_mutated_tensors(starts: Path, start: str, mutations: list[Mutation]) -> None:
    mutated(starts, start, mutations)


@PROFILE
@given(start=START, mutations=st.lists(json_mutations | file_mutations | tensor_mutations, min_size=2, max_size=3))
def test_mutated_in_several_ways(starts: Path, start: str, mutations: list[Mutation]) -> None:
    mutated(starts, start, mutations)


# --- claims that are possible, and odd -------------------------------------------------------------------------------

SMALL = st.floats(-4, 4, allow_subnormal=False)
KNOWN: dict[str, st.SearchStrategy[Any]] = {
    "input_shape": st.sampled_from(
        [[1, 4, 4], [4, 4], [16], [4, 4, 1], [1, 2, 8], [1, 4, 5], [3, 4, 4], [1, 1, 1, 16]]
    ),
    "bounds": st.tuples(SMALL, SMALL),
    "normalization": st.tuples(st.lists(SMALL, max_size=3), st.lists(SMALL, max_size=3)),
    "examples": st.lists(st.integers(1, 5), max_size=3),
    "loss": st.sampled_from(["cross_entropy", "mse", "softmax_mse"]),
    "local_lr": st.floats(1e-3, 10),
    "local_epochs": st.integers(1, 4),
    "local_batch_size": st.integers(1, 5),
    "local_momentum": st.floats(0, 0.99),
    "local_optimizer": st.sampled_from(
        [
            {"name": "sgd", "kwargs": {"weight_decay": 1e9}},
            {"name": "sgd", "kwargs": {"nesterov": True}},
            {"name": "adam"},
            {"name": "adam", "kwargs": {"epsilon": 1e-30, "beta2": 0}},
            {"name": "adamw", "kwargs": {"weight_decay": 0.1}},
        ]
    ),
    "defense": st.sampled_from([[], {"name": "prune", "kwargs": {"ratio": 0.9}}]),
}
ROUND: dict[str, st.SearchStrategy[Any]] = {
    "kind": st.sampled_from(["gradient", "delta"]),
    "reduction": st.sampled_from(["sum", "mean", "weighted_mean"]),
    "clients": st.integers(1, 4),
    "index": st.integers(0, 3),
}


@PROFILE
@given(
    start=st.sampled_from(["fc2", "lenet", "averaging"]),
    knowledge=st.fixed_dictionaries({}, optional=KNOWN),
    seen=st.fixed_dictionaries({}, optional=ROUND),
    batch_size=st.none() | st.integers(1, 12),
    labels=st.none() | st.lists(st.integers(0, CLASSES), min_size=1, max_size=12),
    kept=st.none() | st.sets(st.integers(0, 7), min_size=1),
)
def test_odd_but_possible_claims(
    starts: Path,
    start: str,
    knowledge: dict[str, Any],
    seen: dict[str, Any],
    batch_size: int | None,
    labels: list[int] | None,
    kept: set[int] | None,
) -> None:
    """Settings that fit the format and not each other, labels that are none, updates of some parameters only."""

    def claim_it(folder: Path) -> None:
        document = json.loads((folder / "capture.json").read_bytes())
        size = batch_size if labels is None or batch_size is None else len(labels)
        document["knowledge"] = {**document["knowledge"], **knowledge, "batch_size": size}
        document["rounds"][0] |= {"participants": None, **seen}
        (folder / "capture.json").write_text(json.dumps(document))
        (folder / "knowledge.safetensors").unlink()
        if labels is not None:
            save_file({"labels": torch.tensor(labels)}, folder / "knowledge.safetensors")
        if kept is not None:
            update = load_tensors((folder / "update-0.safetensors").read_bytes())
            some = [name for number, name in enumerate(sorted(update)) if number in kept]
            save_file({name: update[name] for name in some}, folder / "update-0.safetensors")

    mutated(starts, start, [claim_it])


@pytest.mark.parametrize("start", STARTS)
def test_an_unmutated_capture_works(starts: Path, start: str) -> None:
    """The mutations start from something that works: every start loads, and some attack gets through."""
    model = normalised() if start == "normalised" else None
    observation = fp.captures.load(starts / start, model=model)
    assert observation.trapdoor is not None
    mutated(starts, start, [])
    assert fp.run(GradientMatching(iterations=2), observation).inputs is not None
