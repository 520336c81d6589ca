"""From a scenario to what an attacker sees and, on the other side of the wall, the truth."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from typing import Protocol as Interface

import torch
from torch import Tensor, nn

from fedprism import devices, losses
from fedprism.client import FedAvg, FedSGD, Protocol, local_update
from fedprism.defenses.base import Chain, Context, Defense
from fedprism.errors import BadInput
from fedprism.randomness import generator, seeded_layers
from fedprism.threats import ThreatModel
from fedprism.truth import Truth
from fedprism.types import Batch, Knowledge, LossFn, Observation, Reduction, Round, Update, detached, is_soft


class Tamperer(Interface):
    """A malicious server's method: it chooses the parameters and keeps a trapdoor to read the answer with."""

    def tamper(
        self, model: nn.Module, params: Update, rng: torch.Generator
    ) -> tuple[Update, dict[str, Tensor] | None]: ...


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A federation: the model, each client's data, and how they train together.

    Inputs are what the model is fed; `normalization` (mean, std per channel) says how pixels in `bounds` became inputs.
    Clients train in train mode unless `training` is False. Parameters that do not require gradients are frozen: neither
    trained nor sent. `public_data` is data of the same kind that belongs to no client, for threat models that grant it.
    """

    model: nn.Module
    clients: Sequence[Batch]
    protocol: Protocol = field(default_factory=FedSGD)
    defense: Defense = field(default_factory=Chain)
    loss: str | LossFn = "cross_entropy"
    rounds: int = 1
    aggregation: Reduction = "mean"
    training: bool = True
    public_data: Batch | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def __post_init__(self) -> None:
        if not self.clients or self.rounds < 1:
            raise BadInput(
                f"expected at least one client and one round, found {len(self.clients)} clients and "
                f"{self.rounds} rounds; give Scenario(clients=[Batch(inputs, labels)])."
            )
        for number, data in enumerate(self.clients):
            _check_batch(data, number)


def simulate(
    scenario: Scenario,
    threat: ThreatModel,
    *,
    seed: int = 0,
    server: Tamperer | None = None,
    device: str | torch.device | None = None,
) -> tuple[Observation, Truth]:
    """Run the federation; return what `threat` sees and knows, and the truth, both on the CPU.

    `server` chooses the parameters when the threat model tampers. The scenario's model is left as it was. Clients train
    on `device`, or the best one there is.
    """
    if server is not None and not threat.tampers:
        raise BadInput(
            f"expected a threat model that tampers when a server method is given, found {threat.name}; "
            "use threats.malicious_server."
        )
    if threat.participates and len(scenario.clients) < 2:
        raise BadInput(f"expected a second client for {threat.name} to attack, found one client; add clients.")
    model = copy.deepcopy(scenario.model).cpu().train(scenario.training)
    model.zero_grad(set_to_none=True)  # a gradient left over from the user's own training is not for attackers
    for number, data in enumerate(scenario.clients):
        _check_fits(model, data, number)
    place = devices.pick(device)
    trainer = copy.deepcopy(model).to(place) if place.type != "cpu" else model
    params: Update = detached(dict(model.named_parameters()))
    buffers: Update = detached(dict(model.named_buffers()))
    trapdoor = None
    if server is not None:
        params, trapdoor = server.tamper(model, params, generator(seed, "tamper"))
    names = tuple(f"client-{number}" for number in range(len(scenario.clients)))

    rounds: list[Round] = []
    drawn: list[tuple[str, Batch]] = []
    for index in range(scenario.rounds):
        answers = [
            _client_round(scenario, trainer, params, buffers, name, dataset, index, seed)
            for name, dataset in zip(names, scenario.clients, strict=True)
        ]
        context = Context(model=model, params=params, round=index)
        updates = scenario.defense.on_aggregate(
            [answer.update for answer in answers], context, generator(seed, "aggregate", index)
        )
        answers = [answer._replace(update=update) for answer, update in zip(answers, updates, strict=True)]
        after = _step(params, answers, scenario)
        sent = Round(index=index, params=params, update={}, buffers_before=buffers or None)
        rounds.extend(_seen(scenario, threat, sent, answers, after))
        drawn.extend((answer.name, answer.batch) for answer in answers)
        params = after

    observation = Observation(
        model=model if "model" in threat.grants else None,
        rounds=tuple(rounds),
        knowledge=_everything(scenario, threat, drawn).restricted_to(threat.grants),
        trapdoor=trapdoor if "trapdoor" in threat.grants else None,
        subject=names[0] if threat.sees == "client" and len(names) == 1 else None,
        source=f"simulated for {threat.name}, seed {seed}",
    )
    attacked = [(name, batch) for name, batch in drawn if not (threat.participates and name == names[0])]
    truth = Truth(
        inputs=torch.cat([batch.inputs for _, batch in attacked]).detach().clone(),
        labels=torch.cat([batch.labels for _, batch in attacked]).detach().clone(),
        owners=tuple(name for name, batch in attacked for _ in range(len(batch))),
        bounds=scenario.bounds,
        normalization=scenario.normalization,
    )
    return observation, truth


class _Answer(NamedTuple):
    name: str
    batch: Batch
    """The samples the client trained on."""
    update: Update


def _client_round(
    scenario: Scenario,
    model: nn.Module,
    params: Update,
    buffers: Update,
    name: str,
    dataset: Batch,
    index: int,
    seed: int,
) -> _Answer:
    """One client's answer in one round. Clients do not share random numbers."""
    rng = generator(seed, "client", name, "round", index)
    context = Context(model=model, params=params, client=name, round=index)
    batch = dataset[scenario.defense.on_draw(dataset, context, rng)]
    place = next(iter(model.parameters())).device
    with seeded_layers(rng):
        update, _ = local_update(
            model,
            _on(params, place),
            Batch(batch.inputs.to(place), batch.labels.to(place)),
            loss=losses.resolve(scenario.loss),
            protocol=scenario.protocol,
            rng=rng,
            defense=scenario.defense,
            buffers=_on(buffers, place),
            context=context,
            trained=[name for name, p in model.named_parameters() if p.requires_grad],
        )
    return _Answer(name, batch, _on(update, torch.device("cpu")))


def _on(update: Update, device: torch.device) -> Update:
    return {name: tensor.to(device) for name, tensor in update.items()}


def _seen(
    scenario: Scenario, threat: ThreatModel, sent: Round, answers: Sequence[_Answer], after: Update
) -> list[Round]:
    """The round as the threat model sees it: client by client, the sum, or the movement of the global model."""
    kind = scenario.protocol.kind
    if threat.sees == "client":
        return [replace(sent, update=answer.update, kind=kind, participants=(answer.name,)) for answer in answers]
    if threat.participates:
        delta = {name: after[name] - sent.params[name] for name in answers[0].update}
        return [replace(sent, update=delta, kind="delta", clients=len(answers))]
    return [
        replace(
            sent,
            update=_aggregate(answers, scenario.aggregation),
            kind=kind,
            reduction=scenario.aggregation,
            clients=len(answers),
            participants=tuple(answer.name for answer in answers) if "participation" in threat.grants else None,
            examples=tuple(len(answer.batch) for answer in answers) if "examples" in threat.grants else None,
        )
    ]


def _aggregate(answers: Sequence[_Answer], reduction: Reduction) -> Update:
    sizes = [len(answer.batch) for answer in answers]
    weights = {
        "sum": [1.0] * len(answers),
        "mean": [1.0 / len(answers)] * len(answers),
        "weighted_mean": [size / sum(sizes) for size in sizes],
    }[reduction]
    return {
        name: torch.stack([w * answer.update[name] for w, answer in zip(weights, answers, strict=True)]).sum(0)
        for name in answers[0].update
    }


def _step(params: Update, answers: Sequence[_Answer], scenario: Scenario) -> Update:
    """The next global model. Secure sums are divided by the number of clients before the step."""
    moved = _aggregate(answers, "weighted_mean" if scenario.aggregation == "weighted_mean" else "mean")
    factor = 1.0 if scenario.protocol.kind == "delta" else -scenario.protocol.lr
    return {name: p + factor * moved[name] if name in moved else p for name, p in params.items()}


def _everything(scenario: Scenario, threat: ThreatModel, drawn: list[tuple[str, Batch]]) -> Knowledge:
    """All there is to know about the scenario; the threat model then hands out its part."""
    protocol = scenario.protocol
    local = protocol if isinstance(protocol, FedAvg) else FedAvg(lr=protocol.lr)
    sizes = tuple(len(batch) for _, batch in drawn)
    one_by_one = threat.sees == "client" and len(drawn) > 1
    # Whoever sees an aggregate faces the union of the cohort's batches; with a single client that is its batch.
    cohort = sum(sizes[: len(scenario.clients)])
    batch_size = sizes if one_by_one else cohort
    labels = tuple(batch.labels for _, batch in drawn)
    return Knowledge(
        input_shape=tuple(scenario.clients[0].inputs.shape[1:]),
        bounds=scenario.bounds,
        normalization=scenario.normalization,
        batch_size=batch_size,
        examples=sizes,
        labels=labels if one_by_one else torch.cat(labels[: len(scenario.clients)]),
        loss=losses.name_of(scenario.loss) or scenario.loss,
        local_lr=local.lr,
        local_epochs=local.epochs,
        local_batch_size=local.batch_size or max(sizes),
        local_momentum=local.momentum,
        public_data=scenario.clients[0] if threat.participates else scenario.public_data,
        participation=torch.ones(scenario.rounds, len(scenario.clients), dtype=torch.bool),
        cohort_sizes=torch.full((scenario.rounds,), len(scenario.clients)),
        defense=scenario.defense,
    )


def _check_fits(model: nn.Module, data: Batch, number: int) -> None:
    """One sample through the network: its input must be accepted and every label must be one of the classes."""
    training = model.training
    try:
        with torch.no_grad():
            outputs = model.eval()(data.inputs[:1].cpu())
    except RuntimeError as error:
        raise BadInput(
            f"expected a model that accepts inputs of shape {tuple(data.inputs.shape[1:])} and type "
            f"{data.inputs.dtype}, as client {number} holds, found that it does not ({str(error).splitlines()[0]}); "
            "change the model or the data."
        ) from error
    finally:
        model.train(training)
    classes = outputs.shape[-1]
    width = data.labels.shape[-1] if is_soft(data.labels) else int(data.labels.max()) + 1
    if outputs.dim() != 2 or width > classes or (not is_soft(data.labels) and int(data.labels.min()) < 0):
        raise BadInput(
            f"expected labels of client {number} within the model's {classes} classes, found labels up to "
            f"{width - 1} and outputs of shape {tuple(outputs.shape)}; change the model or the labels."
        )


def _check_batch(data: Batch, number: int) -> None:
    inputs, labels = data.inputs, data.labels
    if len(inputs) == 0 or len(inputs) != len(labels):
        raise BadInput(
            f"expected as many labels as inputs and at least one of each for client {number}, "
            f"found {len(inputs)} inputs and {len(labels)} labels; check the client's batch."
        )
    if not inputs.dtype.is_floating_point or not bool(torch.isfinite(inputs).all()):
        raise BadInput(
            f"expected finite floating-point inputs for client {number}, found {inputs.dtype} or values that are not "
            "finite; scale pixels to [0, 1] and remove NaN."
        )
    if labels.dtype != torch.int64 and not is_soft(labels):
        raise BadInput(
            f"expected labels of client {number} as whole numbers (int64) or soft rows (batch, classes), "
            f"found {labels.dtype} of shape {tuple(labels.shape)}; convert with labels.long()."
        )
