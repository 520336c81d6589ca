"""Soteria against a slow loop, sign compression and exact pruning: what is left out of an update."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.client.update import FedSGD, local_update
from fedprism.defenses import Context, Defense, Prune, SignCompression, Soteria, chain
from fedprism.defenses.pruning import prune
from fedprism.defenses.soteria import FLOOR, feature_scores
from fedprism.losses import cross_entropy
from fedprism.types import Update

NETS = {
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 3)),
    "pooled": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 3)
    ),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
}


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name]().double()


def some_batch() -> fp.Batch:
    rng = torch.Generator().manual_seed(1)
    return fp.Batch(torch.rand(4, 1, 8, 8, generator=rng, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))


def sent(model: nn.Module, batch: fp.Batch, defense: Defense) -> Update:
    return local_update(
        model,
        dict(model.named_parameters()),
        batch,
        loss=cross_entropy,
        protocol=FedSGD(),
        rng=torch.Generator().manual_seed(0),
        defense=defense,
    ).update


def scores_one_by_one(model: nn.Module, batch: fp.Batch) -> Tensor:
    """As published: the length of each feature's derivative by each sample, over its magnitude."""
    frozen = copy.deepcopy(model)
    before = nn.Sequential(*list(frozen.children())[:-1])
    inputs = batch.inputs.clone().requires_grad_()
    features = before(inputs)
    scores = []
    for number in range(features.shape[1]):
        (slope,) = torch.autograd.grad(features[:, number].sum(), inputs, retain_graph=True)
        scores.append((slope.flatten(1).norm(dim=1) / (features[:, number].abs() + FLOOR)).sum())
    return torch.stack(scores).detach()


@pytest.mark.parametrize("name", NETS)
def test_scores_are_those_of_a_loop_over_features(name: str) -> None:
    model, batch = net(name), some_batch()
    state, global_state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    layer, found = feature_scores(model, None, batch)
    assert layer == f"{len(list(model.children())) - 1}.weight"
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert torch.equal(global_state, torch.random.get_rng_state())
    torch.testing.assert_close(found, scores_one_by_one(model, batch))


def test_a_layer_fed_by_the_input_itself() -> None:
    model = nn.Linear(5, 3).double()
    data = fp.Batch(torch.rand(2, 5, dtype=torch.float64), torch.tensor([0, 1]))
    layer, scores = feature_scores(model, None, data)
    assert layer == "weight"
    torch.testing.assert_close(scores, (1 / (data.inputs + FLOOR)).sum(0))


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.8])
def test_the_columns_with_the_smallest_scores_go_and_nothing_else(ratio: float) -> None:
    model, batch = net("dense"), some_batch()
    plain, found = sent(model, batch, chain()), sent(model, batch, Soteria(ratio))
    removed = (found["3.weight"] == 0).all(0)
    assert int(removed.sum()) == int(ratio * 20)
    assert torch.equal(found["3.weight"][:, ~removed], plain["3.weight"][:, ~removed])
    assert all(torch.equal(found[name], plain[name]) for name in plain if name != "3.weight")
    scores = scores_one_by_one(model, batch)
    if ratio > 0:
        assert float(scores[removed].max()) <= float(scores[~removed].min())


def test_equal_scores_go_from_the_first_on() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 3)).double()
    nn.init.constant_(model[1].weight, 0.125)  # type: ignore[arg-type]
    nn.init.zeros_(model[1].bias)  # type: ignore[arg-type]
    # Powers of two and one sample: equal to the last digit, in whatever order a CPU adds up.
    batch = some_batch()[:1]
    batch = fp.Batch((8 * batch.inputs).round() / 8, batch.labels)
    found = sent(model, batch, Soteria(0.4))["2.weight"]
    assert (found == 0).all(0).tolist() == [True] * 4 + [False] * 6


def test_an_attacker_repeats_the_zeros_it_sees() -> None:
    model, batch = net("dense"), some_batch()
    observed = sent(model, batch, Soteria(0.5))
    repeated = sent(model, batch, Soteria(0.5).deterministic(observed))
    assert all(torch.equal(observed[name], repeated[name]) for name in observed)
    assert Soteria(0.5).deterministic() == Soteria(0.5)


def test_the_features_that_are_left_out_cannot_be_read_off_the_layer() -> None:
    batch = some_batch()[:1]
    model = net("linear")
    truth = batch.inputs.flatten()
    found = sent(model, batch, Soteria(0.5))
    row = found["1.weight"][0] / found["1.bias"][0]
    hidden = row == 0
    torch.testing.assert_close(row[~hidden], truth[~hidden])
    assert int(hidden.sum()) == 32
    # Those go that are large for their slope, here all 1: the brightest pixels.
    assert float(truth[hidden].min()) >= float(truth[~hidden].max())


def test_where_it_does_not_apply_it_says_so() -> None:
    convolution = nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten())
    scenario = fp.Scenario(
        model=convolution, clients=[fp.Batch(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))], defense=Soteria(0.5)
    )
    with pytest.raises(fp.NotApplicable, match=r"Soteria needs a network that ends in a dense layer"):
        fp.simulate(scenario, fp.threats.eavesdropper, device="cpu")
    with pytest.raises(fp.NotApplicable, match=r"Soteria needs the model and the client's data"):
        Soteria(0.5).on_update({"w": torch.ones(2)}, Context(), torch.Generator())
    frozen = net("dense").float()
    frozen[3].weight.requires_grad_(False)  # type: ignore[index]
    with pytest.raises(fp.NotApplicable, match=r"'3.weight' in the update, but it is frozen"):
        fp.simulate(
            fp.Scenario(model=frozen, clients=scenario.clients, defense=Soteria(0.5)),
            fp.threats.eavesdropper,
            device="cpu",
        )


@pytest.mark.parametrize("ratio", [1.0, -0.1, float("nan"), "half", True])
def test_bad_ratios_are_refused(ratio: float) -> None:
    with pytest.raises(fp.errors.BadInput, match=r"^Soteria's ratio must be .*, not .*[.]$"):
        Soteria(ratio)


# --- sign compression -------------------------------------------------------------------------------------------------


def compressed(defense: Defense, tensor: Tensor) -> Tensor:
    return defense.on_update({"w": tensor}, Context(), torch.Generator())["w"]


def test_signs_times_the_mean_magnitude() -> None:
    found = compressed(SignCompression(), torch.tensor([[3.0, -1.0], [0.0, 2.0]]))
    assert found.tolist() == [[2.0, -2.0], [0.0, 2.0]]
    assert compressed(SignCompression(), torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    counter = torch.tensor(7)
    assert compressed(SignCompression(), counter) is counter


def test_order_matters_behind_pruning_it_sends_the_large_entries_signs() -> None:
    tensor = torch.tensor([5.0, -0.1, 0.2, -3.0])
    assert compressed(chain(Prune(0.5), SignCompression()), tensor).tolist() == [4.0, 0.0, 0.0, -4.0]
    mean = float(tensor.abs().mean())
    # All entries are equal by then: pruning keeps the first ones, not the large ones.
    found = compressed(chain(SignCompression(), Prune(0.5)), tensor)
    assert found.tolist() == pytest.approx([mean, -mean, 0.0, 0.0])


# --- pruning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 0.99])
def test_exactly_the_stated_share_goes_also_on_ties(ratio: float) -> None:
    rng = torch.Generator().manual_seed(0)
    tensor = torch.randint(1, 4, (10, 10), generator=rng) * (2.0 * torch.randint(2, (10, 10), generator=rng) - 1)
    kept = prune(tensor, ratio)
    assert int((kept == 0).sum()) == int(ratio * 100)
    assert float(tensor[kept == 0].abs().max()) <= float(kept[kept != 0].abs().min())
    assert int((prune(torch.ones(100), ratio) == 0).sum()) == int(ratio * 100)


def test_ties_are_exact_beyond_the_limit_of_quantiles() -> None:
    tensor = torch.ones(2**24 + 8)
    tensor[-5:] = 2.0
    kept = prune(tensor, 0.75)
    assert int((kept == 0).sum()) == int(0.75 * len(tensor))
    assert bool((kept[-5:] == 2).all())
    assert bool((kept[: len(tensor) // 4 - 5] == 1).all())


def test_any_dense_layer_may_be_named() -> None:
    model, batch = net("dense"), some_batch()
    plain, found = sent(model, batch, chain()), sent(model, batch, Soteria(0.5, layer="1"))
    removed = (found["1.weight"] == 0).all(0)
    assert int(removed.sum()) == 32
    assert torch.equal(found["1.weight"][:, ~removed], plain["1.weight"][:, ~removed])
    assert all(torch.equal(found[name], plain[name]) for name in plain if name != "1.weight")
    pixels = batch.inputs.flatten(1)
    assert bool(removed[(1 / (pixels.abs() + FLOOR)).sum(0).argsort(stable=True)[:32]].all())
    with pytest.raises(fp.NotApplicable, match="the dense layer 1 or 3, not '2'"):
        sent(model, batch, Soteria(0.5, layer="2"))
