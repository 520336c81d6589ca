"""Metrics against hand-computed values, scikit-image, an LPIPS written out here, and published LPIPS values."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor, nn

from fedprism.metrics import (
    METRICS,
    THRESHOLD_LOOSE,
    THRESHOLD_STRICT,
    LpipsUnavailable,
    avd,
    avd_floor,
    lpips,
    mse,
    mse_matrix,
    pairs,
    psnr,
    ssim,
)
from fedprism.metrics.lpips import BACKBONES

PRETRAINED = Path(os.environ.get("FEDPRISM_DATA", "FEDPRISM_DATA is not set"), "weights")
needs_pretrained = pytest.mark.skipif(
    not all((PRETRAINED / BACKBONES[net].file).is_file() for net in ("vgg", "squeeze")),
    reason="published LPIPS values need the pretrained weights in the folder that FEDPRISM_DATA names",
)


def image_pairs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Smooth images of this shape and noisy versions of them, as (reconstruction, source)."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(*shape[:-2], 4, 4, generator=rng, dtype=torch.float64)
    source = nn.functional.interpolate(coarse, shape[-2:], mode="bilinear")
    noise = torch.randn(shape, generator=rng, dtype=torch.float64)
    strength = torch.linspace(0.02, 0.3, shape[0], dtype=torch.float64).reshape(-1, 1, 1, 1)
    return (source + strength * noise).clamp(0, 1).to(dtype), source.to(dtype)


class TestPixels:
    def test_by_hand(self) -> None:
        reconstruction = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.1, 0.1]])
        source = torch.tensor([[1.0, 1.0], [0.5, 0.5], [0.0, 0.0]])
        torch.testing.assert_close(mse(reconstruction, source), torch.tensor([0.5, 0.0, 0.01]))
        torch.testing.assert_close(psnr(reconstruction, source), torch.tensor([3.0103, math.inf, 20.0]))

    def test_any_shape(self) -> None:
        assert mse(torch.ones(3), torch.zeros(3)).tolist() == [1, 1, 1]
        assert mse(torch.ones(2, 3, 4, 5, 6), torch.zeros(2, 3, 4, 5, 6)).tolist() == [1, 1]

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
    def test_psnr_is_that_of_scikit_image(self, dtype: torch.dtype, tolerance: float) -> None:
        reconstruction, source = image_pairs(5, 3, 32, 32, dtype=dtype)
        expected = [
            peak_signal_noise_ratio(theirs.double().numpy(), ours.double().numpy(), data_range=1)
            for ours, theirs in zip(reconstruction, source, strict=True)
        ]
        np.testing.assert_allclose(psnr(reconstruction, source).numpy(), expected, rtol=tolerance)


@given(n=st.integers(1, 5), m=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_mean_squared_errors_of_all_pairs(n: int, m: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.rand(n, 3, 8, 8, generator=rng), torch.rand(m, 3, 8, 8, generator=rng)
    expected = torch.stack([mse(a, one.expand_as(a)) for one in b], dim=1)
    assert torch.allclose(mse_matrix(a, b).float(), expected, atol=1e-7)


def test_equal_images_have_no_error_to_speak_of() -> None:
    a = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert mse_matrix(a, a).diag().max() < 1e-14


class TestSsim:
    @pytest.mark.parametrize("shape", [(4, 3, 32, 32), (4, 1, 28, 28), (3, 3, 64, 48), (2, 1, 11, 40), (2, 3, 12, 11)])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
    def test_is_that_of_scikit_image(self, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
        reconstruction, source = image_pairs(*shape, dtype=dtype)
        found = ssim(reconstruction, source)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.numpy(), reference_ssim(reconstruction, source, 1.5, 11), atol=tolerance)

    @pytest.mark.parametrize(("side", "window", "sigma"), [(3, 3, 0.3), (5, 5, 0.6), (8, 7, 0.9), (10, 9, 1.2)])
    def test_small_images_get_a_smaller_window(self, side: int, window: int, sigma: float) -> None:
        reconstruction, source = image_pairs(4, 1, side, 13)
        expected = reference_ssim(reconstruction, source, sigma, window)
        np.testing.assert_allclose(ssim(reconstruction, source).numpy(), expected, atol=1e-10)

    def test_flat_bright_images_in_single_precision(self) -> None:
        rng = torch.Generator().manual_seed(0)
        source = torch.full((4, 3, 32, 32), 0.95)
        reconstruction = source + 1e-3 * torch.randn(source.shape, generator=rng)
        exact = ssim(reconstruction.double(), source.double())
        torch.testing.assert_close(ssim(reconstruction, source).double(), exact, atol=1e-6, rtol=0)

    def test_identical_images(self) -> None:
        _, source = image_pairs(3, 3, 16, 16)
        torch.testing.assert_close(ssim(source, source), torch.ones(3, dtype=torch.float64))


def reference_ssim(reconstruction: Tensor, source: Tensor, sigma: float, window: int) -> list[float]:
    return [
        structural_similarity(
            theirs.double().numpy(),
            ours.double().numpy(),
            channel_axis=0,
            data_range=1,
            gaussian_weights=True,
            sigma=sigma,
            win_size=window,
            use_sample_covariance=False,
        )
        for ours, theirs in zip(reconstruction, source, strict=True)
    ]


class TestAvd:
    def test_two_by_two_by_hand(self) -> None:
        # g = 0.5 + 1 - 2 * 0.25 = 1 and 0.75 + 0.25 - 2 * 1 = -1: different images, equal absolute variation.
        left, right = torch.tensor([[[[0.0, 1.0], [0.5, 0.25]]], [[[0.9, 0.75], [0.25, 1.0]]]]).unsqueeze(1)
        black = torch.zeros(1, 1, 2, 2)
        torch.testing.assert_close(avd(left, black), torch.tensor([math.sqrt(2)]))
        torch.testing.assert_close(avd(right, black), torch.tensor([math.sqrt(2)]))
        torch.testing.assert_close(avd(left, right), torch.tensor([0.0]))

    def test_three_by_three_by_hand(self) -> None:
        # g of the source is [[0.4 + 0.2 - 1, 0.5 + 0.3 - 1.2], [0.7 + 0.5 - 1.6, 0.8 + 0.6 - 1.8]] = -0.4 everywhere;
        # that of the reconstruction [[-2, 1], [1, 0]]: a dot in the middle.
        source = torch.tensor([[[[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]]]])
        dot = torch.tensor([[[[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]])
        expected = math.sqrt((1.6**2 + 0.6**2 + 0.6**2 + 0.4**2) / 4) / math.sqrt(0.5)
        torch.testing.assert_close(avd(dot, source), torch.tensor([expected]))

    def test_channels_share_one_mean(self) -> None:
        reconstruction = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]])  # g = 1 and g = 0
        torch.testing.assert_close(avd(reconstruction, torch.zeros(1, 2, 2, 2)), torch.tensor([1.0]))

    def test_noise_scores_one_against_black(self) -> None:
        noise = torch.rand(4, 3, 128, 128, generator=torch.Generator().manual_seed(0))
        black = torch.zeros_like(noise)
        torch.testing.assert_close(avd(noise, black), torch.ones(4), atol=0.02, rtol=0)
        torch.testing.assert_close(avd(noise, black, noise=noise), torch.ones(4))

    def test_every_image_is_normalised_by_its_own_noise(self) -> None:
        reconstruction, source = image_pairs(2, 1, 8, 8)
        noise = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        noise[1] /= 2
        halves = avd(reconstruction, source, noise=noise.flip(0)) / avd(reconstruction, source, noise=noise)
        torch.testing.assert_close(halves[0] * halves[1], torch.tensor(1.0, dtype=torch.float64))
        assert halves[0] != 1

    def test_contrast_inversion_is_not_seen(self) -> None:
        _, source = image_pairs(3, 3, 16, 16)
        torch.testing.assert_close(avd(1 - source, source), torch.zeros(3, dtype=torch.float64))

    @pytest.mark.parametrize("grey", [0.0, 0.5, 1.0])
    def test_a_blank_image_scores_the_floor(self, grey: float) -> None:
        _, source = image_pairs(3, 3, 16, 16)
        torch.testing.assert_close(avd(torch.full_like(source, grey), source), avd_floor(source))
        noise = torch.rand(source.shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(avd(torch.full_like(source, grey), source, noise), avd_floor(source, noise))

    def test_the_floor_of_a_thin_stroke_is_below_both_thresholds(self) -> None:
        stroke = torch.zeros(1, 1, 28, 28)
        stroke[..., 4:24, 13:15] = 1
        assert 0 < avd_floor(stroke) < THRESHOLD_STRICT < THRESHOLD_LOOSE

    def test_constant_noise_is_refused(self) -> None:
        _, source = image_pairs(2, 1, 8, 8)
        with pytest.raises(ValueError, match="a constant image"):
            avd(source, source, noise=torch.ones_like(source))


TAPS = {"vgg": (3, 8, 15, 22, 29), "alex": (1, 4, 7, 9, 11), "squeeze": (1, 4, 7, 9, 10, 11, 12)}
"""The layers of torchvision's networks that LPIPS looks at."""


def random_backbone(net: str, seed: int = 0) -> nn.Sequential:
    """torchvision's layers up to the last tap, with random weights that half precision represents exactly."""
    rng = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        layers = torchvision.models.get_model(BACKBONES[net].model, weights=None).features[: TAPS[net][-1] + 1]
    layers = layers.to_empty(device="cpu").requires_grad_(False)
    for parameter in layers.parameters():
        scale = math.sqrt(2 / parameter[0].numel()) if parameter.ndim > 1 else 0.1
        parameter.copy_((scale * torch.randn(parameter.shape, generator=rng)).half())
    return layers


def save_backbone(folder: Path, net: str, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_backbone(net, seed).state_dict()
    save_file({f"features.{name}": t.half() for name, t in tensors.items()}, folder / BACKBONES[net].file)
    return folder


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What FEDPRISM_DATA may name: a folder whose `weights` hold all three backbones, here random ones."""
    folder = tmp_path_factory.mktemp("data")
    for net in BACKBONES:
        save_backbone(folder / "weights", net)
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No data folder, an empty torchvision cache (returned), and a test failure on any attempt to reach the network."""

    def reached(*_: Any, **__: Any) -> NoReturn:
        pytest.fail("the network was reached for")

    monkeypatch.delenv("FEDPRISM_DATA", raising=False)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", reached)
    monkeypatch.setattr(torch.hub, "download_url_to_file", reached)
    monkeypatch.setattr(urllib.request, "urlopen", reached)
    monkeypatch.setattr(socket.socket, "connect", reached)
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    return cache


def reference_lpips(net: str, layers: nn.Sequential, reconstruction: Tensor, source: Tensor) -> Tensor:
    """LPIPS as in the paper, eq. 1, on torchvision's layers: weighted squared distance of unit-length features."""
    path = files("torchmetrics.functional.image") / "lpips_models" / f"{net}.pth"
    heads = torch.load(str(path), map_location="cpu", weights_only=True)
    shift = torch.tensor([-0.030, -0.088, -0.188]).reshape(1, 3, 1, 1)
    scale = torch.tensor([0.458, 0.448, 0.450]).reshape(1, 3, 1, 1)
    ours, theirs = ((2 * images - 1 - shift) / scale for images in (reconstruction, source))
    value = torch.zeros(len(source))
    for index, layer in enumerate(layers):
        ours, theirs = layer(ours), layer(theirs)
        if index in TAPS[net]:
            weights = heads[f"lin{TAPS[net].index(index)}.model.1.weight"].flatten()
            gap = (nn.functional.normalize(ours) - nn.functional.normalize(theirs)).square()
            value += torch.einsum("nchw,c->nhw", gap, weights).mean((1, 2))
    return value


class TestLpips:
    @pytest.mark.parametrize("net", BACKBONES)
    def test_is_the_formula_on_the_given_backbone(self, net: Any, data_folder: Path, offline: Path) -> None:
        reconstruction, source = image_pairs(3, 3, 40, 36, dtype=torch.float32)
        state = torch.random.get_rng_state()
        found = lpips(reconstruction, source, net=net, weights_dir=data_folder / "weights")
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not found.requires_grad
        expected = reference_lpips(net, random_backbone(net), reconstruction, source)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        assert found.min() > 1e-4  # far above what may differ
        torch.testing.assert_close(lpips(source, source, net=net, weights_dir=data_folder / "weights"), torch.zeros(3))

    def test_the_folder_decides(self, data_folder: Path, offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pair = image_pairs(2, 3, 32, 32, dtype=torch.float32)
        other = save_backbone(offline / "other", "squeeze", seed=1)
        here, there = (lpips(*pair, net="squeeze", weights_dir=f) for f in (data_folder / "weights", other))
        assert (here - there).abs().max() > 1e-4  # 0.005 and more
        monkeypatch.setenv("FEDPRISM_DATA", str(data_folder))
        assert torch.equal(lpips(*pair, net="squeeze"), here)
        assert torch.equal(lpips(*pair, net="squeeze", weights_dir=other), there)

    def test_grey_images_count_as_three_equal_channels(self, data_folder: Path) -> None:
        reconstruction, source = image_pairs(2, 1, 28, 28, dtype=torch.float32)
        folder = data_folder / "weights"
        grey = lpips(reconstruction, source, net="squeeze", weights_dir=folder)
        colour = lpips(reconstruction.repeat(1, 3, 1, 1), source.repeat(1, 3, 1, 1), net="squeeze", weights_dir=folder)
        torch.testing.assert_close(grey, colour)

    @pytest.mark.parametrize("net", BACKBONES)
    def test_smallest_size(self, net: Any, data_folder: Path) -> None:
        side = BACKBONES[net].smallest
        assert lpips(*image_pairs(1, 3, side, 40), net=net, weights_dir=data_folder / "weights").isfinite().all()
        with pytest.raises(ValueError, match=f"at least {side} x {side} pixels, found {side - 1} x 40"):
            lpips(*image_pairs(1, 3, side - 1, 40), net=net, weights_dir=data_folder / "weights")
        with pytest.raises(RuntimeError):  # no larger than needed: the backbone itself gives up
            random_backbone(net)(torch.zeros(1, 3, side - 1, 40))

    def test_without_weights_it_says_so_and_stays_off_the_network(self, offline: Path) -> None:
        with pytest.raises(LpipsUnavailable) as caught:
            lpips(*image_pairs(1, 3, 32, 32), net="alex", weights_dir=offline)
        message = str(caught.value)
        assert "alexnet_features_fp32.safetensors" in message
        assert "allow the download" in message
        assert message.count(". ") == 0
        assert str(offline) not in message

    def test_download_only_when_allowed_then_cached(
        self, data_folder: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = image_pairs(2, 3, 32, 32)
        asked: list[tuple[str, bool]] = []

        def download(url: str, *, weights_only: bool, check_hash: bool, **_: Any) -> None:
            asked.append((url, weights_only and check_hash))
            torch.save(load_file(data_folder / "weights" / BACKBONES["alex"].file), offline / url.split("/")[-1])

        monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
        found = lpips(*pair, net="alex", allow_download=True)
        assert torch.equal(found, lpips(*pair, net="alex"))
        assert torch.equal(found, lpips(*pair, net="alex", weights_dir=data_folder / "weights"))
        assert asked == [("https://download.pytorch.org/models/alexnet-owt-7be5be79.pth", True)]

    def test_a_failed_download_is_explained(self, offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def unreachable(*_: Any, **__: Any) -> NoReturn:
            raise urllib.error.URLError("no route to host")

        monkeypatch.setattr(torch.hub, "load_state_dict_from_url", unreachable)
        with pytest.raises(LpipsUnavailable, match=r"its download failed .*no route to host"):
            lpips(*image_pairs(1, 3, 32, 32), net="alex", allow_download=True)

    def test_a_wrong_file_is_explained(self, tmp_path: Path) -> None:
        file = tmp_path / BACKBONES["alex"].file
        for write in (
            lambda: save_file({"features.0.weight": torch.zeros(1)}, file),
            lambda: save_file({f"features.{k}": v[:1] for k, v in random_backbone("alex").state_dict().items()}, file),
            lambda: file.write_bytes(b"not a safetensors file"),
        ):
            write()
            with pytest.raises(LpipsUnavailable, match=r"alexnet_features_fp32.* is not torchvision's alexnet"):
                lpips(*image_pairs(1, 3, 32, 32), net="alex", weights_dir=tmp_path)

    def test_other_refusals(self) -> None:
        with pytest.raises(ValueError, match=r"called 'resnet'\. Use one of vgg, alex, squeeze"):
            lpips(*image_pairs(1, 3, 32, 32), net="resnet")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="1 or 3 channels, not 4"):
            lpips(*image_pairs(1, 4, 32, 32))

    @needs_pretrained
    def test_squeeze_value_of_torchmetrics(self) -> None:
        """From the docstring of torchmetrics' functional LPIPS, whose inputs 2u - 1 are this u."""
        rng = torch.Generator().manual_seed(42)
        first, second = (torch.rand(2, 3, 100, 100, generator=rng) for _ in range(2))
        found = lpips(first, second, net="squeeze")
        torch.testing.assert_close(found, torch.tensor([0.1024, 0.0938]), atol=1e-4, rtol=0)

    @needs_pretrained
    def test_vgg_value_of_torchmetrics(self) -> None:
        """From the docstring of torchmetrics 0.11.4's LPIPS, which drew its inputs after building the network."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(123)
            torchvision.models.vgg16(weights=None, init_weights=False)
            for channels in (64, 128, 256, 512, 512):
                nn.Conv2d(channels, 1, 1, bias=False)
            first, second = torch.rand(10, 3, 100, 100), torch.rand(10, 3, 100, 100)
        assert lpips(first, second, net="vgg").mean().item() == pytest.approx(0.3493, abs=1e-4)


@pytest.mark.parametrize("name", METRICS)
class TestEveryMetric:
    @pytest.fixture(autouse=True)
    def _random_weights(self, data_folder: Path, offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FEDPRISM_DATA", str(data_folder))

    def test_direction(self, name: str) -> None:
        """A source is closer to itself than its noisy version, in the direction that the table states."""
        reconstruction, source = image_pairs(3, 3, 32, 32, dtype=torch.float32)
        noisy, same = (METRICS[name].function(images, source) for images in (reconstruction, source))
        assert noisy.shape == same.shape == (3,)
        closer = (same - noisy) * (1 if METRICS[name].higher_is_better else -1)
        assert (closer >= 0).all() if name.startswith("recovered") else (closer > 0).all()
        assert closer[-1] > 0

    def test_one_value_an_image_whatever_the_batch(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        reconstruction, source = image_pairs(5, 3, 32, 32, dtype=torch.float32)
        alone = [METRICS[name].function(r[None], s[None]) for r, s in zip(reconstruction, source, strict=True)]
        together = METRICS[name].function(reconstruction, source)
        torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
        monkeypatch.setattr(pairs, "CHUNK_PIXELS", 2 * 32 * 32)
        assert [len(piece) for piece, _ in pairs.chunks(reconstruction, source)] == [2, 2, 1]
        torch.testing.assert_close(METRICS[name].function(reconstruction, source), together, atol=1e-5, rtol=1e-5)

    def test_empty_batch(self, name: str) -> None:
        assert METRICS[name].function(torch.zeros(0, 3, 32, 32), torch.zeros(0, 3, 32, 32)).shape == (0,)

    def test_half_precision_is_computed_in_single(self, name: str) -> None:
        reconstruction, source = image_pairs(2, 3, 32, 32, dtype=torch.float16)
        found = METRICS[name].function(reconstruction, source)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, METRICS[name].function(reconstruction.float(), source.float()))

    def test_refusals(self, name: str) -> None:
        function: Callable[[Tensor, Tensor], Tensor] = METRICS[name].function
        images = torch.rand(2, 3, 32, 32)
        with pytest.raises(ValueError, match=r"has shape \(1, 3, 32, 32\), the source \(2, 3, 32, 32\)"):
            function(images[:1], images)
        with pytest.raises(ValueError, match="Divide bytes by 255"):
            function(images.byte(), images.byte())
        if METRICS[name].images_only:
            with pytest.raises(ValueError, match=r"\(images, channels, height, width\), not \(3, 32, 32\)"):
                function(images[0], images[0])
            with pytest.raises(ValueError, match=r"at least .* found 1 x 1"):
                function(images[..., :1, :1], images[..., :1, :1])
        else:
            assert function(images[0, 0], images[1, 0]).shape == (32,)


def test_torchmetrics_is_imported_only_where_used() -> None:
    code = "import sys, fedprism.metrics; sys.exit('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
