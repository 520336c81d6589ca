"""The device is picked automatically, and a GPU gives the answer that the CPU gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fedprism as fp
from fedprism.runtime import devices


def test_picks_what_there_is_and_refuses_what_there_is_not() -> None:
    assert devices.pick().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert devices.pick("cpu") == torch.device("cpu")
    for wrong in ("cuda:99", "abacus", "", "meta"):
        with pytest.raises(fp.errors.BadInput, match="no device"):
            devices.pick(wrong)


def test_a_device_that_is_full_is_not_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*size: int, device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        devices.pick("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("name", ["dense-inversion", "idlg", "inverting-gradients", "cocktail-party"])
def test_a_gpu_gives_the_answer_of_the_cpu(name: str, photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=32, classes=10, seed=0).double()
    batch = photos.draw(3, rng, unique_labels=True)
    scenario = fp.Scenario(model=model, clients=[fp.Batch(batch.inputs.double(), batch.labels)])
    attack = fp.attacks.ATTACKS[name]()
    if isinstance(attack, fp.attacks.GradientMatching):
        attack = dataclasses.replace(attack, iterations=3)
    answers = []
    for device in ("cpu", "cuda"):
        observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, device=device)
        answers.append(fp.run(attack, observation, device=device))
    assert all(answer.inputs.device.type == "cpu" for answer in answers)
    order = torch.arange(3)
    if name == "cocktail-party":  # its order hangs on the signs of eigenvectors, which no device promises
        order = torch.cdist(*(answer.inputs.flatten(1) for answer in answers)).argmin(1)
    torch.testing.assert_close(answers[0].inputs, answers[1].inputs[order], atol=1e-4, rtol=1e-3)
    assert torch.equal(answers[0].labels, answers[1].labels[order])
