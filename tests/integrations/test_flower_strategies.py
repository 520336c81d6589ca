"""Each strategy of Flower with a recorder around it: the run stays as it is, and what the server saw is recorded."""

from __future__ import annotations

import copy
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import fedprism as fp

pytest.importorskip("flwr", reason='needs flwr: pip install "fedprism[flower]"')

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server import strategy as older
from flwr.server.workflow import DefaultWorkflow
from flwr.serverapp import strategy as newer

from fedprism.errors import BadInput
from fedprism.integrations import load_findings
from fedprism.integrations.facts import read_facts
from flower_runs import (
    FIRST_NODE,
    RATE,
    Frozen,
    LocalGrid,
    assert_close,
    averaging,
    batch_of,
    client_number,
    expected_update,
    fit_app,
    message_app,
    recorded,
    run_secure,
    server_context,
    small_model,
    start,
)

CLIENTS = 5
ALL = {"fraction_evaluate": 0.0, "min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS}
STRATEGIES: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedAvgM": {"server_momentum": 0.5},
    "FedAdagrad": {},
    "FedAdam": {},
    "FedYogi": {},
    "FedMedian": {},
    "FedTrimmedAvg": {},
    "FedProx": {"proximal_mu": 0.1},
    "QFedAvg": {"client_learning_rate": RATE},
    "Krum": {"num_malicious_nodes": 1},
    "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 2},
    "Bulyan": {"num_malicious_nodes": 0},
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


def check_updates(rounds: Any, clients: int) -> None:
    """Each client's update is the step that it takes from the model it was sent."""
    assert {(seen.index, client_number(seen.participants[0])) for seen in rounds} == {
        (index, client) for index in (1, 2) for client in range(clients)
    }
    for seen in rounds:
        assert_close(
            {name: tensor.float() for name, tensor in seen.update.items()},
            expected_update(client_number(seen.participants[0]), seen.params),
            2e-6,
        )


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_does_what_it_does_and_is_recorded(name: str, tmp_path: Path) -> None:
    def made() -> Any:
        return getattr(newer, name)(**STRATEGIES[name], **ALL)

    random.seed(0)  # by which Flower orders the clients, and so the sums
    plain = start(made(), LocalGrid(message_app(), CLIENTS), rounds=2)
    random.seed(0)
    strategy = made()
    wrapped = recorded(strategy, tmp_path / "run", model=small_model())
    assert wrapped is strategy
    result = start(wrapped, LocalGrid(message_app(), CLIENTS), rounds=2)
    assert_close(result.arrays.to_torch_state_dict(), plain.arrays.to_torch_state_dict(), 0)
    check_updates(fp.captures.load(tmp_path / "run").rounds, CLIENTS)


OLDER: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedAdam": {},
    "FedAvgM": {"server_momentum": 0.5},
    "FedYogi": {},
    "FedTrimmedAvg": {},
    "FedMedian": {},
    "Krum": {"num_malicious_clients": 1},
}


@pytest.mark.parametrize("name", OLDER)
def test_a_strategy_of_the_older_api_is_recorded_by_itself(name: str, tmp_path: Path) -> None:
    arrays = ndarrays_to_parameters([tensor.numpy() for tensor in small_model().state_dict().values()])
    strategy = getattr(older, name)(
        **OLDER[name], fraction_evaluate=0.0, min_fit_clients=3, min_available_clients=3, initial_parameters=arrays
    )
    strategy = recorded(strategy, tmp_path / "run", model=small_model())
    legacy = LegacyContext(context=server_context(), config=ServerConfig(num_rounds=2), strategy=strategy)
    DefaultWorkflow()(LocalGrid(fit_app(mods=()), 3), legacy)
    check_updates(fp.captures.load(tmp_path / "run").rounds, 3)
    (first, _) = read_facts(tmp_path / "run")
    assert first.examples[str(FIRST_NODE + 1)] == 2
    assert first.metrics[str(FIRST_NODE)] == {"train_loss": 0.25}


def test_a_strategy_under_secure_aggregation_sees_one_mean_and_not_clients(tmp_path: Path) -> None:
    strategy = recorded(Frozen([[0, 1, 2]]), tmp_path / "run", model=small_model())
    run_secure(LocalGrid(fit_app(), 3), strategy, server_context(), 1)
    (seen,) = fp.captures.load(tmp_path / "run").rounds
    assert (seen.reduction, seen.clients, len(seen.participants)) == ("weighted_mean", 3, 3)
    assert "examples-in-clear" in {finding.check for finding in load_findings(tmp_path / "run")}


def test_a_failing_client_of_the_older_api_is_named(tmp_path: Path) -> None:
    strategy = recorded(Frozen([[0, 1, 2]]), tmp_path / "run", model=small_model())
    legacy = LegacyContext(context=server_context(), config=ServerConfig(num_rounds=1), strategy=strategy)
    DefaultWorkflow()(LocalGrid(fit_app(mods=()), 3, broken=[1]), legacy)
    (facts,) = read_facts(tmp_path / "run")
    assert set(facts.problems) == {str(FIRST_NODE + 1)}
    assert len(fp.captures.load(tmp_path / "run").rounds) == 2


def test_a_strategy_of_the_users_own_keeps_what_its_class_overrides(tmp_path: Path) -> None:
    class Own(newer.FedAvg):
        def start(self, *rest: Any, **named: Any) -> Any:
            self.started = True
            return super().start(*rest, **named)

    strategy = recorded(Own(**ALL), tmp_path / "run", model=small_model())
    start(strategy, LocalGrid(message_app(), CLIENTS))
    assert isinstance(strategy, newer.FedAvg)
    assert strategy.started
    assert len(fp.captures.load(tmp_path / "run").rounds) == CLIENTS
    with pytest.raises(BadInput, match="Wrap it once"):
        recorded(strategy, tmp_path / "again")
    with pytest.raises(BadInput, match=r"recorder\.round"):
        recorded(object(), tmp_path / "again")


# --- several records in a message ------------------------------------------------------------------------------------


class Controlled(newer.FedAvg):
    """SCAFFOLD-like: a control variate, in the shape of the model, stands beside it in a record of its own."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            model = message.content.array_records.pop(self.arrayrecord_key)
            message.content["a-control"] = ArrayRecord(
                {name: Array(array.numpy() * 0 + 7) for name, array in model.items()}
            )
            message.content[self.arrayrecord_key] = model
        return messages

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        for reply in replies:
            assert "a-control" in reply.content.array_records, "recorded, and left as it was"
            del reply.content.array_records["a-control"]
        return super().aggregate_train(server_round, replies)


def controlled_app() -> ClientApp:
    app = ClientApp()
    plain = message_app()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        control = message.content.array_records.pop("a-control")
        reply = plain(message, context)
        content = RecordDict({"a-control": control, **{name: reply.content[name] for name in reply.content}})
        return Message(content, reply_to=message)

    return app


@pytest.mark.parametrize("known", [True, False])
def test_control_variates_beside_the_model_pass_by_with_a_note(known: bool, tmp_path: Path) -> None:
    settings = {"model": small_model()} if known else {}
    strategy = recorded(Controlled(**ALL), tmp_path / "run", **settings)
    start(strategy, LocalGrid(controlled_app(), CLIENTS), rounds=2)
    check_updates(fp.captures.load(tmp_path / "run").rounds, CLIENTS)
    found = {finding.check: finding for finding in load_findings(tmp_path / "run")}
    assert "a-control" in found["arrays-passed-by"].sentence
    assert found["arrays-passed-by"].evidence["tensors"] == 4


def test_a_model_that_is_spread_over_records_is_put_together(tmp_path: Path) -> None:
    state = small_model().state_dict()
    names = list(state)
    parts = {"backbone": ArrayRecord({n: Array(state[n].numpy()) for n in names[:2]})}
    parts |= {"head": ArrayRecord({n: Array(state[n].numpy()) for n in names[2:]})}
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        moved = {
            key: ArrayRecord({n: Array(a.numpy() + np.float32(0.25)) for n, a in record.items()})
            for key, record in message.content.array_records.items()
        }
        return Message(RecordDict({**moved, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    grid = recorded(LocalGrid(app, 1), tmp_path / "run", model=small_model())
    (node,) = grid.get_node_ids()
    list(grid.send_and_receive([Message(RecordDict(parts), dst_node_id=node, message_type="train")]))
    (seen,) = fp.captures.load(tmp_path / "run").rounds
    assert set(seen.update) == set(names)
    assert_close(seen.update, {name: torch.full_like(state[name], 0.25) for name in names})
    assert "arrays-passed-by" not in {finding.check for finding in load_findings(tmp_path / "run")}


# --- what is in the arrays -------------------------------------------------------------------------------------------


def cast_app(dtype: torch.dtype) -> ClientApp:
    """Clients that train in single precision and send half of it."""
    from fedprism.integrations.flower.messages import array_of

    app = ClientApp()
    plain = message_app()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply = plain(message, context)
        state = reply.content["arrays"].to_torch_state_dict()
        half = ArrayRecord({name: array_of(tensor.to(dtype)) for name, tensor in state.items()})
        return Message(RecordDict({"arrays": half, "metrics": reply.content["metrics"]}), reply_to=message)

    return app


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_recorded(dtype: torch.dtype, tmp_path: Path) -> None:
    grid = recorded(LocalGrid(cast_app(dtype), 2), tmp_path / "run", model=small_model())
    content = RecordDict({"arrays": ArrayRecord(small_model().state_dict())})
    messages = [Message(content, dst_node_id=node, message_type="train") for node in grid.get_node_ids()]
    list(grid.send_and_receive(messages))
    rounds = fp.captures.load(tmp_path / "run").rounds
    assert len(rounds) == 2
    before = dict(small_model().state_dict())
    for seen in rounds:
        expected = expected_update(client_number(seen.participants[0]))
        for name, update in seen.update.items():
            assert update.dtype == torch.float32
            sent = (before[name] + expected[name]).to(dtype).float()
            torch.testing.assert_close(update, sent - before[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_loses_nothing_of_its_update(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: tensor.to(dtype) for name, tensor in small_model().state_dict().items()}
    recorder = fp.record(tmp_path / "run", model=small_model().to(dtype))
    after = {name: tensor.float() + 1e-4 for name, tensor in state.items()}
    recorder.round(sent=state, received={"a": (after, 1), "b": (state, 1)})
    first, second = fp.captures.load(recorder.folder).rounds
    for name, tensor in first.update.items():
        torch.testing.assert_close(tensor, torch.full_like(tensor, 1e-4), atol=3e-7, rtol=0)
        assert second.update[name].dtype == dtype
        assert not second.update[name].any()


def test_xgboost_has_no_model_to_record_and_runs_on(tmp_path: Path) -> None:
    counts = {"num_trees": "1", "num_parallel_tree": "1"}
    booster = {"gbtree_model_param": counts, "trees": [{"id": 0}], "iteration_indptr": [0, 1], "tree_info": [0]}
    trees = json.dumps({"learner": {"gradient_booster": {"model": booster}}}).encode()
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        record = ArrayRecord([np.frombuffer(trees, dtype=np.uint8)])
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    strategy = recorded(newer.FedXgbBagging(**ALL), tmp_path / "run")
    first = ArrayRecord([np.frombuffer(b"", dtype=np.uint8)])
    strategy.start(grid=LocalGrid(app, CLIENTS), initial_arrays=first, num_rounds=1, train_config=ConfigRecord())
    (facts,) = read_facts(tmp_path / "run")
    assert len(facts.problems) == CLIENTS


# --- clients that return differences ---------------------------------------------------------------------------------


def difference_app(noise: float = 0.0) -> ClientApp:
    app = ClientApp()
    plain = message_app()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        before = message.content["arrays"].to_torch_state_dict()
        reply = plain(copy.deepcopy(message), context)
        after = reply.content["arrays"].to_torch_state_dict()
        rng = torch.Generator().manual_seed(0)
        change = {n: after[n] - before[n] + noise * torch.randn(after[n].shape, generator=rng) for n in after}
        content = RecordDict({"arrays": ArrayRecord(change), "metrics": reply.content["metrics"]})
        return Message(content, reply_to=message)

    return app


class AddsUp(newer.FedAvg):
    """The server of clients that return differences."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self.sent = arrays.to_torch_state_dict()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        mean, metrics = super().aggregate_train(server_round, replies)
        change = mean.to_torch_state_dict()
        return ArrayRecord({name: tensor + change[name] for name, tensor in self.sent.items()}), metrics


def test_differences_are_recognised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = recorded(AddsUp(**ALL), tmp_path / "run", model=small_model())
    start(strategy, LocalGrid(difference_app(), CLIENTS), rounds=2)
    check_updates(fp.captures.load(tmp_path / "run").rounds, CLIENTS)
    assert caplog.text.count("clients send differences") == 1
    assert "differences-sent" in {finding.check for finding in load_findings(tmp_path / "run")}


def test_what_is_stated_is_not_guessed(tmp_path: Path) -> None:
    strategy = recorded(AddsUp(**ALL), tmp_path / "run", model=small_model(), uplink="weights")
    start(strategy, LocalGrid(difference_app(), CLIENTS))
    for seen in fp.captures.load(tmp_path / "run").rounds:
        change = expected_update(client_number(seen.participants[0]))
        assert_close(seen.update, {name: change[name] - seen.params[name] for name in change})
    with pytest.raises(BadInput, match="weights or difference or gradient"):
        fp.record(tmp_path / "other", uplink="deltas")


# --- names that come later -------------------------------------------------------------------------------------------


def test_lists_that_were_recorded_without_a_model_are_named_by_one_given_later(tmp_path: Path) -> None:
    arrays = ndarrays_to_parameters([tensor.numpy() for tensor in small_model().state_dict().values()])
    strategy = older.FedAvg(
        fraction_evaluate=0.0, min_fit_clients=2, min_available_clients=2, initial_parameters=arrays
    )
    strategy = recorded(strategy, tmp_path / "run")
    legacy = LegacyContext(context=server_context(), config=ServerConfig(num_rounds=2), strategy=strategy)
    DefaultWorkflow()(LocalGrid(fit_app(mods=()), 2), legacy)
    assert list(fp.captures.load(tmp_path / "run").rounds[0].update) == ["0", "1", "2", "3"]
    later = fp.captures.load(tmp_path / "run", model=small_model())
    check_updates(later.rounds, 2)
    found = fp.run(
        fp.attacks.dense_inversion(),
        fp.Observation(
            model=later.model,
            rounds=later.rounds[:1],
            knowledge=fp.Knowledge(input_shape=(1, 8, 8), batch_size=later.rounds[0].examples[0]),
        ),
    )
    assert found.inputs is not None
    assert len(batch_of(client_number(later.rounds[0].participants[0]))) == later.rounds[0].examples[0]
    other = fp.models.build("fc2", input_shape=(1, 8, 8), hidden=8, classes=10, seed=0)
    with pytest.raises(fp.errors.BadCapture, match="model"):
        fp.captures.load(tmp_path / "run", model=other)


def test_averaging_is_not_touched_by_a_recorder_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A planted bug in each place that the recorder passes: the run ends as it does without it."""
    random.seed(0)
    plain = start(averaging(2), LocalGrid(message_app(), 2), rounds=2)
    where = "fedprism.integrations"
    places = [
        (f"{where}.flower.following.carried_by", "what was sent in round 1"),
        (f"{where}.flower.following.examples_of", "the answers of round 1"),
        (f"{where}.recording.round_of", "round 1"),
        (f"{where}.recording.save_findings", "the findings of round 1"),
        ("fedprism.captures.growing.write_tensors", "round 1"),
    ]
    for number, (place, told) in enumerate(places):
        with monkeypatch.context() as planted:
            planted.setattr(place, _planted)
            caplog.clear()
            random.seed(0)
            recorder = fp.record(tmp_path / str(number), model=small_model())
            result = start(recorder.wrap(averaging(2)), LocalGrid(message_app(), 2), rounds=2)
            recorder.close()
        assert_close(result.arrays.to_torch_state_dict(), plain.arrays.to_torch_state_dict(), 0)
        assert f"the recorder goes on without something: {told}" in caplog.text
        if "save_findings" not in place:
            assert "recorder-failed" in {finding.check for finding in load_findings(recorder.folder)}
        with monkeypatch.context() as planted:
            planted.setattr(place, _planted)
            strict = recorded(averaging(2), tmp_path / f"strict-{number}", model=small_model())
            with pytest.raises(ZeroDivisionError):
                start(strict, LocalGrid(message_app(), 2))


def _planted(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("planted")
