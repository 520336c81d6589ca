"""The Flower integration on a grid in this process: real strategies, workflows, mods and client apps."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedprism as fp

pytest.importorskip("flwr", reason='needs flwr: pip install "fedprism[flower]"')

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.client.mod import fixedclipping_mod as fixedclipping_mod_of_fit
from flwr.clientapp.mod import fixedclipping_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerConfig
from flwr.server import strategy as older_strategies
from flwr.server.workflow import DefaultWorkflow
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)

from fedprism import integrations
from fedprism.integrations import flower
from fedprism.integrations.facts import read_facts
from fedprism.integrations.findings import load_findings
from fedprism.integrations.flower.secagg import masks_repeat
from fedprism.integrations.leakage import length
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
    normalized_model,
    recorded,
    run_secure,
    server_context,
    small_model,
    start,
)

KNOWN = fp.Knowledge(input_shape=(1, 8, 8), loss="cross_entropy", local_lr=RATE, local_epochs=1)
COHORTS = [[0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2, 3]]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


# --- plain federated averaging ---------------------------------------------------------------------------------------


def test_a_strategy_is_recorded_client_by_client(tmp_path: Path) -> None:
    strategy = recorded(averaging(), tmp_path / "run", model=small_model(), knowledge=KNOWN)
    result = start(strategy, LocalGrid(message_app(), 4), rounds=2)
    observation = fp.captures.load(tmp_path / "run")
    assert [seen.index for seen in observation.rounds] == [1] * 4 + [2] * 4
    assert {seen.participants[0] for seen in observation.rounds} == {str(FIRST_NODE + number) for number in range(4)}
    assert_close(observation.rounds[0].params, dict(small_model().named_parameters()), 0)
    for seen in observation.rounds:
        client = client_number(seen.participants[0])
        assert seen.examples == (len(batch_of(client)),)
        assert_close(seen.update, expected_update(client, seen.params))
    # What the recorded updates average to is what the strategy made of them.
    second = observation.rounds[4:]
    total = sum(seen.examples[0] for seen in second)
    mean = {
        name: second[0].params[name] + sum(seen.examples[0] / total * seen.update[name] for seen in second)
        for name in second[0].params
    }
    assert_close(mean, result.arrays.to_torch_state_dict())


def test_the_grid_below_sees_the_same(tmp_path: Path) -> None:
    start(recorded(averaging(2), tmp_path / "above", model=small_model()), LocalGrid(message_app(), 2), 2)
    start(averaging(2), recorded(LocalGrid(message_app(), 2), tmp_path / "below", model=small_model()), 2)
    above, below = (
        sorted(fp.captures.load(tmp_path / name).rounds, key=lambda seen: (seen.index, seen.participants))
        for name in ("above", "below")
    )
    assert len(above) == len(below) == 4
    for first, second in zip(above, below, strict=True):
        assert (first.index, first.participants, first.examples) == (second.index, second.participants, second.examples)
        assert_close(first.update, second.update, 1e-7)


def test_recorded_updates_are_attacked(tmp_path: Path) -> None:
    strategy = recorded(averaging(2), tmp_path / "run", model=small_model(), knowledge=KNOWN)
    start(strategy, LocalGrid(message_app(), 2))
    observation = fp.captures.load(tmp_path / "run")
    alone = next(s for s in observation.rounds if s.examples == (1,))
    seen = dataclasses.replace(
        observation, rounds=(alone,), knowledge=dataclasses.replace(observation.knowledge, batch_size=1)
    )
    found = fp.run(fp.attacks.dense_inversion(), seen)
    torch.testing.assert_close(found.inputs, batch_of(client_number(alone.participants[0])).inputs, atol=1e-3, rtol=0)


def test_buffers_are_told_from_parameters(tmp_path: Path) -> None:
    app = message_app(build=normalized_model)
    grid = LocalGrid(app, 4)
    grid.contexts = {node: c for node, c in grid.contexts.items() if c.node_config["partition-id"] % 2}
    model = normalized_model()
    start(recorded(averaging(2), tmp_path / "run", model=model), grid, 2, model)
    seen = fp.captures.load(tmp_path / "run", model=normalized_model()).rounds
    assert set(seen[0].update) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert seen[0].buffers_before["1.num_batches_tracked"] == 0
    assert seen[0].buffers_after["1.num_batches_tracked"] == 1
    assert not torch.equal(seen[0].buffers_after["1.running_mean"], seen[0].buffers_before["1.running_mean"])


def test_answers_that_cannot_be_recorded_do_not_end_the_run(tmp_path: Path) -> None:
    def spoil(message: Message, context: Any, call_next: Any) -> Message:
        reply = call_next(message, context)
        record = reply.content.array_records["arrays"]
        client = context.node_config["partition-id"]
        if client == 1:
            record[name] = Array(record[name].numpy() * float("nan"))
        if client == 4:
            record[name] = Array(dtype="float32", shape=(1,), stype="numpy.ndarray", data=b"no array at all")
            reply.content.metric_records["metrics"]["num-examples"] = float("inf")
        if client == 2:
            reply.content.array_records["arrays"] = ArrayRecord({"other": Array(record[name].numpy())})
        return reply

    name = list(small_model().state_dict())[-1]
    grid = recorded(LocalGrid(message_app(mods=[spoil]), 5, broken=[3]), tmp_path / "run", model=small_model())
    arrays = ArrayRecord(small_model().state_dict())
    content = RecordDict({"arrays": arrays})
    messages = [Message(content, dst_node_id=node, message_type="train") for node in grid.get_node_ids()]
    assert len(list(grid.send_and_receive(messages))) == 5
    (facts,) = read_facts(tmp_path / "run")
    assert [seen.participants for seen in fp.captures.load(tmp_path / "run").rounds] == [(str(FIRST_NODE),)]
    assert set(facts.problems) == {str(FIRST_NODE + number) for number in (1, 2, 3, 4)}
    assert str(FIRST_NODE + 4) not in facts.examples
    assert "NaN" in facts.problems[str(FIRST_NODE + 1)]
    assert "broken" in facts.problems[str(FIRST_NODE + 3)]


# --- secure aggregation ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Frozen]:
    """Five rounds of SecAgg+ with one model; client 3 drops out of the last after it has shared its keys."""
    folder, strategy = tmp_path_factory.mktemp("secure") / "run", Frozen(COHORTS)
    local = LocalGrid(fit_app(), 4)

    grid = recorded(local, folder, model=small_model(), knowledge=KNOWN)
    configure = strategy.configure_fit

    def configured(server_round: int, *rest: Any, **named: Any) -> Any:
        local.broken = {FIRST_NODE + 3} if server_round == 5 else set()
        local.breaks_at = "collect_masked_vectors"
        return configure(server_round, *rest, **named)

    strategy.configure_fit = configured
    run_secure(grid, strategy, server_context(), len(COHORTS))
    return folder, strategy


def test_the_mean_that_the_server_unmasks_is_recorded(secure: tuple[Path, Frozen]) -> None:
    folder, strategy = secure
    rounds = fp.captures.load(folder).rounds
    assert len(rounds) == len(strategy.means) == 5
    for seen, mean in zip(rounds, strategy.means, strict=True):
        assert seen.reduction == "weighted_mean"
        recorded = [(seen.params[name] + seen.update[name]).numpy() for name in small_model().state_dict()]
        for found, unmasked in zip(recorded, parameters_to_ndarrays(mean), strict=True):
            assert abs(found - unmasked).max() < 1e-6
    taken = [{client_number(name) for name in seen.participants} for seen in rounds]
    assert taken == [set(cohort) for cohort in COHORTS[:4]] + [{0, 1, 2}]


def test_the_recorded_mean_is_that_of_the_clients(secure: tuple[Path, Frozen]) -> None:
    for seen in fp.captures.load(secure[0]).rounds:
        updates = [expected_update(client_number(name)) for name in seen.participants]
        total = sum(seen.examples)
        mean = {
            name: sum(size / total * own[name] for size, own in zip(seen.examples, updates, strict=True))
            for name in seen.update
        }
        assert_close(seen.update, mean, 3e-5)  # SecAgg+ rounds weights to 16 / 2**22


def test_what_secure_aggregation_leaves_in_plain_text_is_found(secure: tuple[Path, Frozen]) -> None:
    found = {finding.check: finding for finding in load_findings(secure[0])}
    told = {"participants-in-clear", "examples-in-clear", "metrics-in-clear", "sums-come-apart", "clients-silent"}
    assert set(found) == told | ({"masks-from-few-seeds"} if masks_repeat() else set())
    assert "train_loss" in found["metrics-in-clear"].sentence
    assert found["sums-come-apart"].evidence["determined"] == 4
    assert found["examples-in-clear"].evidence["rounds"] == 5
    facts = read_facts(secure[0])
    assert facts[4].problems == {str(FIRST_NODE + 3): "dropped out of secure aggregation"}
    assert facts[0].metrics[str(FIRST_NODE)] == {"train_loss": 0.25}


def test_every_client_is_taken_out_of_the_sums_and_inverted(secure: tuple[Path, Frozen]) -> None:
    observation = fp.captures.load(secure[0])
    split = fp.run(fp.attacks.disaggregation(), observation)
    assert set(map(client_number, split.owners)) == {0, 1, 2, 3}
    for owner, update in zip(split.owners, split.updates, strict=True):
        assert_close(update, expected_update(client_number(owner)), 2e-4)
    images = fp.run(fp.then(fp.attacks.disaggregation(), fp.attacks.dense_inversion()), observation)
    for owner, image in zip(images.owners, images.inputs, strict=True):
        client = client_number(owner)
        if len(batch_of(client)) == 1:
            assert float(fp.metrics.psnr(image[None], batch_of(client).inputs)) > 40


def test_masks_that_do_not_come_off_leave_no_round(tmp_path: Path) -> None:
    local = LocalGrid(fit_app(), 4, broken=[0, 1, 2])
    local.breaks_at = "unmask"
    grid = recorded(local, tmp_path / "run", model=small_model())
    run_secure(grid, Frozen([[0, 1, 2, 3]]), server_context(), 1)
    assert not (tmp_path / "run" / "capture.json").exists()
    (facts,) = read_facts(tmp_path / "run")
    assert "mask" in facts.problems[str(FIRST_NODE)]


def test_a_round_that_is_given_up_is_noted(tmp_path: Path) -> None:
    class Recovering(Frozen):
        def configure_fit(self, server_round: int, *rest: Any, **named: Any) -> Any:
            local.broken = {FIRST_NODE, FIRST_NODE + 1, FIRST_NODE + 2} if server_round == 1 else set()
            return super().configure_fit(server_round, *rest, **named)

    local = LocalGrid(fit_app(), 4)
    local.breaks_at = "collect_masked_vectors"
    grid = recorded(local, tmp_path / "run", model=small_model())
    run_secure(grid, Recovering([[0, 1, 2, 3]] * 2), server_context(), 2)
    assert [seen.index for seen in fp.captures.load(tmp_path / "run").rounds] == [2]
    first, second = read_facts(tmp_path / "run")
    assert (first.index, set(first.problems), first.model) == (1, set(first.sampled), None)
    assert (second.index, second.problems) == (2, {})


# --- differential privacy --------------------------------------------------------------------------------------------


def test_clipping_on_the_server_shows_it_raw_updates(tmp_path: Path) -> None:
    private = DifferentialPrivacyServerSideFixedClipping(
        averaging(), noise_multiplier=0.5, clipping_norm=0.01, num_sampled_clients=10
    )
    start(recorded(private, tmp_path / "run", model=small_model()), LocalGrid(message_app(), 4))
    for seen in fp.captures.load(tmp_path / "run").rounds:
        assert_close(seen.update, expected_update(client_number(seen.participants[0])))
    found = {finding.check: finding for finding in load_findings(tmp_path / "run")}
    assert found["raw-updates-seen"].evidence["longer"] == 4
    # Weights 1, 2, 1, 2: the largest share of the mean is a third; 0.5 * 0.01 / 10 against 0.01 / 3.
    effective = found["noise-below-configured"].evidence["effective_multiplier"]
    assert effective == pytest.approx(0.5 / 10 * 3)


def test_adaptive_clipping_is_read_as_it_stands_in_each_round(tmp_path: Path) -> None:
    private = DifferentialPrivacyServerSideAdaptiveClipping(
        averaging(2), noise_multiplier=0.1, num_sampled_clients=2, initial_clipping_norm=0.01
    )
    start(recorded(private, tmp_path / "run", model=small_model()), LocalGrid(message_app(), 2), 2)
    first, second = (facts.noise for facts in read_facts(tmp_path / "run"))
    assert first.clipped_by == "server"
    assert first.clipping_norm == pytest.approx(0.01)
    assert second.clipping_norm != first.clipping_norm  # by how much is Flower's own noise
    assert "raw-updates-seen" in {finding.check for finding in load_findings(tmp_path / "run")}


def test_clipping_on_the_client_leaves_no_raw_update(tmp_path: Path) -> None:
    private = DifferentialPrivacyClientSideFixedClipping(
        averaging(2), noise_multiplier=1.0, clipping_norm=0.01, num_sampled_clients=2
    )
    grid = LocalGrid(message_app(mods=[fixedclipping_mod]), 2)
    start(recorded(private, tmp_path / "run", model=small_model()), grid)
    for seen in fp.captures.load(tmp_path / "run").rounds:
        assert length(seen.update) == pytest.approx(0.01, rel=1e-3)
    found = {finding.check for finding in load_findings(tmp_path / "run")}
    assert "raw-updates-seen" not in found
    assert "noise-below-configured" in found  # the two clients weigh 1 and 2


def test_clients_that_do_not_clip_are_found_out(tmp_path: Path) -> None:
    private = DifferentialPrivacyClientSideFixedClipping(
        averaging(2), noise_multiplier=1.0, clipping_norm=0.01, num_sampled_clients=2
    )
    start(recorded(private, tmp_path / "run", model=small_model()), LocalGrid(message_app(), 2))
    found = {finding.check: finding for finding in load_findings(tmp_path / "run")}
    assert found["clipping-left-out"].evidence["longer"] == 2
    longest = max(length(expected_update(number)) for number in range(2))
    assert found["clipping-left-out"].evidence["times"] == pytest.approx(longest / 0.01, rel=1e-4)


def older(wrapper: Any, tmp_path: Path, mods: tuple[Any, ...] = (), rounds: int = 1, **settings: Any) -> dict[str, Any]:
    """A run of a wrapper of the older API around FedAvg on two clients with fit(), and what is found in it."""
    arrays = [tensor.numpy() for tensor in small_model().state_dict().values()]
    inner = older_strategies.FedAvg(
        initial_parameters=ndarrays_to_parameters(arrays), fraction_evaluate=0.0, min_fit_clients=2
    )
    private = wrapper(inner, noise_multiplier=0.5, num_sampled_clients=10, **settings)
    grid = recorded(LocalGrid(fit_app(mods), 2), tmp_path / "run", model=small_model(), strategy=private)
    legacy = LegacyContext(context=server_context(), config=ServerConfig(num_rounds=rounds), strategy=private)
    DefaultWorkflow()(grid, legacy)
    return {finding.check: finding for finding in load_findings(tmp_path / "run")}


def test_the_older_wrappers_are_judged_like_the_newer_ones(tmp_path: Path) -> None:
    found = older(older_strategies.DifferentialPrivacyServerSideFixedClipping, tmp_path, clipping_norm=0.01)
    assert found["raw-updates-seen"].evidence["longer"] == 2
    # Weights 1 and 2: the largest share of the mean is two thirds.
    effective = found["noise-below-configured"].evidence["effective_multiplier"]
    assert effective == pytest.approx(0.5 / (10 * 2 / 3))
    for seen in fp.captures.load(tmp_path / "run").rounds:
        assert_close(seen.update, expected_update(client_number(seen.participants[0])))


def test_the_older_adaptive_wrapper_is_read_round_by_round(tmp_path: Path) -> None:
    wrapper = older_strategies.DifferentialPrivacyServerSideAdaptiveClipping
    found = older(wrapper, tmp_path, rounds=2, initial_clipping_norm=0.01)
    first, second = (facts.noise for facts in read_facts(tmp_path / "run"))
    assert first.clipping_norm == pytest.approx(0.01)
    assert second.clipping_norm != first.clipping_norm
    assert "raw-updates-seen" in found


@pytest.mark.parametrize("mods", [(fixedclipping_mod_of_fit,), ()], ids=["with its mod", "without"])
def test_the_older_wrapper_on_the_client_depends_on_its_mod(mods: tuple[Any, ...], tmp_path: Path) -> None:
    found = older(older_strategies.DifferentialPrivacyClientSideFixedClipping, tmp_path, mods, clipping_norm=0.01)
    assert ("clipping-left-out" in found) == (not mods)
    assert "raw-updates-seen" not in found
    assert "noise-below-configured" in found


def test_the_deprecated_wrappers_are_read_too(tmp_path: Path) -> None:
    fixed = older(older_strategies.DPFedAvgFixed, tmp_path, clip_norm=0.01)
    assert fixed["clipping-left-out"].evidence["longer"] == 2  # the clients do not clip, though they are asked to
    # Noise on each of 2 updates, scaled for 10, and a mean in which all weigh the same.
    effective = fixed["noise-below-configured"].evidence["effective_multiplier"]
    assert effective == pytest.approx(0.5 * (2 / 10) ** 0.5)
    private = older_strategies.DPFedAvgFixed(older_strategies.FedAvg(), 10, clip_norm=1.0, noise_multiplier=0.5)
    silent = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([np.zeros(20_000, np.float32)]), 1, {})
    mean, _ = private.aggregate_fit(1, [(None, silent), (None, dataclasses.replace(silent))], [])  # type: ignore[list-item]
    assert mean is not None
    noise = parameters_to_ndarrays(mean)[0].std()
    assert noise / (1.0 / 2) == pytest.approx(effective, rel=0.05)  # against what one of two clients can change


# --- the example app -------------------------------------------------------------------------------------------------

APP = Path(__file__).parents[2] / "examples" / "flower_app"


@pytest.mark.parametrize("defended", [False, True])
def test_the_example_app_records_what_its_server_sees(
    defended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same components that `flwr run` starts, on a grid in this process."""
    about = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    monkeypatch.syspath_prepend(APP)
    server, client = (
        getattr(importlib.import_module(place), name)
        for place, _, name in (about["components"][part].partition(":") for part in ("serverapp", "clientapp"))
    )
    settings = {**about["config"], "captures": str(tmp_path / "captures"), "defended": defended, "scored": True}
    monkeypatch.setattr(importlib.import_module("recorded.client").kept, "folder", tmp_path / "truth")
    grid, context = LocalGrid(client, 2), server_context()
    for own in (context, *grid.contexts.values()):
        own.run_config.update(settings)
    server(grid, context)
    (capture,) = (tmp_path / "captures").iterdir()
    assert f"fedprism attack {capture} --attack dense-inversion" in capsys.readouterr().out
    observation = fp.captures.load(capture)
    assert len(observation.rounds) == 2 * settings["rounds"]
    assert len(fp.load_truth(tmp_path / "truth" / "run-1", observation).owners) == 4 * settings["rounds"]
    assert ("samples-read-off" in {finding.check for finding in load_findings(capture)}) is not defended


# --- watching --------------------------------------------------------------------------------------------------------


def test_the_watch_stops_a_run_that_leaks_and_keeps_what_was_seen(tmp_path: Path) -> None:
    watch = integrations.Watch(stop_above=0.5)
    strategy = recorded(averaging(), tmp_path / "run", model=small_model(), knowledge=KNOWN, watch=watch)
    with pytest.raises(integrations.LeakageLimit, match="round 1"):
        start(strategy, LocalGrid(message_app(), 4), 3)
    assert {seen.index for seen in fp.captures.load(tmp_path / "run").rounds} == {1}
    (facts,) = read_facts(tmp_path / "run")
    assert facts.leakage.samples > 0.9
    assert "samples-read-off" in {finding.check for finding in load_findings(tmp_path / "run")}


def test_the_watch_lets_a_defended_run_go_on(tmp_path: Path) -> None:
    noise = flower.DefenseMod(fp.chain(fp.defenses.Clip(0.1), fp.defenses.GaussianNoise(0.05)), seed=0)
    strategy = recorded(
        averaging(), tmp_path / "run", model=small_model(), knowledge=KNOWN, watch=integrations.Watch(stop_above=0.5)
    )
    start(strategy, LocalGrid(message_app(mods=[noise]), 4), 2)
    assert [facts.leakage.samples for facts in read_facts(tmp_path / "run")] == [0.0, 0.0]


def test_the_watch_stops_on_a_tampered_model(tmp_path: Path) -> None:
    model = small_model()
    with torch.no_grad():
        first = next(parameter for parameter in model.parameters() if parameter.dim() == 2)
        first.copy_(first[:1].expand_as(first))
    strategy = recorded(averaging(2), tmp_path / "run", model=model, watch=integrations.Watch(stop_on_findings=True))
    with pytest.raises(integrations.LeakageLimit, match="tampering"):
        start(strategy, LocalGrid(message_app(), 2), 1, model)
