"""Patch inversion: what it must read exactly, what only in part, and what it must not claim."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import fedprism as fp
from fedprism.attacks.patch_inversion import EXACT
from fedprism.solvers import PatchStatus
from patch_models import small_vit

INVERT = fp.attacks.patch_inversion()


def attacked(
    model: nn.Module, batch: fp.Batch, threat: fp.ThreatModel = fp.threats.honest_but_curious, **options: object
) -> tuple[fp.Observation, fp.Reconstruction, fp.Scores]:
    observation, truth = fp.simulate(fp.Scenario(model=model, clients=[batch], **options), threat)  # type: ignore[arg-type]
    found = fp.run(INVERT, observation)
    return observation, found, fp.score(found, truth)


def worst(scores: fp.Scores) -> float:
    return min((-1.0 if value is None else value for value in scores.values["psnr"]), default=-1.0)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "softmax_mse"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"class_token": False},
        {"bias": False},
        {"positions": "patches"},
        {"positions": "image", "class_token": False},
        {"rearranged": True},
    ],
    ids=str,
)
def test_a_single_image_is_exact(
    settings: dict[str, object], loss: str, photos: fp.data.ImageSet, rng: torch.Generator
) -> None:
    observation, found, scores = attacked(small_vit(**settings), photos.draw(1, rng), loss=loss)
    assert worst(scores) > 60
    assert scores.labels_match
    assert found.status == EXACT
    residual = fp.residual(observation, found)
    assert residual is not None
    assert residual < 1e-4


def test_an_eavesdropper_reads_it_too(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    _, found, scores = attacked(small_vit(), photos.draw(1, rng), fp.threats.eavesdropper)
    assert worst(scores) > 60
    assert found.status == EXACT


@pytest.mark.quality
@pytest.mark.parametrize("seed", range(8))
def test_single_precision_is_enough(seed: int, photos: fp.data.ImageSet) -> None:
    model = small_vit(seed, patch=4, width=96, depth=4)
    _, found, scores = attacked(model, photos.draw(1, torch.Generator().manual_seed(seed)))
    assert worst(scores) > 60
    assert found.status == EXACT


@pytest.mark.parametrize("shape", [(1, 128), (1, 16, 16, 16)])
def test_sound_and_volumes(shape: tuple[int, ...]) -> None:
    signal = torch.rand(1, *shape, generator=torch.Generator().manual_seed(2))
    observation, truth = fp.simulate(
        fp.Scenario(model=small_vit(0, shape), clients=[fp.Batch(signal, torch.tensor([3]))]), fp.threats.eavesdropper
    )
    found = fp.run(INVERT, observation)
    assert found.inputs is not None
    assert (found.inputs - truth.inputs).abs().max() < 1e-2
    assert found.status == EXACT


def test_a_border_that_no_patch_holds_is_named() -> None:
    shape = (3, 18, 16)
    image = torch.rand(1, *shape, generator=torch.Generator().manual_seed(2))
    scenario = fp.Scenario(model=small_vit(0, shape, patch=4), clients=[fp.Batch(image, torch.tensor([3]))])
    found = fp.run(INVERT, fp.simulate(scenario, fp.threats.honest_but_curious)[0])
    assert found.inputs is not None
    assert (found.inputs[:, :, :16] - image[:, :, :16]).abs().max() < 1e-2
    assert torch.equal(found.inputs[:, :, 16:], torch.full((1, 3, 2, 16), 0.5))
    assert found.status == EXACT + "; 96 values are in no patch and stay unknown"


@pytest.mark.parametrize("factor", [1e-6, 1e-2, 2.0, 1e6])
@pytest.mark.parametrize("kind", ["gradient", "delta"])
def test_the_scale_of_an_update_plays_no_part(
    factor: float, kind: str, photos: fp.data.ImageSet, rng: torch.Generator
) -> None:
    observation, found, _ = attacked(small_vit(), photos.draw(1, rng))
    sign = 1 if kind == "gradient" else -1
    update = {name: sign * factor * tensor for name, tensor in observation.round.update.items()}
    round = dataclasses.replace(observation.round, update=update, kind=kind)  # type: ignore[arg-type]
    again = fp.run(INVERT, dataclasses.replace(observation, rounds=(round,)))
    assert found.inputs is not None
    assert again.inputs is not None
    assert (again.inputs - found.inputs).abs().max() < 1e-2
    assert again.status == found.status == EXACT


def test_clipping_hides_nothing(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    _, found, scores = attacked(small_vit(), photos.draw(1, rng), defense=fp.defenses.Clip(1e-3))
    assert worst(scores) > 60
    assert found.status == EXACT


def test_one_step_of_federated_averaging(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    """A delta is a difference of two models, whose rounding is all that is lost."""
    model, batch = small_vit(), photos.draw(1, rng)
    step = fp.FedAvg(lr=0.1, epochs=1, batch_size=1)
    _, found, scores = attacked(model, batch, protocol=step)
    assert worst(scores) > 30
    assert (found.status == EXACT) <= (worst(scores) > 55), "what rounding leaves open is not called exact"
    _, found, scores = attacked(model.double(), fp.Batch(batch.inputs.double(), batch.labels), protocol=step)
    assert worst(scores) > 100
    assert found.status == EXACT


def test_several_steps_on_one_sample_are_one_system(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    """Every step adds to both sides of it. Whoever does not know the steps can compute no certificate, and says so."""
    batch, steps = photos.draw(1, rng), fp.FedAvg(lr=0.5, epochs=3, batch_size=1)
    _, found, scores = attacked(small_vit().double(), fp.Batch(batch.inputs.double(), batch.labels), protocol=steps)
    assert worst(scores) > 60
    assert found.status == EXACT
    _, found, scores = attacked(small_vit(), batch, fp.threats.eavesdropper, protocol=steps)
    assert worst(scores) > 40
    assert found.status.startswith(PatchStatus.SOLVED)
    assert "stays unexplained" in found.status


def test_noise_is_answered_by_what_is_left_and_not_called_exact(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    defense = fp.chain(fp.defenses.Clip(1.0, always=True), fp.defenses.GaussianNoise(1e-6))
    _, found, scores = attacked(small_vit(), photos.draw(1, rng), defense=defense)
    assert EXACT not in found.status
    assert "unexplained" in found.status
    assert worst(scores) > 15


def test_noise_instead_of_an_update_gives_nothing(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    observation, _, _ = attacked(small_vit(), photos.draw(1, rng))
    update = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in observation.round.update.items()}
    round = dataclasses.replace(observation.round, update=update)
    found = fp.run(INVERT, dataclasses.replace(observation, rounds=(round,)))
    assert found.inputs is not None
    assert len(found.inputs) == 0
    assert found.status == PatchStatus.UNRELATED


def test_an_output_layer_of_zeros_is_named(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    model = small_vit()
    nn.init.zeros_(model.head.weight)
    _, found, _ = attacked(model, photos.draw(1, rng))
    assert found.inputs is not None
    assert len(found.inputs) == 0
    assert found.status.startswith("'head.weight' is zero")


def test_dropout_is_read_but_not_certified(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    """The masks are in both gradients of the patch layer, and nobody can compute the rest of the update again."""
    _, found, scores = attacked(small_vit(dropout=0.1), photos.draw(1, rng))
    assert worst(scores) > 60
    assert found.status.startswith(PatchStatus.SOLVED)
    assert EXACT not in found.status


def test_a_batch_is_refused(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    with pytest.raises(fp.NotApplicable, match="update of one sample, not of 4"):
        attacked(small_vit(), photos.draw(4, rng))


def test_a_batch_of_unknown_size_is_not_called_exact(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    _, found, scores = attacked(small_vit(), photos.draw(4, rng), fp.threats.eavesdropper)
    assert EXACT not in found.status
    assert worst(scores) < 30


class Mixer(nn.Module):
    """The stem of ConvNeXt and MLP-Mixer: patches and a norm, and no parameter of the places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 48, 8, stride=8), nn.LayerNorm(48)
        self.across, self.head = nn.Linear(16, 16), nn.Linear(48, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(self.stem(images).flatten(2).transpose(1, 2))
        outputs: torch.Tensor = self.head((tokens + self.across(tokens.transpose(1, 2)).transpose(1, 2)).mean(1))
        return outputs


def test_stems_without_positions_are_refused_with_what_is_missing(
    photos: fp.data.ImageSet, rng: torch.Generator
) -> None:
    with pytest.raises(fp.NotApplicable, match=r"'stem.weight', .* no parameter is added .* no attention"):
        attacked(Mixer(), photos.draw(1, rng))


def without(observation: fp.Observation, *names: str) -> fp.Observation:
    """The observation with these parameters' entries left out of the update, as if they were frozen."""
    update = {name: tensor for name, tensor in observation.round.update.items() if name not in names}
    return dataclasses.replace(observation, rounds=(dataclasses.replace(observation.round, update=update),))


def test_frozen_positions_without_attention_are_named(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    observation, _, _ = attacked(small_vit(), photos.draw(1, rng))
    attention = [name for name in observation.round.update if "in_proj" in name]
    with pytest.raises(fp.NotApplicable, match="'position' is not sent"):
        fp.run(INVERT, without(observation, "position", *attention))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_frozen_positions_are_read_by_the_first_attention(seed: int, trained: bool, photos: fp.data.ImageSet) -> None:
    model = small_vit(seed, width=96)
    if trained:
        rescale_norms(model)
    batch = photos.draw(1, torch.Generator().manual_seed(seed))
    observation, truth = fp.simulate(fp.Scenario(model=model, clients=[batch]), fp.threats.honest_but_curious)
    found = fp.run(INVERT, without(observation, "position"))
    assert worst(fp.score(found, truth)) > 60
    assert found.status == EXACT


@pytest.mark.parametrize("class_token", [True, False])
def test_fixed_positions_are_read_by_the_first_attention(
    class_token: bool, photos: fp.data.ImageSet, rng: torch.Generator
) -> None:
    batch = photos.draw(1, rng)
    model = small_vit(positions="sines", width=96, class_token=class_token).double()
    _, found, scores = attacked(model, fp.Batch(batch.inputs.double(), batch.labels))
    assert worst(scores) > 100
    assert found.status == EXACT


def in_a_row() -> nn.Module:
    """A small network whose frozen positions are on a line: sums of patches in which they cancel out have none."""
    model = small_vit(input_shape=(3, 16, 16), patch=8, positions="patches", width=48)
    rng = torch.Generator().manual_seed(5)
    first, step = torch.randn(2, 48, generator=rng)
    with torch.no_grad():
        model.position.copy_(first + torch.arange(4).unsqueeze(1) * step)
    return model


def test_what_the_first_attention_leaves_open_the_rest_of_the_update_tells(
    photos: fp.data.ImageSet, rng: torch.Generator
) -> None:
    batch = fp.Batch(photos.draw(1, rng).inputs[:, :, 8:24, 8:24], torch.tensor([3]))
    observation, truth = fp.simulate(fp.Scenario(model=in_a_row(), clients=[batch]), fp.threats.honest_but_curious)
    observation = without(observation, "position")
    closed = fp.run(fp.attacks.patch_inversion(most_open=0), observation)
    assert worst(fp.score(closed, truth)) < 30
    assert EXACT not in closed.status
    refined = fp.run(INVERT, observation)
    assert worst(fp.score(refined, truth)) > 60
    assert refined.status == EXACT
    assert refined.diagnostics["refined_numbers"] == 16


def test_tokens_in_no_order_are_not_called_exact(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    batch = photos.draw(1, rng)
    _, found, scores = attacked(
        small_vit(positions="none", width=96).double(), fp.Batch(batch.inputs.double(), batch.labels)
    )
    assert found.status.startswith(PatchStatus.UNDETERMINED)
    assert worst(scores) < 40


def test_an_attention_too_narrow_for_the_patches_gives_nothing(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    observation, _, _ = attacked(small_vit(width=24), photos.draw(1, rng))
    found = fp.run(INVERT, without(observation, "position"))
    assert found.inputs is not None
    assert len(found.inputs) == 0
    assert found.status == PatchStatus.CROWDED


def rescale_norms(model: nn.Module) -> None:
    """Scales and shifts of the norms as training leaves them: none is one or zero."""
    rng = torch.Generator().manual_seed(4)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            with torch.no_grad():
                module.weight.copy_(1 + 0.2 * torch.randn(module.weight.shape, generator=rng))
                module.bias.copy_(0.2 * torch.randn(module.bias.shape, generator=rng))


def test_networks_without_patches_are_refused(photos: fp.data.ImageSet, rng: torch.Generator) -> None:
    with pytest.raises(fp.NotApplicable, match="cuts the input into patches"):
        attacked(fp.models.build("lenet", input_shape=(3, 32, 32), classes=10, seed=0), photos.draw(1, rng))
