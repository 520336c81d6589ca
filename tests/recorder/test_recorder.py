"""`fp.record` in a loop of one's own: what it reads off one's objects, what it keeps, and that it never interferes."""

from __future__ import annotations

import copy
import errno
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedprism as fp
from fedprism.errors import BadInput
from fedprism.integrations import load_findings
from fedprism.integrations.facts import read_facts
from fedprism.optimizers import SGD, AdamW

DIGITS = fp.data.load("digits")
RATE = 0.5


def network() -> nn.Module:
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)


def trained(state: dict[str, torch.Tensor], client: int) -> dict[str, torch.Tensor]:
    model = network()
    model.load_state_dict(state)
    batch = DIGITS.batch([client])
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def run(recorder: fp.Recorder, rounds: int = 2, clients: int = 2) -> list[dict[str, torch.Tensor]]:
    """Federated averaging by hand; the models that were sent, and the last one."""
    states = [dict(network().state_dict())]
    for _ in range(rounds):
        received = {client: (trained(states[-1], client), 1) for client in range(clients)}
        recorder.round(sent=states[-1], received=received)
        mean = {name: sum(state[name] for state, _ in received.values()) / clients for name in states[-1]}
        states.append(mean)
    recorder.close()
    return states


# --- what it reads off the user's objects ----------------------------------------------------------------------------


def test_three_lines_tell_shape_loss_and_steps(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9, nesterov=True, weight_decay=0.01)
    sample = DIGITS.batch([0]).inputs
    recorder = fp.record(tmp_path / "run", model=model, sample=sample, loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    run(recorder, rounds=1)
    known = fp.captures.load(recorder.folder).knowledge
    assert known.input_shape == (1, 8, 8)
    assert known.loss == "cross_entropy"
    assert (known.local_lr, known.local_momentum) == (0.25, 0.9)
    assert known.local_optimizer == SGD(nesterov=True, weight_decay=0.01)
    assert known.batch_size == (1, 1)
    assert set(recorder.missing) == {"batch_size", "bounds", "local_epochs", "local_batch_size"}
    assert not any(path.stat().st_size == sample.nbytes for path in recorder.folder.iterdir()), "no sample is kept"


def test_knowledge_that_is_stated_comes_first(tmp_path: Path) -> None:
    adam = torch.optim.AdamW(network().parameters(), lr=1e-3, weight_decay=0.1)
    recorder = fp.record(tmp_path / "run", optimizer=adam, knowledge=fp.Knowledge(local_lr=0.5, bounds=(0.0, 1.0)))
    known = recorder.recording.capture.knowledge
    assert (known.local_lr, known.bounds) == (0.5, (0.0, 1.0))
    assert known.local_optimizer == AdamW(weight_decay=0.1)
    assert "local_momentum" not in recorder.missing


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        ("mse", "mse"),
        (nn.functional.cross_entropy, "cross_entropy"),
        (nn.BCEWithLogitsLoss(), "binary_cross_entropy"),
        (nn.HuberLoss(), "huber"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), None),
        (nn.CrossEntropyLoss(weight=torch.ones(10)), None),
        (nn.CrossEntropyLoss(reduction="sum"), None),
        (lambda outputs, labels: outputs.mean(), None),
    ],
)
def test_a_loss_is_named_only_if_it_is_that_of_the_table(loss: Any, name: str | None, tmp_path: Path) -> None:
    recorder = fp.record(tmp_path / "run", loss=loss)
    assert recorder.recording.capture.knowledge.loss == name
    assert "loss" not in recorder.missing, "the recorder has the function, which an audit of it is handed"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"sample": DIGITS.batch([0]).inputs[0, 0, 0]}, "sample=x[:1]"),
        ({"sample": "x"}, "sample=x[:1]"),
        ({"optimizer": torch.optim.RMSprop(network().parameters(), lr=0.1)}, "RMSprop"),
    ],
)
def test_what_cannot_be_read_is_a_warning_and_a_finding(
    settings: dict[str, Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = fp.record(tmp_path / "run", model=network(), **settings)
    assert told in caplog.text
    run(recorder, rounds=1)
    (found,) = [finding for finding in load_findings(recorder.folder) if finding.check == "recorder-failed"]
    assert told in found.sentence
    with pytest.raises(BadInput):
        fp.record(tmp_path / "strict", model=network(), strict=True, **settings)


@pytest.mark.parametrize(
    "wrong",
    [{"uplink": "deltas"}, {"every": 0}, {"layers": "fc"}, {"layers": []}, {"most_gigabytes": 0}, {"loss": "nothing"}],
)
def test_a_mistake_in_the_call_is_told_before_the_run(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        fp.record(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


# --- rounds of a loop of one's own -----------------------------------------------------------------------------------


def test_a_loop_is_recorded_as_it_was(tmp_path: Path) -> None:
    recorder = fp.record(tmp_path / "run", model=network())
    states = run(recorder)
    rounds = fp.captures.load(recorder.folder).rounds
    assert [(seen.index, seen.participants, seen.examples) for seen in rounds] == [
        (index, (client,), (1,)) for index in (1, 2) for client in ("0", "1")
    ]
    for seen in rounds:
        state = states[seen.index - 1]
        after = trained(state, int(seen.participants[0]))
        for name, update in seen.update.items():
            assert torch.equal(seen.params[name], state[name])
            torch.testing.assert_close(update, after[name] - state[name], rtol=0, atol=1e-7)


def test_tensors_are_copied_before_the_loop_goes_on(tmp_path: Path) -> None:
    recorder = fp.record(tmp_path / "run", model=network())
    sent = {name: tensor.clone() for name, tensor in network().state_dict().items()}
    answer = trained(sent, 0)
    kept = copy.deepcopy(answer)
    recorder.round(sent=sent, received={"a": answer})
    for tensor in (*sent.values(), *answer.values()):
        tensor.zero_()
    (seen,) = fp.captures.load(recorder.folder).rounds
    for name, tensor in network().state_dict().items():
        assert torch.equal(seen.params[name], tensor)
        torch.testing.assert_close(seen.update[name], kept[name] - tensor, rtol=0, atol=1e-7)


def test_silent_clients_means_and_gradients(tmp_path: Path) -> None:
    state = dict(network().state_dict())
    means = fp.record(tmp_path / "means", model=network())
    means.round(sent=network(), received={("a", "b"): (trained(state, 0), (3, 4)), "c": None}, index=7)
    (seen,) = fp.captures.load(means.folder).rounds
    assert (seen.index, seen.reduction, seen.clients, seen.examples) == (7, "weighted_mean", 2, (3, 4))
    (facts,) = read_facts(means.folder)
    assert (facts.protocol, facts.problems) == ("secagg+", {"c": "no answer"})
    gradients = fp.record(tmp_path / "gradients", model=network(), uplink="gradient")
    gradients.round(sent=state, received={"a": ({name: torch.ones_like(t) for name, t in state.items()}, 2)})
    (seen,) = fp.captures.load(gradients.folder).rounds
    assert seen.kind == "gradient"
    assert all(bool((tensor == 1).all()) for tensor in seen.update.values())


def test_lists_of_arrays_and_frozen_parts(tmp_path: Path) -> None:
    state = dict(network().state_dict())
    recorder = fp.record(tmp_path / "run", model=network())
    head = list(state)[-1]
    recorder.round(
        sent=[tensor.numpy() for tensor in state.values()],
        received={"list": [tensor.numpy() + 1 for tensor in state.values()], "part": {head: state[head] + 2}},
    )
    first, second = fp.captures.load(recorder.folder).rounds
    assert set(first.update) == set(state)
    assert set(second.update) == {head}
    torch.testing.assert_close(second.update[head], torch.full_like(state[head], 2))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_differences_are_told_from_weights_under_noise_too(noise: float, tmp_path: Path) -> None:
    state = dict(network().state_dict())
    rng = torch.Generator().manual_seed(0)
    after = trained(state, 0)
    noised = {name: t + noise * torch.randn(t.shape, generator=rng) for name, t in after.items()}
    change = {name: noised[name] - state[name] for name in state}
    seen = []
    for name, answer in (("weights", noised), ("difference", change)):
        recorder = fp.record(tmp_path / name, model=network())
        recorder.round(sent=state, received={"a": answer})
        (recorded,) = fp.captures.load(recorder.folder).rounds
        (facts,) = read_facts(recorder.folder)
        assert facts.uplink == name
        seen.append(recorded.update)
    for name in state:
        torch.testing.assert_close(seen[0][name], seen[1][name], rtol=0, atol=1e-6)


def test_where_nothing_tells_weights_are_assumed(tmp_path: Path) -> None:
    state = dict(network().state_dict())
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    rng = torch.Generator().manual_seed(0)
    loud = {name: 100 * torch.randn(tensor.shape, generator=rng) for name, tensor in state.items()}
    for place, (sent, answer) in enumerate([(zeros, state), (state, loud)]):
        recorder = fp.record(tmp_path / str(place), model=network())
        recorder.round(sent=sent, received={"a": answer})
        (seen,) = fp.captures.load(recorder.folder).rounds
        for name, update in seen.update.items():
            torch.testing.assert_close(update, answer[name] - sent[name])


# --- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "kept"), [({"every": 3}, [1, 4]), ({"rounds": [2, 5]}, [2, 5]), ({"rounds": range(1, 3)}, [1, 2])]
)
def test_rounds_are_chosen_and_the_others_are_told(choice: Any, kept: list[int], tmp_path: Path) -> None:
    recorder = fp.record(tmp_path / "run", model=network(), **choice)
    run(recorder, rounds=5, clients=1)
    assert [seen.index for seen in fp.captures.load(recorder.folder).rounds] == kept
    facts = read_facts(recorder.folder)
    assert [each.index for each in facts] == [1, 2, 3, 4, 5]
    assert [each.index for each in facts if each.left_out is None] == kept
    (found,) = [finding for finding in load_findings(recorder.folder) if finding.check == "rounds-left-out"]
    assert found.evidence["rounds"] == 5 - len(kept)
    assert len(list(recorder.folder.glob("params-*"))) == len(kept)


def test_layers_are_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = list(network().state_dict())
    first = names[0].rpartition(".")[0]
    recorder = fp.record(tmp_path / "run", model=network(), layers=[f"{first}.*"])
    run(recorder, rounds=1)
    for seen in fp.captures.load(recorder.folder).rounds:
        assert set(seen.update) == {name for name in names if name.startswith(f"{first}.")}
        assert set(seen.params) == set(names)
    run(fp.record(tmp_path / "none", model=network(), layers=["nothing"]), rounds=1)
    assert "no layer of the update is called nothing" in caplog.text


def test_a_size_limit_ends_the_recording_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one_round = 2 * sum(tensor.nbytes for tensor in network().state_dict().values())
    recorder = fp.record(tmp_path / "run", model=network(), most_gigabytes=2.5 * one_round / 1e9)
    run(recorder, rounds=4, clients=1)
    assert [seen.index for seen in fp.captures.load(recorder.folder).rounds] == [1, 2]
    assert recorder.recording.capture.bytes <= 2.5 * one_round
    assert "Choose what is kept with every=, rounds= and layers=" in caplog.text
    assert [each.left_out is None for each in read_facts(recorder.folder)] == [True, True, False, False]


# --- it never interferes ---------------------------------------------------------------------------------------------


def test_a_second_run_goes_into_a_numbered_folder(tmp_path: Path) -> None:
    folders = []
    for _ in range(3):
        recorder = fp.record(tmp_path / "run", model=network())
        run(recorder, rounds=1)
        folders.append(recorder.folder.name)
    assert folders == ["run", "run-2", "run-3"]
    assert all(len(fp.captures.load(tmp_path / name).rounds) == 2 for name in folders)
    fp.record(tmp_path / "idle", model=network()).close()
    assert not (tmp_path / "idle").exists(), "a recorder that sees no round makes no folder"


@pytest.mark.parametrize("where", ["write_tensors", "write_bytes"])
def test_a_full_disk_stops_the_recording_only(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = fp.record(tmp_path / "run", model=network())
    state = dict(network().state_dict())
    recorder.round(sent=state, received={"a": (trained(state, 0), 1)})
    recorder.close()

    def full(path: Path, *_: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as planted:
        planted.setattr(f"fedprism.captures.growing.{where}", full)
        if where == "write_bytes":  # the manifest is replaced in one step, so that the old one stays
            planted.setattr(f"fedprism.captures.growing.{where}", lambda *_: full(tmp_path / "elsewhere"))
        for _ in range(3):
            recorder.round(sent=state, received={"a": (trained(state, 1), 1)})
        recorder.close()
    assert caplog.text.count("No space left on device") == 1
    assert [seen.index for seen in fp.captures.load(recorder.folder).rounds] == [1]
    names = {path.name for path in recorder.folder.glob("*.safetensors")}
    assert names == {"params-0.safetensors", "update-0.safetensors"}, "nothing half-written is left"
    checks = {finding.check for finding in load_findings(recorder.folder)}
    assert {"recorder-failed", "rounds-left-out"} <= checks


def test_a_place_that_cannot_be_written_is_told_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    recorder = fp.record(tmp_path / "file" / "run", model=network())
    assert "is a file" in caplog.text
    run(recorder)
    with pytest.raises(BadInput):
        fp.record(tmp_path / "file" / "run", strict=True)


@pytest.mark.parametrize("answer", ["words", object(), {"fc.weight": "x"}, {"other": torch.ones(2)}, {}])
def test_answers_of_any_kind_leave_the_run_alone(answer: Any, tmp_path: Path) -> None:
    recorder = fp.record(tmp_path / "run", model=network())
    state = dict(network().state_dict())
    recorder.round(sent=state, received={"bad": (answer, 1), "good": (trained(state, 0), 1)})
    assert [seen.participants for seen in fp.captures.load(recorder.folder).rounds] == [("good",)]
    assert set(read_facts(recorder.folder)[0].problems) == {"bad"}


def test_the_run_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing is held up; rounds are still handed over, and beyond what may wait they are left out."""
    from fedprism.captures import growing

    go_on, write = threading.Event(), growing.write_tensors
    monkeypatch.setattr(growing, "write_tensors", lambda *given: (go_on.wait(60), write(*given))[1])
    state = dict(network().state_dict())
    one_round = 2 * sum(tensor.nbytes for tensor in state.values())
    monkeypatch.setattr("fedprism.integrations.recording.MOST_WAITING", 3.5 * one_round)
    recorder = fp.record(tmp_path / "run", model=network())
    for _ in range(5):
        recorder.round(sent=state, received={"a": (trained(state, 0), 1)})
    assert not (tmp_path / "run" / "capture.json").exists()
    go_on.set()
    recorder.close()
    assert [seen.index for seen in fp.captures.load(recorder.folder).rounds] == [1, 2, 3]
    assert "the disk is slower" in str(read_facts(recorder.folder)[-1].left_out)


def test_random_numbers_of_the_run_are_left_alone(tmp_path: Path) -> None:
    """With the watch, which runs attacks, and without."""
    draws = []
    for place, watch in enumerate([None, fp.integrations.Watch()]):
        torch.manual_seed(0)
        recorder = fp.record(
            tmp_path / str(place), model=network(), sample=DIGITS.batch([0]).inputs, loss="cross_entropy", watch=watch
        )
        run(recorder)
        draws.append(torch.rand(4))
    torch.manual_seed(0)
    assert all(torch.equal(draw, torch.rand(4)) for draw in draws[:1])
    assert torch.equal(*draws)


def test_the_watch_stops_a_loop_too(tmp_path: Path) -> None:
    recorder = fp.record(
        tmp_path / "run",
        model=network(),
        sample=DIGITS.batch([0]).inputs,
        loss="cross_entropy",
        optimizer=torch.optim.SGD(network().parameters(), lr=RATE),
        watch=fp.integrations.Watch(stop_above=0.5),
    )
    with pytest.raises(fp.integrations.LeakageLimit):
        run(recorder)
    assert {seen.index for seen in fp.captures.load(recorder.folder).rounds} == {1}


def test_wrapping_needs_something_of_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = fp.record(tmp_path / "run")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"recorder\.round"):
        recorder.wrap(object())


def test_nothing_is_said_where_all_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedprism"):
        known = fp.Knowledge(
            input_shape=(1, 8, 8), loss="mse", batch_size=1, bounds=(0.0, 1.0), local_epochs=1, local_batch_size=1
        )
        optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
        assert fp.record(tmp_path / "run", optimizer=optimizer, knowledge=known).missing == ()
        assert caplog.text == ""
