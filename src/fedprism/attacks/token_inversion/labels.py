"""Labels that go with recovered texts: the next token at each place, or a class for each text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedprism.attacks.certificate import explaining_labels
from fedprism.inputs import Inputs, outputs_of
from fedprism.losses import IGNORED_LABEL, predictions
from fedprism.network.forward_pass import evaluating
from fedprism.types import Observation

PER_TOKEN = 3
"""Dimensions of outputs that are scores for each token: texts, tokens, classes."""


def likely_labels(
    observation: Observation, inputs: Inputs, tokens: Tensor, lengths: Tensor, padding: int
) -> Iterator[Tensor]:
    """Labels to try, the likeliest first; none without the loss."""
    if observation.knowledge.loss is None:
        return
    known = observation.knowledge.labels
    if isinstance(known, Tensor) and len(known) == len(tokens) == 1:
        yield known
        return
    if _scores_each_token(observation, inputs):
        yield from _next_tokens(tokens, lengths, padding)
        return
    labels = explaining_labels(observation, inputs)
    if labels is not None:
        yield labels
    elif isinstance(known, Tensor) and len(known) == len(tokens):
        yield known


def _scores_each_token(observation: Observation, inputs: Inputs) -> bool:
    assert observation.model is not None
    with torch.no_grad(), evaluating(observation.model):
        outputs = predictions(outputs_of(observation.model, observation.round.sent, inputs))
    return outputs.dim() == PER_TOKEN


def _next_tokens(tokens: Tensor, lengths: Tensor, padding: int) -> Iterator[Tensor]:
    """The next token at each place; behind the last, the end of the text or nothing. Padding has no label."""
    labels = torch.full_like(tokens, IGNORED_LABEL)
    labels[:, :-1] = tokens[:, 1:]
    places = torch.arange(tokens.shape[1])
    labels[places >= lengths[:, None] - 1] = IGNORED_LABEL
    ends = (torch.arange(len(tokens)), lengths - 1)
    for last in (padding, IGNORED_LABEL):
        each = labels.clone()
        each[ends] = last
        yield each
