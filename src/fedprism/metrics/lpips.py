"""Learned perceptual image patch similarity (LPIPS), without touching the network unless told to.

Zhang et al., "The unreasonable effectiveness of deep features as a perceptual metric", CVPR 2018, version 0.1.

The linear heads come with torchmetrics. The backbone, torchvision's, is a safetensors file in `weights_dir` (by default
`weights` inside FEDPRISM_DATA), torchvision's cached download, or with allow_download=True a new download.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .pairs import chunks, paired, require_size

Net: TypeAlias = Literal["vgg", "alex", "squeeze"]


class LpipsUnavailable(RuntimeError):
    """The pretrained backbone cannot be had; the message, one sentence without local paths, says why and what to do."""


class Backbone(NamedTuple):
    """A pretrained network: torchvision's name, the file of its weights, the least side its pooling layers leave."""

    model: str
    file: str
    smallest: int


BACKBONES: dict[str, Backbone] = {
    "vgg": Backbone("vgg16", "vgg16_features_fp16.safetensors", 16),
    "alex": Backbone("alexnet", "alexnet_features_fp32.safetensors", 31),
    "squeeze": Backbone("squeezenet1_1", "squeezenet1_1_fp16.safetensors", 17),
}


def lpips(
    reconstruction: Tensor,
    source: Tensor,
    net: Net = "vgg",
    weights_dir: str | Path | None = None,
    allow_download: bool = False,
) -> Tensor:
    """LPIPS of each pair: (N, C, H, W) and (N, C, H, W) with values from 0 to 1 -> (N,). 0 is perfect.

    C is 3, or 1 for grey images. Raises LpipsUnavailable if the backbone's weights are missing.
    """
    reconstruction, source = paired(reconstruction, source, images=True)
    network = network_for(source, net, weights_dir, allow_download)
    with torch.no_grad():
        values = [network(shown(ours), shown(theirs)).flatten() for ours, theirs in chunks(reconstruction, source)]
    return torch.cat(values).to(source.dtype)


def network_for(images: Tensor, net: Net, weights_dir: str | Path | None, allow_download: bool) -> nn.Module:
    """The network that compares such images, on their device; a ValueError where it cannot."""
    if net not in BACKBONES:
        raise ValueError(f"no LPIPS network is called '{net}'. Use one of {', '.join(BACKBONES)}.")
    require_size(images, BACKBONES[net].smallest, f"lpips-{net}")
    if images.shape[1] not in (1, 3):
        raise ValueError(f"LPIPS needs images with 1 or 3 channels, not {images.shape[1]}.")
    return _network(net, _locate(BACKBONES[net], weights_dir, allow_download), images.device)


def shown(images: Tensor) -> Tensor:
    """Images from [0, 1] as the network wants them: three channels, single precision, values from -1 to 1."""
    return (2 * images.float() - 1).expand(-1, 3, -1, -1)


def _locate(backbone: Backbone, weights_dir: str | Path | None, allow_download: bool) -> Path:
    """The file with the backbone's weights, downloaded into torchvision's cache if need be and allowed."""
    from torchvision.models import get_model_weights

    if weights_dir is None and (data := os.environ.get("FEDPRISM_DATA")):
        weights_dir = Path(data, "weights")
    if weights_dir is not None and (file := Path(weights_dir, backbone.file)).is_file():
        return file.resolve()
    url: str = get_model_weights(backbone.model)["IMAGENET1K_V1"].url
    cached = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if cached.is_file():
        return cached
    missing = (
        f"LPIPS needs torchvision's pretrained {backbone.model}, which is neither in the weights folder (weights_dir, "
        f"or 'weights' inside FEDPRISM_DATA) as {backbone.file} nor in torchvision's cache"
    )
    if not allow_download:
        raise LpipsUnavailable(f"{missing}; put the file there or allow the download.")
    try:
        torch.hub.load_state_dict_from_url(url, map_location="cpu", progress=False, check_hash=True, weights_only=True)
    except OSError as error:
        raise LpipsUnavailable(f"{missing}, and its download failed ({error}); put the file there.") from error
    return cached


@functools.lru_cache(maxsize=4)
def _network(net: Net, weights: Path, device: torch.device) -> nn.Module:
    """torchmetrics' LPIPS network in evaluation mode: (N, 3, H, W) twice, from -1 to 1 -> (N, 1, 1, 1).

    It is built without storage and then filled: nothing is downloaded, and no random number is drawn.
    """
    from torchmetrics.functional.image.lpips import _LPIPS, ScalingLayer
    from torchvision.models import get_model

    with torch.device("meta"):
        network = _LPIPS(pretrained=False, net=net, pnet_rand=True)
        layers = get_model(BACKBONES[net].model, weights=None).features
    network.scaling_layer = ScalingLayer()  # its constants are in no file
    heads = Path(inspect.getfile(_LPIPS)).parent / "lpips_models" / f"{net}.pth"
    network.load_state_dict(torch.load(heads, map_location="cpu", weights_only=True), strict=False, assign=True)
    # The network holds the same layers in the same order, cut into slices, which changes nothing but their names.
    names = zip(network.net.state_dict(), layers.state_dict(), strict=True)
    try:
        safe = weights.suffix == ".safetensors"
        tensors = load_file(weights) if safe else torch.load(weights, map_location="cpu", weights_only=True)
        network.net.load_state_dict({ours: tensors[f"features.{name}"].float() for ours, name in names}, assign=True)
    except (KeyError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise LpipsUnavailable(
            f"{weights.name} is not torchvision's {BACKBONES[net].model} ({type(error).__name__}). Replace the file."
        ) from error
    return network.to(device)
