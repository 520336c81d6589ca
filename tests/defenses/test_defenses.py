"""Defenses with planted answers, and the attacker who knows them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedprism as fp
from fedprism.defenses import Chain, Context, Defense, GaussianNoise, LaplaceNoise, Prune, chain
from fedprism.defenses.pruning import prune
from fedprism.types import Update


@given(size=st.integers(1, 200), ratio=st.floats(0, 0.999), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_pruning_keeps_exactly_the_largest(size: int, ratio: float, seed: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    kept = prune(tensor, ratio)
    removed = int(ratio * size)
    assert int((kept == 0).sum()) == removed
    assert torch.equal(kept[kept != 0], tensor[kept != 0])
    if 0 < removed < size:
        assert tensor[kept == 0].abs().max() <= tensor[kept != 0].abs().min()


def test_exactly_as_many_entries_go_as_asked_for_also_on_ties() -> None:
    assert prune(torch.tensor([3.0, -1.0, 1.0, 1.0]), 0.5).tolist() == [3.0, -1.0, 0.0, 0.0]
    assert prune(torch.tensor([3.0, -1.0, 2.0, 1.0]), 0.5).tolist() == [3.0, 0.0, 2.0, 0.0]


def test_pruning_has_no_limit_of_size() -> None:
    tensor = torch.arange(2**24 + 8, dtype=torch.float32)
    kept = prune(tensor, 0.75)
    assert int((kept == 0).sum()) == int(0.75 * len(tensor))


@pytest.mark.parametrize("noise", [GaussianNoise(0.3), LaplaceNoise(0.3)])
def test_noise_has_the_stated_spread(noise: Defense, rng: torch.Generator) -> None:
    update = {"w": torch.zeros(200_000), "count": torch.tensor(3)}
    noised = noise.on_update(update, Context(), rng)
    assert noised["w"].std() == pytest.approx(0.3, rel=0.02)
    assert noised["w"].mean() == pytest.approx(0, abs=0.005)
    assert torch.equal(noised["count"], update["count"])
    kurtosis = (noised["w"] / 0.3).pow(4).mean()
    assert kurtosis == pytest.approx(3 if isinstance(noise, GaussianNoise) else 6, rel=0.1)


@pytest.mark.parametrize("kind", [GaussianNoise, LaplaceNoise])
def test_noise_may_be_relative_to_each_tensor(kind: type[GaussianNoise], rng: torch.Generator) -> None:
    update = {"small": torch.randn(50_000, generator=rng), "large": 7 + 100 * torch.randn(50_000, generator=rng)}
    noised = kind(relative=0.1).on_update(update, Context(), rng)
    for name, tensor in update.items():
        assert float((noised[name] - tensor).std() / tensor.std()) == pytest.approx(0.1, rel=0.03)
    constant = {"w": torch.full((3,), 2.0), "none": torch.zeros(0)}
    assert torch.equal(kind(relative=0.5).on_update(constant, Context(), rng)["w"], constant["w"])
    for wrong in ({}, {"std": 0.1, "relative": 0.1}, {"relative": -1.0}):
        with pytest.raises(fp.errors.BadInput, match=kind.__name__):
            kind(**wrong)


@pytest.mark.parametrize("kind", [Prune, GaussianNoise, LaplaceNoise])
@pytest.mark.parametrize("strength", [-0.1, float("nan"), float("inf"), "0.9", None, True])
def test_bad_strengths_are_refused(kind: type[Defense], strength: object) -> None:
    with pytest.raises(fp.errors.BadInput, match=kind.__name__):
        kind(strength)  # type: ignore[call-arg]


def test_everything_is_not_to_be_pruned() -> None:
    with pytest.raises(fp.errors.BadInput, match="from 0 up to, but not including, 1, not"):
        Prune(1.0)


@pytest.mark.parametrize("wrong", [3, "prune", Prune, [Prune(0.9)]])
def test_only_defenses_are_chained(wrong: Any) -> None:
    with pytest.raises(fp.errors.BadInput, match="a chain takes defenses such as"):
        chain(GaussianNoise(0.1), wrong)


def test_chain_is_closed_associative_and_has_an_identity(rng: torch.Generator) -> None:
    first, second = Prune(0.5), Prune(0.9)
    assert chain(first) is first
    assert chain(chain(first), chain(second, chain())) == chain(first, second)
    assert chain() == Chain()
    assert eval(repr(chain(first, second)), vars(fp.defenses)) == chain(first, second)
    update = {"w": torch.randn(10, generator=rng)}
    assert chain().on_update(update, Context(), rng) is update
    assert not chain().overrides("on_examples")


def test_a_chain_says_who_is_in_it_and_which_stages_it_changes() -> None:
    prune, mix = Prune(0.5), fp.defenses.MixUp(2)
    assert Chain((prune, Chain((mix,)))).members == (prune, mix)
    assert prune.members == (prune,)
    assert chain(prune, mix).overrides("on_batch")
    assert not prune.overrides("on_batch", "on_examples")


def test_order_in_a_chain_matters() -> None:
    def zeros(defense: Defense) -> int:
        update: Update = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
        return int((defense.on_update(update, Context(), torch.Generator().manual_seed(1))["w"] == 0).sum())

    assert zeros(chain(GaussianNoise(0.1), Prune(0.9))) == 900
    assert zeros(chain(Prune(0.9), GaussianNoise(0.1))) == 0


PUBLIC = fp.Batch(torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3)
EVERY: dict[str, Defense] = {
    "prune": Prune(0.5),
    "clip": fp.defenses.Clip(0.1),
    "quantize": fp.defenses.Quantize(4),
    "cast": fp.defenses.Cast("bfloat16"),
    "gaussian-noise": GaussianNoise(0.1),
    "laplace-noise": LaplaceNoise(0.1),
    "dp-sgd": fp.defenses.DpSgd(1.0),
    "secure-aggregation": fp.defenses.SecureAggregation(),
    "equal-labels": fp.defenses.EqualLabels(2),
    "mse-loss": fp.defenses.MseLoss(),
    "mixup": fp.defenses.MixUp(3),
    "instahide": fp.defenses.InstaHide(3),
    "inter-instahide": fp.defenses.InstaHide(4, cross=PUBLIC),
    "soteria": fp.defenses.Soteria(0.5),
    "sign-compression": fp.defenses.SignCompression(),
    "random-weights": fp.defenses.RandomWeights(0.5),
    "chain": chain(fp.defenses.InstaHide(3), Prune(0.9), GaussianNoise(0.1)),
}


def test_no_defense_is_forgotten_here() -> None:
    assert set(fp.defenses.DEFENSES) < set(EVERY)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("protocol", [fp.FedSGD(), fp.FedAvg(lr=0.1, epochs=2)], ids=["gradient", "delta"])
def test_data_and_shared_buffers_stay_as_they_are(name: str, protocol: Any) -> None:
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model = nn.Sequential(*layers)
    data = fp.Batch(torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3)
    everything = [*model.state_dict().values(), data.inputs, data.labels, PUBLIC.inputs, PUBLIC.labels]
    before = [tensor.clone() for tensor in everything]
    scenario = fp.Scenario(
        model=model,
        clients=[data],
        defense=EVERY[name],
        protocol=protocol,
        training=name != "dp-sgd",  # which refuses layers that mix examples
    )
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    assert all(torch.equal(tensor, old) for tensor, old in zip(everything, before, strict=True))
    assert all(bool(tensor.isfinite().all()) for tensor in observation.rounds[0].update.values())


def test_draws_compose() -> None:
    class Every(Defense):
        def __init__(self, step: int) -> None:
            self.step = step

        def on_draw(self, dataset: fp.Batch, context: Context, rng: torch.Generator) -> torch.Tensor:
            return torch.arange(0, len(dataset), self.step)

    data = fp.Batch(torch.rand(12, 2), torch.arange(12))
    assert chain(Every(2), Every(3)).on_draw(data, Context(), torch.Generator()).tolist() == [0, 6]


def test_only_the_repeatable_part_reaches_the_attacker() -> None:
    assert chain(Prune(0.9), GaussianNoise(0.1)).deterministic() == Prune(0.9)
    assert GaussianNoise(0.1).deterministic() == chain()


def test_the_zeros_of_a_pruned_update_tell_what_was_kept(rng: torch.Generator) -> None:
    observed = {"w": torch.tensor([0.0, 5.0, 0.0, -4.0])}
    repeated = Prune(0.5).deterministic(observed).on_update({"w": torch.tensor([9.0, 1.0, 8.0, 2.0])}, Context(), rng)
    assert repeated["w"].tolist() == [0.0, 1.0, 0.0, 2.0]


def test_an_attacker_who_knows_the_pruning_sees_more(photos: fp.data.ImageSet) -> None:
    model = fp.models.build("lenet", input_shape=(3, 32, 32), classes=10, width=32, activation="relu", seed=0)
    batch = photos.draw(1, torch.Generator().manual_seed(0))
    scenario = fp.Scenario(model=model, clients=[batch], defense=Prune(0.95))
    attack = dataclasses.replace(
        fp.attacks.inverting_gradients(), iterations=300, priors=(fp.attacks.TotalVariation(0.01),)
    )
    quality = {}
    for threat in (fp.threats.honest_but_curious, fp.threats.honest_but_curious.granting("defense")):
        observation, truth = fp.simulate(scenario, threat)
        found = fp.run(attack, observation)
        assert ("defense" in found.knowledge_used) == ("defense" in threat.grants)
        quality[threat] = fp.score(found, truth).mean("psnr")
    naive, adaptive = quality.values()
    assert adaptive > naive + 3
