"""The ceiling: how close any attacker could come to a private sample, whatever method is used.

Attacks show what leaks at least. That they fail shows nothing; a low ceiling does. It looks at the private samples and
therefore belongs to the auditor: it never reaches attacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedprism.client.update import FedAvg
from fedprism.defenses import DpSgd, GaussianNoise
from fedprism.display.words import ShortRepr
from fedprism.errors import BadInput, NotApplicable
from fedprism.evaluation.channel import Channel, channel, has_relative_noise
from fedprism.inputs import described
from fedprism.losses import resolve
from fedprism.randomness import generator, seeded_layers
from fedprism.runtime.replay import first_nonsmooth_op
from fedprism.simulation.federation import simulate
from fedprism.simulation.scenario import Scenario
from fedprism.solvers.bounds.cube import Bound, Cube, without_looking
from fedprism.solvers.bounds.natural import natural_prior
from fedprism.solvers.bounds.overlap import gaussian_doubt
from fedprism.solvers.bounds.search import MOST_ADAPTED, Effort, Prior, linearised_error, prior_cube, tightest
from fedprism.threats import ThreatModel
from fedprism.truth import Truth

FREE_PAIRS = 500
"""Pairs for the accountant's bound, which computes no updates."""
THOROUGH = Effort(tried=6, certified=50, adapts=True)
"""Mostly 110 updates to choose a cube, at most 168 (89 more for samples of 64 values); 100 to certify it."""
QUICK = Effort(tried=4, certified=16, adapts=False)
"""Mostly 70 updates to choose a cube, at most 112; 32 to certify it: per sample, if gradients of a batch meet."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Ceiling(ShortRepr):
    """No attacker does better, on average over the hypercube of samples that is drawn around each private one.

    `values` has one for each private sample, in the order of the truth; infinite where no ceiling is known. Each holds
    with `confidence`. `witness`: two inputs (2, *input_shape) that differ visibly though their updates hardly do.
    `linearised` estimates the same for the one sample itself, where the network has no kinks: it is no bound.
    `from_epsilon` is what the privacy accountant alone guarantees; `values` are never above it.
    """

    metric: str
    values: tuple[float, ...]
    confidence: float
    pairs: int
    witness: Tensor | None
    prior: str
    linearised: tuple[float, ...] | None
    from_epsilon: float | None
    status: str
    cubes: tuple[Cube, ...] = field(default=(), repr=False, compare=False)
    """The hypercube around each sample, in pixels from 0 to 1."""


def ceiling(
    scenario: Scenario,
    threat: ThreatModel,
    *,
    seed: int,
    confidence: float = 0.95,
    device: str | torch.device | None = None,
) -> Ceiling:
    """The best mean PSNR in decibels that any attacker could reach, for each private sample.

    Each private sample is hidden among the vertices of a hypercube around it; the attacker is granted all else, and
    still cannot tell vertices apart whose updates the defense's noise makes alike. Holds for any network and defense.
    """
    if not 0 < confidence < 1:
        raise BadInput(f"confidence must be between 0 and 1, not {confidence}. 0.95 is common.")
    held = scenario.clients[0].inputs
    if not (isinstance(held, Tensor) and held.is_floating_point()):
        # The bound moves inputs by steps: tokens and categories have none between them.
        raise NotApplicable(
            "a ceiling needs a model with one tensor of floating-point numbers as input, not "
            f"{described(held)}; no ceiling is known for such inputs."
        )
    _, truth = simulate(scenario, threat, seed=seed, device=device)
    sources = [channel(scenario, threat, seed, *place, device=device) for place in _places(scenario, truth)]
    prior, sentence = natural_prior(tuple(scenario.clients[0].tensor.shape[1:]))
    promised = _from_epsilon(scenario, threat, sources, prior, confidence, seed)
    reason, estimates = _not_covered(scenario, threat, sources[0]), None
    if reason:
        bounds = [Bound(0.0, prior_cube(source.pixels(), prior), 0, None) for source in sources]
    else:
        bounds, estimates = _bounds(sources, prior, seed, confidence, smooth=_is_smooth(scenario))
    best = max(range(len(bounds)), key=lambda number: bounds[number].error)
    witness = bounds[best].witness
    if reason and promised is not None:
        reason += " What the accountant guarantees holds all the same."
    return Ceiling(
        metric="psnr",
        values=tuple(min(_decibels(bound.error), math.inf if promised is None else promised) for bound in bounds),
        confidence=confidence,
        pairs=sum(bound.pairs for bound in bounds),
        witness=None if witness is None else sources[best].inputs(witness),
        prior=sentence,
        linearised=estimates,
        from_epsilon=promised,
        status=reason or _status(sources[0], bounds),
        cubes=tuple(bound.cube for bound in bounds),
    )


def _bounds(
    sources: Sequence[Channel], prior: Prior, seed: int, confidence: float, *, smooth: bool
) -> tuple[list[Bound], tuple[float, ...] | None]:
    bounds, estimates = list[Bound](), list[float]()
    for number, source in enumerate(sources):
        rng = generator(seed, "ceiling", number)
        center = source.pixels()
        # Computing a sample's own gradient is cheaper than that of its batch, if only the sample's part differs.
        used = source.alone(prior_cube(center, prior).draw(rng))
        effort = THOROUGH if used is not source or len(sources) == 1 else QUICK
        bounds.append(tightest(center, prior, used.signal, used.doubt, effort=effort, confidence=confidence, rng=rng))
        if smooth and center.numel() <= MOST_ADAPTED and isinstance(used.noise, GaussianNoise | DpSgd):
            estimates.append(_decibels(linearised_error(center, prior, used.signal)))
    return bounds, tuple(estimates) if len(estimates) == len(sources) else None


def _places(scenario: Scenario, truth: Truth) -> list[tuple[int, int]]:
    """Client and row of each sample of the truth."""
    places, last = list[tuple[int, int]](), dict[int, int]()
    for inputs, owner in zip(truth.tensor, truth.owners, strict=True):
        client = int(owner.rpartition("-")[2])
        held = scenario.clients[client].tensor.cpu()
        same = (held == inputs).flatten(1).all(1).nonzero().flatten().tolist()
        # Samples are listed in their order; one that is held twice is listed twice.
        row = next((row for row in same if row > last.get(client, -1)), same[0])
        last[client] = row
        places.append((client, row))
    return places


def _not_covered(scenario: Scenario, threat: ThreatModel, source: Channel) -> str:
    """Why no hypercube is tried; empty if one is."""
    if threat.tampers:
        return "No ceiling is known: the server chooses the parameters, and the ceiling would hold for these only."
    scaled = isinstance(scenario.protocol, FedAvg) and not scenario.protocol.optimizer.adds_gradients
    if scaled and any(isinstance(member, DpSgd) for member in scenario.defense.members):
        return "No ceiling is known: DP-SGD's noise in steps of an optimizer that scales each entry is not covered."
    if has_relative_noise(scenario):
        return "No ceiling is known: noise relative to the update itself is not covered."
    if source.noise is None:
        return ""
    if scenario.rounds > 1 and not scenario.frozen:
        return "No ceiling is known: noisy rounds that build on each other are not covered."
    if _changes_examples_twice(scenario) and isinstance(source.noise, DpSgd):
        return "No ceiling is known: defenses that change single examples beside DP-SGD are not covered."
    if scenario.defense.overrides("on_draw") and scenario.aggregation == "weighted_mean":
        return "No ceiling is known: a mean weighted by batches that the defense draws is not covered."
    return ""


def _status(source: Channel, bounds: Sequence[Bound]) -> str:
    pairs, known = sum(bound.pairs for bound in bounds), sum(bound.error > 0 for bound in bounds)
    samples = f"{known} of {len(bounds)} samples"
    if source.noise is None and not known:
        return f"No ceiling is known: no noise is on the update, and the updates of all {pairs} pairs tried differ."
    if source.noise is None:
        return f"No noise is on the update, but for {samples} some of the {pairs} pairs tried have equal updates."
    if not known:
        return f"No ceiling is known: the noise of {source.noise!r} hides none of the {pairs} pairs tried."
    unknown = f"the sample and the noise of {source.noise!r}"
    return f"A bound for {samples} over {pairs} pairs, against an attacker who knows all but {unknown}."


def _is_smooth(scenario: Scenario) -> bool:
    """Whether loss and network have derivatives of every order, and the defense does nothing but clip and add noise."""
    if any(not isinstance(member, GaussianNoise | DpSgd) for member in scenario.defense.members):
        return False
    data = scenario.clients[0][:1]
    model = scenario.model
    with torch.enable_grad(), seeded_layers(torch.Generator()):
        training = model.training
        try:
            outputs = model.eval()(data.tensor.to(next(model.parameters()).device))
        finally:
            model.train(training)
        loss = scenario.defense.on_loss(resolve(scenario.loss))(outputs, data.labels.to(outputs.device))
        return not first_nonsmooth_op(loss)


def _from_epsilon(
    scenario: Scenario, threat: ThreatModel, sources: Sequence[Channel], prior: Prior, confidence: float, seed: int
) -> float | None:
    """PSNR that the guarantee of DP-SGD allows, from the Gaussian mechanism behind it; None where there is none.

    Two data sets that differ in one sample are as hard to tell apart as N(0, 1) from N(mu, 1): mu = 2 / noise for one
    release, because one sample is replaced by another, and the square root of the releases times that for several.
    """
    members = scenario.defense.members
    noise = max((member.noise for member in members if isinstance(member, DpSgd)), default=0.0)
    mixes = scenario.defense.overrides("on_draw") or any(
        member.overrides("on_batch") and not isinstance(member, DpSgd) for member in members
    )
    beside = scenario.sends_buffers or "batchnorm_exact" in threat.grants
    if not noise or mixes or beside or _changes_examples_twice(scenario):
        return None
    protocol = scenario.protocol
    releases = scenario.rounds * (protocol.epochs if isinstance(protocol, FedAvg) else 1)
    doubt = gaussian_doubt(2 / noise * math.sqrt(releases))
    rng = generator(seed, "ceiling", "accountant")
    errors = [
        without_looking(prior_cube(source.pixels(), prior), doubt, pairs=FREE_PAIRS, confidence=confidence, rng=rng)
        for source in sources
    ]
    return _decibels(min(errors))


def _changes_examples_twice(scenario: Scenario) -> bool:
    """DP-SGD's noise is in each example's gradient: what changes these again might take it out."""
    return sum(member.overrides("on_examples") for member in scenario.defense.members) > 1


def _decibels(error: float) -> float:
    return -10 * math.log10(error) if error > 0 else math.inf
