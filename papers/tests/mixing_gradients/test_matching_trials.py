"""Gradient matching of many trials at once: planted batches come back, each trial as it would alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fedprism as fp
from fedprism.attacks import (
    LBFGS,
    Adam,
    BatchNorm,
    GradientMatching,
    Labels,
    Pull,
    Starts,
    cosine,
    joined,
    squared_error,
    uniform_start,
)
from fedprism.runtime import memory
from fedprism.runtime.cuda_graphs import Engine
from fedprism.solvers import MatchingSettings, TotalVariation, match_gradients
from fedprism_papers.mixing_gradients.convolutions import AsProducts
from fedprism_papers.mixing_gradients.matching_trials import TrialStatus, match_trials
from fedprism_papers.mixing_gradients.side_by_side import SideBySide

TRIALS, BATCH, CLASSES, PIXELS = 4, 2, 5, 16
ONE_STEP = LBFGS(inner=1, history=20)


def planted(trials: int = TRIALS) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (trials, classes, pixels), private images (trials, batch, 1, 4, 4) and their labels."""
    rng = torch.Generator().manual_seed(0)
    weights = torch.rand(trials, CLASSES, PIXELS, generator=rng, dtype=torch.float64) - 0.5
    images = torch.rand(trials, BATCH, 1, 4, 4, generator=rng, dtype=torch.float64)
    return weights, images, torch.stack([torch.randperm(CLASSES, generator=rng)[:BATCH] for _ in range(trials)])


def dense_gradient(weights: Tensor, images: Tensor, labels: Tensor) -> list[Tensor]:
    """Of cross-entropy, in closed form: (trials, classes, pixels) and (trials, classes)."""
    flat = images.flatten(2)
    outputs = flat @ weights.transpose(1, 2)
    targets = labels if labels.is_floating_point() else torch.nn.functional.one_hot(labels, CLASSES).to(outputs)
    signals = (torch.softmax(outputs, dim=2) - targets) / flat.shape[1]
    return [signals.transpose(1, 2) @ flat, signals.sum(1)]


def noise(trials: int = TRIALS) -> Tensor:
    return torch.rand(trials, BATCH, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("distance", [squared_error, cosine])
def test_every_trial_goes_as_it_goes_alone(distance: object) -> None:
    """Against `match_gradients`, whose optimiser is torch.optim.LBFGS in one call, one trial at a time."""
    weights, images, labels = planted()
    target = dense_gradient(weights, images, labels)
    box = (torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
    options: dict[str, Any] = {"distance": distance, "priors": (TotalVariation(1e-3),), "lr": 0.05, "box": box}
    together = match_trials(
        lambda x, _: dense_gradient(weights, x, labels),
        target,
        noise(),
        MatchingSettings(optimizer=ONE_STEP, iterations=12, **options),
    )
    single = dataclasses.replace(ONE_STEP, inner=12)
    for number in range(TRIALS):
        own = slice(number, number + 1)

        def gradients(x: Tensor, _: Tensor | None, own: slice = own) -> list[Tensor]:
            return [g[0] for g in dense_gradient(weights[own], x.unsqueeze(0), labels[own])]

        alone = match_gradients(
            gradients,
            [t[number] for t in target],
            noise()[number],
            MatchingSettings(optimizer=single, iterations=1, **options),
        )
        # The last of the points is not looked at by torch.optim.LBFGS; here it is.
        assert float(together.objectives[number]) <= alone.objective + 1e-9


def test_planted_batches_come_back() -> None:
    weights, images, labels = planted()
    found = match_trials(
        lambda x, _: dense_gradient(weights, x, labels),
        dense_gradient(weights, images, labels),
        noise(),
        MatchingSettings(distance=squared_error, optimizer=ONE_STEP, lr=0.5, iterations=400, tolerance=1e-12),
    )
    assert set(found.statuses) == {TrialStatus.REACHED}
    assert found.steps < 400
    torch.testing.assert_close(found.inputs, images, rtol=0, atol=1e-3)


def test_labels_are_found_with_the_images() -> None:
    weights, images, labels = planted()

    def gradients(x: Tensor, logits: Tensor | None) -> list[Tensor]:
        assert logits is not None
        return dense_gradient(weights, x, torch.softmax(logits, dim=-1))

    start = torch.randn(TRIALS, BATCH, CLASSES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = match_trials(
        gradients,
        dense_gradient(weights, images, labels),
        noise(),
        MatchingSettings(distance=squared_error, optimizer=ONE_STEP, lr=0.3, iterations=500),
        label_start=start,
    )
    assert found.label_logits is not None
    assert float(found.objectives.max()) < 1e-3
    guessed = found.label_logits.argmax(-1).sort(1).values
    assert float((guessed == labels.sort(1).values).double().mean()) > 0.7


def test_what_fails_fails_alone() -> None:
    """One target is NaN from the start: its trial returns its start and says so, the others what they always return."""
    weights, images, labels = planted()
    target = dense_gradient(weights, images, labels)
    clean, spoilt = (
        match_trials(
            lambda x, _: dense_gradient(weights, x, labels),
            [target[0] * factor, target[1]],
            noise(),
            MatchingSettings(optimizer=ONE_STEP, lr=0.05, iterations=20),
        )
        for factor in (torch.ones(TRIALS, 1, 1), torch.tensor([1, torch.nan, 1, 1]).view(-1, 1, 1))
    )
    assert [status is TrialStatus.DIVERGED for status in spoilt.statuses] == [False, True, False, False]
    assert float(spoilt.objectives[1]) == float("inf")
    torch.testing.assert_close(spoilt.inputs[1], noise()[1], rtol=0, atol=0)
    others = [0, 2, 3]
    torch.testing.assert_close(spoilt.inputs[others], clean.inputs[others], rtol=0, atol=0)


@pytest.mark.parametrize(("stride", "padding", "biased"), [(1, 0, True), (2, 2, True), ((2, 1), (0, 1), False)])
def test_products_of_windows_are_convolutions(stride: int, padding: int, biased: bool) -> None:
    """Value, gradient and the gradient of a gradient's norm, with weights of its own for every trial."""
    rng = torch.Generator().manual_seed(0)
    layer = torch.nn.Conv2d(2, 3, (3, 2), stride=stride, padding=padding, bias=biased).double()
    weights = {n: torch.randn(4, *p.shape, generator=rng, dtype=p.dtype) for n, p in layer.named_parameters()}
    inputs = torch.randn(4, 2, 2, 7, 6, generator=rng, dtype=torch.float64)

    def measured() -> list[Tensor]:
        images = inputs.clone().requires_grad_()
        own = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        outputs = torch.func.vmap(lambda p, x: torch.func.functional_call(layer, p, (x,)))(own, images)
        grads = torch.autograd.grad(outputs.pow(3).sum(), list(own.values()), create_graph=True)
        norm = torch.stack([g.square().sum() for g in grads]).sum()
        return [outputs.detach(), *(g.detach() for g in grads), *torch.autograd.grad(norm, images)]

    expected = measured()
    with AsProducts():
        found = measured()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_other_convolutions_are_left_alone() -> None:
    images = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    layers = [
        torch.nn.Conv2d(4, 4, 3, groups=2),
        torch.nn.Conv2d(4, 4, 3, dilation=2),
        torch.nn.Conv2d(4, 4, 3, padding="same"),
    ]
    for layer in layers:
        with AsProducts():
            found = layer(images)
        torch.testing.assert_close(found, layer(images), rtol=0, atol=0)


# --- as an attack ----------------------------------------------------------------------------------------------------


def observed(digits: fp.data.ImageSet, count: int = 3, size: int = 1, **scenario: object) -> list[fp.Observation]:
    seen = []
    for number in range(count):
        model = fp.models.build("lenet", input_shape=digits.images.shape[1:], classes=10, width=4, seed=number)
        with torch.no_grad():
            rng = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=rng) - 0.5)
        batch = digits.batch(range(number * size, (number + 1) * size))
        made = fp.Scenario(model=model, clients=[batch], **scenario)  # type: ignore[arg-type]
        seen.append(fp.simulate(made, fp.threats.honest_but_curious, seed=number)[0])
    return seen


ATTACK = GradientMatching(
    distance=squared_error, labels=Labels.INFERRED, optimizer=LBFGS(inner=1), start=uniform_start, lr=0.5, iterations=60
)


@pytest.mark.quality
def test_images_of_several_clients_come_back(digits: fp.data.ImageSet) -> None:
    seen = observed(digits)
    found = fp.run(SideBySide(attack=dataclasses.replace(ATTACK, iterations=240)), joined(seen), seed=0)
    truth = digits.batch(range(3))
    assert found.inputs is not None
    assert found.labels is not None
    assert found.labels.tolist() == truth.labels.tolist()
    assert float(fp.metrics.psnr(found.inputs.clamp(0, 1), truth.inputs).min()) > 20  # 29 to 68 dB in 14 runs
    assert found.diagnostics["starts"].shape == truth.inputs.shape


def test_fewer_trials_stand_side_by_side_where_memory_is_short(digits: fp.data.ImageSet) -> None:
    seen, attack = joined(observed(digits)), SideBySide(attack=dataclasses.replace(ATTACK, iterations=4))
    whole = fp.run(attack, seen, seed=0, device="cpu").inputs
    with memory.limited_to(0.4) as share:
        parts = fp.run(attack, seen, seed=0, device="cpu").inputs
    assert not share.divisible, "one trial at a time is the least"
    assert whole is not None
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-3)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Split(fp.attacks.Reduction):
    def reduce(self, observation: fp.Observation) -> tuple[fp.Observation, ...]:
        return fp.attacks.split_updates(observation)


def test_after_a_reduction_all_parts_are_attacked_at_once(digits: fp.data.ImageSet) -> None:
    seen = joined(observed(digits))
    both = fp.then(Split(), SideBySide(attack=dataclasses.replace(ATTACK, iterations=3)))
    found = fp.run(both, seen, seed=0)
    assert found.inputs is not None
    assert len(found.inputs) == 3
    assert eval(repr(both), vars(fp.attacks) | {"Split": Split, "SideBySide": SideBySide}) == both


@pytest.mark.parametrize(
    ("scenario", "attack"),
    [
        ({"protocol": fp.FedAvg(lr=0.1, epochs=2)}, ATTACK),
        ({}, dataclasses.replace(ATTACK, batchnorm=BatchNorm(pull=Pull.RUNNING))),
        ({}, dataclasses.replace(ATTACK, starts=Starts(restarts=2))),
        ({}, dataclasses.replace(ATTACK, optimizer=Adam())),
    ],
    ids=["local steps", "statistics", "restarts", "Adam"],
)
def test_what_does_not_fit_into_one_program_is_refused(
    digits: fp.data.ImageSet, scenario: dict[str, object], attack: GradientMatching
) -> None:
    seen = observed(digits, **scenario)
    with pytest.raises((fp.NotApplicable, fp.MissingKnowledge)):
        fp.run(SideBySide(attack=attack), joined(seen), seed=0)


def test_batches_of_several_sizes_are_refused(digits: fp.data.ImageSet) -> None:
    seen = [*observed(digits, count=1), *observed(digits, count=1, size=2)]
    with pytest.raises(fp.NotApplicable, match="one size"):
        fp.run(SideBySide(attack=ATTACK), joined(seen), seed=0)


def test_steps_are_plain_where_there_is_no_gpu() -> None:
    weights, images, labels = planted(1)
    found = match_trials(
        lambda x, _: dense_gradient(weights, x, labels),
        dense_gradient(weights, images, labels),
        noise(1),
        MatchingSettings(optimizer=ONE_STEP, iterations=1, engine=Engine(graph=False)),
    )
    assert found.stepping.startswith("step by step")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_graph_on_a_gpu_does_what_the_processor_does(digits: fp.data.ImageSet) -> None:
    """Convolutions as products and steps as graphs; short, because rounding grows along the way."""
    attack = SideBySide(attack=dataclasses.replace(ATTACK, lr=0.05, iterations=8))
    seen = joined(observed(digits))
    there, here = (fp.run(attack, seen, seed=0, device=device) for device in ("cuda", "cpu"))
    assert there.diagnostics["stepping"] == "every iteration is one CUDA graph"
    assert there.inputs is not None
    assert here.inputs is not None
    torch.testing.assert_close(there.inputs.cpu(), here.inputs, rtol=1e-2, atol=1e-2)
