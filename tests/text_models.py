"""Small random transformers that tests build themselves: decoders and encoders, with or without LoRA."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as cross_entropy
from torch.nn.functional import scaled_dot_product_attention

WORDS = 200
WIDTH = 48
HEADS = 4
PLACES = 10
END = 0
"""The token that ends a text, and that pads it."""

Positions = Literal["rotary", "absolute", "none"]


class LoRA(nn.Module):
    """A frozen dense layer with an adapter of low rank beside it; its `first` factor is fed the layer's input."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.first = nn.Linear(base.in_features, rank, bias=False)
        self.second = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.second(self.first(x))  # type: ignore[no-any-return]


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of (texts, heads, tokens, width)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class Block(nn.Module):
    def __init__(self, rotary: bool, causal: bool) -> None:
        super().__init__()
        self.rotary, self.causal = rotary, causal
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fed = self.norm(x)
        q, k, v = (part(fed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.rotary:
            q, k = rotated(q), rotated(k)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Scores for the next token at each place, (texts, tokens) -> (texts, tokens, words); or classes of texts."""

    def __init__(self, positions: Positions = "rotary", classes: int = 0, layers: int = 3, causal: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=END)
        self.position = nn.Parameter(0.3 * torch.randn(PLACES, WIDTH)) if positions == "absolute" else None
        self.blocks = nn.ModuleList(Block(positions == "rotary", causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes or WORDS)
        self.classes = classes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        if self.position is not None:
            x = x + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(1) if self.classes else x)  # type: ignore[no-any-return]


def decoder(seed: int = 0, positions: Positions = "rotary", classes: int = 0, causal: bool = True) -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(positions, classes, causal=causal)


def with_lora(model: Decoder, rank: int, parts: str = "qv", started: bool = True, seed: int = 0) -> Decoder:
    """Only adapters are trained; `started`: some rounds went before, so the second factors are not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.requires_grad_(False)
        for block in model.blocks:
            for name in parts:
                adapter = LoRA(getattr(block, name), rank)
                if started:
                    nn.init.normal_(adapter.second.weight, std=0.05)
                setattr(block, name, adapter)
    return model


def texts(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random texts padded at their ends, and the next token at each place as the label."""
    rng = torch.Generator().manual_seed(seed)
    tokens, labels = torch.full((len(lengths), PLACES), END), torch.full((len(lengths), PLACES), -100)
    for row, label, length in zip(tokens, labels, lengths, strict=True):
        row[:length] = torch.randint(1, WORDS, (length,), generator=rng)
        label[: length - 1], label[length - 1] = row[1:length], END
    return tokens, labels
