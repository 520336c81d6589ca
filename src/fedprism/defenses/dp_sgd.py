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
from torch import Tensor, nn
from torch.func import vmap

from fedprism.defenses import accounting
from fedprism.defenses.base import Context, Defense, change_floats, check_number
from fedprism.defenses.clipping import clip_update
from fedprism.errors import NotApplicable
from fedprism.types import Batch, Update


@dataclass(frozen=True)
class DpSgd(Defense):
    """Clips each example's gradient to length `clip`, and adds N(0, (noise * clip)²) to every entry of their sum.

    The mean that is sent carries noise of standard deviation noise * clip / batch size. Under federated averaging every
    local step does this. The guarantee is differential privacy of single examples, of which one more or less moves the
    sum by at most `clip`; the batch size counts as public. The noise is not from a secure random source.
    """

    noise: float
    clip: float = 1.0

    def __post_init__(self) -> None:
        in_clips = "it is the noise on the sum in units of clip, and 1.0 is common"
        check_number(self.noise, "DpSgd's noise", in_clips, zero=True)
        check_number(self.clip, "DpSgd's clip", "1.0 is common")

    def on_batch(self, batch: Batch, context: Context, rng: torch.Generator) -> Batch:
        # The examples of a batch must not meet before their gradients are clipped.
        mixing = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
        layers = context.model.named_modules() if context.model is not None else ()
        name = next((name for name, layer in layers if isinstance(layer, mixing) and layer.training), None)
        if name is not None:
            raise NotApplicable(
                f"DpSgd needs the gradient of each example, and the batch-norm layer '{name}' in train mode "
                "mixes the examples. Use GroupNorm instead, or train with training=False."
            )
        return batch

    def on_examples(self, grads: Update, context: Context, rng: torch.Generator) -> Update:
        clipped: Update = vmap(lambda example: clip_update(example, self.clip))(dict(grads))
        if self.noise == 0:
            return clipped

        def noised(tensor: Tensor) -> Tensor:
            """Every example gets the same draw, so that the mean over them carries it once."""
            return tensor + self.noise * self.clip / len(tensor) * torch.randn(tensor.shape[1:], generator=rng).to(
                tensor
            )

        return change_floats(clipped, noised)

    def deterministic(self, observed: Update | None = None) -> Defense:
        return replace(self, noise=0.0)

    def epsilon(self, *, delta: float = 1e-5, steps: int = 1, rate: float = 1.0) -> float:
        """The epsilon at `delta` of a run with `steps` releases that an example is in (`accounting.epsilon`)."""
        return accounting.epsilon(self.noise, delta=delta, steps=steps, rate=rate)
