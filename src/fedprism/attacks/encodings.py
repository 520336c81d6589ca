"""The samples behind mixtures: recover what each update's network was fed, then take the mixtures apart.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021
(section 5); Carlini et al., "Is Private Learning Possible with Instance Encoding?", 2021 (decoding).

An attack on one update recovers the encodings that it was trained on, and `decode_mixtures` solves for the samples in
those of several updates, told which were mixed: the papers' strongest attacker.

Differs from the papers in: where only the mapping is told, the weights are read off the soft labels, and a soft label
off the update itself where that is of one mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from fedprism import losses
from fedprism.attacks.base import Attack, Circumstances
from fedprism.attacks.gradient_matching.attack import GradientMatching
from fedprism.attacks.gradient_matching.forward import input_box
from fedprism.attacks.gradient_matching.labels import Labels
from fedprism.attacks.gradient_matching.presets import inverting_gradients
from fedprism.attacks.updates import split_updates
from fedprism.client.batchnorm import buffers_of
from fedprism.defenses.mixup import Told
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.naming import preset
from fedprism.network.network_map import network_map
from fedprism.solvers.matching.priors import TotalVariation
from fedprism.solvers.separation.decode import Decoding, decode_mixtures
from fedprism.types import Knowledge, Observation, Reconstruction, is_soft


def known_labels(variation: TotalVariation) -> GradientMatching:
    """Inverting gradients with the mixtures' soft labels, and this belief about images."""
    return replace(inverting_gradients(), labels=Labels.KNOWN, priors=(variation,))


@dataclass(frozen=True, kw_only=True, repr=False)
class Encodings(Attack):
    """Decodes the mixtures that `inner`, an attack on one update, finds behind each of several updates."""

    inner: Attack = known_labels(TotalVariation(0.1))  # noqa: RUF009 (frozen)
    masked: bool = False
    """Whether entries carry random signs (InstaHide); all samples may then as well be their negatives."""
    ridge: float = 1e-3
    """Against errors of the encodings, relative to the largest squared singular value of the mixing."""

    citation: ClassVar[str] = "Huang et al. 2021; Carlini et al. 2021 (decoding of MixUp and InstaHide)"

    def __post_init__(self) -> None:
        if not self.ridge >= 0:
            raise BadInput(f"ridge must be at least 0, not {self.ridge}; 0.001 is usual.")

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs | {"mixing", "batch_size"}

    @property
    def uses(self) -> frozenset[str]:
        return self.inner.uses | {"labels", "bounds", "normalization", "loss"}

    def not_worth(self, circumstances: Circumstances) -> str | None:
        named = "it needs an attacker who is granted labels and mixing"
        return named if circumstances.mixes else "no client of this plan mixes samples"

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        if observation.knowledge.mixing is None:
            raise MissingKnowledge(self.name, "mixing")
        mixing = Told.of(observation.knowledge.mixing, len(observation.rounds))
        singles = each_update(observation)
        mixtures = mixtures_behind(mixing, singles)
        answers = [self._encodings(single, rng) for single in singles]
        inputs = torch.cat([answer.inputs for answer in answers])
        rows = torch.cat(mixtures).to(inputs.device)
        mapping = mixing.mapping.to(inputs.device)[rows]
        known = [answer.labels.to(inputs.device) for answer in answers if answer.labels is not None]
        soft = torch.cat(known) if len(known) == len(answers) else None
        if mixing.coefficients is None and (soft is None or len(soft) != len(rows)):
            raise MissingKnowledge(self.name, "labels")  # nothing else tells the weights
        coefficients = None if mixing.coefficients is None else mixing.coefficients.to(inputs.device)[rows]
        decoded = self.decode(inputs, mapping, coefficients, rng, soft=soft)
        statuses = dict.fromkeys(answer.status for answer in answers)
        return replace(decoded, status="; ".join([decoded.status, *statuses]))

    def decode(
        self,
        encodings: Tensor,
        mapping: Tensor,
        coefficients: Tensor | None,
        rng: torch.Generator,
        *,
        soft: Tensor | None = None,
        samples: int | None = None,
    ) -> Reconstruction:
        """The samples behind encodings; soft: their labels, (encodings, classes), where they are known."""
        decoded = decode_mixtures(
            encodings,
            mapping,
            coefficients,
            labels=soft if coefficients is None else None,
            masked=self.masked,
            samples=samples,
            ridge=self.ridge,
            rng=rng,
        )
        weights = "weights known" if coefficients is not None else "weights read off the soft labels"
        return Reconstruction(
            inputs=decoded.inputs,
            labels=_classes(decoded, mapping, soft),
            ambiguity=frozenset({"sign"} if decoded.ambiguity else ()),
            status=f"{len(encodings)} encodings of {len(decoded.inputs)} samples, {weights}; {decoded.status}",
            diagnostics={
                "encodings": encodings.cpu(),
                "residual": decoded.residual,
                "condition": decoded.condition,
                "solved": decoded.solved,
            },
        )

    def _encodings(self, single: Observation, rng: torch.Generator) -> _Answer:
        """What the network was fed behind one update, in the order in which it was."""
        size, labels = single.knowledge.batch_size, single.knowledge.labels
        encodings = self.inner.run(_either_sign(single) if self.masked else single, rng)
        if encodings.inputs is None or len(encodings.inputs) != size:
            answers = 0 if encodings.inputs is None else len(encodings.inputs)
            raise NotApplicable(
                f"{self.name} needs {size} encodings behind an update, but {self.inner.name} returned {answers}; "
                "use an inner attack that answers for every sample of a batch."
            )
        # Rows that were fitted to different soft labels come in the order of these.
        distinct = isinstance(labels, Tensor) and len(torch.unique(labels, dim=0)) == len(labels)
        ordered = size == 1 or ("labels" in self.inner.needs and distinct)
        if unknown := encodings.ambiguity - ({"order"} if ordered else set()) - ({"sign"} if self.masked else set()):
            raise NotApplicable(
                f"{self.name} needs to know which encoding is which, but {self.inner.name} leaves the "
                f"{' and '.join(sorted(unknown))} open; grant soft labels that differ to an attack that uses them, "
                "or attack updates of one mixture."
            )
        if isinstance(labels, Tensor) and is_soft(labels):
            return _Answer(encodings.tensor, labels, encodings.status)
        return _Answer(encodings.tensor, _soft_label(single, encodings.tensor), encodings.status)


@preset(Encodings)
def mixup_decoding() -> Encodings:
    """Gradient matching for each update's mixtures, and least squares for the images in them."""
    return Encodings()


@preset(Encodings)
def instahide_decoding() -> Encodings:
    """The same for mixtures with random signs: images are smooth in |x|, and signs are searched for entry by entry."""
    return Encodings(inner=known_labels(TotalVariation(0.01, magnitude=True)), masked=True)


class _Answer(NamedTuple):
    inputs: Tensor
    labels: Tensor | None
    """Soft ones, as they are known or read off; None where they are not."""
    status: str


def each_update(observation: Observation) -> tuple[Observation, ...]:
    """One observation per update, with that update's own statistics."""
    if any(round.clients != 1 for round in observation.rounds):
        raise NotApplicable(
            "decoding needs updates of single clients, not aggregates of several; disaggregate them first."
        )
    return split_updates(observation)


def mixtures_behind(mixing: Told, singles: Sequence[Observation]) -> list[Tensor]:
    """For each update the rows of its mixtures. It must be of one local step: they are then one batch."""
    mixtures = [(mixing.updates == number).nonzero().flatten() for number in range(len(singles))]
    for number, (single, rows) in enumerate(zip(singles, mixtures, strict=True)):
        if single.knowledge.batch_size != len(rows):
            raise NotApplicable(
                f"decoding needs as many mixtures behind an update as it has samples, but update {number} has "
                f"{len(rows)} and {single.knowledge.batch_size}; attack clients that take one local step per round."
            )
    return mixtures


def _either_sign(single: Observation) -> Observation:
    """The same with a pixel range that holds the negatives too: entries with random signs leave that of images."""
    box = input_box(single)
    if box is None:
        return single
    widest = float(torch.stack([edge.abs().max() for edge in box]).max())
    known: Knowledge = replace(single.knowledge, bounds=(-widest, widest), normalization=None)
    return replace(single, knowledge=known)


def _soft_label(single: Observation, inputs: Tensor) -> Tensor | None:
    """The soft label of an update's one mixture, since the last bias gradient is softmax(outputs) - label, or None."""
    (round,), model = single.rounds, single.model
    if len(inputs) != 1 or round.kind != "gradient" or model is None:
        return None
    if not losses.is_cross_entropy(single.knowledge.loss):
        return None
    last = network_map(single).output_layer()
    if last is None or last.bias is None or last.bias not in round.update:
        return None
    buffers = {name: tensor.clone() for name, tensor in buffers_of(single, round).items()}
    with torch.no_grad():
        outputs = functional_call(model, {**round.params, **buffers}, (inputs,))
    return (torch.softmax(outputs, dim=1) - round.update[last.bias]).clamp(0, 1)


def _classes(decoded: Decoding, mapping: Tensor, soft: Tensor | None) -> Tensor | None:
    """Each sample's class: as it was read off, or the heaviest one of its own soft label."""
    if decoded.classes is not None or soft is None or len(soft) != len(mapping):
        return decoded.classes
    return decode_mixtures(soft, mapping, decoded.coefficients).inputs.argmax(1)
