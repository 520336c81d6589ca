"""`fedprism inspect`: exit codes, JSON, and hostile files that end in one sentence or in a finding."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedprism as fp
from fedprism import cli
from fedprism.randomness import generator

FACTORY = """
import fedprism as fp


def network():
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=32, classes=10, seed=0)
"""


def network() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=32, classes=10, seed=0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    params = dict(network().state_dict())
    save_file(params, "honest.safetensors")
    fished, _ = fp.attacks.ClassFishing(target=2).tamper(network(), params, generator(0))
    save_file(dict(fished), "fished.safetensors")
    rng = torch.Generator().manual_seed(0)
    save_file({"inputs": torch.rand(6, 1, 8, 8, generator=rng), "labels": torch.arange(6)}, "batch.safetensors")
    Path("own_network.py").write_text(FACTORY)
    return tmp_path


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


WITH_CODE = ["--model", "own_network:network", "--batch", "batch.safetensors"]


def test_an_honest_model_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "honest.safetensors", "--reference", "honest.safetensors", *WITH_CODE]) == 0
    printed = capsys.readouterr()
    assert "Nothing serious" in printed.out
    assert "does not prove" in printed.out
    assert printed.err == ""


def test_a_trap_is_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "fished.safetensors", *WITH_CODE]) == 1
    printed = capsys.readouterr()
    assert "one-live-row" in printed.out
    assert "'3.weight'" in printed.out
    assert "few-samples-dominate" in printed.out
    assert printed.err == ""


def test_json_holds_the_evidence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "fished.safetensors", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["format"] == "fedprism-inspection/1"
    assert answer["serious"] == 2
    first = answer["findings"][0]
    assert (first["check"], first["severity"], first["tensor"]) == ("one-live-row", "serious", "3.weight")
    assert first["evidence"]["class"] == 2
    assert cli.main(["inspect", "honest.safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_a_jump_against_the_round_before(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "fished.safetensors", "--reference", "honest.safetensors"]) == 1
    assert "jumps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.safetensors"], "'nowhere.safetensors': no such file"),
        (["."], "no such file"),
        (["honest.safetensors", "--reference", "nowhere"], "no such file"),
        (["honest.safetensors", "--batch", "batch.safetensors"], "together"),
        (["honest.safetensors", "--model", "own_network:network"], "together"),
        (["honest.safetensors", "--model", "own_network:nothing", "--batch", "batch.safetensors"], "--model"),
        (["honest.safetensors", "--model", "own_network:network", "--batch", "honest.safetensors"], "no 'inputs'"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(["inspect", *arguments]) == 2
    assert said in sentence(capsys)


@pytest.mark.parametrize(
    ("inputs", "labels", "said"),
    [
        (torch.ones(3, 1, 8, 8, dtype=torch.uint8), torch.arange(3), "floating-point"),
        (torch.full((3, 1, 8, 8), torch.nan), torch.arange(3), "finite"),
        (torch.ones(3, 1, 8, 8), torch.arange(2), "as many labels"),
        (torch.ones(3, 1, 9, 9), torch.arange(3), "does not accept inputs"),
        (torch.ones(3, 1, 8, 8), torch.tensor([0, 1, 99]), "labels"),
    ],
)
def test_bad_batches_are_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], inputs: Tensor, labels: Tensor, said: str
) -> None:
    save_file({"inputs": inputs, "labels": labels}, "bad.safetensors")
    code = ["--model", "own_network:network", "--batch", "bad.safetensors"]
    assert cli.main(["inspect", "honest.safetensors", *code]) == 2
    assert said in sentence(capsys)


HEADERS = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "a huge header": struct.pack("<Q", 2**62) + b"{}",
    "a header that is no JSON": struct.pack("<Q", 8) + b"nonsense",
    "no tensors": struct.pack("<Q", 8) + b"{}      ",
    "a pickle": b"\x80\x04cos\nsystem\n",
    "a tensor beyond the file": struct.pack("<Q", 64)
    + json.dumps({"a": {"dtype": "F32", "shape": [99999], "data_offsets": [0, 399996]}}).encode().ljust(64),
    "an empty tensor": struct.pack("<Q", 64)
    + json.dumps({"a": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}}).encode().ljust(64),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_files_are_one_sentence(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hostile.safetensors").write_bytes(HEADERS[name])
    assert cli.main(["inspect", "hostile.safetensors"]) == 2
    assert "Traceback" not in sentence(capsys)


def test_hostile_names_do_not_reach_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"\x1b[31m[bold]evil\n" + "x" * 5000: torch.full((2, 2), torch.nan)}, "evil.safetensors")
    assert cli.main(["inspect", "evil.safetensors"]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert len(printed) < 3000


def test_help_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--help"]) == 0
    assert "Exit code 1" in " ".join(capsys.readouterr().out.split())
