"""Clipping and DP-SGD with planted answers, against a slow loop over single examples, and in an attacker's hands."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedprism as fp
from fedprism.client.update import FedAvg, FedSGD, Protocol, local_update
from fedprism.defenses import Clip, Context, Defense, DpSgd
from fedprism.losses import cross_entropy
from fedprism.types import Update, detached

LENGTHS = st.floats(1e-3, 1e3)


def length(update: Update) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in update.values() if t.dtype.is_floating_point))


def clipped(defense: Defense, update: Update) -> Update:
    return defense.on_update(update, Context(), torch.Generator())


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def some_batch(size: int) -> fp.Batch:
    rng = torch.Generator().manual_seed(1)
    inputs = 3 * torch.randn(size, 4, generator=rng, dtype=torch.float64)
    return fp.Batch(inputs, torch.randint(2, (size,), generator=rng))


def sent(
    model: nn.Module, batch: fp.Batch, defense: Defense, *, seed: int = 0, protocol: Protocol | None = None
) -> Update:
    return local_update(
        model,
        dict(model.named_parameters()),
        batch,
        loss=cross_entropy,
        protocol=protocol or FedSGD(),
        rng=torch.Generator().manual_seed(seed),
        defense=defense,
    ).update


def flat(update: Update) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in update.values()])


# --- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defense", "a", "b"),
    [
        (Clip(1.0), 0.6, -0.8),
        (Clip(5.0), 3.0, -4.0),
        (Clip(10.0), 3.0, -4.0),
        (Clip(10.0, always=True), 6.0, -8.0),
        (Clip(1.0, always=True), 0.6, -0.8),
    ],
    ids=repr,
)
def test_the_whole_update_is_one_vector(defense: Defense, a: float, b: float) -> None:
    # 3, 4 and 5: the length runs over both tensors, and the counter is neither counted nor scaled.
    update = {"a": torch.tensor([3.0]), "b": torch.tensor([[-4.0, 0.0]]), "count": torch.tensor(1000)}
    found = clipped(defense, update)
    assert found["a"].tolist() == pytest.approx([a])
    assert found["b"].tolist() == [pytest.approx([b, 0.0])]
    assert found["count"] is update["count"]
    assert update["a"].item() == 3.0


@given(now=LENGTHS, norm=LENGTHS, always=st.booleans(), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_clipping_changes_the_length_and_nothing_else(now: float, norm: float, always: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    update = {"a": torch.randn(5, generator=rng), "b": torch.randn(2, 3, generator=rng)}
    update = {name: tensor * (now / length(update)) for name, tensor in update.items()}
    found, long = clipped(Clip(norm, always=always), update), length(update)
    if not always and long <= norm:
        assert all(torch.equal(found[name], update[name]) for name in update)
        return
    assert length(found) == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(flat(found) / norm, flat(update) / long)


@pytest.mark.parametrize("always", [False, True])
def test_zeros_stay_zeros(always: bool) -> None:
    found = clipped(Clip(2.0, always=always), {"a": torch.zeros(3), "b": torch.zeros(1)})
    assert not flat(found).any()
    whole = {"count": torch.tensor(3)}
    assert clipped(Clip(2.0, always=always), whole) == whole


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 1e-6),
        (torch.float16, 6e4),
        (torch.bfloat16, 1e38),
        (torch.float32, 1e-44),
        (torch.float32, 1e38),
    ],
)
def test_extreme_lengths_do_not_overflow(dtype: torch.dtype, size: float) -> None:
    entries = torch.full((9,), size, dtype=torch.float64).to(dtype)
    found = clipped(Clip(3.0, always=True), {"a": entries})["a"]
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.ones_like(found))


@pytest.mark.parametrize(
    "defense", [Clip(0.1), Clip(100.0), Clip(2.0, always=True), DpSgd(3.0, clip=0.5).deterministic()]
)
@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(lr=0.1, epochs=2, batch_size=2, shuffle=False)])
def test_an_attacker_can_differentiate_through_it(defense: Defense, protocol: Protocol) -> None:
    model, inputs = small_net(), some_batch(3).inputs.requires_grad_()
    soft = torch.rand(3, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()

    def forward(x: Tensor, y: Tensor) -> Tensor:
        answer = local_update(
            model,
            dict(model.named_parameters()),
            fp.Batch(x, torch.softmax(y, 1)),
            loss=cross_entropy,
            protocol=protocol,
            rng=torch.Generator(),
            defense=defense.deterministic(),
            create_graph=True,
        )
        return flat(answer.update)

    assert torch.autograd.gradcheck(forward, (inputs, soft))


@pytest.mark.parametrize("always", [False, True])
def test_the_derivative_at_zero_is_finite(always: bool) -> None:
    update = {"a": torch.zeros(3, requires_grad=True), "b": torch.zeros(2, requires_grad=True)}
    (derivative,) = torch.autograd.grad(flat(clipped(Clip(1.0, always=always), update)).sum(), [update["a"]])
    assert torch.equal(derivative, torch.ones(3))


def test_what_an_attacker_can_repeat() -> None:
    assert Clip(2.0, always=True).deterministic() == Clip(2.0, always=True)
    assert DpSgd(2.0, clip=0.5).deterministic() == DpSgd(0.0, clip=0.5)


@pytest.mark.quality
def test_an_attacker_who_knows_the_clipping_sees_more(digits: fp.data.ImageSet) -> None:
    model = fp.models.build("lenet", input_shape=(1, 16, 16), classes=10, seed=0)
    batch = digits.draw(1, torch.Generator().manual_seed(0))
    scenario = fp.Scenario(model=model, clients=[batch], defense=Clip(0.5))
    attack = dataclasses.replace(fp.attacks.dlg(), iterations=60)
    quality = {}
    for threat in (fp.threats.honest_but_curious, fp.threats.honest_but_curious.granting("defense")):
        observation, truth = fp.simulate(scenario, threat, device="cpu")
        quality[threat] = fp.score(fp.run(attack, observation, device="cpu"), truth).mean("psnr")
    naive, adaptive = quality.values()
    assert adaptive > 18  # 23 to 41 dB over twenty draws, after 5 to 7
    assert adaptive > naive + 10


# --- DP-SGD ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("above", [6, 3, 0])
def test_every_example_is_clipped_on_its_own(above: int) -> None:
    """Where so many of six examples are longer than the threshold."""
    model, batch = small_net(), some_batch(6)
    examples = []
    for index in range(len(batch)):
        model.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs[index : index + 1]), batch.labels[index : index + 1]).backward()
        examples.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    # Half the shortest and twice the longest, too, so that a threshold can lie below and above all.
    lengths = sorted(length(one) for one in examples)
    lengths = [lengths[0] / 2, *lengths, 2 * lengths[-1]]
    clip = (lengths[6 - above] + lengths[7 - above]) / 2
    assert sum(length(one) > clip for one in examples) == above
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one in examples:
        for name, gradient in one.items():
            expected[name] += gradient * min(1.0, clip / length(one)) / len(batch)
    found = sent(model, batch, DpSgd(0.0, clip=clip))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name].detach())


@pytest.mark.parametrize(("noise", "clip", "size"), [(1.0, 1.0, 1), (0.5, 3.0, 4), (8.0, 0.1, 7)])
def test_noise_on_the_mean_has_the_stated_spread(noise: float, clip: float, size: int) -> None:
    model, batch, draws = small_net(), some_batch(size), 500
    exact = flat(sent(model, batch, DpSgd(0.0, clip=clip)))
    errors = torch.stack(
        [flat(sent(model, batch, DpSgd(noise, clip=clip), seed=seed)) - exact for seed in range(draws)]
    )
    scaled = errors / (noise * clip / size)
    # n squares of unit normals: mean 1, variance 2 / n. The limits are five standard deviations wide.
    n = scaled.numel()
    assert n == draws * 23
    assert float(scaled.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / n))
    assert float(scaled.mean()) == pytest.approx(0, abs=5 / math.sqrt(n))
    assert float(scaled.pow(4).mean()) == pytest.approx(3, abs=5 * math.sqrt(96 / n))
    # Entries are independent: off the diagonal, the correlations of 500 draws are within 5 / sqrt(500).
    correlations = torch.corrcoef(scaled.T) - torch.eye(23, dtype=torch.float64)
    assert float(correlations.abs().max()) < 5 / math.sqrt(draws)


def test_noise_is_drawn_anew_in_every_local_step() -> None:
    class Deaf(nn.Module):
        """Its parameters do not reach the outputs: every gradient is zero, and all that is left is noise."""

        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Parameter(torch.zeros(20_000))

        def forward(self, x: Tensor) -> Tensor:
            return x + 0 * self.idle.sum()

    batch = fp.Batch(torch.rand(5, 2), torch.tensor([0, 1, 0, 1, 1]))
    protocol = FedAvg(lr=0.5, epochs=3, batch_size=2)
    found = sent(Deaf(), batch, DpSgd(2.0, clip=0.1), protocol=protocol)["idle"]
    # Three epochs of batches of 2, 2 and 1: variances add up.
    variance = 3 * sum((0.5 * 2.0 * 0.1 / size) ** 2 for size in (2, 2, 1))
    n = found.numel()
    assert float(found.square().mean()) == pytest.approx(variance, rel=5 * math.sqrt(2 / n))


def test_noise_follows_the_generator_alone() -> None:
    model, batch, defense = small_net(), some_batch(3), DpSgd(1.0)
    torch.manual_seed(1)
    first = flat(sent(model, batch, defense, seed=4))
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    assert torch.equal(first, flat(sent(model, batch, defense, seed=4)))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.equal(first, flat(sent(model, batch, defense, seed=5)))


def test_examples_are_left_alone_and_so_are_whole_numbers() -> None:
    rng = torch.Generator().manual_seed(0)
    grads = {"w": torch.randn(3, 2, 2, generator=rng), "b": torch.randn(3, 4, generator=rng), "n": torch.arange(3)}
    before = detached(grads)
    found = DpSgd(0.5, clip=0.01).on_examples(grads, Context(), rng)
    assert all(torch.equal(grads[name], before[name]) for name in grads)
    assert torch.equal(found["n"], before["n"])
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in before.items()}


def test_batch_norm_in_train_mode_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    scenario = fp.Scenario(model=model, clients=[some_batch(3)], defense=DpSgd(1.0))
    with pytest.raises(fp.NotApplicable, match=r"batch-norm layer '1' in train mode.*training=False"):
        fp.simulate(scenario, fp.threats.eavesdropper, device="cpu")
    fp.simulate(dataclasses.replace(scenario, training=False), fp.threats.eavesdropper, device="cpu")


# --- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (Clip, {"norm": 0.0}, "Clip's norm"),
        (Clip, {"norm": -1.0}, "Clip's norm"),
        (Clip, {"norm": math.inf}, "Clip's norm"),
        (Clip, {"norm": math.nan}, "Clip's norm"),
        (Clip, {"norm": "1"}, "Clip's norm"),
        (Clip, {"norm": 1.0, "always": "no"}, "Clip's always"),
        (DpSgd, {"noise": -0.1}, "DpSgd's noise"),
        (DpSgd, {"noise": math.nan}, "DpSgd's noise"),
        (DpSgd, {"noise": None}, "DpSgd's noise"),
        (DpSgd, {"noise": 1.0, "clip": 0.0}, "DpSgd's clip"),
        (DpSgd, {"noise": 1.0, "clip": math.inf}, "DpSgd's clip"),
    ],
)
def test_bad_strengths_are_refused(kind: type[Defense], settings: dict[str, object], words: str) -> None:
    with pytest.raises(fp.errors.BadInput, match=f"^{words} must be .*, not .*[.]$"):
        kind(**settings)


@pytest.mark.parametrize("defense", [Clip(1.0), Clip(2, always=True), DpSgd(0.5), fp.chain(DpSgd(1, 0.1), Clip(0.1))])
def test_captures_carry_it_to_an_adaptive_attacker(defense: Defense, tmp_path: Path) -> None:
    model = fp.models.build("fc2", input_shape=(1, 2, 2), hidden=3, classes=2, seed=0)
    batch = fp.Batch(torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1]))
    scenario = fp.Scenario(model=model, clients=[batch], defense=defense)
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious.granting("defense", "labels"), device="cpu")
    folder = fp.captures.save(observation, tmp_path / "capture")
    loaded = fp.captures.load(folder)
    assert loaded.knowledge.defense == defense
    described = json.loads((folder / "capture.json").read_text())["knowledge"]["defense"]
    assert {entry["name"] for entry in described} <= {"clip", "dp-sgd"}
    attack = dataclasses.replace(fp.attacks.inverting_gradients(), iterations=2, starts=fp.attacks.Starts())
    first, second = (fp.run(attack, seen, device="cpu") for seen in (observation, loaded))
    assert first.inputs is not None
    assert second.inputs is not None
    assert torch.equal(first.inputs, second.inputs)
    assert "defense" in first.knowledge_used
