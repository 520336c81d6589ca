"""The client's forward model against torch's own optimiser and autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fedprism as fp
from fedprism.client.update import FedAvg, FedSGD, local_update
from fedprism.defenses import Context, Defense
from fedprism.losses import cross_entropy, mse, softmax_mse
from fedprism.types import Update


def small_net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.BatchNorm2d(4)] if norm else []
    convolution = nn.Conv2d(1, 4, 3)
    nn.init.constant_(convolution.bias, 0.5)  # type: ignore[arg-type]  # so that some of it passes the ReLU
    return nn.Sequential(convolution, *middle, nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).double()


def some_batch(size: int = 6) -> fp.Batch:
    rng = torch.Generator().manual_seed(1)
    inputs = torch.rand(size, 1, 8, 8, generator=rng, dtype=torch.float64)
    return fp.Batch(inputs, torch.randint(5, (size,), generator=rng))


def run_local(model: nn.Module, batch: fp.Batch, protocol: FedSGD | FedAvg, **options: object) -> Update:
    rng = torch.Generator().manual_seed(2)
    params = dict(model.named_parameters())
    return local_update(model, params, batch, loss=cross_entropy, protocol=protocol, rng=rng, **options).update  # type: ignore[arg-type]


def test_fedsgd_is_the_gradient() -> None:
    model, batch = small_net(), some_batch()
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    update = run_local(model, batch, FedSGD())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(update[name], parameter.grad)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batch_size", [None, 2, 4])
def test_fedavg_is_torch_sgd(momentum: float, batch_size: int | None) -> None:
    model, batch = small_net(), some_batch()
    update = run_local(model, batch, FedAvg(lr=0.1, epochs=3, batch_size=batch_size, momentum=momentum, shuffle=False))
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=momentum)
    for _ in range(3):
        for indices in torch.arange(6).split(batch_size or 6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(batch.inputs[indices]), batch.labels[indices]).backward()
            optimizer.step()
    for (name, before), after in zip(model.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(update[name], (after - before).detach())


def test_shuffling_follows_the_generator() -> None:
    model, batch = small_net(), some_batch()
    protocol = FedAvg(lr=0.5, epochs=2, batch_size=2)

    def weights(seed: int) -> torch.Tensor:
        rng = torch.Generator().manual_seed(seed)
        params = dict(model.named_parameters())
        return local_update(model, params, batch, loss=cross_entropy, protocol=protocol, rng=rng).update["3.weight"]

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(lr=0.1, epochs=2, batch_size=2, momentum=0.5, shuffle=False)])
def test_is_differentiable_in_inputs_and_soft_labels(protocol: FedSGD | FedAvg) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    rng = torch.Generator().manual_seed(3)
    inputs = torch.rand(4, 4, generator=rng, dtype=torch.float64, requires_grad=True)
    soft = torch.rand(4, 2, generator=rng, dtype=torch.float64, requires_grad=True)

    def flat_update(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        update = run_local(model, fp.Batch(x, torch.softmax(y, 1)), protocol, create_graph=True)
        return torch.cat([tensor.flatten() for tensor in update.values()])

    assert torch.autograd.gradcheck(flat_update, (inputs, soft))


def test_buffers_move_but_the_model_does_not() -> None:
    model, batch = small_net(norm=True).train(), some_batch()
    before = copy.deepcopy(model.state_dict())
    answer = local_update(
        model,
        dict(model.named_parameters()),
        batch,
        loss=cross_entropy,
        protocol=FedSGD(),
        rng=torch.Generator(),
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    reference = copy.deepcopy(model)
    reference(batch.inputs)
    for name, buffer in reference.named_buffers():
        assert torch.equal(answer.buffers[name], buffer)
        assert not torch.equal(answer.buffers[name], before[name])


def test_per_example_gradients_average_to_the_batch_gradient() -> None:
    class Watch(Defense):
        def on_examples(self, grads: Update, context: Context, rng: torch.Generator) -> Update:
            assert all(len(g) == 6 for g in grads.values())
            return grads

    model, batch = small_net(), some_batch()
    watched, plain = run_local(model, batch, FedSGD(), defense=Watch()), run_local(model, batch, FedSGD())
    for name in plain:
        torch.testing.assert_close(watched[name], plain[name])


def test_stages_run_in_order_and_see_their_context() -> None:
    seen: list[tuple[str, int | None]] = []

    class Log(Defense):
        def on_batch(self, batch: fp.Batch, context: Context, rng: torch.Generator) -> fp.Batch:
            assert context.indices is not None
            assert len(context.indices) == len(batch)
            seen.append(("batch", context.step))
            return batch

        def on_loss(self, loss: fp.types.LossFn) -> fp.types.LossFn:
            seen.append(("loss", None))
            return loss

        def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
            seen.append(("update", context.step))
            return update

    run_local(small_net(), some_batch(), FedAvg(epochs=2, batch_size=3), defense=Log())
    assert seen == [("loss", None), *(("batch", step) for step in range(4)), ("update", None)]


def test_unused_parameters_get_zero() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 5).double(), nn.Linear(2, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x.flatten(1))

    assert not run_local(Partly(), some_batch(), FedSGD())["idle.weight"].any()


HEAD = ("3.weight", "3.bias")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_frozen_parameters_are_used_and_neither_trained_nor_sent(momentum: float) -> None:
    model, batch = small_net(), some_batch()
    protocol = FedAvg(lr=0.1, epochs=3, batch_size=2, momentum=momentum, shuffle=False)
    update = run_local(model, batch, protocol, trained=HEAD)
    assert tuple(update) == HEAD
    head = copy.deepcopy(model[3:])
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=momentum)
    with torch.no_grad():
        features = model[:3](batch.inputs)
    for indices in torch.arange(6).split(2) * 3:
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(features[indices]), batch.labels[indices]).backward()
        optimizer.step()
    for name, before, after in zip(HEAD, model[3:].parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(update[name], (after - before).detach())


def test_frozen_parameters_are_the_ones_handed_in_not_the_models() -> None:
    model, batch = small_net(), some_batch()
    elsewhere = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    answer = local_update(
        model, elsewhere, batch, loss=cross_entropy, protocol=FedSGD(), rng=torch.Generator(), trained=HEAD
    )
    assert not answer.update["3.weight"].any()  # the features of zero convolutions are zero
    assert answer.update["3.bias"].any()


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(lr=0.1, epochs=2, batch_size=3, shuffle=False)])
def test_defenses_see_all_parameters_and_only_trained_gradients(protocol: FedSGD | FedAvg) -> None:
    class Watch(Defense):
        def on_batch(self, batch: fp.Batch, context: Context, rng: torch.Generator) -> fp.Batch:
            assert context.params is not None
            assert set(context.params) == {"0.weight", "0.bias", *HEAD}
            return batch

        def on_examples(self, grads: Update, context: Context, rng: torch.Generator) -> Update:
            assert tuple(grads) == HEAD
            return grads

        def on_update(self, update: Update, context: Context, rng: torch.Generator) -> Update:
            assert tuple(update) == HEAD
            return update

    model, batch = small_net(), some_batch()
    watched = run_local(model, batch, protocol, defense=Watch(), trained=HEAD)
    plain = run_local(model, batch, protocol, trained=HEAD)
    for name in HEAD:
        torch.testing.assert_close(watched[name], plain[name])


def test_a_client_that_trains_nothing_is_refused() -> None:
    with pytest.raises(fp.errors.BadInput, match=r"all are frozen\. Unfreeze"):
        run_local(small_net(), some_batch(), FedSGD(), trained=())


@pytest.mark.parametrize("wrong", [{"lr": 0}, {"epochs": 0}, {"batch_size": 0}, {"momentum": 1.0}])
def test_bad_protocols_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(fp.errors.BadInput, match=r"momentum|lr must"):
        FedAvg(**wrong)  # type: ignore[arg-type]


def test_losses_agree_with_torch_and_take_soft_labels() -> None:
    outputs = functional_call(small_net(), {}, (some_batch().inputs,))
    labels = some_batch().labels
    hot = nn.functional.one_hot(labels, 5).double()
    for loss in (cross_entropy, mse, softmax_mse):
        torch.testing.assert_close(loss(outputs, labels), loss(outputs, hot))
    torch.testing.assert_close(mse(outputs, labels), ((outputs - hot) ** 2).mean())
    torch.testing.assert_close(softmax_mse(outputs, labels), ((outputs.softmax(1) - hot) ** 2).mean())
