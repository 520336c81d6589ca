"""All pairs at once must be what the metrics say pair by pair."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedprism as fp
from fedprism.metrics import lpips, ssim

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from pairwise_metrics import lpips_matrix, ssim_matrix


@functools.cache
def photos(size: int) -> fp.data.ImageSet:
    return fp.data.load("photos", size=size)


def images(count: int, seed: int, size: int = 32) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return photos(size).draw(count, rng).inputs


@pytest.mark.parametrize("size", [8, 32])
def test_structural_similarities_of_all_pairs(size: int) -> None:
    a, b = images(3, 0, size).double(), images(4, 1, size).double()
    expected = torch.stack([ssim(a, one.expand_as(a)) for one in b], dim=1)
    assert torch.allclose(ssim_matrix(a, b), expected, atol=1e-9)


def test_similarities_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = images(5, 0).double(), images(4, 1).double()
    whole = ssim_matrix(a, b)
    monkeypatch.setattr("pairwise_metrics.PAIRS_BYTES", 1)
    assert torch.allclose(ssim_matrix(a, b), whole, atol=1e-12)


@pytest.fixture
def random_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SqueezeNet with random weights: the comparison with `lpips` holds for any weights, and needs no download."""
    from safetensors.torch import save_file
    from torchvision.models import squeezenet1_1

    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_file(squeezenet1_1(weights=None).state_dict(), tmp_path / "squeezenet1_1_fp16.safetensors")
    return tmp_path


@pytest.mark.parametrize("bytes_kept", [2**31, 1])
def test_perceptual_distances_of_all_pairs(
    random_backbone: Path, monkeypatch: pytest.MonkeyPatch, bytes_kept: int
) -> None:
    monkeypatch.setattr("pairwise_metrics.FEATURE_BYTES", bytes_kept)
    monkeypatch.setattr("pairwise_metrics.CHUNK_PIXELS", 2 * 32 * 32)
    a, b = images(3, 0), images(5, 1)
    found = lpips_matrix(a, b, net="squeeze", weights_dir=random_backbone)
    expected = [lpips(a, one.expand_as(a), net="squeeze", weights_dir=random_backbone) for one in b]
    assert torch.allclose(found, torch.stack(expected, dim=1), atol=1e-5)


@pytest.mark.skipif("FEDPRISM_DATA" not in os.environ, reason="FEDPRISM_DATA names no folder with VGG-16's weights")
def test_perceptual_distances_with_trained_weights() -> None:
    a, b = images(2, 0), images(3, 1)
    expected = torch.stack([lpips(a, one.expand_as(a)) for one in b], dim=1)
    assert torch.allclose(lpips_matrix(a, b), expected, atol=1e-5)


def test_no_images_have_no_distances(random_backbone: Path) -> None:
    nothing = torch.zeros(0, 3, 32, 32)
    assert lpips_matrix(nothing, images(2, 0), net="squeeze", weights_dir=random_backbone).shape == (0, 2)
    assert ssim_matrix(nothing, images(2, 0)).shape == (0, 2)


@pytest.mark.parametrize("matrix", [lpips_matrix, ssim_matrix])
def test_images_of_other_sizes_are_refused(matrix: object) -> None:
    assert callable(matrix)
    with pytest.raises(ValueError, match="of one size"):
        matrix(torch.rand(2, 3, 32, 32), torch.rand(2, 3, 16, 16))
