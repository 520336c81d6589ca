"""Batches that clients keep of a recorded run: in a folder of their own, put beside the recording afterwards."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedprism as fp
from fedprism.errors import BadInput

DIGITS = fp.data.load("digits")


def recording(*rounds: tuple[int, dict[str, int]]) -> fp.Observation:
    """Rounds by number, each the sum of these clients' updates of so many samples."""
    update = {"weight": torch.ones(1)}
    return fp.Observation(
        model=None,
        rounds=tuple(
            fp.Round(
                index=index, params=update, update=update, clients=len(clients), participants=tuple(clients),
                examples=tuple(clients.values()),
            )
            for index, clients in rounds
        ),
    )  # fmt: skip


def test_batches_come_in_the_order_of_the_recording(tmp_path: Path) -> None:
    kept = {("../b", 2): [3], ("a", 1): [0, 1], ("a", 2): [2], ("a", 7): [9]}
    for (client, index), places in kept.items():
        for place in places:  # one by one, as mini-batches come
            fp.keep_truth(tmp_path / "truth", DIGITS.batch([place]), client=client, round=index)
    observation = recording((1, {"a": 2}), (2, {"../b": 1}), (2, {"a": 1}), (2, {"silent": 1}))
    truth = fp.load_truth(tmp_path / "truth", observation)
    assert truth.owners == ("a", "a", "../b", "a")
    expected = DIGITS.batch([0, 1, 3, 2])
    assert torch.equal(truth.inputs, expected.inputs)
    assert torch.equal(truth.labels, expected.labels)
    assert all(path.parent == tmp_path / "truth" for path in tmp_path.rglob("*.safetensors"))
    assert (tmp_path / "truth").stat().st_mode & 0o077 == 0, "nobody else may look at private samples"


def test_samples_behind_sums_are_there_once(tmp_path: Path) -> None:
    for index in (1, 2):
        fp.keep_truth(tmp_path, DIGITS.batch([0]), client="a", round=index)
        fp.keep_truth(tmp_path, DIGITS.batch([0, index]), client="b", round=index)
    truth = fp.load_truth(tmp_path, recording((1, {"a": 1, "b": 2}), (2, {"a": 1, "b": 2})))
    assert truth.owners == ("a", "b", "b", "b")
    assert torch.equal(truth.inputs, DIGITS.batch([0, 0, 1, 2]).inputs)


def test_a_sample_that_is_kept_in_each_epoch_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        fp.keep_truth(tmp_path, DIGITS.batch([0]), client="a", round=1)
    with caplog.at_level(logging.WARNING, logger="fedprism"):
        fp.load_truth(tmp_path, recording((1, {"a": 1})))
    assert "a kept 2 samples in round 1 and says that it trained on 1" in caplog.text


def test_truth_and_captures_keep_apart(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "capture.json").write_text("{}")
    for folder in ("run", "run/truth"):
        with pytest.raises(BadInput, match="needs a folder of its own"):
            fp.keep_truth(tmp_path / folder, DIGITS.batch([0]), client="a", round=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["capture.json"]


def test_what_does_not_belong_to_the_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no batches that clients kept"):
        fp.load_truth(tmp_path)
    path = fp.keep_truth(tmp_path, DIGITS.batch([0]), client="a", round=1)
    with pytest.raises(BadInput, match=r"load_truth\(folder, observation\)"):
        fp.load_truth(tmp_path)
    with pytest.raises(BadInput, match="Give the folder of the same run"):
        fp.load_truth(tmp_path, recording((1, {"b": 1}), (2, {"a": 1})))
    save_file({"inputs": torch.rand(1, 2), "labels": torch.zeros(1)}, path)
    with pytest.raises(BadInput, match="does not hold a batch as clients keep it"):
        fp.load_truth(tmp_path, recording((1, {"a": 1})))
