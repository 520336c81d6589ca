"""Each kind of hostility in a capture, by name: a result or one sentence, and nothing happens."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fedprism as fp
from fedprism import cli
from fedprism.captures import schema
from fedprism.errors import BadCapture
from fedprism.files import tensors
from hostility import (
    SHAPE,
    Mutation,
    assert_sentence,
    bounded_memory,
    capture,
    claim,
    starts,
    with_header,
)
from mutations import (
    KNOWLEDGE,
    KWARGS,
    PARAMS,
    UPDATE,
    both,
    content,
    first_round,
    grown,
    known,
    model,
    put,
    raw,
    swapped,
    tensor,
    two_aggregates,
    words,
)

HOSTILE: dict[str, tuple[Mutation, str]] = {
    # wrong or missing keys
    "no manifest": (lambda folder: (folder / "capture.json").unlink(), "has no usable file 'capture.json'"),
    "empty manifest": (content("capture.json", lambda _: b""), "Invalid JSON: EOF"),
    "no JSON": (content("capture.json", lambda _: b"\x80\x04K\x01."), "Invalid JSON"),
    "a list": (content("capture.json", lambda _: b"[]"), "should be an object"),
    "format missing": (words(lambda d: d.pop("format")), "at 'format': Field required"),
    "format of the future": (words(lambda d: d.update(format="fedprism-capture/2")), "should be 'fedprism-capture/1'"),
    "rounds missing": (words(lambda d: d.pop("rounds")), "at 'rounds': Field required"),
    "no rounds": (words(lambda d: d.update(rounds=[])), "at least 1 item"),
    "kind missing": (words(lambda d: d["rounds"][0].pop("kind")), "at 'rounds.0.kind': Field required"),
    "kind misspelt": (first_round(kind="gradients"), "should be 'gradient' or 'delta'"),
    "unknown key": (known(truth=[1, 2]), "at 'knowledge.truth': Extra inputs are not permitted"),
    "key with a line break": (known(**{"a\nb": 1}), r"at 'knowledge.a\nb'"),
    "source of another type": (words(lambda d: d.update(source=1)), "at 'source'"),
    "nesting": (raw('"source": ', '"x": ' + "[" * 10_000 + "]" * 10_000 + ', "source": '), "recursion limit"),
    "number of 5000 digits": (raw('"batch_size": 2', '"batch_size": ' + "9" * 5000), "number out of range"),
    "true for one": (first_round(clients=True), "at 'rounds.0.clients'"),
    "clients without number": (first_round(participants=["a", "b"]), "1 clients need as many participants, not 2"),
    "a round without batch size": (known(batch_size=[1, 2]), "one value for each of 1 rounds, not 2"),
    "nobody at all": (
        first_round(clients=0, reduction="sum", participants=[]),
        "the only round has no client",
    ),
    "a mean over nobody": (first_round(clients=0, participants=[]), "a mean needs at least one client"),
    "a client without samples": (known(batch_size=[0]), "batch_size is 0, but 1 clients took part"),
    # values out of range
    "bounds reversed": (known(bounds=[1, 0]), "the low bound must be below the high one, not 1.0 and 0.0"),
    "bounds not finite": (known(bounds=[0, float("inf")]), "at 'knowledge.bounds.1'"),
    "an optimizer of no table": (known(local_optimizer={"name": "lion"}), "no local optimizer is called 'lion'"),
    "a setting of no optimizer": (
        known(local_optimizer={"name": "sgd", "kwargs": {"beta1": 0.5}}),
        "the local optimizer sgd does not take the settings",
    ),
    "an optimizer out of range": (
        known(local_optimizer={"name": "adam", "kwargs": {"beta1": 1.5}}),
        "beta1 must be a number from 0 up to",
    ),
    "NaN": (known(local_momentum=float("nan")), "at 'knowledge.local_momentum'"),
    "normalization of two channels": (known(normalization=[[0, 0], [1, 1]]), "1 means and stds"),
    "normalization by zero": (known(normalization=[[0], [0]]), "at 'knowledge.normalization.1.0'"),
    "negative batch": (known(batch_size=-1), "at 'knowledge.batch_size': Input should be greater than or equal to 1"),
    "loss out of no table": (known(loss="os.system"), "no loss is called 'os.system'"),
    "defense out of no table": (known(defense={"name": "x"}), "no defense is called 'x'"),
    "defense with odd settings": (
        known(defense={"name": "prune", "kwargs": {"x": 1}}),
        "prune does not take the settings",
    ),
    "defense out of range": (known(defense={"name": "prune", "kwargs": {"ratio": 7}}), "Prune's ratio must be"),
    # absurd sizes
    "input of 4 G values": (
        known(input_shape=[65536, 65536]),
        "at most 16777216 values, not 4294967296",
    ),
    "batch of 17 G values": (
        known(batch_size=2**20, input_shape=[1, 128, 128]),
        "a batch holds at most 268435456 values",
    ),
    "ten million local steps": (
        known(local_epochs=10_000, batch_size=1000, local_batch_size=1),
        "local_epochs give 100",
    ),
    "a client of 34 G values among aggregates": (
        both(words(two_aggregates), known(examples=[2**31])),
        "at most 268435456 values; examples is 2147483648",
    ),
    "a client of a million steps among aggregates": (
        both(words(two_aggregates), known(examples=[100_000], local_batch_size=1)),
        "examples, local_batch_size and local_epochs give 100000",
    ),
    "a billion epochs": (known(local_epochs=10**9), "at 'knowledge.local_epochs'"),
    "hidden of a trillion": (model(**{**KWARGS, "hidden": 10**12}), "hidden must be a whole number"),
    "hidden below zero": (model(**{**KWARGS, "hidden": -5}), "hidden must be a whole number from 1"),
    "model of 16 G parameters": (
        model(**{**KWARGS, "hidden": 2**20, "input_shape": [16384]}),
        "parameters; the limit is 4294967296",
    ),
    "larger than its file": (model(**{**KWARGS, "hidden": 2**20}), "not (1048576, 16)"),
    "manifest of 17 MB": (grown("capture.json", schema.MOST_MANIFEST_BYTES + 1), "is larger than 16777216 bytes"),
    "manifest of a terabyte": (grown("capture.json", 2**40), "is larger than 16777216 bytes"),
    "tensors of a terabyte": (grown(UPDATE, 2**40), "1099511627776 bytes; the limit is 4294967296"),
    # models
    "model out of no table": (model("fc3"), "no model is called 'fc3'; did you mean fc2"),
    "model to import": (model("os:system"), "no model is called 'os:system'"),
    "model that is code": (model("__import__('os').system('id')"), "no model is called"),
    "model without settings": (model(), "the model fc2 needs input_shape"),
    "model with odd settings": (model(**KWARGS, device="meta"), "has no option 'device'"),
    "model with a seed": (model(**KWARGS, seed=1), "not 'seed'"),
    "another model": (model("dense", input_shape=[1, 4, 4], classes=3), "must hold the model's parameters"),
    "model of another kind": (model("lenet", input_shape=[1, 4, 4]), "has no '0.weight'"),
    "input that does not fit": (known(input_shape=[1, 4, 5]), "does not accept input_shape (1, 4, 5)"),
    # paths
    "path above": (first_round(update="../secret.safetensors"), "the path leaves the folder"),
    "path through and above": (first_round(update="x/../../secret.safetensors"), "the path leaves the folder"),
    "absolute path": (first_round(params="/etc/passwd"), "the path leaves the folder"),
    "the folder": (first_round(params="."), "no such file"),
    "empty path": (first_round(params=""), "at 'rounds.0.params'"),
    "path with a NUL": (first_round(params="a\0b"), "not a valid name"),
    "long path": (first_round(params="x" * 999), "not a valid name"),
    "missing file": (first_round(params="params-7.safetensors"), "no such file"),
    "link out": (swapped(UPDATE, "out"), "the path leaves the folder"),
    "manifest that is a link out": (swapped("capture.json", "out"), "the path leaves the folder"),
    "knowledge that is a link out": (swapped(KNOWLEDGE, "out"), "the path leaves the folder"),
    "loop of links": (swapped(UPDATE, "loop"), "has no usable file 'update-0.safetensors'"),
    "manifest in a loop of links": (swapped("capture.json", "loop"), "has no usable file 'capture.json'"),
    "trapdoor in a loop of links": (swapped("trapdoor.safetensors", "loop"), "no usable file 'trapdoor.safetensors'"),
    "dangling link": (swapped(KNOWLEDGE, "dangling"), "has no usable file 'knowledge.safetensors'"),
    "folder for a file": (swapped(UPDATE, "folder"), "no such file"),
    "folder for the manifest": (swapped("capture.json", "folder"), "no such file"),
    "device for a file": (swapped(UPDATE, "device"), "the path leaves the folder"),
    # files that are none
    "truncated header": (content(UPDATE, lambda old: old[:20]), "is not a safetensors file"),
    "truncated data": (content(UPDATE, lambda old: old[:-5]), "is not a safetensors file"),
    "bytes after the end": (content(UPDATE, lambda old: old + b"x"), "is not a safetensors file"),
    "empty file": (content(UPDATE, lambda _: b""), "is not a safetensors file"),
    "giant header": (content(UPDATE, lambda old: struct.pack("<Q", 2**63) + old[8:]), "is not a safetensors file"),
    "a pickle": (content(PARAMS, lambda _: pickle.dumps({"a": 1})), "is not a safetensors file"),
    "a million tensors": (
        content(UPDATE, lambda _: many_tensors(tensors.MOST_TENSORS + 1)),
        "65537 tensors; the limit is 65536",
    ),
    "a claim of 2**40 values": (
        content(UPDATE, partial(with_header, partial(claim, 0, "shape", [2**40]))),
        "is not a safetensors file",
    ),
    "a claim beyond whole numbers": (
        content(UPDATE, partial(with_header, partial(claim, 0, "shape", [2**62, 8]))),
        "is not a safetensors file",
    ),
    # tensors
    "parameter missing": (tensor(PARAMS, lambda t: t.pop("1.bias")), "has no '1.bias'. Give the model"),
    "parameter too many": (
        tensor(PARAMS, put(x=torch.ones(1))),
        "and nothing else, but has 'x'",
    ),
    "update too many": (tensor(UPDATE, put(x=torch.ones(1))), "and nothing else, but has 'x'"),
    "update of nothing": (tensor(UPDATE, dict.clear), "no update of any parameter"),
    "name of two lines": (tensor(UPDATE, put(**{"a\nb": torch.ones(1)})), r"has 'a\nb'"),
    "endless name": (tensor(UPDATE, put(**{"x" * 10**6: torch.ones(1)})), "xxx...xxx"),
    "transposed": (tensor(UPDATE, lambda t: t.update({"1.weight": t["1.weight"].T})), "has shape (16, 5)"),
    "scalar": (tensor(UPDATE, put(**{"1__bias": torch.tensor(1.0)})), "not (5,)"),
    "empty": (tensor(UPDATE, put(**{"1__bias": torch.ones(0)})), "is empty"),
    "whole numbers": (tensor(UPDATE, lambda t: t.update({"1.bias": t["1.bias"].long()})), "is torch.int64, not"),
    "bytes": (tensor(PARAMS, lambda t: t.update({"1.bias": t["1.bias"].byte()})), "is torch.uint8, not"),
    "yes and no": (tensor(UPDATE, lambda t: t.update({"1.bias": t["1.bias"] > 0})), "is torch.bool, not"),
    "eight bits": (
        tensor(UPDATE, lambda t: t.update({"1.bias": t["1.bias"].to(torch.float8_e5m2)})),
        "tensors must be I64",
    ),
    "complex": (
        tensor(UPDATE, lambda t: t.update({"1.bias": t["1.bias"].to(torch.complex64)})),
        "'1.bias' in 'update-0.safetensors' is of type C64",
    ),
    "NaN in the update": (
        tensor(UPDATE, lambda t: t["1.weight"].view(-1)[7:8].fill_(torch.nan)),
        "holds NaN or infinity",
    ),
    "infinity in the parameters": (
        tensor(PARAMS, lambda t: t["3.bias"].fill_(-torch.inf)),
        "'3.bias' in 'params-0.safetensors' holds NaN or infinity",
    ),
    "NaN in the trapdoor": (tensor("trapdoor.safetensors", lambda t: t["bins"].fill_(torch.nan)), "NaN or infinity"),
    # knowledge
    "knowledge of nothing": (tensor(KNOWLEDGE, put(truth=torch.ones(1))), "not a field of knowledge"),
    "labels out of range": (tensor(KNOWLEDGE, put(labels=torch.tensor([0, 3]))), "of 3 classes, not torch.int64"),
    "labels below zero": (tensor(KNOWLEDGE, put(labels=torch.tensor([0, -1]))), "with values from -1 to 0"),
    "labels too many": (
        tensor(KNOWLEDGE, put(labels=torch.zeros(3).long())),
        "batch_size is 2, but there are 3 labels",
    ),
    "labels as fractions": (tensor(KNOWLEDGE, put(labels=torch.rand(2))), "not torch.float32 of shape (2,)"),
    "soft labels of four classes": (
        tensor(KNOWLEDGE, put(labels=torch.rand(2, 4))),
        "of 3 classes, not torch.float32",
    ),
    "labels twice": (tensor(KNOWLEDGE, put(labels__0=torch.tensor([0, 1]))), "'labels' both whole and in parts"),
    "labels of another round": (
        tensor(KNOWLEDGE, lambda t: t.update({"labels.1": t.pop("labels")})),
        "there is no 'labels.0'",
    ),
    "windows of one dimension": (tensor(KNOWLEDGE, put(windows=torch.ones(3))), "needs 2 dimensions"),
    "infinite counts": (
        tensor(KNOWLEDGE, put(counts=torch.full((1, 1), torch.inf))),
        "'counts' in 'knowledge.safetensors' holds NaN or infinity",
    ),
    "half of the public data": (
        tensor(KNOWLEDGE, put(public_data__inputs=torch.rand(1, *SHAPE))),
        "there is no 'public_data.labels'",
    ),
    "public data of another shape": (
        tensor(KNOWLEDGE, put(public_data__inputs=torch.rand(1, 9), public_data__labels=torch.zeros(1).long())),
        "public_data.inputs must be floating-point numbers of shape (1, 4, 4), not torch.float32 of shape (9,)",
    ),
}


def many_tensors(count: int) -> bytes:
    header = {str(n): {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(count)}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(count)


@pytest.mark.parametrize(("mutate", "fragment"), HOSTILE.values(), ids=HOSTILE)
def test_each_hostility_is_refused_in_a_sentence(
    mutate: Mutation, fragment: str, capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `load`, and by the command line with exit code 2; nothing is written."""
    mutate(capture)
    before = os.listdir(capture.parent)
    with pytest.raises(BadCapture) as caught:
        fp.captures.load(capture)
    assert fragment in str(caught.value)
    assert_sentence(caught.value)
    output = capture.parent / "output"
    assert cli.main(["attack", str(capture), "--attack", "dense-inversion", "-o", str(output)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"error: {caught.value}\n"
    assert os.listdir(capture.parent) == before


def test_nobody_waits_for_a_pipe(capture: Path) -> None:
    """In a process of its own, because a process that waits for a pipe cannot be woken."""
    names = sorted(os.listdir(capture))
    folders = [str(shutil.copytree(capture, capture.parent / f"without-{name}")) for name in names]
    for folder, name in zip(folders, names, strict=True):
        swapped(name, "fifo")(Path(folder))
    code = """
import sys, fedprism as fp
for folder in sys.argv[1:]:
    try:
        fp.captures.load(folder)
    except fp.errors.BadCapture as error:
        print(error)
"""
    command = [sys.executable, "-c", code, *folders]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    assert len(printed) == len(names) == 5
    for line, name in zip(printed, names, strict=True):
        assert f"has no usable file '{name}'" in line


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_no_pickle_is_loaded(protocol: int, capture: Path) -> None:
    mark = capture.parent / "pwned"
    poison = pickle.dumps(Payload(mark), protocol)
    pickle.loads(poison)
    assert mark.exists(), "the payload works"
    mark.unlink()
    for name in os.listdir(capture):
        hurt = Path(shutil.copytree(capture, capture.parent / f"with-{name}"))
        (hurt / name).write_bytes(poison)
        (hurt / "model.pt").write_bytes(poison)
        with pytest.raises(BadCapture):
            fp.captures.load(hurt)
    (capture / "model.pt").write_bytes(poison)
    (capture / "data.pkl").write_bytes(poison)
    assert fp.captures.load(capture).model is not None
    assert not mark.exists()


@pytest.mark.parametrize("name", ["evil", "evil:build", "evil.build", "capture.evil:build", "./evil.py:build"])
@pytest.mark.parametrize("place", ["model", "loss", "defense"])
def test_no_name_is_imported(name: str, place: str, capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = capture.parent / "imported"
    for folder in (capture.parent, capture):
        (folder / "evil.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()\ndef build(**_): ...\n")
    monkeypatch.syspath_prepend(capture.parent)
    monkeypatch.chdir(capture)
    changes = {"model": model(name, **KWARGS), "loss": known(loss=name), "defense": known(defense=[{"name": name}])}
    changes[place](capture)
    with pytest.raises(BadCapture, match=r"no (model|loss|defense) is called"):
        fp.captures.load(capture)
    assert not mark.exists()
    assert "evil" not in sys.modules
