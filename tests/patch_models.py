"""Small networks of patches for tests: Vision Transformers in the ways that people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SmallViT(nn.Module):
    """A Vision Transformer: patches, positions, attention blocks, a dense head on the class token or on the mean.

    positions: "all" adds one parameter to class token and patches, "patches" to the patches before the class token
    joins them, "image" to the convolution's output as it is, "sines" adds fixed sines, "none" nothing.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...] = (3, 32, 32),
        *,
        patch: int = 8,
        width: int = 48,
        depth: int = 2,
        heads: int = 4,
        classes: int = 10,
        class_token: bool = True,
        positions: str = "all",
        bias: bool = True,
        dropout: float = 0.0,
        rearranged: bool = False,
    ) -> None:
        super().__init__()
        channels, *sides = input_shape
        self.sides, self.patch, self.rearranged, self.positions = sides, patch, rearranged, positions
        convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(sides)]
        features = channels * patch ** len(sides)
        self.embed: nn.Module = (
            nn.Linear(features, width, bias=bias)
            if rearranged
            else convolution(channels, width, patch, stride=patch, bias=bias)
        )
        grid = [side // patch for side in sides]
        count = torch.Size(grid).numel()
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width)) if class_token else None
        shape = {"all": (1, count + class_token, width), "patches": (1, count, width), "image": (1, width, *grid)}
        self.position = nn.Parameter(0.02 * torch.randn(shape[positions])) if positions in shape else None
        angles = torch.arange(count).unsqueeze(1) * torch.exp(-torch.arange(width) / width * 6)
        self.register_buffer("sines", torch.where(torch.arange(width) % 2 == 0, angles.sin(), angles.cos()))
        layers = [
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout=dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def embedded(self, images: Tensor) -> Tensor:
        """The embedded patches (samples, patches, width)."""
        if not self.rearranged:
            maps = self.embed(images)
            return (maps + self.position if self.positions == "image" else maps).flatten(2).transpose(1, 2)
        down, across = (side // self.patch for side in self.sides)
        pieces = images.unflatten(3, (across, self.patch)).unflatten(2, (down, self.patch))
        return self.embed(pieces.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embedded(images)
        if self.positions == "sines":
            tokens = tokens + self.sines
        if self.positions == "patches":
            tokens = tokens + self.position
        if self.token is not None:
            tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], dim=1)
        if self.positions == "all":
            tokens = tokens + self.position
        tokens = self.norm(self.blocks(tokens))
        return self.head(tokens[:, 0] if self.token is not None else tokens.mean(1))


def small_vit(seed: int = 0, input_shape: tuple[int, ...] = (3, 32, 32), **settings: object) -> SmallViT:
    """A Vision Transformer with seeded weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallViT(input_shape, **settings)  # type: ignore[arg-type]
