"""Batch-norm statistics: what the simulator hands out, what an attacker does with them, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import (
    LBFGS,
    BatchNorm,
    GradientMatching,
    Labels,
    Normalise,
    Pull,
    Starts,
    bn_exact,
    bn_infer,
    bn_proxy,
)
from fedprism.attacks.gradient_matching.batchnorm import normalised_model, pull_prior
from fedprism.attacks.gradient_matching.forward import Forward, forward_model
from fedprism.client.batchnorm import exact_statistics
from fedprism.defenses import Context, Defense
from fedprism.runtime.moments import Moments, channel_moments
from fedprism.solvers import BatchMoments
from fedprism.types import Knowledge, Update, detached

KNOWING = fp.threats.honest_but_curious.granting("labels", "batchnorm_exact", "batchnorm_running")
EXACT_TWICE = dataclasses.replace(bn_exact(), batchnorm=BatchNorm(normalise="exact", pull=Pull.EXACT))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def small() -> fp.data.ImageSet:
    return fp.data.load("photos", size=16)


def network(
    *, channels: int = 8, activation: Callable[[], nn.Module] = nn.ReLU, seed: int = 0, **settings: Any
) -> nn.Sequential:
    """Two convolutions without bias, each followed by batch norm, and a dense layer; for 3 x 16 x 16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels, **settings),
            activation(),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels, **settings),
            activation(),
            nn.Flatten(),
            nn.Linear(channels * 64, 10),
        )


def accustomed(model: nn.Sequential, photos: fp.data.ImageSet) -> nn.Sequential:
    """The model after it has seen other photographs: its running statistics are those of photographs."""
    others = photos.draw(32, torch.Generator().manual_seed(100)).inputs
    with torch.no_grad():
        for _ in range(10):
            for part in others.split(8):
                model.train()(part)
    return model


def batch_of(photos: fp.data.ImageSet, size: int = 2, seed: int = 0) -> fp.Batch:
    return photos.draw(size, torch.Generator().manual_seed(seed), unique_labels=True)


def observed(model: nn.Module, *batches: fp.Batch, **settings: Any) -> tuple[fp.Observation, fp.truth.Truth]:
    return fp.simulate(fp.Scenario(model=model, clients=batches, **settings), KNOWING)


def by_hand(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, channel by channel."""
    values = [features[:, channel].reshape(-1) for channel in range(features.shape[1])]
    means = [v.sum() / len(v) for v in values]
    return torch.stack(means), torch.stack([((v - m) ** 2).sum() / len(v) for v, m in zip(values, means, strict=True)])


class TestSimulator:
    def test_exact_statistics_are_those_of_the_private_batch(self, small: fp.data.ImageSet) -> None:
        model, batch = accustomed(network(), small).double(), batch_of(small, 3)
        batch = fp.Batch(batch.inputs.double(), batch.labels)
        given = observed(model, batch)[0].knowledge.batchnorm_exact
        assert given is not None
        assert set(given) == {"1.mean", "1.var", "4.mean", "4.var"}
        features = F.conv2d(batch.inputs, model[0].weight, padding=1).detach()
        mean, var = by_hand(features)
        torch.testing.assert_close((given["1.mean"], given["1.var"]), (mean, var))
        shaped = [t.view(1, -1, 1, 1) for t in (mean, var)]
        features = F.relu((features - shaped[0]) / (shaped[1] + 1e-5).sqrt())
        mean, var = by_hand(F.conv2d(features, model[3].weight, stride=2, padding=1).detach())
        torch.testing.assert_close((given["4.mean"], given["4.var"]), (mean, var))

    def test_exact_statistics_are_of_the_samples_drawn(self, small: fp.data.ImageSet) -> None:
        batch = batch_of(small, 4)
        observation, truth = observed(network(), batch, fraction=0.5)
        given = observation.knowledge.batchnorm_exact
        assert given is not None
        assert len(truth.inputs) == 2
        mean, _ = by_hand(F.conv2d(truth.inputs, network()[0].weight, padding=1).detach())
        torch.testing.assert_close(given["1.mean"], mean)

    def test_a_client_in_evaluation_mode_normalises_by_its_buffers(self, small: fp.data.ImageSet) -> None:
        model, batch = accustomed(network(), small), batch_of(small)
        given = observed(model, batch, training=False)[0].knowledge.batchnorm_exact
        assert given is not None
        with torch.no_grad():
            mean, var = by_hand(model.eval()[:4](batch.inputs))
        torch.testing.assert_close((given["4.mean"], given["4.var"]), (mean, var))

    def test_running_statistics_are_the_buffers_that_were_sent(self, small: fp.data.ImageSet) -> None:
        model = accustomed(network(), small)
        given = observed(model, batch_of(small))[0].knowledge.batchnorm_running
        assert given is not None
        assert set(given) == {"1.mean", "1.var", "4.mean", "4.var"}
        assert torch.equal(given["4.mean"], model[4].running_mean)
        assert torch.equal(given["4.var"], model[4].running_var)

    def test_only_who_is_granted_them_knows(self, small: fp.data.ImageSet) -> None:
        scenario = fp.Scenario(model=network(), clients=[batch_of(small)])
        for threat in fp.threats.THREATS.values():
            assert not {"batchnorm_exact", "batchnorm_running"} & threat.grants
        knowledge = fp.simulate(scenario, fp.threats.honest_but_curious)[0].knowledge
        assert knowledge.batchnorm_exact is None
        assert knowledge.batchnorm_running is None

    def test_shared_buffers_never_change(self, small: fp.data.ImageSet) -> None:
        model = accustomed(network(), small)
        before, scenario = detached(dict(model.state_dict())), fp.Scenario(model=model, clients=[batch_of(small)])
        observation, _ = fp.simulate(scenario, KNOWING)
        seen = observation.rounds[0].buffers_before
        assert seen is not None
        for attack in (bn_exact(), bn_infer(), bn_proxy(), EXACT_TWICE):
            fp.run(dataclasses.replace(attack, iterations=12), observation)
        for state in (model.state_dict(), observation.model.state_dict(), seen):  # type: ignore[union-attr]
            assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())

    def test_looking_at_statistics_writes_none(self, small: fp.data.ImageSet) -> None:
        model = network().train()
        buffers = dict(model.named_buffers())
        before = detached(buffers)
        exact_statistics(model, dict(model.named_parameters()), buffers, batch_of(small).inputs)
        assert all(torch.equal(tensor, before[name]) for name, tensor in buffers.items())

    def test_a_defense_that_changes_batches_has_statistics_of_what_it_feeds(self, small: fp.data.ImageSet) -> None:
        class Darker(Defense):
            def on_batch(self, batch: fp.Batch, context: Context, rng: torch.Generator) -> fp.Batch:
                return fp.Batch(batch.inputs / 2, batch.labels)

        batch = batch_of(small)
        given = observed(network(), batch, defense=fp.chain(fp.defenses.Prune(0.1), Darker()))[0]
        mean, _ = by_hand(F.conv2d(batch.inputs / 2, network()[0].weight, padding=1).detach())
        assert isinstance(given.knowledge.batchnorm_exact, dict)
        torch.testing.assert_close(given.knowledge.batchnorm_exact["1.mean"], mean)


class TestNormalise:
    """Each choice repeats the client that it is the model of, and only that one."""

    @staticmethod
    def misfit(normalise: Normalise, small: fp.data.ImageSet, *, training: bool) -> float:
        """The share of the update that the true batch leaves unexplained."""
        model = accustomed(network(), small).double()
        batch = batch_of(small, 4)
        observation, truth = observed(model, fp.Batch(batch.inputs.double(), batch.labels), training=training)
        forward = forward_model(observation, observation.rounds[0], normalise=normalise)
        found = forward(truth.inputs, truth.labels, create_graph=False)
        return length([f - t for f, t in zip(found, forward.target, strict=True)]) / length(forward.target)

    @pytest.mark.parametrize("normalise", [Normalise.CLIENT, Normalise.OWN])
    def test_own_statistics_repeat_a_client_in_train_mode(self, normalise: Normalise, small: fp.data.ImageSet) -> None:
        assert self.misfit(normalise, small, training=True) < 1e-12

    @pytest.mark.parametrize("normalise", [Normalise.CLIENT, Normalise.RUNNING])
    def test_running_ones_repeat_evaluation_mode(self, normalise: Normalise, small: fp.data.ImageSet) -> None:
        assert self.misfit(normalise, small, training=False) < 1e-12

    @pytest.mark.parametrize(
        ("normalise", "training"), [(Normalise.RUNNING, True), (Normalise.EXACT, True), (Normalise.OWN, False)]
    )
    def test_others_do_not(self, normalise: Normalise, training: bool, small: fp.data.ImageSet) -> None:
        assert self.misfit(normalise, small, training=training) > 0.1

    @pytest.mark.parametrize("tracked", [True, False])
    def test_exact_ones_repeat_the_forward_pass(self, tracked: bool, small: fp.data.ImageSet) -> None:
        model, batch = network(track_running_stats=tracked), batch_of(small)
        observation, _ = observed(model, batch)
        forward = forward_model(observation, observation.rounds[0], normalise=Normalise.EXACT)
        expected = copy.deepcopy(model).train()(batch.inputs)
        # One image alone: its own statistics would be others.
        torch.testing.assert_close(outputs(forward, batch.inputs[:1]), expected[:1])
        assert not torch.allclose(copy.deepcopy(model).train()(batch.inputs[:1]), expected[:1], atol=0.01)

    def test_arguments_are_left_as_they_were(self, small: fp.data.ImageSet) -> None:
        model = network().train()
        buffers, knowledge = dict(model.named_buffers()), observed(model, batch_of(small))[0].knowledge
        before = detached(buffers)
        for choice in Normalise:
            normalised_model(model, dict(model.named_parameters()), buffers, knowledge, choice)
        assert model[1].training
        assert all(torch.equal(tensor, before[name]) for name, tensor in buffers.items())


def outputs(forward: Forward, inputs: Tensor) -> Tensor:
    found: Tensor = torch.func.functional_call(forward.model, {**forward.params, **forward.buffers}, (inputs,))
    return found


def length(tensors: Any) -> float:
    return float(torch.cat([t.flatten() for t in tensors]).norm())


class TestPull:
    def test_distance_by_hand(self) -> None:
        found = [Moments(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0])), Moments(torch.ones(1), torch.ones(1))]
        wanted = [Moments(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 2.0])), Moments(torch.ones(1), torch.zeros(1))]
        assert BatchMoments(1.0, lambda _: found, wanted).distance(torch.empty(0)) == pytest.approx((5 + 1) + (0 + 1))

    def test_variances_are_divided_by_n_or_by_n_minus_one(self) -> None:
        features = torch.tensor([[[0.0, 2.0]], [[4.0, 6.0]]])  # one channel of 0, 2, 4, 6
        assert channel_moments(features) == (pytest.approx(3), pytest.approx(20 / 4))
        assert channel_moments(features, unbiased=True).var == pytest.approx(20 / 3)
        assert channel_moments(torch.tensor([[5.0]]), unbiased=True).var == 0

    @pytest.mark.parametrize("pull", [Pull.EXACT, Pull.RUNNING])
    def test_the_private_batch_has_the_statistics_wanted(self, pull: Pull, small: fp.data.ImageSet) -> None:
        batch, model = batch_of(small), network(momentum=1.0)
        with torch.no_grad():
            model.train()(batch.inputs)  # the running statistics are this batch's, with the unbiased variance
        observation, truth = observed(model, batch)
        buffers, params = dict(model.named_buffers()), observation.rounds[0].params
        prior = pull_prior(model, params, buffers, observation.knowledge, BatchNorm(pull=pull, pull_weight=0.5))
        assert prior is not None
        assert prior.distance(truth.inputs) < 1e-5
        others = batch_of(small, seed=1).inputs
        assert prior.distance(others) > 0.05  # 0.2 to 0.8
        assert prior(others) == pytest.approx(0.5 * float(prior.distance(others)))

    def test_a_gradient_does_not_tell_brightness_but_the_statistics_do(self, small: fp.data.ImageSet) -> None:
        """Batch norm undoes whatever scales the input of a convolution without bias, where its floor adds nothing."""
        model, batch = network(eps=1e-12).double(), batch_of(small)
        observation, truth = observed(model, fp.Batch(batch.inputs.double(), batch.labels))
        darker = fp.Reconstruction(inputs=truth.inputs / 2, labels=truth.labels)
        residual = fp.residual(observation, darker)
        assert residual is not None
        assert residual < 1e-6
        seen = observation.rounds[0]
        buffers = seen.buffers_before or {}
        prior = pull_prior(model, seen.params, buffers, observation.knowledge, BatchNorm(pull=Pull.EXACT))
        assert prior is not None
        assert prior.distance(truth.inputs) < 1e-6
        assert prior.distance(truth.inputs / 2) > 0.05  # 0.2 to 0.6


class TestRecovery:
    @pytest.mark.quality
    def test_exact_statistics_give_photographs_away(self, small: fp.data.ImageSet) -> None:
        """From the same start; without the statistics the gradient is explained all the same, by other pictures."""
        model = network(activation=nn.Tanh)
        observation, truth = observed(model, batch_of(small))
        attack = GradientMatching(
            labels=Labels.KNOWN,
            optimizer=LBFGS(line_search=True),
            start=fp.attacks.uniform_start,
            lr=1.0,
            iterations=20,
            batchnorm=BatchNorm(normalise=Normalise.OWN),
        )
        towards = BatchNorm(normalise=Normalise.OWN, pull=Pull.EXACT)
        without, pulled = (
            fp.run(chosen, observation) for chosen in (attack, dataclasses.replace(attack, batchnorm=towards))
        )
        assert without.diagnostics["objective"] < 0.01
        assert pulled.diagnostics["objective"] < 0.01
        seen = observation.rounds[0]
        buffers = seen.buffers_before or {}
        prior = pull_prior(model, seen.params, buffers, observation.knowledge, BatchNorm(pull=Pull.EXACT))
        assert prior is not None
        assert without.inputs is not None
        assert pulled.diagnostics["pull_distance"] < float(prior.distance(without.inputs)) / 2
        # By 5 to 17 dB over eighteen draws; the distance is at most a third.
        assert fp.score(pulled, truth).mean("psnr") > fp.score(without, truth).mean("psnr") + 2

    @pytest.mark.quality
    def test_running_statistics_in_place_of_private_ones_show_less(self, small: fp.data.ImageSet) -> None:
        model = accustomed(network(channels=16), small)
        observation, truth = observed(model, batch_of(small, 4))
        exact, infer, proxy = (
            fp.score(fp.run(dataclasses.replace(attack, iterations=200), observation), truth).mean("psnr")
            for attack in (bn_exact(), bn_infer(), bn_proxy())
        )
        # By 3 to 11 dB over twenty draws.
        assert exact > proxy + 1
        assert infer > proxy + 1


def test_dense_layers_and_local_training_too(small: fp.data.ImageSet) -> None:
    batch = batch_of(small, 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 10))
    observation, _ = observed(model, batch, protocol=fp.FedAvg(lr=0.1, epochs=2, batch_size=2))
    given = observation.knowledge.batchnorm_exact
    assert given is not None
    # Of all its samples with the parameters it was sent, whatever the local steps.
    mean, var = by_hand(model[1](batch.inputs.flatten(1)).detach())
    torch.testing.assert_close((given["2.mean"], given["2.var"]), (mean, var))
    attack = dataclasses.replace(
        bn_exact(), lr=0.03, starts=Starts(), batchnorm=dataclasses.replace(bn_exact().batchnorm, pull_weight=1.0)
    )
    near, far = (fp.run(dataclasses.replace(attack, iterations=steps), observation).diagnostics for steps in (40, 1))
    assert near["pull_distance"] < far["pull_distance"] / 5


def test_presets_declare_what_they_need(small: fp.data.ImageSet) -> None:
    statistics = {"batchnorm_exact", "batchnorm_running"}
    needs = {name: fp.attacks.ATTACKS[name]().needs & statistics for name in ("bn-exact", "bn-infer", "bn-proxy")}
    assert needs == {
        "bn-exact": {"batchnorm_exact"},
        "bn-infer": {"batchnorm_running"},
        "bn-proxy": {"batchnorm_running"},
    }
    assert not fp.attacks.inverting_gradients().needs & statistics
    scenario = fp.Scenario(model=network(), clients=[batch_of(small)])
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious.granting("batchnorm_running"))
    with pytest.raises(fp.MissingKnowledge, match="batchnorm_exact"):
        fp.run(bn_exact(), observation)
    found = fp.run(dataclasses.replace(bn_infer(), iterations=2), observation)
    assert found.knowledge_used & statistics == {"batchnorm_running"}


def test_the_result_says_what_was_used(small: fp.data.ImageSet) -> None:
    observation, _ = observed(network(), batch_of(small))
    found = fp.run(dataclasses.replace(bn_exact(), iterations=2), observation)
    assert "labels inferred" in found.status
    assert "batch norm by the guess's own statistics, pulled towards the exact statistics" in found.status
    assert found.diagnostics["normalise"] == "own"
    assert found.diagnostics["pull"] == "exact"
    found = fp.run(dataclasses.replace(bn_proxy(), iterations=2, labels="known"), observation)
    assert "labels known; batch norm by the running statistics, not pulled" in found.status
    assert found.diagnostics["pull_distance"] is None
    plain = fp.run(dataclasses.replace(fp.attacks.inverting_gradients(), iterations=2), observation)
    assert "batch norm" not in plain.status


def test_the_same_answer_from_a_capture(small: fp.data.ImageSet, tmp_path: Path) -> None:
    observation, _ = observed(network(), batch_of(small))
    loaded = fp.captures.load(fp.captures.save(observation, tmp_path / "capture"), model=network())
    attack = dataclasses.replace(EXACT_TWICE, iterations=3)
    first, second = (fp.run(attack, o, seed=1).inputs for o in (observation, loaded))
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["bn-exact", "bn-infer", "bn-proxy"])
def test_a_model_without_batch_norm_is_refused(name: str, small: fp.data.ImageSet) -> None:
    model = fp.models.build("lenet", input_shape=(3, 16, 16), classes=10, seed=0)
    observation, _ = observed(model, batch_of(small))
    with pytest.raises(fp.NotApplicable, match=r"needs a model with batch-norm layers, but .* has none; use") as caught:
        fp.run(fp.attacks.ATTACKS[name](), observation)
    assert "\n" not in str(caught.value)


def changed(knowledge: Knowledge, name: str, tensor: Tensor | None) -> Knowledge:
    given: dict[str, Tensor] = dict(knowledge.batchnorm_exact or {})
    given.pop(name)
    exact: Update = given if tensor is None else {**given, name: tensor}
    return dataclasses.replace(knowledge, batchnorm_exact=exact)


def test_statistics_that_do_not_fit_are_refused(small: fp.data.ImageSet) -> None:
    observation, _ = observed(network(), batch_of(small))
    for tensor, words in (
        (None, r"batchnorm_exact must hold a '4.var' of 8 channels, but it is missing; give"),
        (torch.ones(7), r"batchnorm_exact must hold a '4.var' of 8 channels, but it has the shape \(7,\); give"),
        (-torch.ones(8), r"'4.var' in batchnorm_exact must hold variances of at least 0, not -1"),
    ):
        odd = dataclasses.replace(observation, knowledge=changed(observation.knowledge, "4.var", tensor))
        for attack in (bn_exact(), GradientMatching(batchnorm=BatchNorm(normalise=Normalise.EXACT))):
            with pytest.raises(fp.errors.BadInput, match=words):
                fp.run(attack, odd)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(fp.errors.BadInput, match="client or own or exact or running"):
        BatchNorm(normalise="batch")  # type: ignore[arg-type]
    with pytest.raises(fp.errors.BadInput, match="none or exact or running"):
        BatchNorm(pull="own")  # type: ignore[arg-type]
    with pytest.raises(fp.errors.BadInput, match="pull_weight must be above 0"):
        BatchNorm(pull_weight=0.0)
