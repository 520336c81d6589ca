"""Which of 256 reconstructions belongs to which of 256 images, by LPIPS and by structural similarity."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from pairwise_metrics import lpips_matrix, ssim_matrix
from torch import Tensor

from fedprism.metrics import LpipsUnavailable, lpips, ssim
from workloads.base import Comparison, Conditions, best_of, matrix_rate, operations, pictures, timed

COUNT, SIDE = 256, 32
SAMPLE = {"cpu": 2, "cuda": 16}
"""Images that are compared with all others, one after the other."""


def scoring(conditions: Conditions) -> Iterator[Comparison]:
    rng = torch.Generator().manual_seed(0)
    sources = pictures(COUNT, SIDE, torch.device("cpu"))
    found = (sources + 0.1 * torch.randn(sources.shape, generator=rng)).clamp(0, 1)
    folder = None if conditions.data_dir is None else conditions.data_dir / "weights"

    def perceptual(a: Tensor, b: Tensor) -> Tensor:
        return lpips(a, b, weights_dir=folder)

    def all_perceptual(a: Tensor, b: Tensor) -> Tensor:
        return lpips_matrix(a, b, weights_dir=folder)

    for name, pairwise, matrix in (("LPIPS", perceptual, all_perceptual), ("SSIM", ssim, ssim_matrix)):
        try:
            yield _compare(name, pairwise, matrix, found.to(conditions.device), sources.to(conditions.device))
        except (LpipsUnavailable, ImportError) as reason:
            print(f"{name} left out: {reason}", flush=True)


def _compare(
    name: str,
    pairwise: Callable[[Tensor, Tensor], Tensor],
    matrix: Callable[[Tensor, Tensor], Tensor],
    found: Tensor,
    sources: Tensor,
) -> Comparison:
    matrix(found[:2], sources[:2])  # warm
    ours, values = best_of(2, sources.device, lambda: matrix(found, sources))
    count = SAMPLE[sources.device.type]
    part, expected = timed(
        sources.device,
        lambda: torch.stack([pairwise(found, one.expand_as(found)) for one in sources[:count]], dim=1),
    )
    off = float((values[:, :count] - expected).abs().max())
    return Comparison(
        workload=f"{name} of all pairs",
        size=f"{COUNT} x {COUNT}, {SIDE} px",
        ours=ours,
        quality=f"differs by at most {off:.0e}",
        other="pair by pair, 256 at a time",
        theirs=part * COUNT / count,
        share_of_limit=operations(lambda: matrix(found, sources)) / ours / matrix_rate(sources.device),
        extrapolated=True,
    )
