"""Ceilings against the best attacker there is: one who knows every vertex of the cube and weighs them all."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from federations import flat
from fedprism.evaluation.channel import channel
from fedprism.solvers.bounds.cube import Cube

DRAWS = 80
"""Private samples drawn from a cube: the mean error of the best attacker is then known to about a tenth."""
SHAPE = (1, 2, 4)
"""Small enough to try all 256 vertices of a cube."""
SIZE = 8
CHOICE = 0.3
"""Decibels by which cubes that leave the same doubt may differ."""
SERVER = fp.threats.honest_but_curious
D = fp.defenses


class Steps(fp.defenses.Defense):
    """Rounds to a coarse grid: many samples have the same update."""

    def on_update(self, update: fp.types.Update, context: D.Context, rng: torch.Generator) -> fp.types.Update:
        return {name: (tensor / 10).round() * 10 for name, tensor in update.items()}


def network(seed: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        activation(),
        nn.Flatten(),
        nn.Linear(4 * SIZE, 6),
        activation(),
        nn.Linear(6, 3),
    )


def batch(size: int, seed: int = 0) -> fp.Batch:
    rng = torch.Generator().manual_seed(seed)
    return fp.Batch(torch.rand(size, *SHAPE, generator=rng), torch.randint(3, (size,), generator=rng))


def scenario(defense: D.Defense, seed: int = 0, size: int = 1, **changes: Any) -> fp.Scenario:
    return fp.Scenario(
        **{"model": network(seed), "clients": [batch(size, seed)], "defense": defense, **changes}  # type: ignore[arg-type]
    )


def holding(given: fp.Scenario, sample: Tensor) -> fp.Scenario:
    """The scenario with its first private sample replaced."""
    data = given.clients[0]
    inputs = data.inputs.clone()
    inputs[0] = sample.view(inputs.shape[1:])
    return dataclasses.replace(given, clients=[fp.Batch(inputs, data.labels), *given.clients[1:]])


def update(given: fp.Scenario, seed: int) -> Tensor:
    return flat(fp.simulate(given, SERVER, seed=seed, device="cpu")[0].round.update).double()


def vertices(cube: Cube) -> Tensor:
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * len(cube.steps))
    return torch.stack([cube.vertex(row) for row in signs])


def best_error(given: fp.Scenario, cube: Cube, log_density: Callable[[Tensor], Tensor]) -> float:
    """Mean squared error of the posterior mean, for private samples drawn from the cube; no attacker does better."""
    samples = vertices(cube)
    quiet = dataclasses.replace(
        given, defense=given.defense.members[0] if len(given.defense.members) > 1 else fp.chain()
    )
    if isinstance(given.defense, D.DpSgd):
        quiet = dataclasses.replace(given, defense=given.defense.deterministic())
    updates = torch.stack([update(holding(given=quiet, sample=sample), 0) for sample in samples])
    rng = torch.Generator().manual_seed(7)
    errors = []
    for seed in range(DRAWS):
        truth = samples[int(torch.randint(len(samples), (), generator=rng))]
        observed = update(holding(given, truth), seed)
        weights = torch.softmax(log_density(observed - updates), 0)
        errors.append(float((weights @ samples.double() - truth.double()).square().mean()))
    return sum(errors) / DRAWS


def gaussian(deviation: float) -> Callable[[Tensor], Tensor]:
    return lambda left: -(left / deviation).square().sum(1) / 2


def laplace(deviation: float) -> Callable[[Tensor], Tensor]:
    return lambda left: -left.abs().sum(1) * math.sqrt(2) / deviation


CELLS = [
    *[(D.GaussianNoise(noise), gaussian(noise)) for noise in (3e-3, 0.03, 0.3)],
    (D.LaplaceNoise(0.03), laplace(0.03)),
    (D.DpSgd(0.05, 1.0), gaussian(0.05)),
    (fp.chain(D.Prune(0.5), D.GaussianNoise(0.03)), gaussian(0.03)),
    (fp.chain(D.Clip(0.1), D.GaussianNoise(0.01)), gaussian(0.01)),
]


@pytest.mark.parametrize(
    ("seed", "defense", "log_density"),
    [(seed, *cell) for seed, cell in enumerate(CELLS)],
    ids=[repr(cell[0]) for cell in CELLS],
)
def test_the_best_possible_attacker_does_not_beat_the_ceiling(
    seed: int, defense: D.Defense, log_density: Callable[[Tensor], Tensor]
) -> None:
    given = scenario(defense, seed)
    ceiling = fp.ceiling(given, SERVER, seed=0)
    floor = -10 * math.log10(best_error(given, ceiling.cubes[0], log_density))
    assert floor <= ceiling.values[0] + 0.5  # half a decibel: the error over DRAWS is known to a tenth
    assert ceiling.values[0] < floor + 12
    assert ceiling.confidence == 0.95
    assert "natural images" in ceiling.prior


def dense(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(SIZE, 12), nn.ReLU(), nn.Linear(12, 3))


@pytest.mark.parametrize("noise", [0.003, 0.03])
@pytest.mark.parametrize(
    ("model", "attack"),
    [
        (dense, fp.attacks.dense_inversion()),
        (dense, dataclasses.replace(fp.attacks.inverting_gradients(), iterations=60)),
        (network, dataclasses.replace(fp.attacks.inverting_gradients(), iterations=60)),
    ],
    ids=["dense-inversion", "matching-dense", "matching-convolutions"],
)
def test_no_attack_of_ours_is_above_the_ceiling(
    model: Callable[[int], nn.Module], attack: fp.attacks.Attack, noise: float
) -> None:
    given = scenario(D.GaussianNoise(noise), model=model(0))
    ceiling = fp.ceiling(given, SERVER, seed=0)
    errors = []
    for seed in range(6):
        sample = ceiling.cubes[0].draw(torch.Generator().manual_seed(seed))
        observation, truth = fp.simulate(holding(given, sample), SERVER, seed=seed, device="cpu")
        scores = fp.score(fp.run(attack, observation, seed=seed, device="cpu"), truth, metrics=["mse"])
        errors += [value for value in scores.values["mse"] if value is not None]
    assert errors
    assert -10 * math.log10(sum(errors) / len(errors)) <= ceiling.values[0]


@pytest.mark.parametrize("seed", range(2))
def test_it_falls_as_noise_grows_and_ends_at_the_prior(seed: int) -> None:
    noises = [1e-4, 1e-2, 1.0, 100.0]
    values = [fp.ceiling(scenario(D.GaussianNoise(noise), seed), SERVER, seed=0).values[0] for noise in noises]
    # Another cube may be chosen for more noise, which moves the prior's own ceiling a little.
    assert all(more_noise <= less_noise + CHOICE for less_noise, more_noise in itertools.pairwise(values))
    assert values[0] > values[-1] + 20
    assert 12 < values[-1] < 16


def test_without_noise_there_is_no_ceiling_unless_updates_are_equal() -> None:
    for defense in (fp.chain(), D.Clip(0.1), D.Prune(0.9), D.MixUp(k=2), D.InstaHide(k=2)):
        ceiling = fp.ceiling(scenario(defense, size=2), SERVER, seed=0)
        assert ceiling.values == (math.inf, math.inf)
        assert ceiling.status.startswith("No ceiling is known: no noise")
        assert ceiling.witness is None
        assert ceiling.pairs > 0
    rounded = fp.ceiling(scenario(Steps()), SERVER, seed=0)
    assert rounded.values[0] < 16
    assert rounded.witness is not None
    assert torch.equal(*(update(holding(scenario(Steps()), sample), 0) for sample in rounded.witness))


@pytest.mark.parametrize("seed", range(3))
def test_on_smooth_networks_it_is_close_to_the_linearised_number(seed: int) -> None:
    given = scenario(D.GaussianNoise(0.01), seed, model=network(seed, nn.Tanh))
    ceiling = fp.ceiling(given, SERVER, seed=0)
    assert ceiling.linearised is not None
    assert ceiling.linearised[0] - 0.5 < ceiling.values[0] < ceiling.linearised[0] + 6
    assert fp.ceiling(scenario(D.GaussianNoise(0.01), seed), SERVER, seed=0).linearised is None


def test_noise_on_gradients_that_adam_scales_gives_no_ceiling_but_the_accountants() -> None:
    """In a step of Adam the noise is no longer Gaussian, nor as large as it was."""
    adam = fp.FedAvg(lr=0.1, optimizer=fp.optimizers.Adam())
    ceiling = fp.ceiling(scenario(D.DpSgd(4.0, 1.0), size=2, protocol=adam), SERVER, seed=0)
    assert ceiling.status.startswith("No ceiling is known: DP-SGD's noise in steps")
    assert ceiling.from_epsilon == ceiling.values[0]


def test_the_accountant_alone_gives_a_ceiling() -> None:
    strong, weak = (fp.ceiling(scenario(D.DpSgd(noise, 1.0), size=2), SERVER, seed=0) for noise in (4.0, 0.5))
    assert strong.from_epsilon is not None
    assert weak.from_epsilon is not None
    assert strong.from_epsilon < weak.from_epsilon
    assert max(strong.values) <= strong.from_epsilon
    assert 12 < strong.from_epsilon < 17
    several = fp.ceiling(scenario(D.DpSgd(4.0, 1.0), rounds=3), SERVER, seed=0)
    assert several.status.startswith("No ceiling is known: noisy rounds")
    assert several.from_epsilon is not None
    assert strong.from_epsilon < several.from_epsilon == several.values[0]
    assert fp.ceiling(scenario(D.GaussianNoise(1.0)), SERVER, seed=0).from_epsilon is None


def test_noise_relative_to_the_update_has_no_ceiling() -> None:
    for defense in (D.GaussianNoise(relative=1.0), fp.chain(D.LaplaceNoise(relative=0.1), D.GaussianNoise(0.1))):
        ceiling = fp.ceiling(scenario(defense), SERVER, seed=0)
        assert ceiling.values == (math.inf,)
        assert "noise relative to the update" in ceiling.status


def test_a_server_that_chooses_the_parameters_has_no_ceiling() -> None:
    ceiling = fp.ceiling(scenario(D.GaussianNoise(1.0)), fp.threats.malicious_server, seed=0)
    assert ceiling.values == (math.inf,)
    assert "chooses the parameters" in ceiling.status


@pytest.mark.parametrize(
    ("changes", "threat"),
    [
        ({}, SERVER),
        ({"protocol": fp.FedAvg(lr=0.5)}, SERVER),
        ({"aggregation": "sum"}, fp.threats.secure_aggregation),
        ({"aggregation": "mean"}, fp.threats.secure_aggregation),
        ({"aggregation": "weighted_mean"}, fp.threats.secure_aggregation),
        ({"frozen": True, "rounds": 2}, SERVER),
    ],
    ids=["one", "steps", "sum", "mean", "weighted", "frozen"],
)
@pytest.mark.parametrize(
    "defense", [D.GaussianNoise(0.2), D.DpSgd(0.5, 1.0), fp.chain(D.Clip(1.0), D.GaussianNoise(3.0))]
)
def test_the_channel_knows_how_much_noise_is_seen(
    changes: dict[str, Any], threat: fp.ThreatModel, defense: D.Defense
) -> None:
    given = scenario(defense, clients=[batch(2, 0), batch(3, 1)], **changes)
    source = channel(given, threat, 0, client=1, row=2)
    observation, _ = fp.simulate(given, threat, seed=0, device="cpu")
    seen = torch.cat(
        [flat(round.update).double() / s for round, s in zip(observation.rounds, source.deviations, strict=True)]
    )
    noise = seen - source.signal(source.pixels())
    if isinstance(given.protocol, fp.FedAvg) and isinstance(defense, D.DpSgd):
        assert float(noise.std()) < 1e-3  # the same noise is in both
    else:
        assert float(noise.std()) == pytest.approx(1, abs=0.1)


def test_a_participant_knows_its_own_noise() -> None:
    given = scenario(D.GaussianNoise(0.2), clients=[batch(2, 0), batch(2, 1), batch(2, 2)], protocol=fp.FedSGD(lr=0.5))
    source = channel(given, fp.threats.curious_client, 0, client=1, row=0)
    # Two of three clients in the mean, times the server's step.
    assert source.deviations == (pytest.approx(0.5 * 0.2 * math.sqrt(2) / 3),)
    ceiling = fp.ceiling(given, fp.threats.curious_client, seed=0)
    assert len(ceiling.values) == 4


@pytest.mark.parametrize("defense", [D.GaussianNoise(0.1), D.DpSgd(0.1, 1.0)])
def test_a_sample_of_a_batch_is_bounded_by_its_own_gradient_where_that_is_the_same(defense: D.Defense) -> None:
    given = scenario(defense, size=4)
    source = channel(given, SERVER, 0, client=0, row=1)
    other = torch.rand(SIZE, generator=torch.Generator().manual_seed(5))
    single = source.alone(other)
    assert len(single.scenario.clients[0]) == 1
    expected = source.signal(source.pixels()) - source.signal(other)
    found = single.signal(source.pixels()) - single.signal(other)
    torch.testing.assert_close(found.norm(), expected.norm(), rtol=1e-3, atol=0)
    normalised = nn.Sequential(nn.Flatten(), nn.Linear(SIZE, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    assert channel(scenario(D.GaussianNoise(0.1), size=4, model=normalised), SERVER, 0, 0, 1).alone(other).row == 1


def test_statistics_that_are_sent_without_noise_leave_no_ceiling() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIZE, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    given = scenario(D.GaussianNoise(10.0), size=4, model=model)
    assert max(fp.ceiling(given, SERVER, seed=0).values) < 16
    assert fp.ceiling(dataclasses.replace(given, sends_buffers=True), SERVER, seed=0).values == (math.inf,) * 4
    assert fp.ceiling(given, SERVER.granting("batchnorm_exact"), seed=0).values == (math.inf,) * 4


def test_samples_that_are_not_drawn_are_not_listed_and_pixels_are_as_the_model_was_fed() -> None:
    data = batch(4, 3)
    shifted = fp.Batch((data.inputs - 0.5) / 0.25, data.labels)
    given = scenario(
        fp.chain(D.EqualLabels(1), D.GaussianNoise(100.0)), clients=[shifted], normalization=((0.5,), (0.25,))
    )
    ceiling = fp.ceiling(given, SERVER, seed=0)
    _, truth = fp.simulate(given, SERVER, seed=0, device="cpu")
    assert len(ceiling.values) == len(truth.inputs) == 1
    assert 12 < ceiling.values[0] < 16
    assert ceiling.witness is not None
    assert ceiling.witness.shape == (2, *SHAPE)
    assert float(ceiling.witness.min()) < -0.5


def test_the_same_seed_gives_the_same_ceiling_and_bad_confidence_is_refused() -> None:
    given = scenario(D.GaussianNoise(0.1))
    assert fp.ceiling(given, SERVER, seed=3).values == fp.ceiling(given, SERVER, seed=3).values
    with pytest.raises(fp.errors.BadInput, match="confidence"):
        fp.ceiling(given, SERVER, seed=0, confidence=1.0)
