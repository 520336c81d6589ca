"""Reads the tokens of texts off the gradients of the layers that are fed them, and puts them in order.

Petrov, Dimitrov, Baader, Müller, Vechev, "DAGER: Exact Gradient Inversion for Large Language Models", NeurIPS 2024.

Differs from the paper in: the rank of a gradient is read off its rounding errors instead of being set per batch size;
all layers that are fed the tokens take part, adapters, too; with fewer rows than tokens, as in LoRA, the tokens are
pursued (`solvers/tokens/pursuit.py`); an answer is called exact only if the whole update was computed again from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch

from fedprism.attacks.base import Circumstances, UpdateAttack
from fedprism.attacks.certificate import certified
from fedprism.attacks.gradient_matching.forward import FORWARD_USES
from fedprism.attacks.token_inversion.labels import likely_labels
from fedprism.attacks.token_inversion.reading import Found, find_texts, find_tokens, own_layers, readings
from fedprism.client.observed import direction
from fedprism.errors import NotApplicable
from fedprism.network.token_layers import TokenModel
from fedprism.solvers.tokens.prefixes import PrefixStatus, Texts
from fedprism.solvers.tokens.pursuit import PursuitStatus
from fedprism.types import Observation, Reconstruction, Update

NO_TABLES = "no entry of the input is looked up in a table of this model"


class TokenStatus(StrEnum):
    EXACT = "the texts explain the whole update to rounding error"
    TEXTS = "texts that the row spaces of several layers allow; whether they explain the whole update is not known"
    CONTRADICTED = "texts that the row spaces of several layers allow; the update recomputed from them is another one"
    SET = "which tokens occur in the batch, not in which text nor in which place"


@dataclass(frozen=True, kw_only=True, repr=False)
class TokenInversion(UpdateAttack):
    """Tokens in the row spaces of the layers that are fed them, put in order by the layers behind."""

    citation: ClassVar[str] = "Petrov et al. 2024 (DAGER, tokens in the row space of the first attention)"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "input_shape"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"loss", "batch_size", "labels"}) | FORWARD_USES

    @property
    def reads_any_inputs(self) -> bool:
        return True

    def not_worth(self, circumstances: Circumstances) -> str | None:
        return None if circumstances.looks_up else NO_TABLES

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        model = TokenModel(observation)
        gradient = direction(observation.round, observation.knowledge)
        layers = readings(observation, model, gradient)
        own_layers(layers)
        found = find_tokens(model, layers)
        if not len(found.tokens):
            raise NotApplicable(
                f"token-inversion needs '{found.reading.reader.name}' to tell the tokens of the batch, but "
                f"{found.status} (rank {found.reading.space.rank} of {found.reading.space.rows})"
                f"{_first_step(gradient)}; use a smaller batch or more rows."
            )
        size = observation.knowledge.batch_size
        samples = size if isinstance(size, int) else None
        texts = find_texts(model, layers, found, samples)
        diagnostics = {
            "layer": found.reading.reader.name,
            "rank": found.reading.space.rank,
            "rows": found.reading.space.rows,
            "tokens": len(found.tokens),
            "chosen_one_by_one": found.greedy,
        }
        if texts is None or not texts.texts or texts.status is not PrefixStatus.GROWN:
            return _set_of(model, found, samples, diagnostics)
        answer = _checked(observation, model, texts, diagnostics)
        lost = not set(found.tokens.tolist()) <= {int(token) for text in texts.texts for token in text}
        return _set_of(model, found, samples, diagnostics) if lost and answer.status != TokenStatus.EXACT else answer


def token_inversion() -> TokenInversion:
    """Texts from the layers that are fed their tokens: full gradients and LoRA."""
    return TokenInversion()


def _first_step(gradient: Update) -> str:
    """What to say if the factors that are fed the tokens have no gradient, as if the others are still zero."""
    silent = [name for name, tensor in gradient.items() if tensor.dim() > 1 and not bool(tensor.any())]
    return f", and that '{silent[0]}' has no gradient, as in the first step of LoRA" if silent else ""


def _checked(
    observation: Observation, model: TokenModel, texts: Texts, diagnostics: dict[str, object]
) -> Reconstruction:
    """The texts, held against the whole update with every labelling that is likely."""
    lengths = torch.tensor([len(text) for text in texts.texts])
    tokens = torch.full((len(lengths), model.places), model.padding)
    for row, text in zip(tokens, texts.texts, strict=True):
        row[: len(text)] = text
    inputs = model.inputs(tokens, lengths)
    labels, explains = None, None
    for guessed in likely_labels(observation, inputs, tokens, lengths, model.padding):
        explained = certified(observation, inputs, guessed)
        if labels is None or explained:
            labels, explains = guessed, explained
        if explained:
            break
    status = TokenStatus.TEXTS if explains is None else TokenStatus.EXACT if explains else TokenStatus.CONTRADICTED
    return Reconstruction(
        inputs=inputs, labels=labels, ambiguity=frozenset({"order"}), status=status, diagnostics=diagnostics
    )


def _set_of(model: TokenModel, found: Found, samples: int | None, diagnostics: dict[str, object]) -> Reconstruction:
    """All tokens in any order, as many texts as there are samples."""
    size = samples or -(-len(found.tokens) // model.places)
    held = found.tokens[: size * model.places]
    tokens = torch.full((size * model.places,), model.padding)
    tokens[: len(held)] = held
    status = TokenStatus.SET if found.status is PursuitStatus.SPANNED else f"{TokenStatus.SET}; {found.status}"
    return Reconstruction(
        inputs=model.inputs(tokens.view(size, model.places)),
        ambiguity=frozenset({"order", "places", "counts", *(("samples",) if size > 1 else ())}),
        status=status,
        diagnostics=diagnostics,
    )
