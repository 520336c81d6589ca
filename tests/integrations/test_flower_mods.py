"""Mods of Flower clients: a defense before the update leaves, an inspection before training begins."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fedprism as fp

pytest.importorskip("flwr", reason='needs flwr: pip install "fedprism[flower]"')

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.client.mod import secaggplus_mod

from fedprism.errors import BadInput
from fedprism.integrations import flower
from fedprism.integrations.leakage import length
from flower_runs import (
    Frozen,
    LocalGrid,
    assert_close,
    averaging,
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
    training_message,
)


def recorded_updates(tmp_path: Path, app: Any, model: Any = small_model) -> dict[int, Any]:
    strategy = recorded(averaging(2), tmp_path / "run", model=model())
    start(strategy, LocalGrid(app, 2), 1, model())
    return {client_number(seen.participants[0]): seen.update for seen in fp.captures.load(tmp_path / "run").rounds}


def test_a_chain_of_defenses_is_applied_before_the_update_leaves(tmp_path: Path) -> None:
    defense = fp.chain(fp.defenses.Clip(0.05), fp.defenses.Prune(0.9))
    found = recorded_updates(tmp_path, message_app(mods=[flower.DefenseMod(defense)]))
    for client, update in found.items():
        assert length(update) <= 0.05 + 1e-6
        raw = expected_update(client)
        rng = torch.Generator()
        assert_close(update, defense.on_update(raw, fp.defenses.Context(), rng), 1e-6)


def test_noise_is_repeatable_only_with_a_seed() -> None:
    message = training_message(small_model().state_dict())

    def echo(inner: Message, context: Any) -> Message:
        return Message(copy.deepcopy(inner.content), reply_to=inner)

    def sent(mod: flower.DefenseMod) -> torch.Tensor:
        reply = mod(message, None, echo)
        return torch.cat([t.flatten() for t in reply.content.array_records["arrays"].to_torch_state_dict().values()])

    noise = fp.defenses.GaussianNoise(0.1)
    before = torch.cat([t.flatten() for t in small_model().state_dict().values()])
    seeded = [sent(flower.DefenseMod(noise, seed=1)) for _ in range(2)]
    assert torch.equal(*seeded)
    free = [sent(flower.DefenseMod(noise)) for _ in range(2)]
    assert not torch.equal(*free)
    for vector in (*seeded, *free):
        assert float((vector - before).std()) == pytest.approx(0.1, rel=0.1)


def test_buffers_are_not_defended(tmp_path: Path) -> None:
    model = normalized_model()
    mod = flower.DefenseMod(fp.defenses.GaussianNoise(10.0), model=model)
    state = model.state_dict()
    message = training_message(state)
    reply = mod(message, None, lambda inner, _: Message(copy.deepcopy(inner.content), reply_to=inner))
    sent = reply.content.array_records["arrays"].to_torch_state_dict()
    assert torch.equal(sent["1.running_mean"], state["1.running_mean"])
    assert sent["1.num_batches_tracked"].dtype == torch.int64
    assert float((sent["2.weight"] - state["2.weight"]).abs().mean()) > 1


def test_a_defense_works_inside_secure_aggregation(tmp_path: Path) -> None:
    app = fit_app(mods=[secaggplus_mod, flower.DefenseMod(fp.defenses.Clip(0.05), model=small_model())])
    grid = recorded(LocalGrid(app, 3), tmp_path / "run", model=small_model())
    run_secure(grid, Frozen([[0, 1, 2]]), server_context(), 1)
    (seen,) = fp.captures.load(tmp_path / "run").rounds
    assert length(seen.update) <= 0.05 + 1e-3


@pytest.mark.parametrize("defense", [fp.defenses.MixUp(k=2), fp.defenses.DpSgd(1.0, 1.0), fp.defenses.MseLoss()])
def test_defenses_that_act_elsewhere_are_refused(defense: Any) -> None:
    with pytest.raises(BadInput, match="on the update alone"):
        flower.DefenseMod(fp.chain(fp.defenses.Clip(1.0), defense))


def test_a_tampered_model_is_refused_and_an_honest_one_is_trained_on(tmp_path: Path) -> None:
    trained_on = []

    def note(message: Message, context: Any, call_next: Any) -> Message:
        trained_on.append(message)
        return call_next(message, context)

    app = message_app(mods=[flower.InspectionMod(remember=True), note])
    model = small_model()
    start(averaging(2), LocalGrid(app, 2), 2, model)
    assert len(trained_on) == 4
    with torch.no_grad():
        first = next(parameter for parameter in model.parameters() if parameter.dim() == 2)
        first.copy_(first[:1].expand_as(first))
    assert fp.inspection.inspect(model.state_dict()).serious
    grid = recorded(LocalGrid(app, 2), tmp_path / "run")
    content = RecordDict({"arrays": ArrayRecord(model.state_dict())})
    messages = [Message(content, dst_node_id=node, message_type="train") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(messages))
    assert all("refuses to train" in reply.error.reason for reply in replies)
    assert len(trained_on) == 4
