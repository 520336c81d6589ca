"""Images out of the spans of small convolutional networks; what is ambiguous, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks.certificate import rounding_error
from fedprism.attacks.span_inversion.attack import SpanInversionStatus

DIGITS = fp.data.load("digits")
ATTACK = fp.attacks.span_inversion(iterations=250, restarts=2)
LEAST_EXACT_DB = 40.0


def no_norm(width: int) -> nn.Module:
    return nn.Identity()


def groups(width: int) -> nn.Module:
    return nn.GroupNorm(4, width)


class Residual(nn.Module):
    """Two paths that are added, with a stride and a pool in front; the weight of one layer is used by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(1, 24, 3, padding=1), nn.Conv2d(24, 48, 3, stride=2, padding=1)
        self.aside, self.last = nn.Conv2d(24, 48, 1, stride=2), nn.Conv2d(48, 48, 3, padding="same")
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.avg_pool2d(torch.tanh(self.stem(images)), 2)
        both = torch.tanh(self.down(features)) + nn.functional.conv2d(features, self.aside.weight, stride=2)
        return self.head(torch.tanh(self.last(both)).flatten(2).mean(2))  # type: ignore[no-any-return]


def network(norm: Callable[[int], nn.Module] = no_norm, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3, 2, 1, bias=norm is no_norm), norm(24), activation()),
        *(nn.Conv2d(24, 48, 3, 2, 1, bias=norm is no_norm), norm(48), activation()),
        *(nn.Conv2d(48, 48, 3, 1, 1, bias=norm is no_norm), norm(48), activation()),
        *(nn.Flatten(), nn.Linear(4 * 48, 10)),
    )


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def observed(
    make: Callable[[], nn.Module] = network, numbers: tuple[int, ...] = (0,), **options: object
) -> tuple[fp.Observation, fp.Truth]:
    scenario = fp.Scenario(model=seeded(make), clients=[DIGITS.batch(list(numbers))], **options)  # type: ignore[arg-type]
    return fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")


def quality(answer: fp.Reconstruction, truth: fp.Truth) -> list[float]:
    return [value or 0.0 for value in fp.score(answer, truth, metrics=("psnr",)).values["psnr"]]


def assert_explained(observation: fp.Observation, answer: fp.Reconstruction) -> None:
    residual = fp.residual(observation, answer)
    assert residual is not None
    assert residual <= rounding_error(observation.round.update)


@pytest.mark.quality
@pytest.mark.parametrize(
    "make",
    [network, lambda: network(activation=nn.GELU), lambda: network(nn.BatchNorm2d, nn.SiLU), Residual],
    ids=["ReLU", "GELU", "batch norm and SiLU", "residual"],
)
def test_one_image_comes_out_exactly(make: Callable[[], nn.Module]) -> None:
    observation, truth = observed(make, training=False)
    answer = fp.run(ATTACK, observation)
    assert answer.status == SpanInversionStatus.EXACT
    assert min(quality(answer, truth)) > 100
    assert answer.labels is not None
    assert answer.labels.tolist() == truth.labels.tolist()
    assert_explained(observation, answer)


@pytest.mark.quality
@pytest.mark.parametrize("numbers", [(3, 4), (0, 10)], ids=["two classes", "one class"])
def test_a_batch_comes_out_image_by_image(numbers: tuple[int, ...]) -> None:
    observation, truth = observed(numbers=numbers)
    answer = fp.run(ATTACK, observation)
    assert answer.status == SpanInversionStatus.EXACT
    assert min(quality(answer, truth)) > 60
    assert_explained(observation, answer)


@pytest.mark.quality
def test_batch_norm_by_the_batch_is_guessed_with_it() -> None:
    observation, truth = observed(lambda: network(nn.BatchNorm2d), (1, 2))
    answer = fp.run(ATTACK, observation)
    assert answer.status in (SpanInversionStatus.EXACT, SpanInversionStatus.GAIN, SpanInversionStatus.AMBIGUOUS)
    assert min(quality(answer, truth)) > 30
    assert_explained(observation, answer)


def test_a_factor_that_group_norm_hides_is_not_called_exact() -> None:
    """With ever less in the divisor of group norm for its stability, the image's contrast leaves no trace."""

    def hiding() -> nn.Module:
        model = network(groups)
        for layer in model.modules():
            if isinstance(layer, nn.GroupNorm):
                layer.eps = 1e-12
        return model

    observation, _ = observed(hiding)
    answer = fp.run(ATTACK, observation)
    assert answer.status in (SpanInversionStatus.GAIN, SpanInversionStatus.AMBIGUOUS)
    assert_explained(observation, answer)


@pytest.mark.parametrize("factor", [1e-3, 70.0])
def test_any_factor_leaves_the_answer(factor: float) -> None:
    observation, truth = observed()
    update = {name: factor * tensor for name, tensor in observation.round.update.items()}
    answer = fp.run(ATTACK, replace(observation, rounds=(replace(observation.round, update=update),)))
    assert answer.status == SpanInversionStatus.EXACT
    assert min(quality(answer, truth)) > 100


def test_noise_in_place_of_an_update_is_refused() -> None:
    observation, _ = observed()
    rng = torch.Generator().manual_seed(1)
    noise = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in observation.round.update.items()}
    with pytest.raises(fp.NotApplicable, match="gradient-matching"):
        fp.run(ATTACK, replace(observation, rounds=(replace(observation.round, update=noise),)))


@pytest.mark.parametrize("change", ["weights", "activation"])
def test_the_update_of_another_model_is_not_called_exact(change: str) -> None:
    observation, truth = observed()
    if change == "weights":
        other = {name: tensor.flip(0).contiguous() for name, tensor in observation.round.params.items()}
        observation = replace(observation, rounds=(replace(observation.round, params=other),))
    else:
        observation = replace(observation, model=network(activation=nn.GELU))
    answer = fp.run(replace(ATTACK, restarts=1), observation)
    assert max(quality(answer, truth)) < LEAST_EXACT_DB
    assert answer.status in (SpanInversionStatus.CONTRADICTED, SpanInversionStatus.APPROXIMATE)


def test_noise_in_the_update_lowers_what_is_expected() -> None:
    observation, truth = observed(defense=fp.defenses.GaussianNoise(1e-4))
    answer = fp.run(ATTACK, observation)
    assert answer.status != SpanInversionStatus.EXACT
    (expected,) = answer.diagnostics["expected_error"]
    assert expected > 1e-4
    assert min(quality(answer, truth)) > 20


def test_an_update_of_more_images_than_are_known_is_not_called_exact() -> None:
    observation, _ = observed(numbers=(3, 4))
    fewer = replace(observation.knowledge, batch_size=1)
    try:
        answer = fp.run(replace(ATTACK, restarts=1), replace(observation, knowledge=fewer))
    except fp.NotApplicable:
        return
    assert not answer.status.startswith(SpanInversionStatus.EXACT)


def test_more_places_than_units_are_refused() -> None:
    observation, _ = observed(numbers=tuple(range(20)))
    with pytest.raises(fp.NotApplicable, match="fewer places"):
        fp.run(ATTACK, observation)


def test_layers_that_say_nothing_are_named() -> None:
    observation, _ = observed()
    answer = fp.run(replace(ATTACK, iterations=2, restarts=1), observation)
    layers = answer.diagnostics["layers"]
    assert layers["0.weight"].endswith("says nothing")
    assert layers["3.weight"] == "rank 4 of 48"
    assert answer.status == SpanInversionStatus.APPROXIMATE
