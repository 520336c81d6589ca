"""MixUp and InstaHide: what is mixed, with what weights, whose row it is, and what stays as it was."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.client.update import FedAvg, FedSGD, Protocol, local_update
from fedprism.defenses import Context, Defense, InstaHide, MixUp, Prune, chain
from fedprism.losses import cross_entropy
from fedprism.types import Update


def some_data(samples: int, *, classes: int = 5, seed: int = 0) -> fp.Batch:
    rng = torch.Generator().manual_seed(seed)
    return fp.Batch(torch.randn(samples, 1, 3, 3, generator=rng), torch.randint(classes, (samples,), generator=rng))


def small_net(classes: int = 5) -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 3, 3), hidden=6, classes=classes, seed=0)


def sent(
    model: nn.Module, data: fp.Batch, defense: Defense, *, seed: int = 0, protocol: Protocol | None = None
) -> Update:
    return local_update(
        model,
        dict(model.named_parameters()),
        data,
        loss=cross_entropy,
        protocol=protocol or FedSGD(),
        rng=torch.Generator().manual_seed(seed),
        defense=defense,
    ).update


def replayed(defense: MixUp, samples: int, seed: int, public: int = 0) -> Tensor:
    """The matrix (samples, samples + public) of the mixtures that a generator with this seed gives."""
    mixing = defense.mixing(samples, torch.Generator().manual_seed(seed))
    return torch.zeros(samples, samples + public, dtype=torch.float64).scatter_(1, mixing.partners, mixing.coefficients)


@pytest.mark.parametrize(("k", "samples"), [(2, 2), (2, 30), (4, 4), (4, 5), (4, 500), (16, 16)])
def test_rows_are_distinct_and_start_with_their_sample(k: int, samples: int, rng: torch.Generator) -> None:
    mixing = MixUp(k).mixing(samples, rng)
    assert mixing.partners.shape == mixing.coefficients.shape == (samples, k)
    assert torch.equal(mixing.partners[:, 0], torch.arange(samples))
    assert all(len(set(row)) == k and max(row) < samples for row in mixing.partners.tolist())


def test_partners_are_uniform(rng: torch.Generator) -> None:
    drawn = torch.cat([MixUp(4).mixing(20, rng).partners for _ in range(500)])
    # Of each sample the 19 others, 3 a mixture: 1,500 draws, 79 of each on average.
    for own in (0, 7, 19):
        counts = drawn[drawn[:, 0] == own, 1:].flatten().bincount(minlength=20).double()
        assert int(counts[own]) == 0
        others = counts[torch.arange(20) != own]
        assert float((others - 1500 / 19).square().sum() / (1500 / 19)) < 42.3  # chi-squared, 18 degrees: 1 in 1,000
    # Where nearly all samples are mixed, every order of them is as likely.
    pairs = torch.cat([MixUp(2).mixing(3, rng).partners for _ in range(2000)])
    first = pairs[pairs[:, 0] == 0, 1]
    assert float((first == 1).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / 2000**0.5)


@pytest.mark.parametrize("defense", [MixUp(4), InstaHide(3), InstaHide(5, cross=some_data(9))], ids=repr)
def test_a_mixture_hangs_on_seed_and_sample_alone(defense: MixUp) -> None:
    """Whatever else is in the batch, and in whatever order: a client may also draw an epoch as a whole."""
    everyone = defense.mixing(50, torch.Generator().manual_seed(3))
    for own in ([3], [41, 3, 17], list(range(49, -1, -1))):
        some = defense.mixing(50, torch.Generator().manual_seed(3), torch.tensor(own))
        assert torch.equal(some.partners, everyone.partners[own])
        assert torch.equal(some.coefficients, everyone.coefficients[own])
    other = defense.mixing(50, torch.Generator().manual_seed(4))
    assert not torch.equal(other.partners, everyone.partners)


def test_a_batch_out_of_many_samples_draws_its_own_rows_alone() -> None:
    """A pool of 2^40 samples: whatever was drawn or held for each of them would not fit into memory."""
    own = torch.tensor([0, 5, 2**40 - 1])
    for defense in (MixUp(4), InstaHide(4)):
        mixing = defense.mixing(2**40, torch.Generator().manual_seed(0), own)
        assert mixing.partners[:, 0].tolist() == own.tolist()
        assert int(mixing.partners.max()) < 2**40


def test_coefficients_are_dirichlet_below_the_bound(rng: torch.Generator) -> None:
    drawn = MixUp(4).mixing(20_000, rng).coefficients
    torch.testing.assert_close(drawn.sum(1), torch.ones(20_000, dtype=torch.float64))
    assert float(drawn.max()) <= 0.65
    assert float(drawn.min()) >= 0
    free = MixUp(4, bound=1.0).mixing(20_000, rng).coefficients
    # Dirichlet(3, 1, 1, 1): means 1/2 and 1/6, variances 3 * 3 / (36 * 7) and 5 / (36 * 7).
    expected = torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6], dtype=torch.float64)
    torch.testing.assert_close(free.mean(0), expected, atol=5 * 0.2 / 20_000**0.5, rtol=0)
    variances = torch.tensor([9 / 252, 5 / 252, 5 / 252, 5 / 252], dtype=torch.float64)
    torch.testing.assert_close(free.var(0), variances, atol=0, rtol=0.1)
    # The bound cuts off, and does nothing else: what is below it is spread as before.
    below = free[free.amax(1) <= 0.65]
    torch.testing.assert_close(drawn.mean(0), below.mean(0), atol=0.01, rtol=0)


@pytest.mark.parametrize("soft", [False, True])
def test_the_gradient_is_that_of_the_mixtures(soft: bool) -> None:
    model, data, defense = small_net(), some_data(6, classes=3), MixUp(3)
    rows = nn.functional.one_hot(data.labels, 5).float()
    matrix = replayed(defense, 6, seed=7).float()
    mixed = fp.Batch((matrix @ data.inputs.flatten(1)).view_as(data.inputs), matrix @ rows)
    given = fp.Batch(data.inputs, rows) if soft else data
    # Labels are as wide as the model's outputs, also where the last classes do not occur.
    expected, found = sent(model, mixed, chain()), sent(model, given, defense, seed=7)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_instahide_is_mixup_with_fresh_signs() -> None:
    data = some_data(40)
    mixed, hidden = (
        defense.on_batch(data, Context(), torch.Generator().manual_seed(3)) for defense in (MixUp(4), InstaHide(4))
    )
    assert torch.equal(mixed.labels, hidden.labels)
    torch.testing.assert_close(mixed.inputs.abs(), hidden.inputs.abs())
    rng = torch.Generator().manual_seed(3)
    signs = [(InstaHide(4).on_batch(data, Context(), rng).inputs > 0) for _ in range(2)]
    flips = hidden.inputs.sign() != mixed.inputs.sign()
    assert float(flips.double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / flips.numel() ** 0.5)
    assert not torch.equal(*signs)


def test_inter_instahide_mixes_two_own_samples_with_public_ones(rng: torch.Generator) -> None:
    data, public = some_data(10), some_data(7, seed=5)
    defense = InstaHide(4, cross=public)
    mixing = defense.mixing(10, rng)
    assert bool((mixing.partners[:, :2] < 10).all())
    assert bool((mixing.partners[:, 2:] >= 10).all())
    assert int(mixing.partners.max()) < 17
    assert all(len(set(row)) == 4 for row in mixing.partners.tolist())
    many = defense.mixing(2000, rng).coefficients
    assert float(many[:, :2].sum(1).min()) >= 0.3
    assert float(many.max()) <= 0.65
    encoded = defense.on_batch(data, Context(model=small_net()), torch.Generator().manual_seed(2))
    matrix = replayed(defense, 10, seed=2, public=7).float()
    everything = torch.cat([data.inputs, public.inputs]).flatten(1)
    torch.testing.assert_close((matrix @ everything).abs(), encoded.inputs.flatten(1).abs())
    # Public labels play no part.
    own = matrix[:, :10] @ nn.functional.one_hot(data.labels, 5).float()
    torch.testing.assert_close(encoded.labels, own)
    assert float(encoded.labels.sum(1).max()) < 1
    assert "7 public samples" in repr(defense)


def test_mixtures_belong_to_sample_indices() -> None:
    """Also of a short last batch in a shuffled order: row r of a batch starts with the sample that indices[r] names."""
    data = some_data(10)
    for indices in ([7, 2, 9, 0], [5, 8], [3]):
        own = torch.tensor(indices)
        context = Context(batch=data, indices=own)
        found = MixUp(3).on_batch(data[own], context, torch.Generator().manual_seed(1))
        mixing = MixUp(3).mixing(10, torch.Generator().manual_seed(1), own)
        assert mixing.partners[:, 0].tolist() == indices
        matrix = torch.zeros(len(own), 10, dtype=torch.float64).scatter_(1, mixing.partners, mixing.coefficients)
        torch.testing.assert_close(found.inputs.flatten(1), matrix.float() @ data.inputs.flatten(1))


def test_every_step_mixes_anew_and_the_generator_alone_decides() -> None:
    model, data = small_net(), some_data(8)
    protocol = FedAvg(lr=0.1, epochs=2, batch_size=4)
    torch.manual_seed(1)
    first = sent(model, data, InstaHide(3), seed=4, protocol=protocol)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    again = sent(model, data, InstaHide(3), seed=4, protocol=protocol)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(before, torch.random.get_rng_state())
    rng = torch.Generator().manual_seed(0)
    one, other = (MixUp(3).on_batch(data, Context(), rng) for _ in range(2))
    assert not torch.equal(one.inputs, other.inputs)


def test_a_federation_runs_and_its_data_stays_as_it_was() -> None:
    data, model = some_data(8), small_net()
    before, state = copy.deepcopy(data), copy.deepcopy(model.state_dict())
    scenario = fp.Scenario(model=model, clients=[data], defense=chain(MixUp(4), Prune(0.5)), rounds=3, frozen=True)
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious)
    assert torch.equal(data.inputs, before.inputs)
    assert torch.equal(data.labels, before.labels)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(truth.inputs[: len(data)], data.inputs)
    # The model stands still, but every round is another mixture.
    weights = [next(iter(seen.update.values())) for seen in observation.rounds]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_batch_norm_buffers_and_modes_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 5)).train()
    before = copy.deepcopy(model.state_dict())
    data, global_state = some_data(6), torch.random.get_rng_state()
    mixed = MixUp(2).on_batch(data, Context(model=model), torch.Generator().manual_seed(0))
    assert mixed.labels.shape == (6, 5)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    assert torch.equal(global_state, torch.random.get_rng_state())


def test_order_in_a_chain() -> None:
    model, data = small_net(), some_data(6)
    mixed = sent(model, data, MixUp(3), seed=5)
    pruned = {name: Prune(0.5).on_update({name: t}, Context(), torch.Generator())[name] for name, t in mixed.items()}
    # They act at different stages: the update is pruned after the batch is mixed, whichever is named first.
    for defense in (chain(MixUp(3), Prune(0.5)), chain(Prune(0.5), MixUp(3))):
        found = sent(model, data, defense, seed=5)
        assert all(torch.equal(found[name], pruned[name]) for name in pruned)


def test_what_an_attacker_can_repeat() -> None:
    assert MixUp(4).deterministic() == chain()
    assert chain(InstaHide(4), Prune(0.9)).deterministic() == Prune(0.9)


def test_captures_carry_the_settings_but_no_data(tmp_path: Path) -> None:
    defense = chain(InstaHide(3, bound=0.7), MixUp(2))
    scenario = fp.Scenario(model=small_net(), clients=[some_data(4)], defense=defense)
    threat = fp.threats.honest_but_curious.granting("defense")
    loaded = fp.captures.load(fp.captures.save(fp.simulate(scenario, threat)[0], tmp_path / "capture"))
    assert loaded.knowledge.defense == defense
    public = fp.Scenario(model=small_net(), clients=[some_data(4)], defense=InstaHide(4, cross=some_data(5)))
    with pytest.raises(fp.errors.BadInput, match="Withhold"):
        fp.captures.save(fp.simulate(public, threat)[0], tmp_path / "other")


@pytest.mark.parametrize("kind", [MixUp, InstaHide])
def test_too_little_to_mix_is_refused(kind: type[MixUp]) -> None:
    scenario = fp.Scenario(model=small_net(), clients=[some_data(3)], defense=kind(4))
    with pytest.raises(fp.errors.BadInput, match=r"^3 samples are fewer than k = 4 to mix\. .*[.]$"):
        fp.simulate(scenario, fp.threats.honest_but_curious)


@pytest.mark.parametrize(("own", "public"), [(5, 1), (1, 5)])
def test_too_little_public_or_own_data_is_refused(own: int, public: int) -> None:
    with pytest.raises(fp.errors.BadInput, match=f"2 = 2 public samples, but there are {own} and {public}"):
        InstaHide(4, cross=some_data(public)).mixing(own, torch.Generator())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"k": 1}, "'s k must be"),
        ({"k": 2.0}, "'s k must be"),
        ({"k": 1000}, "'s k must be"),
        ({"k": 4, "bound": 0.25}, "'s bound must be above 1 / k"),
        ({"k": 4, "bound": 1.5}, "'s bound must be above 1 / k"),
        ({"k": 4, "bound": "a"}, "'s bound must be above 1 / k"),
    ],
)
@pytest.mark.parametrize("kind", [MixUp, InstaHide])
def test_bad_strengths_are_refused(kind: type[MixUp], settings: dict[str, float], words: str) -> None:
    with pytest.raises(fp.errors.BadInput, match=f"^{kind.__name__}{words}.*, not .*[.]$"):
        kind(**settings)  # type: ignore[arg-type]


def test_a_bound_that_is_never_met_is_refused_and_so_is_other_public_data() -> None:
    with pytest.raises(fp.errors.BadInput, match="Raise it"):
        MixUp(32, bound=0.032).mixing(40, torch.Generator())
    with pytest.raises(fp.errors.BadInput, match="cross must be a Batch"):
        InstaHide(4, cross="inter")  # type: ignore[arg-type]
    data, other = some_data(4), fp.Batch(torch.rand(4, 2, 2), torch.arange(4))
    with pytest.raises(fp.errors.BadInput, match=r"public samples have shape \(2, 2\), the client's"):
        InstaHide(4, cross=other).on_batch(data, Context(batch=data), torch.Generator())
