"""The imprint layer: samples sorted into bins, each read off exactly where it is alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedprism as fp
from fedprism.attacks.imprint import ImprintStatus


def imprinted(
    model: nn.Module, batch: fp.Batch, attack: fp.attacks.Imprint | None = None, **scenario: object
) -> tuple[fp.Reconstruction, fp.Truth]:
    attack = attack or fp.attacks.imprint()
    described = fp.Scenario(model=model, clients=[batch], **scenario)  # type: ignore[arg-type]
    observation, truth = fp.simulate(described, fp.threats.malicious_server, seed=0, server=attack)
    return fp.run(attack, observation, seed=0), truth


def graded(levels: list[float], *, shape: tuple[int, ...] = (1, 8, 8)) -> fp.Batch:
    """Noise around the given mean levels: which bin each sample falls into is known."""
    noise = 0.2 * (torch.rand(len(levels), *shape, generator=torch.Generator().manual_seed(0)) - 0.5)
    noise -= noise.flatten(1).mean(1).view(-1, *[1] * len(shape))
    inputs = noise + torch.tensor(levels).view(-1, *[1] * len(shape))
    return fp.Batch(inputs, torch.arange(len(levels)) % 10)


def fc2(hidden: int = 64) -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=hidden, classes=10, seed=0)


@pytest.mark.quality
def test_samples_in_bins_of_their_own_are_exact() -> None:
    found, truth = imprinted(fc2(), graded([0.25, 0.35, 0.45, 0.5, 0.6, 0.7]))
    assert found.status == ImprintStatus.EXACT
    psnr = fp.score(found, truth, metrics=("psnr",)).values["psnr"]
    assert all(value is not None and value > 60 for value in psnr)


@pytest.mark.quality
def test_photographs_come_out_of_a_large_batch(photos: fp.data.ImageSet) -> None:
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=256, classes=photos.classes, seed=0)
    found, truth = imprinted(model, photos.draw(48, torch.Generator().manual_seed(0)))
    psnr = fp.score(found, truth, metrics=("psnr",)).values["psnr"]
    assert sum(value is not None and value > 40 for value in psnr) >= 20  # 28 to 41 over forty seeds


@pytest.mark.quality
def test_an_update_of_one_step_is_as_good_as_a_gradient() -> None:
    found, truth = imprinted(fc2(), graded([0.3, 0.5, 0.7]), protocol=fp.FedAvg(lr=0.1))
    assert fp.score(found, truth, metrics=("psnr",)).mean("psnr") > 50


def test_two_samples_in_one_bin_are_not_called_exact() -> None:
    found, _ = imprinted(fc2(), graded([0.3, 0.5, 0.5, 0.7]))
    assert found.status == ImprintStatus.SOME
    assert found.inputs is not None
    assert len(found.inputs) < 4


def test_samples_below_all_edges_leave_nothing() -> None:
    found, _ = imprinted(fc2(), graded([0.3, 0.5]), fp.attacks.Imprint(centre=5.0))
    assert found.status == ImprintStatus.EMPTY
    assert found.inputs is not None
    assert len(found.inputs) == 0


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (fp.models.build("lenet", input_shape=(1, 8, 8), seed=0), "another kind of layer"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "fewer layers"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Sigmoid(), nn.Linear(9, 10)), "other than a ReLU"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 9, bias=False), nn.ReLU(), nn.Linear(9, 10)), "no bias"),
    ],
)
def test_refuses_what_it_cannot_imprint(model: nn.Module, reason: str) -> None:
    with pytest.raises(fp.NotApplicable, match=reason):
        imprinted(model, graded([0.3, 0.5]))


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(fp.errors.BadInput, match="spread must be above 0"):
        fp.attacks.Imprint(spread=0.0)
