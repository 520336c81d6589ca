"""Less at a time where memory is short: the same answers, and only where a batch really is the sum of its parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import GradientMatching, Labels, TotalVariation
from fedprism.client import cohort, update
from fedprism.client.batch_parts import is_mean_over_samples
from fedprism.client.update import batch_gradient, example_gradients
from fedprism.runtime import memory
from fedprism.solvers import FeatureInversion, invert_features, squared_error
from fedprism.types import Batch

CLASSES = 4


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    head = (nn.Flatten(), nn.Linear(4 * 6 * 6, CLASSES))
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *layers, nn.Sigmoid(), *head).double()


def some(size: int) -> Batch:
    rng = torch.Generator().manual_seed(1)
    inputs = torch.rand(size, 1, 6, 6, generator=rng, dtype=torch.float64)
    return Batch(inputs, torch.randint(CLASSES, (size,), generator=rng))


def observed(model: nn.Module, size: int = 5, **changes: object) -> fp.Observation:
    scenario = fp.Scenario(**{"model": model, "clients": [some(size)], **changes})  # type: ignore[arg-type]
    return fp.simulate(scenario, fp.threats.honest_but_curious.granting("labels"), seed=0, device="cpu")[0]


# --- the share -------------------------------------------------------------------------------------------------------


def test_a_share_is_taken_inside_its_block_alone() -> None:
    assert memory.together(10) == 10
    assert not memory.is_limited()
    with memory.limited_to(0.25) as share:
        assert memory.is_limited()
        assert not share.divisible
        assert memory.together(10) == 2
        assert share.divisible
        assert memory.together(1) == 1
    assert memory.together(10) == 10
    with memory.limited_to(0.01) as share:
        assert memory.together(10) == 1, "there is always one"
    assert not share.divisible, "one cannot be halved"


@pytest.mark.parametrize("part", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_is_a_share(part: float) -> None:
    with pytest.raises(ValueError, match="share of memory"), memory.limited_to(part):
        pass


# --- who may be split ------------------------------------------------------------------------------------------------


def mean_of(model: nn.Module, loss: nn.Module) -> bool:
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def gradient(batch: Batch) -> list[Tensor]:
        copies = {name: tensor.clone() for name, tensor in buffers.items()}
        return list(batch_gradient(model, params, copies, batch, loss).values())

    state = torch.random.get_rng_state()
    answer = is_mean_over_samples(gradient, some(4))
    assert torch.equal(torch.random.get_rng_state(), state), "asking leaves no trace"
    return answer


def test_only_a_mean_over_samples_is_split() -> None:
    mean, total = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")
    assert mean_of(network(), mean)
    assert not mean_of(network(), total)
    assert not mean_of(network(nn.BatchNorm2d(4)), mean)
    assert mean_of(network(nn.BatchNorm2d(4)).eval(), mean)
    assert not mean_of(network(nn.Dropout(0.5)), mean)
    assert mean_of(network(nn.Dropout(0.5)).eval(), mean)


# --- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [Labels.KNOWN, Labels.JOINT])
@pytest.mark.parametrize("part", [0.5, 0.01])
def test_gradient_matching_takes_the_same_way_in_parts(labels: Labels, part: float) -> None:
    attack = GradientMatching(
        iterations=25, labels=labels, distance=squared_error, lr=0.02, priors=(TotalVariation(weight=1e-4),)
    )
    observation = observed(network())
    whole = fp.run(attack, observation, seed=0, device="cpu")
    with memory.limited_to(part) as share:
        found = fp.run(attack, observation, seed=0, device="cpu")
    assert share.divisible == (part == 0.5)
    assert whole.inputs is not None
    assert found.inputs is not None
    assert whole.diagnostics["iterations_run"] == 25
    assert not torch.equal(found.inputs, torch.zeros_like(found.inputs))
    torch.testing.assert_close(found.inputs, whole.inputs, rtol=1e-8, atol=1e-10)
    assert found.diagnostics["objective"] == pytest.approx(whole.diagnostics["objective"], rel=1e-9)
    assert (
        found.diagnostics["objective"]
        < 0.9
        * fp.run(dataclasses.replace(attack, iterations=1), observation, seed=0, device="cpu").diagnostics["objective"]
    ), "it went somewhere"


def asked_at_a_time(observation: fp.Observation, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most samples that the attacker's forward model sees at once."""
    seen: list[int] = []
    model = observation.model
    assert model is not None
    forward = type(model).forward

    def watched(self: nn.Module, inputs: Tensor) -> Tensor:
        seen.append(len(inputs))
        return forward(self, inputs)

    monkeypatch.setattr(type(model), "forward", watched)
    fp.run(GradientMatching(iterations=2, labels=Labels.KNOWN), observation, seed=0, device="cpu")
    return max(seen[2:])  # after the label inference and the layers have been looked at


def test_batches_that_see_each_other_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    normalised = observed(network(nn.BatchNorm2d(4)))
    pruned = observed(network(), defense=fp.defenses.Clip(1e-3))
    pruned = dataclasses.replace(
        pruned, knowledge=dataclasses.replace(pruned.knowledge, defense=fp.defenses.Clip(1e-3))
    )
    for observation in (normalised, pruned):
        with monkeypatch.context() as patched, memory.limited_to(0.2) as share:
            assert asked_at_a_time(observation, patched) == 5
        assert not share.divisible, "nothing is gained by halving once more"


@pytest.mark.parametrize(("layer", "largest"), [(nn.Identity(), 3), (nn.BatchNorm2d(4), 7)])
def test_a_large_batch_is_trained_on_in_parts_that_fit(
    layer: nn.Module, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, sizes = network(layer), some(7), list[int]()
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    whole = batch_gradient(model, params, buffers, batch, fp.losses.resolve("cross_entropy"))
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    # Of a sample autograd keeps what the sigmoid made of its 36 pixels and, with batch norm, more.
    monkeypatch.setattr(update, "LARGE_BATCH", 7 * 36)
    monkeypatch.setattr(update, "BYTES_TOGETHER", 8 * int(3.5 * 4 * 36))
    parts = batch_gradient(model, params, buffers, batch, fp.losses.resolve("cross_entropy"))
    assert max(sizes) == largest, "samples that see each other stay together"
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-8, atol=1e-12)


def test_what_clients_send_is_the_same_in_parts() -> None:
    for model in (network(), network(nn.BatchNorm2d(4))):
        whole = observed(model).rounds[0].update
        with memory.limited_to(0.4):
            parts = observed(model).rounds[0].update
        for name, tensor in whole.items():
            torch.testing.assert_close(parts[name], tensor, rtol=1e-9, atol=1e-12)
    params = dict(network().named_parameters())
    each = example_gradients(network(), params, {}, some(5), nn.CrossEntropyLoss())
    with memory.limited_to(0.4):
        chunked = example_gradients(network(), params, {}, some(5), nn.CrossEntropyLoss())
    for name, tensor in each.items():
        torch.testing.assert_close(chunked[name], tensor, rtol=1e-12, atol=1e-14)


def test_images_are_found_by_themselves_however_many_at_a_time() -> None:
    weight = torch.randn(12, 36, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = some(5).inputs
    target = (start.flatten(1) ** 2) @ weight.T
    sizes: list[int] = []

    def features_of(images: Tensor) -> Tensor:
        sizes.append(len(images))
        return images.flatten(1) @ weight.T

    settings = FeatureInversion(iterations=10)
    whole = invert_features(features_of, target, start, settings=settings)
    assert max(sizes) == 5
    sizes.clear()
    with memory.limited_to(0.5):
        parts = invert_features(features_of, target, start, settings=settings)
    assert max(sizes) == 2
    torch.testing.assert_close(parts.inputs, whole.inputs, rtol=1e-10, atol=1e-12)


def test_fewer_clients_train_at_once() -> None:
    model = network()
    params = dict(model.named_parameters())
    held = dict(model.named_buffers())
    training = cohort._Training(model, params, held, nn.CrossEntropyLoss(), fp.FedSGD())
    usual = training.fitting(some(2))
    with memory.limited_to(0.5):
        assert training.fitting(some(2)) == usual // 2
