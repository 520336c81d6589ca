"""The truth on disk lies in a folder of its own, and the command line scores with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedprism as fp
from fedprism import cli


@pytest.fixture
def world(tmp_path: Path, photos: fp.data.ImageSet, rng: torch.Generator) -> tuple[Path, Path, fp.Truth]:
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=16, classes=10, seed=0)
    scenario = fp.Scenario(model=model, clients=[photos.draw(3, rng, unique_labels=True)])
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious)
    return fp.captures.save(observation, tmp_path / "capture"), fp.save_truth(truth, tmp_path / "truth"), truth


def test_round_trip(world: tuple[Path, Path, fp.Truth]) -> None:
    capture, folder, truth = world
    loaded = fp.load_truth(folder)
    assert torch.equal(loaded.inputs, truth.inputs)
    assert torch.equal(loaded.labels, truth.labels)
    assert (loaded.owners, loaded.bounds, loaded.normalization) == (truth.owners, truth.bounds, truth.normalization)
    with pytest.raises(fp.errors.BadInput, match="folder of its own"):
        fp.save_truth(truth, capture)


def test_the_command_scores_with_it(world: tuple[Path, Path, fp.Truth], tmp_path: Path) -> None:
    capture, folder, _ = world
    output = tmp_path / "out"
    words = ["attack", str(capture), "--attack", "dense-inversion", "--truth", str(folder), "-o", str(output)]
    assert cli.main([*words, "--metrics", "psnr,lpips-alex"]) == 0
    scores = json.loads((output / "record.json").read_text())["scores"]
    assert min(scores["values"]["psnr"]) > 60
    assert scores["labels_match"] is True
    # Either the column is there, or it says why it is not.
    assert ("lpips-alex" in scores["values"]) != ("lpips-alex" in scores["unavailable"])


@pytest.mark.parametrize("flag", [["--truth", "nowhere"], ["--metrics", "pnsr"]])
def test_bad_words_end_in_one_sentence(
    flag: list[str], world: tuple[Path, Path, fp.Truth], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert cli.main(["attack", str(world[0]), "--attack", "dense-inversion", "-o", str(output), *flag]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not output.exists()


def test_files_that_are_no_truth_are_refused(tmp_path: Path) -> None:
    for tensors in ({"inputs": torch.rand(2, 3), "labels": torch.arange(2)}, {"inputs": torch.tensor([torch.nan])}):
        save_file(tensors, tmp_path / "truth.safetensors")
        with pytest.raises(fp.FedprismError, match=r"truth\.safetensors"):
            fp.load_truth(tmp_path)
