"""What the model does with the client's own batch, before anything is sent: needs the model's code.

In an honest network each sample's gradient is about as large as its error at the outputs; behind a trap only one's is.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism.checks import shown
from fedprism.client.update import batch_gradient
from fedprism.errors import BadInput
from fedprism.inspection.base import Finding, serious
from fedprism.types import Batch, LossFn, Update, is_soft

MOST_SAMPLES = 32
"""Each sample costs a backward pass."""
SAME_LOGITS = 1e-3
"""Difference of a sample's outputs, relative to their size, up to which they count as equal."""
STILL = 1e-6
"""Spread of the outputs over the samples, relative to their size, up to which it is rounding of float32."""
HOPELESS = 15.0
"""A loss in nats beyond any honest mistake."""
DOMINATION = 1e3
"""How many times the median sample's contribution to a tensor's gradient a dominating sample's is."""
SMALL_ERROR = 1e-3
"""Samples with a smaller error at the outputs, relative to the largest, are left out: quotients by it are rounding."""
FEWEST_SAMPLES = 3
"""Fewer samples have no median that one could stand out from."""


def behaviour(params: Update, model: nn.Module, batch: Batch, loss: LossFn) -> list[Finding]:
    """Outputs that do not tell classes apart, classes ruled out beforehand, gradients that one sample dominates."""
    batch = Batch(batch.tensor[:MOST_SAMPLES], batch.labels[:MOST_SAMPLES])
    model = copy.deepcopy(model).eval()
    tensors = _fitting(params, model)
    with torch.no_grad():
        outputs = _outputs(model, tensors, batch)
    if not bool(torch.isfinite(outputs).all()):
        return [serious("outputs", "", "the outputs on the client's own batch are not finite", {})]
    return [*_same_logits(outputs), *_hopeless(outputs, batch, loss), *_dominated(model, tensors, batch, outputs, loss)]


def _fitting(params: Update, model: nn.Module) -> dict[str, Tensor]:
    """The tensors by the model's names, or one sentence."""
    wanted = dict(model.state_dict())
    for name, like in wanted.items():
        if name not in params or params[name].shape != like.shape:
            shape = tuple(params[name].shape) if name in params else "none"
            raise BadInput(
                f"tensor '{name}' has shape {shape}, the model expects {tuple(like.shape)}. Give the factory "
                "of this very model."
            )
    return {name: params[name].detach().to(like) for name, like in wanted.items()}


def _outputs(model: nn.Module, tensors: Update, batch: Batch) -> Tensor:
    try:
        outputs: Tensor = functional_call(model, dict(tensors), (batch.inputs,))
    except (RuntimeError, ValueError, IndexError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise BadInput(
            f"the model does not accept inputs of shape {tuple(batch.tensor.shape)} ({reason}). Give the "
            "client's own batch."
        ) from error
    if outputs.dim() != 2:
        raise BadInput(
            f"the model must return (batch, classes), not shape {tuple(outputs.shape)}. Give a model that classifies."
        )
    labels, soft = batch.labels, is_soft(batch.labels)
    if labels.shape != outputs.shape if soft else not 0 <= labels.min() <= labels.max() < outputs.shape[1]:
        raise BadInput(
            f"labels of shape {tuple(labels.shape)} up to {float(labels.max()):g} do not fit the model's "
            f"{outputs.shape[1]} classes. Give the client's own batch."
        )
    return outputs


def _same_logits(outputs: Tensor) -> list[Finding]:
    """A head of zeros gives every sample the same outputs; equal logits that move with the sample are made."""
    scale = outputs.abs().amax(1)
    apart = outputs.amax(1) - outputs.amin(1)
    moves = outputs.mean(1).std(correction=0)
    if outputs.shape[1] < 2 or not bool((apart <= SAME_LOGITS * scale).all() & (moves > STILL * scale.max())):
        return []
    evidence = {"largest_difference": float(apart.max()), "scale": float(scale.max())}
    return [
        serious(
            "same-logits", "", "every class has the same output, although the output depends on the sample", evidence
        )
    ]


def _hopeless(outputs: Tensor, batch: Batch, loss: LossFn) -> list[Finding]:
    with torch.no_grad():
        values = torch.stack([loss(outputs[i : i + 1], batch.labels[i : i + 1]) for i in range(len(outputs))])
    hopeless = int((values > HOPELESS).sum())
    if hopeless < FEWEST_SAMPLES or 2 * hopeless < len(values):
        return []
    sentence = f"{hopeless} of {len(values)} samples have a loss above {HOPELESS:g}: their classes are ruled out"
    return [serious("classes-ruled-out", "", sentence, {"samples": hopeless, "largest_loss": float(values.max())})]


def _dominated(
    model: nn.Module, tensors: dict[str, Tensor], batch: Batch, outputs: Tensor, loss: LossFn
) -> list[Finding]:
    """Tensors to whose gradient one sample contributes, for the size of its error, far more than the median one."""
    if len(batch) < FEWEST_SAMPLES:
        return []
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    untrained = {name: tensor for name, tensor in tensors.items() if name not in trained}
    errors = [_error(outputs[i : i + 1], batch.labels[i : i + 1], loss) for i in range(len(batch))]
    kept = [i for i, error in enumerate(errors) if error > SMALL_ERROR * max(errors)]
    norms = []  # (samples, tensors)
    for i in kept:
        params = {name: tensors[name].requires_grad_() for name in trained}
        gradient = batch_gradient(model, params, untrained, batch[i : i + 1], loss)
        norms.append(torch.stack([torch.linalg.vector_norm(gradient[name]) for name in trained]) / errors[i])
    if len(norms) < FEWEST_SAMPLES:
        return []
    answers = torch.stack(norms)
    largest = answers.amax(0)
    dominated = (largest > 0) & (largest > DOMINATION * answers.median(0).values)
    answering = int((largest > 0).sum())
    if 2 * int(dominated.sum()) < max(answering, 1):
        return []
    where = [name for name, so in zip(trained, dominated.tolist(), strict=True) if so]
    fractions = answers[:, dominated].div(answers[:, dominated].amax(0)).mean(1)
    sample, heard = kept[int(fractions.argmax())], int((fractions > 1 / DOMINATION).sum())
    sentence = (
        f"{heard} of {len(kept)} samples, sample {sample} above all, make up the gradient of {len(where)} of "
        f"{answering} tensors, {shown(where[0])} first"
    )
    evidence = {"sample": sample, "heard": heard, "samples": len(kept), "tensors": len(where), "of": answering}
    return [serious("few-samples-dominate", "", sentence, evidence)]


def _error(outputs: Tensor, labels: Tensor, loss: LossFn) -> float:
    outputs = outputs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(outputs, labels), [outputs])
    return float(torch.linalg.vector_norm(gradient))
