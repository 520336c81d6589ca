"""What the recipes of MKOR share: how they count, compare and add noise."""

from __future__ import annotations

import pytest
import torch

import fedprism as fp
from fedprism.attacks import Mkor, mkor
from fedprism_papers.mkor import malicious_server as recipe
from fedprism_papers.mkor import table_2, vgg16
from fedprism_papers.mkor.malicious_server import noised
from fedprism_papers.shared.base import Measured, Settings
from fedprism_papers.shared.cells import attack_cell


def test_answers_are_compared_within_their_class_only() -> None:
    black, white = torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4)
    truth = fp.Truth(inputs=torch.cat([white, black, white]), labels=torch.tensor([0, 1, 1]), owners=("client-0",) * 3)
    found = fp.Reconstruction(
        inputs=torch.cat([black, white]), labels=torch.tensor([0, 1]), ambiguity=frozenset({"order"})
    )
    ours, theirs, rows = recipe.by_class(found, truth)
    assert rows == [0, 2]
    assert torch.equal(ours, torch.cat([black, white]))
    assert torch.equal(theirs, torch.cat([white, white]))


def test_noise_is_relative_to_each_tensor(rng: torch.Generator) -> None:
    update = {"small": torch.randn(10_000, generator=rng), "large": 100 * torch.randn(10_000, generator=rng)}
    seen = fp.Observation(model=None, rounds=(fp.Round(params=update, update=update),))
    after = noised(seen, 0.1, rng).rounds[0].update
    for name, tensor in update.items():
        assert float((after[name] - tensor).std() / tensor.std()) == pytest.approx(0.1, rel=0.05)


@pytest.mark.quality
def test_the_papers_modified_network_gives_every_image_away() -> None:
    """But that of the dump class, which six classes of eight may hold."""
    settings = Settings(quick=True)
    victim = recipe.poolless(recipe.small_chain(settings), settings)
    cell = recipe.ChosenParameters(victim=victim, size=6, batches=1)
    lost = {recipe.DUMP: int((cell.batch(0, settings).labels == victim.images.classes - 1).sum()), recipe.EQUAL: 0}
    for name, outcome in attack_cell(cell, recipe.only_midpoint(), settings, print, "").entries.items():
        assert isinstance(outcome, Measured)
        assert outcome.values[recipe.ANSWERED] == pytest.approx(((6 - lost[name]) / 6,))
        assert outcome.values[recipe.PSNR][0] > 100  # 149 dB and more


@pytest.mark.quality
def test_without_hidden_layers_noise_hides_images_behind_the_dump_class_but_not_behind_equal_logits() -> None:
    """The dump class's row is the sum of all images, to which the noise is relative."""
    settings = Settings(quick=True)
    victim = recipe.poolless(recipe.small_chain(settings), settings)
    cell = recipe.ChosenParameters(victim=victim, size=6, batches=1, noise=0.1)
    entries = attack_cell(cell, recipe.only_midpoint(), settings, print, "").entries
    values = {name: entry.values for name, entry in entries.items() if isinstance(entry, Measured)}
    assert values[recipe.EQUAL][recipe.ANSWERED] == (1.0,)
    assert values[recipe.EQUAL][recipe.PSNR][0] > 25
    assert values[recipe.DUMP][recipe.PSNR][0] < values[recipe.EQUAL][recipe.PSNR][0] - 5


def test_every_table_has_its_column_of_modified_networks() -> None:
    """Named for what they are."""
    assert "strides" in table_2.STRIDES
    assert table_2.PAPER.keys() == {table_2.ORIGINAL, table_2.STRIDES}
    assert vgg16.PAPER_POOLLESS["MKOR"].endswith("156.7 dB")
    assert set(recipe.gradient_matching(1)) < set(vgg16.PAPER)
    assert [line.poolless for line in vgg16.LINES] == 4 * [False] + 4 * [True]


def test_labels_reach_only_the_attack_that_is_given_them() -> None:
    """With inferred labels, which are wrong for many of a hundred digits, images end below a black one."""
    settings = Settings(quick=True, iterations=3)
    victim = table_2.lenets(settings)[table_2.ORIGINAL]
    cell = recipe.ChosenParameters(victim=victim, size=12, batches=1, unique=False)
    methods = table_2.methods(settings)
    seen, truth = cell.observe(methods["inverting gradients"], 0, settings)
    found = fp.run(methods["inverting gradients"], seen, seed=0)
    assert found.labels is not None
    assert torch.equal(found.labels.sort().values, truth.labels.sort().values)
    for name, attack in methods.items():
        assert ("labels" in attack.needs | attack.uses) == (name == "inverting gradients")


@pytest.mark.quality
def test_a_server_may_hide_its_parameters_under_noise(rng: torch.Generator) -> None:
    settings = Settings(quick=True)
    victim = recipe.small_chain(settings)
    state = dict(victim.model.state_dict())
    plain, trapdoor = mkor().tamper(victim.model, state, rng)
    noisy, same = Mkor(parameter_noise=0.01).tamper(victim.model, state, rng)
    assert trapdoor.keys() == same.keys()
    added = noisy["12.weight"] - plain["12.weight"]
    assert float(added.std()) == pytest.approx(0.01 / (128 * 64) ** 0.5, rel=0.02)
    cell = recipe.ChosenParameters(victim=victim, size=6, batches=1)
    seen = [cell.observe(Mkor(parameter_noise=noise), 0, settings) for noise in (0.0, 0.01)]
    scores = [fp.score(fp.run(mkor(), answer), truth, metrics=("psnr",)).mean("psnr") for answer, truth in seen]
    assert scores[0] - 1 < scores[1] < scores[0]
