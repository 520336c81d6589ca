"""Direct inversion: what it must read exactly, what only approximately, and what it must refuse."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import fedprism as fp
from dense_clients import Products, double
from fedprism.solvers import DenseStatus, invert_dense, numerical_rank

INVERT = fp.attacks.dense_inversion()


def attacked(
    model: nn.Module, batch: fp.Batch, threat: fp.ThreatModel = fp.threats.honest_but_curious, **options: object
) -> tuple[fp.Reconstruction, fp.Scores]:
    observation, truth = fp.simulate(fp.Scenario(model=model, clients=[batch], **options), threat)  # type: ignore[arg-type]
    found = fp.run(INVERT, observation)
    return found, fp.score(found, truth)


def worst(scores: fp.Scores) -> float:
    return min(-1.0 if value is None else value for value in scores.values["psnr"])


@pytest.mark.parametrize("name", ["dense", "fc2"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "softmax_mse"])
def test_a_single_image_is_exact_whatever_the_loss(
    name: str, loss: str, photos: fp.data.ImageSet, rng: torch.Generator
) -> None:
    model = fp.models.build(name, input_shape=(3, 32, 32), classes=10, seed=0).double()
    found, scores = attacked(model, double(photos.draw(1, rng)), loss=loss)
    assert worst(scores) > 200
    assert found.status == DenseStatus.EXACT


@pytest.mark.parametrize("hidden", [64, 3072])
@pytest.mark.parametrize("batch", [1, 6])
def test_weights_of_inputs_by_outputs_are_read_as_well(
    batch: int, hidden: int, photos: fp.data.ImageSet, rng: torch.Generator
) -> None:
    model = Products(3072, hidden, 10).double()
    found, scores = attacked(model, double(photos.draw(batch, rng, unique_labels=True)))
    assert worst(scores) > 80
    assert scores.labels_match
    assert found.status == DenseStatus.EXACT
    assert found.diagnostics["layer"] == "first"


@pytest.mark.parametrize("init", ["default", "uniform"])
@pytest.mark.parametrize(("classes", "batch"), [(1000, 8), (100, 8), (10, 8)])
def test_distinct_labels_through_one_layer(
    classes: int, batch: int, init: str, photos: fp.data.ImageSet, rng: torch.Generator
) -> None:
    model = fp.models.build("dense", input_shape=(3, 32, 32), classes=classes, seed=1)
    if init == "uniform":
        fp.models.uniform_(model, -0.05, 0.05, seed=1)
    found, scores = attacked(model.double(), double(photos.draw(batch, rng, unique_labels=True)))
    assert worst(scores) > 80
    assert scores.labels_match
    assert found.status == DenseStatus.EXACT


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.Identity()])
def test_distinct_labels_through_a_stack(activation: nn.Module, photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(3072, 64), activation, nn.Linear(64, 48), activation, nn.Linear(48, 30)]
    found, scores = attacked(nn.Sequential(*layers).double(), double(photos.draw(6, rng, unique_labels=True)))
    assert worst(scores) > 80
    assert scores.labels_match
    assert found.status == DenseStatus.EXACT


@pytest.mark.quality
@pytest.mark.parametrize("seed", [3, 6, 10, 12, 21])
def test_single_precision_is_enough(seed: int, photos: fp.data.ImageSet) -> None:
    """Also where a unit is so near its threshold that rounding could have put it on the other side, as here."""
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=256, classes=10, seed=seed)
    batch = photos.draw(8, torch.Generator().manual_seed(seed), unique_labels=True)
    found, scores = attacked(model, batch)
    assert found.status == DenseStatus.EXACT
    assert worst(scores) > 120
    assert found.inputs.dtype == torch.float32


def test_the_batch_size_is_read_off_the_rank(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=64, classes=100, seed=0).double()
    found, scores = attacked(model, double(photos.draw(5, rng, unique_labels=True)), fp.threats.eavesdropper)
    assert found.diagnostics["batch_size"] == 5
    assert "batch_size" not in found.knowledge_used
    assert worst(scores) > 80


def test_one_local_step_of_fedavg_is_a_gradient(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=64, classes=10, seed=0).double()
    batch = double(photos.draw(4, rng, unique_labels=True))
    _, scores = attacked(model, batch, protocol=fp.FedAvg(lr=0.05))
    assert worst(scores) > 80


def test_several_local_steps_still_give_pictures_away(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = fp.models.build("dense", input_shape=(3, 32, 32), classes=100, seed=0).double()
    batch = double(photos.draw(1, rng))
    _, scores = attacked(model, batch, protocol=fp.FedAvg(lr=0.01, epochs=5))
    assert worst(scores) > 80


def test_a_secure_sum_is_the_union_of_the_batches(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=64, classes=10, seed=0).double()
    batch = double(photos.draw(6, rng, unique_labels=True))
    scenario = fp.Scenario(model=model, clients=[batch[:3], batch[3:]], aggregation="sum")
    observation, truth = fp.simulate(scenario, fp.threats.secure_aggregation)
    assert worst(fp.score(fp.run(INVERT, observation), truth)) > 80


def test_several_clients_one_by_one(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=64, classes=10, seed=0).double()
    batch = double(photos.draw(6, rng, unique_labels=True))
    scenario = fp.Scenario(model=model, clients=[batch[:2], batch[2:]])
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious)
    found = fp.run(INVERT, observation)
    assert found.owners == ("client-0",) * 2 + ("client-1",) * 4
    assert worst(fp.score(found, truth)) > 80


def test_rows_that_agree_name_single_samples(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    # A residual connection makes the network no plain stack, and the loss gives no labels away.
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(3072, 400), nn.Linear(400, 400), nn.Linear(400, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(self.first(x.flatten(1)))
            return self.last(hidden + torch.relu(self.second(hidden)))

    torch.manual_seed(0)
    found, scores = attacked(Residual().double(), double(photos.draw(2, rng, unique_labels=True)), loss="mse")
    assert found.status == DenseStatus.AGREED
    assert worst(scores) > 80


def test_repeated_labels_are_said_to_be_blended(photos: fp.data.ImageSet) -> None:
    one_class = photos.batch((photos.labels == 2).nonzero().flatten()[:3])
    model = fp.models.build("dense", input_shape=(3, 32, 32), classes=100, seed=0)
    found, scores = attacked(model, one_class)
    assert found.status == DenseStatus.BLENDED
    assert len(found.inputs) == 1
    average = fp.score(
        fp.Reconstruction(inputs=one_class.inputs.mean(0, keepdim=True)),
        fp.Truth(inputs=found.inputs, labels=one_class.labels[:1], owners=("c",)),
    )
    assert average.mean("psnr") > 30
    assert sum(value is None for value in scores.values["psnr"]) == 2


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_of_every_class_is_not_claimed_to_be_exact(seed: int, photos: fp.data.ImageSet) -> None:
    # Signals of all classes add up to zero, so their gradient tells at most classes - 1 samples apart: wrong inputs
    # explain it to rounding error.
    model = fp.models.build("dense", input_shape=(3, 32, 32), classes=8, seed=seed)
    batch = photos.draw(8, torch.Generator().manual_seed(seed), unique_labels=True)
    found, scores = attacked(model, batch)
    assert found.status != DenseStatus.EXACT
    assert worst(scores) < 40


def test_noise_is_noticed_not_hidden(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=64, classes=10, seed=0)
    batch = photos.draw(4, rng, unique_labels=True)
    found, scores = attacked(model, batch, defense=fp.defenses.GaussianNoise(0.1))
    assert found.status == DenseStatus.RESIDUAL
    assert scores.mean("psnr") < 12


@pytest.mark.quality
def test_a_little_noise_does_not_protect(photos: fp.data.ImageSet) -> None:
    """25 to 33 dB over thirty batches and networks, where a grey square has about ten."""
    qualities = []
    for seed in range(4):
        model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=256, classes=10, seed=seed)
        batch = photos.draw(8, torch.Generator().manual_seed(seed), unique_labels=True)
        found, scores = attacked(model, batch, defense=fp.defenses.GaussianNoise(1e-3))
        assert found.status == DenseStatus.RESIDUAL
        qualities.append(scores.mean("psnr"))
    assert sum(qualities) / len(qualities) > 24


def test_refuses_a_network_whose_input_meets_a_convolution(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = fp.models.build("lenet", input_shape=(3, 32, 32), classes=10, seed=0)
    with pytest.raises(fp.NotApplicable, match="use gradient-matching"):
        attacked(model, photos.draw(1, rng))


def test_refuses_a_layer_without_a_bias(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10, bias=False))
    with pytest.raises(fp.NotApplicable, match="bias"):
        attacked(model, photos.draw(1, rng))


def test_an_update_of_zeros_is_no_answer(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=8, classes=10, seed=0)
    observation, _ = fp.simulate(fp.Scenario(model=model, clients=[photos.draw(2, rng)]), fp.threats.honest_but_curious)
    seen = observation.rounds[0]
    empty = dataclasses.replace(seen, update={name: torch.zeros_like(t) for name, t in seen.update.items()})
    found = fp.run(INVERT, dataclasses.replace(observation, rounds=(empty,)))
    assert found.status == DenseStatus.NOT_INVERTIBLE
    assert len(found.inputs) == 0


def test_the_solver_alone_returns_invertible_rows_only() -> None:
    inputs = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    signals = torch.tensor([[0.5, 0.0], [0.0, -2.0], [0.0, 0.0]])
    solved = invert_dense(signals @ inputs, signals.sum(1))
    assert solved.rows.tolist() == [0, 1]
    torch.testing.assert_close(solved.inputs, inputs.double())
    assert numerical_rank(signals @ inputs, signals.sum(1)) == 2


def test_a_reference_row_removes_what_all_rows_share() -> None:
    rng = torch.Generator().manual_seed(0)
    inputs = torch.rand(5, 40, generator=rng, dtype=torch.float64)
    signals = torch.full((5, 60), 1 / 60, dtype=torch.float64) - torch.eye(60, dtype=torch.float64)[:5]
    weight_grad, bias_grad = signals.T @ inputs / 5, signals.mean(0)
    plain, exact = invert_dense(weight_grad, bias_grad), invert_dense(weight_grad, bias_grad, reference=59)
    assert (plain.inputs[:5] - inputs).abs().max() > 1e-3
    torch.testing.assert_close(exact.inputs[exact.rows < 5], inputs)
    assert torch.equal(exact.rows, torch.arange(5))


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "mse", None])
def test_one_output_is_too_little_to_check_the_input_by(loss: str | None, digits: fp.data.ImageSet) -> None:
    """Of noise, too, the one row is a multiple of some input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(256, 1))
    batch = fp.Batch(digits.batch([0]).inputs, torch.ones(1, 1))
    scenario = fp.Scenario(model=model, clients=[batch], loss=loss or "mse")
    threat = fp.threats.honest_but_curious
    observation, _ = fp.simulate(scenario, threat if loss else threat.withholding("loss"), seed=0)
    rng = torch.Generator().manual_seed(1)
    noise = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in observation.round.update.items()}
    for update in (observation.round.update, noise):
        seen = dataclasses.replace(observation, rounds=(dataclasses.replace(observation.round, update=update),))
        assert fp.run(INVERT, seen).status == DenseStatus.UNCHECKABLE
