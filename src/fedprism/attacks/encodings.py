"""The samples behind mixtures: recover what each update's network was fed, then take the mixtures apart.

Huang, Gupta, Song, Li, Arora, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021
(section 5); Carlini et al., "Is Private Learning Possible with Instance Encoding?", 2021 (decoding).

MixUp and InstaHide train on encodings. An attack on one update finds the encodings behind it, and `decode_mixtures`
solves for the samples out of those of several updates. Who is told which samples were mixed with what weights is the
papers' strongest attacker: what is found is an upper bound on what gets out.

Differs from the papers in: where only the mapping is told, the weights are read off the soft labels, and a soft label
off the update itself where that is of one mixture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from fedprism import losses
from fedprism.attacks.base import Attack, PerClient
from fedprism.attacks.forward import input_box
from fedprism.attacks.gradient_matching import GradientMatching
from fedprism.attacks.matching_labels import Labels
from fedprism.attacks.matching_presets import inverting_gradients
from fedprism.attacks.structure import trace
from fedprism.batchnorm import buffers_of
from fedprism.defenses.mixup import Told
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.solvers.decode import Decoding, decode_mixtures
from fedprism.solvers.priors import TotalVariation
from fedprism.types import Ambiguity, Knowledge, Observation, Reconstruction, is_soft


def known_labels(variation: TotalVariation) -> GradientMatching:
    """Inverting gradients with the mixtures' soft labels, and this belief about images."""
    return replace(inverting_gradients(), labels=Labels.KNOWN, priors=(variation,))


@dataclass(frozen=True, kw_only=True, repr=False)
class Encodings(Attack):
    """Decodes the mixtures that `inner`, an attack on one update, finds behind each of several updates.

    masked: entries carry random signs (InstaHide). All samples may then as well be their negatives: a declared
    ambiguity. ridge: against errors of the encodings, relative to the largest squared singular value of the mixing.
    starts, search_iterations: of the search for signs.
    """

    inner: Attack = known_labels(TotalVariation(0.1))  # noqa: RUF009 (frozen)
    masked: bool = False
    ridge: float = 1e-3
    starts: int = 3
    search_iterations: int = 200

    citation: ClassVar[str] = "Huang et al. 2021; Carlini et al. 2021 (decoding of MixUp and InstaHide)"
    reads_many: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.ridge >= 0 or self.starts < 1 or self.search_iterations < 1:
            raise BadInput(
                f"expected a ridge of at least 0 and at least one start and one search iteration, found {self.ridge}, "
                f"{self.starts} and {self.search_iterations}; change the one that is out of range."
            )

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs | {"mixing", "batch_size"}

    @property
    def uses(self) -> frozenset[str]:
        return self.inner.uses | {"labels", "bounds", "normalization", "loss"}

    def run(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        given = observation.knowledge.mixing
        if given is None:
            raise MissingKnowledge(self.name, "mixing")
        told = Told.of(given, len(observation.rounds))
        parts = each_update(observation)
        mixtures = mixtures_behind(told, parts)
        found = [self._encodings(part, rng) for part in parts]
        inputs = torch.cat([one.inputs for one in found])
        rows = torch.cat(mixtures).to(inputs.device)
        mapping = told.mapping.to(inputs.device)[rows]
        known = [one.labels.to(inputs.device) for one in found if one.labels is not None]
        soft = torch.cat(known) if len(known) == len(found) else None
        if told.coefficients is None and (soft is None or len(soft) != len(rows)):
            raise MissingKnowledge(self.name, "labels")  # nothing else tells the weights
        coefficients = None if told.coefficients is None else told.coefficients.to(inputs.device)[rows]
        answer = self.decode(inputs, mapping, coefficients, rng, soft=soft)
        statuses = dict.fromkeys(one.status for one in found)
        return replace(answer, status="; ".join([answer.status, *statuses]))

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
        """The samples behind encodings that were found, of which encoding e mixes the samples mapping[e], (…, k).

        soft: the encodings' labels, (encodings, classes), where they are known. samples: how many there are, where the
        mapping does not show it.
        """
        decoded = decode_mixtures(
            encodings,
            mapping,
            coefficients,
            labels=soft if coefficients is None else None,
            masked=self.masked,
            samples=samples,
            ridge=self.ridge,
            starts=self.starts,
            iterations=self.search_iterations,
            rng=rng,
        )
        either_way: frozenset[Ambiguity] = frozenset({"sign"}) if decoded.ambiguity else frozenset()
        weights = "weights known" if coefficients is not None else "weights read off the soft labels"
        return Reconstruction(
            inputs=decoded.inputs,
            labels=_classes(decoded, mapping, soft),
            ambiguity=either_way,
            status=f"{len(encodings)} encodings of {len(decoded.inputs)} samples, {weights}; {decoded.status}",
            diagnostics={
                "encodings": encodings.cpu(),
                "residual": decoded.residual,
                "condition": decoded.condition,
                "solved": decoded.solved,
            },
        )

    def _encodings(self, part: Observation, rng: torch.Generator) -> _Found:
        """What the network was fed behind one update, in the order in which it was."""
        size, labels = part.knowledge.batch_size, part.knowledge.labels
        found = self.inner.run(_either_sign(part) if self.masked else part, rng)
        if found.inputs is None or len(found.inputs) != size:
            answers = 0 if found.inputs is None else len(found.inputs)
            raise NotApplicable(
                f"{self.name} expects {size} encodings behind an update, found {answers} by {self.inner.name}; "
                "use an inner attack that answers for every sample of a batch."
            )
        # Rows that were fitted to different soft labels come in the order of these.
        guided = "labels" in self.inner.needs and isinstance(labels, Tensor) and _all_differ(labels)
        open_still = found.ambiguity - ({"order"} if size == 1 or guided else set())
        open_still -= {"sign"} if self.masked else set()
        if open_still:
            raise NotApplicable(
                f"{self.name} expects encodings of which it is known which is which, found {self.inner.name} to leave "
                f"the {' and '.join(sorted(open_still))} open; grant soft labels that differ to an attack that uses "
                "them, or attack updates of one mixture."
            )
        soft = labels if isinstance(labels, Tensor) and is_soft(labels) else None
        return _Found(found.inputs, soft if soft is not None else _read_off(part, found.inputs), found.status)


def mixup_decoding() -> Encodings:
    """Gradient matching for each update's mixtures, and least squares for the images in them."""
    return Encodings()


def instahide_decoding() -> Encodings:
    """The same for mixtures with random signs: images are smooth in |x|, and signs are searched for entry by entry."""
    return Encodings(inner=known_labels(TotalVariation(0.01, magnitude=True)), masked=True)


class _Found(NamedTuple):
    inputs: Tensor
    labels: Tensor | None
    """Soft ones, as they are known or read off; None where they are not."""
    status: str


def each_update(observation: Observation) -> tuple[Observation, ...]:
    """One observation an update, each with its own statistics."""
    if any(seen.clients != 1 for seen in observation.rounds):
        raise NotApplicable(
            "decoding expects updates of single clients, found aggregates of several; disaggregate them first."
        )
    statistics = observation.knowledge.batchnorm_exact
    parts = PerClient().reduce(observation)
    if not isinstance(statistics, tuple):
        return parts
    return tuple(
        replace(part, knowledge=replace(part.knowledge, batchnorm_exact=own))
        for part, own in zip(parts, statistics, strict=True)
    )


def mixtures_behind(told: Told, parts: Sequence[Observation]) -> list[Tensor]:
    """For each update the rows of its mixtures. It must be of one local step: they are then one batch."""
    mixtures = [(told.updates == number).nonzero().flatten() for number in range(len(parts))]
    for number, (part, rows) in enumerate(zip(parts, mixtures, strict=True)):
        if part.knowledge.batch_size != len(rows):
            raise NotApplicable(
                f"decoding expects as many mixtures behind an update as it has samples, found {len(rows)} and "
                f"{part.knowledge.batch_size} in update {number}; attack clients that take one local step a round."
            )
    return mixtures


def _either_sign(part: Observation) -> Observation:
    """The same with a pixel range that holds the negatives too: entries with random signs leave that of images."""
    box = input_box(part)
    if box is None:
        return part
    widest = float(torch.stack([edge.abs().max() for edge in box]).max())
    known: Knowledge = dataclasses.replace(part.knowledge, bounds=(-widest, widest), normalization=None)
    return replace(part, knowledge=known)


def _read_off(part: Observation, inputs: Tensor) -> Tensor | None:
    """The soft label of the one mixture behind an update; None where it cannot be told.

    The gradient of the output layer's bias is softmax(outputs) - label, and the outputs follow from the mixture.
    """
    (seen,), loss, model = part.rounds, part.knowledge.loss, part.model
    if len(inputs) != 1 or seen.kind != "gradient" or model is None:
        return None
    if loss is None or losses.name_of(loss) != "cross_entropy":
        return None
    last = trace(part).output_layer()
    if last is None or last.bias is None or last.bias not in seen.update:
        return None
    buffers = {name: tensor.clone() for name, tensor in buffers_of(part, seen).items()}
    with torch.no_grad():
        outputs = functional_call(model, {**seen.params, **buffers}, (inputs,))
    return (torch.softmax(outputs, dim=1) - seen.update[last.bias]).clamp(0, 1)


def _all_differ(labels: Tensor) -> bool:
    return len(torch.unique(labels, dim=0)) == len(labels)


def _classes(decoded: Decoding, mapping: Tensor, soft: Tensor | None) -> Tensor | None:
    """Each sample's class: as it was read off, or the heaviest one of its own soft label."""
    if decoded.classes is not None or soft is None or len(soft) != len(mapping):
        return decoded.classes
    return decode_mixtures(soft, mapping, decoded.coefficients).inputs.argmax(1)
