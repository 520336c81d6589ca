"""How gradient matching runs: prepared layers, closed forms and graphs compute what the plain way computes."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import fedprism as fp
from fedprism.attacks import Engine, GradientMatching, TotalVariation, cosine
from fedprism.attacks.gradient_matching.forward import (
    PreparedForward,
    forward_model,
    moments_of_last_pass,
    repeatable_defense,
)
from fedprism.attacks.gradient_matching.pruned import SignsOfTheLargest, SmallerThanSent
from fedprism.client.batchnorm import layer_moments
from fedprism.defenses import Clip, Context, DpSgd, GaussianNoise, Prune, SignCompression
from fedprism.defenses.pruning import KeepSupport
from fedprism.runtime import double_backward, progress
from fedprism.runtime.cuda_graphs import WARM_UP, Repeated, Stepping
from fedprism.solvers import MatchingSettings, match_gradients, squared_error

SIDE, CLASSES = 8, 5
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture
def network() -> nn.Module:
    """Every kind of layer that is swapped (strides, groups, dilation, with and without bias), and some that are not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=3, bias=False),
        nn.BatchNorm2d(6, affine=False),
        nn.Tanh(),
        nn.Conv2d(6, 4, 3, padding="same"),
        nn.Flatten(),
        nn.Linear(4 * SIDE * SIDE // 4, CLASSES),
    ).double()


def random_batch(size: int, rng: torch.Generator) -> fp.Batch:
    inputs = torch.rand(size, 3, SIDE, SIDE, generator=rng, dtype=torch.float64)
    return fp.Batch(inputs, torch.randint(CLASSES, (size,), generator=rng))


@pytest.mark.parametrize("many_weights", [0, 10**9])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("protocol", [fp.FedSGD(), fp.FedAvg(lr=0.1, epochs=2, batch_size=2, shuffle=False)])
@pytest.mark.parametrize("defense", [fp.chain(), fp.chain(Clip(1.0), Prune(0.9)), DpSgd(0.0, 1.0)])
def test_the_prepared_forward_model_is_the_clients_own(
    many_weights: int,
    training: bool,
    protocol: fp.FedSGD | fp.FedAvg,
    defense: fp.defenses.Defense,
    network: nn.Module,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if defense.overrides("on_examples") and training:
        return  # refused by DpSgd itself
    monkeypatch.setattr(double_backward, "MANY_WEIGHTS", many_weights)
    size = 4 if training else 1  # batch norm refuses a single image in train mode
    batch = random_batch(size, rng)
    scenario = fp.Scenario(model=network, clients=[batch], training=training, protocol=protocol, defense=defense)
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious.granting("defense"))
    forward = forward_model(observation, observation.rounds[0])
    inputs = random_batch(size, rng).inputs.requires_grad_()
    directions = [torch.randn(tensor.shape, generator=rng, dtype=torch.float64) for tensor in forward.target]
    before = {name: tensor.clone() for name, tensor in forward.buffers.items()}
    prepared = PreparedForward(forward)
    for _ in range(2):  # a second time, in case the first left something behind
        expected, found = forward(inputs, batch.labels), prepared(inputs, batch.labels)
        torch.testing.assert_close(found, expected)
        slopes = [torch.autograd.grad(sent, inputs, directions) for sent in (expected, found)]
        torch.testing.assert_close(slopes[1], slopes[0])
    torch.testing.assert_close(dict(forward.buffers), before, rtol=0, atol=0)


@pytest.mark.parametrize("unbiased", [False, True])
def test_batch_norm_statistics_are_read_in_passing(unbiased: bool, network: nn.Module, rng: torch.Generator) -> None:
    batch, guess = random_batch(3, rng), random_batch(3, rng).inputs.requires_grad_()
    observation, _ = fp.simulate(fp.Scenario(model=network, clients=[batch]), fp.threats.honest_but_curious)
    forward = forward_model(observation, observation.rounds[0])
    prepared = PreparedForward(forward)
    in_passing = moments_of_last_pass(prepared.model, unbiased=unbiased)
    prepared(guess, batch.labels)
    expected = layer_moments(forward.model, forward.params, forward.buffers, guess, unbiased=unbiased)
    torch.testing.assert_close(in_passing(guess), list(expected.values()))


def test_nothing_of_an_iteration_lives_on_to_the_next(network: nn.Module, rng: torch.Generator) -> None:
    """A graph that is kept holds memory, and nodes of a CUDA stream that the next iteration may not run on."""
    batch, guess = random_batch(3, rng), random_batch(3, rng).inputs.requires_grad_()
    observation, _ = fp.simulate(fp.Scenario(model=network, clients=[batch]), fp.threats.honest_but_curious)
    prepared = PreparedForward(forward_model(observation, observation.rounds[0]))
    in_passing = moments_of_last_pass(prepared.model, unbiased=False)

    def iterate() -> None:
        sent = sum(tensor.square().sum() for tensor in prepared(guess, batch.labels))
        moments = sum(moment.mean.sum() for moment in in_passing(guess))
        node = get_gradient_edge(prepared.trained["0.weight"]).node
        assert "seen" not in node.metadata, "the node is that of an earlier iteration"
        node.metadata["seen"] = True
        torch.autograd.grad(sent + moments, guess)

    iterate()
    iterate()


def test_layers_for_second_derivatives_compute_the_same(network: nn.Module, rng: torch.Generator) -> None:
    kinds = [type(layer) for layer in network.modules()]
    for model, size in ((network.train(), 2), (network.eval(), 2), (network.eval(), 1)):
        inputs = random_batch(size, rng).inputs
        swapped = double_backward.for_second_derivatives(model)
        assert [name for name, _ in swapped.named_parameters()] == [name for name, _ in model.named_parameters()]
        torch.testing.assert_close(swapped(inputs), copy.deepcopy(model)(inputs))
    assert [type(layer) for layer in network.modules()] == kinds


@pytest.mark.parametrize("few_copies", [0, 10**9])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, 3),
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1)),
        nn.Conv2d(2, 3, 2, stride=3, padding=1, bias=False),
        nn.Conv2d(2, 3, 3, dilation=2, padding=2),
        nn.Conv2d(2, 3, 1),
    ],
    ids=repr,
)
def test_convolutions_for_second_derivatives_have_the_same_ones(
    few_copies: int, layer: nn.Conv2d, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(double_backward, "FEW_COPIES", few_copies)
    layers = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Tanh(), layer, nn.Tanh()).double()
    inputs = torch.rand(3, 2, 9, 8, generator=rng, dtype=torch.float64).requires_grad_()
    found = []
    for model in (layers, double_backward.for_second_derivatives(layers)):
        outputs = model(inputs)
        gradients = torch.autograd.grad(outputs.square().sum(), list(layers.parameters()), create_graph=True)
        found.append([outputs, *gradients, *torch.autograd.grad([g.square().sum() for g in gradients], inputs)])
    torch.testing.assert_close(found[1], found[0])


class Shared(nn.Module):
    """One weight by two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs) + self.shift)


def test_a_model_made_of_other_tensors_computes_as_if_it_were_called_with_them(rng: torch.Generator) -> None:
    model, inputs = Shared(), torch.randn(2, 4, generator=rng)
    tensors = {name: torch.randn(t.shape, generator=rng) for name, t in model.named_parameters()}
    tensors["shift"] = torch.randn(4, generator=rng)
    expected = torch.func.functional_call(model, tensors, (inputs,))
    double_backward.install_tensors(model, tensors)
    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=0)
    assert model.second.weight is model.first.weight is tensors["first.weight"]
    assert "first.weight" in dict(model.named_parameters())


def parabolas(inputs: Tensor, logits: Tensor | None) -> list[Tensor]:
    """Gradients of a problem small enough to check by hand, one of them the same for all inputs."""
    return [inputs.flatten(1).square().sum(1), inputs.sin().flatten(), torch.ones(3, dtype=inputs.dtype)]


def test_the_cosine_in_closed_form_is_the_one_that_autograd_differentiates(rng: torch.Generator) -> None:
    target = [t.detach() for t in parabolas(torch.rand(2, 3, 4, 4, generator=rng, dtype=torch.float64), None)]
    start = torch.rand(2, 3, 4, 4, generator=rng, dtype=torch.float64)

    def same_cosine(gradients: fp.solvers.distances.Gradients, wanted: fp.solvers.distances.Gradients) -> Tensor:
        return cosine(gradients, wanted)

    runs = [
        match_gradients(
            parabolas,
            target,
            start,
            MatchingSettings(
                distance=distance,
                priors=(TotalVariation(0.01),),
                optimizer=fp.attacks.Adam(signed=False),
                iterations=30,
            ),
        )
        for distance in (cosine, same_cosine)
    ]
    torch.testing.assert_close(runs[0].history, runs[1].history)
    torch.testing.assert_close(runs[0].inputs, runs[1].inputs)
    assert runs[0].history[-1] < runs[0].history[0]


@pytest.mark.parametrize("stepwise", [False, True])
def test_adam_takes_the_steps_of_torch(stepwise: bool, rng: torch.Generator) -> None:
    settings = fp.attacks.Adam(signed=False, stepwise=stepwise)
    target = [t.detach() for t in parabolas(torch.rand(1, 6, generator=rng, dtype=torch.float64), None)]
    start = torch.rand(1, 6, generator=rng, dtype=torch.float64)
    found = match_gradients(
        parabolas, target, start, MatchingSettings(distance=squared_error, optimizer=settings, iterations=40)
    )
    inputs = start.clone().requires_grad_()
    optimizer, values = torch.optim.Adam([inputs], lr=0.1), []
    for done in range(40):
        optimizer.param_groups[0]["lr"] = 0.1 * settings.rate(done / 40)
        optimizer.zero_grad()
        value = squared_error(parabolas(inputs, None), target)
        values.append(value.detach())
        value.backward()
        optimizer.step()
    torch.testing.assert_close(found.history, torch.stack(values))


def test_labels_are_optimised_along_with_the_inputs(rng: torch.Generator) -> None:
    target = (torch.tensor([[2.0, -4.0]]), torch.tensor([[0.5, 1.0, -1.0]]))
    found = match_gradients(
        lambda x, logits: [2 * x, logits if logits is not None else x],
        target,
        torch.zeros(1, 2),
        MatchingSettings(distance=squared_error, iterations=600),
        label_start=torch.zeros(1, 3),
    )
    assert found.label_logits is not None
    torch.testing.assert_close(found.label_logits, target[1], atol=0.02, rtol=0)


def test_variation_of_the_magnitude_does_not_see_signs(rng: torch.Generator) -> None:
    images = torch.rand(2, 3, 5, 5, generator=rng)
    signs = 2.0 * torch.randint(2, images.shape, generator=rng) - 1
    prior = TotalVariation(0.5, magnitude=True)
    torch.testing.assert_close(prior(images * signs), TotalVariation(0.5)(images))
    assert TotalVariation(0.5)(images * signs) > prior(images * signs)
    attack = GradientMatching(priors=(prior,), engine=Engine(graph=False))
    names = {"GradientMatching": GradientMatching, "TotalVariation": TotalVariation, "Engine": Engine}
    assert eval(repr(attack), names) == attack


class TestPruningFollowed:
    def test_what_was_not_sent_counts_by_what_it_exceeds_the_smallest_sent(self, rng: torch.Generator) -> None:
        observed = {"w": torch.tensor([0.0, 3.0, 0.0, -4.0, 0.0]), "silent": torch.zeros(2)}
        followed = SmallerThanSent.of(observed)
        # Sent entries of twice the length allow twice as much: 6, where 3 was the smallest of (3, -4).
        guess = {"w": torch.tensor([9.0, 6.0, -8.0, 8.0, 5.0]), "silent": torch.tensor([1.0, -2.0])}
        compared = followed.on_update(guess, Context(), rng)
        assert compared["w"].tolist() == pytest.approx([3.0, 6.0, -2.0, 8.0, 0.0])
        assert compared["silent"].tolist() == [1.0, -2.0]

    def test_signs_that_were_sent_count_up_to_where_the_guess_would_have_been_cut(self, rng: torch.Generator) -> None:
        observed = {"w": torch.tensor([0.0, 3.0, 0.0, -3.0, 0.0]), "silent": torch.zeros(2)}
        followed = SignsOfTheLargest.of(observed)
        # Two were sent, and the second largest of the guess is 6. Those sent have a mean magnitude of 4.
        guess = {"w": torch.tensor([9.0, 2.0, -5.0, -6.0, 4.0]), "silent": torch.tensor([1.0, -2.0])}
        compared = followed.on_update(guess, Context(), rng)
        assert compared["w"].tolist() == pytest.approx([3.0, 2 * 4 / 6, 0.0, -4.0, 0.0])
        assert compared["silent"].tolist() == [1.0, -2.0]
        assert followed.on_update({"w": torch.zeros(5)}, Context(), rng)["w"].tolist() == [0.0] * 5

    @pytest.mark.parametrize("after", [fp.chain(), Clip(0.01), SignCompression()])
    def test_the_true_batch_loses_nothing(
        self, after: fp.defenses.Defense, network: nn.Module, rng: torch.Generator
    ) -> None:
        batch = random_batch(2, rng)
        scenario = fp.Scenario(model=network, clients=[batch], defense=fp.chain(Prune(0.8), after))
        observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious.granting("defense"))
        forward = forward_model(observation, observation.rounds[0])
        own = forward(batch.inputs, batch.labels, create_graph=False)
        sent = [tensor != 0 for tensor in forward.target]
        assert all(bool((g[~s].abs() <= 1e-9).all()) for g, s in zip(own, sent, strict=True))
        assert any(bool((~s).any()) for s in sent)
        if after == SignCompression():  # what is compared is what was sent
            assert all(torch.allclose(g, t, atol=1e-7) for g, t in zip(own, forward.target, strict=True))

    def test_it_is_followed_from_the_answer_that_ignores_it(self, rng: torch.Generator) -> None:
        images = fp.data.load("photos", size=16)
        model = fp.models.build("lenet", input_shape=(3, 16, 16), classes=images.classes, seed=0)
        scenario = fp.Scenario(model=fp.models.uniform_(model, seed=0), clients=[images.batch([2])], defense=Prune(0.9))
        threat = fp.threats.honest_but_curious.granting("labels", "defense")
        observation, truth = fp.simulate(scenario, threat, seed=0, device="cpu")
        attack = GradientMatching(labels=fp.attacks.Labels.KNOWN, priors=(TotalVariation(1e-3),), iterations=150)
        reported = list[tuple[int, int]]()
        with progress.listening(lambda done, total: reported.append((done, total))):
            found = fp.run(attack, observation, seed=0, device="cpu")
        ignoring = fp.run(dataclasses.replace(attack, adaptive=False), observation, seed=0, device="cpu")

        assert reported == [(step, 300) for step in range(1, 301)]
        assert found.status.endswith("following the pruning explains more")
        assert found.diagnostics["following_pruning"] < found.diagnostics["ignoring_pruning"] / 1.5
        assert found.diagnostics["restart_objectives"] == ignoring.diagnostics["restart_objectives"]
        assert "pruning" not in ignoring.status
        better, worse = (fp.score(one, truth, metrics=("psnr",)).mean("psnr") for one in (found, ignoring))
        assert better > worse + 1

    def test_an_answer_that_cannot_be_improved_is_kept(self, network: nn.Module, rng: torch.Generator) -> None:
        batch = random_batch(2, rng)
        scenario = fp.Scenario(model=network, clients=[batch], defense=Prune(0.8))
        threat = fp.threats.honest_but_curious.granting("labels", "defense")
        observation, _ = fp.simulate(scenario, threat)
        attack = GradientMatching(
            labels=fp.attacks.Labels.KNOWN, start=lambda shape, rng: batch.inputs, iterations=1, lr=1e-9
        )
        found = fp.run(attack, observation, device="cpu")
        assert found.diagnostics["following_pruning"] == pytest.approx(0, abs=1e-9)
        torch.testing.assert_close(found.inputs, batch.inputs, atol=1e-6, rtol=0)

    def test_random_parts_are_left_out_and_sums_of_clients_tell_only_what_is_in_none(self) -> None:
        observed = {"w": torch.tensor([0.0, 3.0])}
        alone = fp.types.Round(params=observed, update=observed)
        assert isinstance(repeatable_defense(fp.chain(Prune(0.5), GaussianNoise(0.1)), alone), SmallerThanSent)
        several = dataclasses.replace(alone, clients=2)
        assert isinstance(repeatable_defense(Prune(0.5), several), KeepSupport)


class TestRepeated:
    @pytest.mark.parametrize(("graph", "stepping"), [(True, Stepping.NO_GPU), (False, Stepping.PLAIN)])
    def test_without_a_graph_every_call_is_a_step(self, graph: bool, stepping: Stepping) -> None:
        counted = torch.zeros(())
        step = Repeated(lambda: counted.add_(1) and None, torch.device("cpu"), graph=graph)
        for _ in range(WARM_UP + 3):
            step()
        assert counted == WARM_UP + 3
        assert step.stepping is stepping
        assert str(step) == str(stepping)

    def test_the_diagnostics_say_how_iterations_were_run(self, network: nn.Module, rng: torch.Generator) -> None:
        scenario = fp.Scenario(model=network, clients=[random_batch(1, rng)], training=False)
        observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious)
        found = fp.run(GradientMatching(iterations=2), observation, device="cpu")
        assert found.diagnostics["stepping"] == Stepping.NO_GPU

    def test_switches_are_put_back(self) -> None:
        before = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
        with Engine(autotune=True, tf32=True).settings():
            assert torch.backends.cudnn.benchmark
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32) == before

    @NEEDS_GPU
    def test_a_graph_does_what_its_step_does(self, network: nn.Module, rng: torch.Generator) -> None:
        scenario = fp.Scenario(model=network, clients=[random_batch(2, rng)], training=False)
        observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious.granting("labels"))
        attack = GradientMatching(iterations=50, priors=(TotalVariation(1e-3),), labels=fp.attacks.Labels.KNOWN)
        captured = fp.run(attack, observation, device="cuda")
        plain = fp.run(dataclasses.replace(attack, engine=Engine(graph=False)), observation, device="cuda")
        assert captured.diagnostics["stepping"] == Stepping.GRAPH
        assert plain.diagnostics["stepping"] == Stepping.PLAIN
        torch.testing.assert_close(captured.inputs, plain.inputs, atol=1e-6, rtol=0)

    @NEEDS_GPU
    def test_starts_that_race_share_no_node_of_a_stream(self, network: nn.Module, rng: torch.Generator) -> None:
        scenario = fp.Scenario(model=network, clients=[random_batch(2, rng)])
        threat = fp.threats.honest_but_curious.granting("labels", "batchnorm_exact")
        observation, _ = fp.simulate(scenario, threat)
        attack = dataclasses.replace(fp.attacks.bn_exact(), labels=fp.attacks.Labels.KNOWN, iterations=60)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch warns of nodes that wait for another stream
            found = fp.run(attack, observation, device="cuda")
        assert found.diagnostics["stepping"] == Stepping.GRAPH

    @NEEDS_GPU
    def test_a_step_that_asks_for_a_value_goes_on_without_a_graph(self) -> None:
        counted = torch.zeros((), device="cuda")

        def asks() -> None:
            counted.add_(1)
            float(counted)

        step = Repeated(asks, counted.device)
        for _ in range(WARM_UP + 3):
            step()
        assert counted == WARM_UP + 3
        assert step.stepping is Stepping.REFUSED
        assert step.reason in str(step)
