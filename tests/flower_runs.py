"""Small Flower federations for tests: real strategies, workflows, mods and client apps on a grid in this process.

The simulation engine, with processes of its own, is started by `test_flower_simulation.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import fedprism as fp

RATE = 0.5
FIRST_NODE = 2**63 + 11  # beyond what a float or a signed number holds, as Flower's own are


def small_model() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)


def batch_of(client: int) -> fp.Batch:
    """The data of one client: one or two digits."""
    digits = fp.data.load("digits")
    first = int((digits.labels == client % 10).nonzero()[0])
    second = int((digits.labels == (client + 3) % 10).nonzero()[0])
    return digits.batch([first, second] if client % 2 else [first])


def trained(model: nn.Module, batch: fp.Batch) -> dict[str, torch.Tensor]:
    """The state_dict after one step of gradient descent."""
    model.train()
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def message_app(mods: Iterable[Any] = (), build: Any = small_model, kept: Any = None) -> ClientApp:
    """A client of the message API; `kept` is one of the mods that is handed what it trains on."""
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        model = build()
        model.load_state_dict(next(iter(message.content.array_records.values())).to_torch_state_dict())
        batch = batch_of(int(context.node_config["partition-id"]))
        if kept is not None:
            kept.keep(batch.inputs, batch.labels)
        after = ArrayRecord(trained(model, batch))
        metrics = MetricRecord({"num-examples": len(batch), "train_loss": 0.25})
        return Message(RecordDict({"arrays": after, "metrics": metrics}), reply_to=message)

    return app


def fit_app(mods: Iterable[Any] = (secaggplus_mod,)) -> ClientApp:
    """A client with fit(), as SecAgg+ needs it."""

    class Client(NumPyClient):
        def __init__(self, client: int) -> None:
            self.client = client

        def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict]:
            model, batch = small_model(), batch_of(self.client)
            names = model.state_dict()
            model.load_state_dict({n: torch.tensor(p) for n, p in zip(names, parameters, strict=True)})
            after = trained(model, batch)
            return [tensor.numpy() for tensor in after.values()], len(batch), {"train_loss": 0.25}

    return ClientApp(
        client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client(), mods=list(mods)
    )


def say_who_is_sending() -> None:
    """Flower asks the process, once and for all, whom its messages are from."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def training_message(state: dict[str, torch.Tensor]) -> Message:
    say_who_is_sending()
    return Message(RecordDict({"arrays": ArrayRecord(state)}), dst_node_id=7, message_type="train")


class LocalGrid(Grid):
    """Hands copies of messages to client apps in this process. Clients in `broken` fail, at each training message."""

    def __init__(self, app: ClientApp, clients: int, broken: Iterable[int] = ()) -> None:
        say_who_is_sending()
        self.app = app
        self.contexts = {
            FIRST_NODE + number: Context(0, FIRST_NODE + number, {"partition-id": number}, RecordDict(), {})
            for number in range(clients)
        }
        self.broken = {FIRST_NODE + number for number in broken}
        self.breaks_at = ""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        received = copy.deepcopy(message)
        node = message.metadata.dst_node_id
        stages = [str(record.get("stage", "")) for record in message.content.config_records.values()]
        if node in self.broken and self.breaks_at in ("", *stages):
            return Message(Error(code=0, reason="broken"), reply_to=received)
        return copy.deepcopy(self.app(received, self.contexts[node]))

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)

    def create_message(self, *arguments: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError


class Frozen(LegacyFedAvg):
    """Sends the same model in every round, to cohorts that change, and keeps the means that it is handed."""

    def __init__(self, cohorts: list[list[int]]) -> None:
        arrays = [tensor.numpy() for tensor in small_model().state_dict().values()]
        super().__init__(initial_parameters=ndarrays_to_parameters(arrays), fraction_evaluate=0.0)
        self.cohorts = cohorts
        self.means: list[Any] = []

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        everyone = super().configure_fit(server_round, parameters, client_manager)
        proxies = sorted(client_manager.all().values(), key=lambda proxy: proxy.node_id)
        return [(proxies[number], everyone[0][1]) for number in self.cohorts[server_round - 1]]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.means.append(results[0][1].parameters)
        return None, {}


def run_secure(grid: Grid, strategy: Any, context: Context, rounds: int, **settings: Any) -> None:
    """SecAgg+ as an app starts it."""
    legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=rounds), strategy=strategy)
    given = {"num_shares": 3, "reconstruction_threshold": 2, "max_weight": 2.0, "timeout": 60, **settings}
    workflow = SecAggPlusWorkflow(**given)
    DefaultWorkflow(fit_workflow=workflow)(grid, legacy)


def server_context() -> Context:
    return Context(0, 0, {}, RecordDict(), {})


def start(strategy: Any, grid: Grid, rounds: int = 1, model: nn.Module | None = None) -> Any:
    """A run of a strategy of the message API."""
    arrays = ArrayRecord((model or small_model()).state_dict())
    return strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, train_config=ConfigRecord())


def averaging(clients: int = 4, **settings: Any) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients, **settings)


def expected_update(client: int, params: Any = None) -> dict[str, torch.Tensor]:
    """What a client sends, computed without Flower."""
    model = small_model()
    if params is not None:
        model.load_state_dict(dict(params))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = trained(model, batch_of(client))
    return {name: after[name] - before[name] for name in before}


def assert_close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance)


def client_number(participant: str) -> int:
    return int(participant) - FIRST_NODE


def normalized_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))


def recorded(what: Any, folder: Any, *, strategy: Any = None, **settings: Any) -> Any:
    """A strategy or grid with a recorder whose own errors fail the test, and which waits for the disk."""
    return fp.record(folder, **{"strict": True, **settings}).wrap(what, strategy=strategy)
