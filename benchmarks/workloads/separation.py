"""Un-mixing a dense layer's gradient: ours, the published optimisation, and scikit-learn's FastICA.

The published method takes 25,000 Adam steps with automatic differentiation: a hundred are timed and multiplied up
(`published_separation`). How good its answer is comes from a full run of the same objective with its slopes written out
(`CocktailObjective`), which takes the same steps faster; for one batch size, which is given as a comparison of its own.
FastICA gets what ours gets: the gradient's row space.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from sklearn.decomposition import FastICA
from torch import Tensor

import fedprism as fp
from fedprism.attacks import CocktailParty
from fedprism.evaluation.scoring import match
from fedprism.metrics import psnr
from fedprism.randomness import generator
from fedprism.types import Reconstruction
from fedprism_papers.shared.base import Settings
from fedprism_papers.shared.victims import Victim, fc2_cifar10, fc2_photos, fc2_tiny_imagenet
from workloads.base import Comparison, Conditions, best_of, timed
from workloads.published_separation import OBJECTIVE, published_seconds

SIZES = (32, 64, 128, 256)
FULL_RUN = 64
"""The batch size at which the published objective is minimised to the end."""
NAME = "cocktail party"


def separation(conditions: Conditions) -> Iterator[Comparison]:
    settings = Settings(data_dir=conditions.data_dir, device=str(conditions.device))
    makers = (fc2_photos,) if conditions.data_dir is None else (fc2_cifar10, fc2_tiny_imagenet)
    for make in makers:
        victim = make(settings)
        for size in SIZES:
            yield from _compare(conditions, victim, size)


def _compare(conditions: Conditions, victim: Victim, size: int) -> Iterator[Comparison]:
    batch = victim.draw(size, generator(0, "batch", victim.name, size, 0))
    observation, truth = fp.simulate(
        fp.Scenario(model=victim.model, clients=[batch], normalization=victim.normalization),
        fp.threats.honest_but_curious,
        device=str(conditions.device),
    )

    def run(attack: CocktailParty) -> Reconstruction:
        return fp.run(attack, observation, device=str(conditions.device))

    def quality(found: Reconstruction) -> str:
        matched = match(found, truth)
        return f"{float(psnr(matched.recovered, matched.truth).clamp(max=200).mean()):.1f} dB"

    ours, found = best_of(3, conditions.device, lambda: run(CocktailParty()))
    row = {"workload": NAME, "size": f"{victim.name}, n = {size}", "ours": ours, "quality": quality(found)}
    gradient = observation.rounds[0].update[f"{victim.dense_layer}.weight"].to(conditions.device)
    shape = tuple(truth.inputs.shape[1:])
    published_quality = ""
    if size == FULL_RUN:
        full, answer = timed(
            conditions.device, lambda: run(CocktailParty(objective=OBJECTIVE, exact=False, bias_scale=False))
        )
        published_quality = quality(answer)
        yield Comparison(
            **row,
            other="published objective, slopes written out",
            theirs=full,
            their_quality=published_quality,
        )
    yield Comparison(
        **row,
        other="published optimisation, automatic differentiation",
        theirs=published_seconds(gradient, size, shape),
        their_quality=published_quality,
        extrapolated=True,
    )
    seconds, sources = timed(torch.device("cpu"), lambda: _fast_ica(gradient, size))
    answer = Reconstruction(
        inputs=sources.view(-1, *shape), ambiguity=frozenset({"order", "sign", "scale"}), status="FastICA"
    )
    yield Comparison(**row, other="scikit-learn FastICA", theirs=seconds, their_quality=quality(answer))


def _fast_ica(gradient: Tensor, size: int) -> Tensor:
    """Sources (size, pixels): pixels are the samples, the gradient's rows the mixtures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged shows in the answer
        ica = FastICA(n_components=size, whiten="unit-variance", max_iter=200, tol=1e-4, random_state=0)
        found = ica.fit_transform(gradient.cpu().double().T.numpy())
    return torch.from_numpy(found.T.copy()).float()
