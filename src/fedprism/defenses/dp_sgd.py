"""DP-SGD: clip the gradient of every example, average, add Gaussian noise.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep Learning with Differential Privacy", CCS 2016
(algorithm 1).

Differs from the paper in: the sum is divided by the number of examples that are there, not by the expected number, and
batches are the protocol's own (the whole data, or shuffled pieces of it), not drawn by a coin toss for each example.
Code that states the standard deviation s of the noise on the mean is covered by noise = s * batch size / clip.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.func import vmap

from fedprism.defenses import accounting
from fedprism.defenses.base import Context, Defense
from fedprism.defenses.clipping import clip_update
from fedprism.errors import BadInput, NotApplicable
from fedprism.types import Batch, Update


@dataclass(frozen=True)
class DpSgd(Defense):
    """Clips each example's gradient to length `clip`, and adds N(0, (noise * clip)²) to every entry of their sum.

    The mean that is sent carries noise of standard deviation noise * clip / batch size. Under federated averaging every
    local step does this.

    The guarantee is differential privacy of single examples, not of a client's whole data: each step is one Gaussian
    mechanism, because adding or removing an example moves the sum by at most `clip` (replacing one: twice that). The
    batch size counts as public. `epsilon` says what one release or a whole run guarantees. The noise serves audits: it
    is not from a secure random source.
    """

    noise: float
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.noise, int | float) and 0 <= self.noise < float("inf")):
            raise BadInput(
                f"expected DpSgd's noise to be a number of at least 0, found {self.noise!r}; "
                "it is the noise on the sum in units of clip, and 1.0 is common."
            )
        if not (isinstance(self.clip, int | float) and 0 < self.clip < float("inf")):
            raise BadInput(f"expected DpSgd's clip to be a number above 0, found {self.clip!r}; 1.0 is common.")

    def on_batch(self, batch: Batch, context: Context, rng: torch.Generator) -> Batch:
        # The examples of a batch must not meet before their gradients are clipped.
        mixing = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
        layers = context.model.modules() if context.model is not None else ()
        if any(isinstance(layer, mixing) and layer.training for layer in layers):
            raise NotApplicable(
                "DpSgd expects a gradient for every example on its own, found batch-norm layers in train mode, which "
                "mix the examples; train with training=False or use a model without batch-norm."
            )
        return batch

    def on_examples(self, grads: Update, context: Context, rng: torch.Generator) -> Update:
        clipped: Update = vmap(lambda example: clip_update(example, self.clip))(dict(grads))
        if self.noise == 0:
            return clipped
        # Every example gets the same draw, so that the mean over them carries it once.
        return {
            name: tensor + self.noise * self.clip / len(tensor) * _unit_noise(tensor.shape[1:], rng).to(tensor)
            if tensor.dtype.is_floating_point
            else tensor
            for name, tensor in clipped.items()
        }

    def deterministic(self, observed: Update | None = None) -> Defense:
        return replace(self, noise=0.0)

    def epsilon(self, *, delta: float = 1e-5, steps: int = 1, rate: float = 1.0) -> float:
        """The epsilon at `delta`: of one release as it stands, of a run with `steps`.

        `steps` counts the releases that an example is in: with the whole data in every step that is each of them, with
        shuffled batches one an epoch. `rate` below 1 is for batches in which each example is with this probability by
        a coin toss of its own, as in the paper, and then every step counts. Infinite without noise.
        """
        return accounting.epsilon(self.noise, delta=delta, steps=steps, rate=rate)


def _unit_noise(size: torch.Size, rng: torch.Generator) -> torch.Tensor:
    """Noise of standard deviation 1, drawn on the CPU so that a seed means the same noise on every device."""
    return torch.randn(size, generator=rng)
