"""MseLoss: the client's gradient is that of the squared error, in the simulator and in an attacker's forward model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedprism as fp
from fedprism import losses
from fedprism.attacks.gradient_matching.forward import forward_model
from fedprism.defenses import MseLoss
from fedprism.errors import BadInput
from fedprism.solvers.closed_form.dense import absent_class, invert_dense


def signals(outputs: Tensor, labels: Tensor, softmax: bool) -> Tensor:
    """dL/do by hand: 2 (o - y) / C, and for the softmax p_j (g_j - sum_k g_k p_k) with g = 2 (p - y) / C."""
    targets = F.one_hot(labels, outputs.shape[1]).to(outputs)
    if not softmax:
        return 2 * (outputs - targets) / outputs.numel()
    p = outputs.softmax(1)
    g = 2 * (p - targets) / outputs.numel()
    return p * (g - (g * p).sum(1, keepdim=True))


@pytest.fixture
def scenario(digits: fp.data.ImageSet) -> fp.Scenario:
    model = fp.models.build("dense", input_shape=(1, 16, 16), classes=10, seed=0)
    return fp.Scenario(model=model, clients=[digits.batch(range(5))])


@pytest.mark.parametrize("softmax", [True, False])
def test_the_gradient_is_that_of_the_squared_error(scenario: fp.Scenario, softmax: bool) -> None:
    defended = dataclasses.replace(scenario, defense=MseLoss(softmax=softmax))
    seen, truth = fp.simulate(defended, fp.threats.eavesdropper)
    with torch.no_grad():
        by_hand = signals(scenario.model(truth.inputs), truth.labels, softmax)
    torch.testing.assert_close(seen.rounds[0].update["1.bias"], by_hand.sum(0))
    torch.testing.assert_close(seen.rounds[0].update["1.weight"], by_hand.T @ truth.inputs.flatten(1))


@pytest.mark.parametrize(("softmax", "name"), [(True, "softmax_mse"), (False, "mse")])
def test_defending_is_the_same_as_agreeing_on_the_loss(scenario: fp.Scenario, softmax: bool, name: str) -> None:
    defended = dataclasses.replace(scenario, defense=MseLoss(softmax=softmax))
    agreed = dataclasses.replace(scenario, loss=name)
    updates = [fp.simulate(s, fp.threats.eavesdropper)[0].rounds[0].update for s in (defended, agreed)]
    assert all(torch.equal(updates[0][key], updates[1][key]) for key in updates[0])


def test_works_for_many_clients_at_once(scenario: fp.Scenario, digits: fp.data.ImageSet) -> None:
    """Each of three clients sends what it would send alone."""
    clients = [digits.batch(range(start, start + 4)) for start in (0, 4, 8)]
    together = dataclasses.replace(scenario, clients=clients, defense=MseLoss(softmax=False))
    seen = [round_.update for round_ in fp.simulate(together, fp.threats.eavesdropper)[0].rounds]
    for client, update in zip(clients, seen, strict=True):
        alone = dataclasses.replace(together, clients=[client])
        expected = fp.simulate(alone, fp.threats.eavesdropper)[0].rounds[0].update
        for key in expected:
            torch.testing.assert_close(update[key], expected[key])


@pytest.mark.parametrize("classes", [3, 10])
def test_labels_become_rows_of_ones_and_zeros(classes: int) -> None:
    labels, like = torch.tensor([2, 0, 1]), torch.zeros(3, classes, dtype=torch.float64)
    rows = losses.one_hot(labels, like)
    assert rows.dtype == torch.float64
    assert torch.equal(rows, F.one_hot(labels, classes).double())


def test_works_on_single_examples(scenario: fp.Scenario) -> None:
    """Clipping that clips nothing leaves the mean over the examples."""
    one_by_one = fp.chain(MseLoss(softmax=False), fp.defenses.DpSgd(0.0, clip=1e6))
    updates = [
        fp.simulate(dataclasses.replace(scenario, defense=defense), fp.threats.eavesdropper)[0].rounds[0].update
        for defense in (one_by_one, MseLoss(softmax=False))
    ]
    for key in updates[0]:
        torch.testing.assert_close(updates[0][key], updates[1][key])


def test_an_adaptive_attacker_repeats_it(scenario: fp.Scenario) -> None:
    """Only who trains with the same loss can explain the update."""
    threat = fp.threats.honest_but_curious.granting("labels", "defense")
    seen, truth = fp.simulate(dataclasses.replace(scenario, defense=MseLoss(softmax=False)), threat)
    forward = forward_model(seen, seen.rounds[0])
    again = forward(truth.inputs, truth.labels, create_graph=False)
    for ours, theirs in zip(again, forward.target, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_softmax_and_squared_error_still_tell_samples_apart_where_classes_are_many(photos: fp.data.ImageSet) -> None:
    """Against the paper's reading of it: with 500 classes only the raw squared error mixes four samples."""
    batch = photos.draw(4, torch.Generator().manual_seed(0), unique_labels=True)
    model = fp.models.build("dense", input_shape=(3, 32, 32), classes=500, seed=0)
    worst = {}
    for softmax in (True, False):
        scenario = fp.Scenario(model=model, clients=[batch], defense=MseLoss(softmax=softmax))
        update = fp.simulate(scenario, fp.threats.eavesdropper)[0].rounds[0].update
        weight_grad, bias_grad = update["1.weight"], update["1.bias"]
        found = invert_dense(weight_grad, bias_grad, reference=absent_class(bias_grad, batch.labels), floor=0.0)
        rows = {int(row): estimate for row, estimate in zip(found.rows, found.inputs, strict=True)}
        estimates = torch.stack([rows[int(label)] for label in batch.labels]).view_as(batch.inputs).float()
        worst[softmax] = float(fp.metrics.psnr(estimates.clamp(0, 1), batch.inputs).min())
    assert worst[True] > 30
    assert worst[False] < 25


def test_names_and_refusals() -> None:
    assert MseLoss().on_loss(losses.cross_entropy) is losses.softmax_mse
    assert MseLoss(softmax=False).on_loss(losses.cross_entropy) is losses.mse
    with pytest.raises(BadInput, match="MseLoss's softmax must be True or False, not 'no'"):
        MseLoss("no")  # type: ignore[arg-type]
