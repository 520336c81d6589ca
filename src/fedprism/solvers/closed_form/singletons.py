"""How many samples of a batch are the only one of their class: those that a method which reads classes reads alone.

Wang, Velipasalar, Gursoy, "Maximum Knowledge Orthogonality Reconstruction with Gradients in Federated Learning", WACV
2024 (equation 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def expected_singletons(probabilities: Tensor | Sequence[float], size: int) -> float:
    """K times the sum over classes of p (1 - p)^(K - 1), for K = `size` samples drawn from these classes.

    probabilities: one for each class, of whatever sum above 0: counts will do.
    """
    shares = torch.as_tensor(probabilities, dtype=torch.float64)
    if shares.dim() != 1 or not bool((shares >= 0).all()) or not 0 < float(shares.sum()) < torch.inf or size < 0:
        raise ValueError(
            "probabilities must be finite numbers of at least 0, one for each class and not all 0, and size must be at "
            f"least 0, but these are {len(shares) if shares.dim() else 'no list of'} numbers and the size is {size}. "
            "Give the classes' shares."
        )
    shares = shares / shares.sum()
    return float((size * shares * (1 - shares) ** (size - 1)).sum()) if size else 0.0
