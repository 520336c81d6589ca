"""Growing captures, findings and the watch: what needs no framework to be tested."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedprism as fp
from fedprism.captures.growing import GrowingCapture
from fedprism.errors import BadCapture, BadInput
from fedprism.evaluation.residuals import residuals
from fedprism.inspection import Severity
from fedprism.integrations.arrays import named
from fedprism.integrations.facts import FILE, CentralNoise, RoundFacts, plain_metrics, read_facts
from fedprism.integrations.findings import effective_multiplier, findings, load_findings, save_findings
from fedprism.integrations.leakage import LeakageLimit, Watch, labels_read, samples_read
from fedprism.integrations.recording import Recording
from fedprism.integrations.updates import Answer, Sent, round_of

DIGITS = fp.data.load("digits")


def model() -> torch.nn.Module:
    return fp.models.build("fc2", input_shape=(1, 8, 8), hidden=32, classes=10, seed=0)


def seen_round(size: int = 2, defense: Any = None, protocol: Any = None) -> tuple[fp.Round, fp.Knowledge]:
    """One client's update, with as many digits of different classes."""
    batch = DIGITS.draw(size, torch.Generator().manual_seed(0), unique_labels=True)
    extra = {"defense": defense} if defense is not None else {}
    scenario = fp.Scenario(model=model(), clients=[batch], protocol=protocol or fp.FedSGD(), **extra)
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    return dataclasses.replace(observation.rounds[0], examples=(size,)), observation.knowledge


# --- captures that grow ----------------------------------------------------------------------------------------------


def test_a_capture_is_whole_after_every_round(tmp_path: Path) -> None:
    seen, knowledge = seen_round()
    capture = GrowingCapture(tmp_path / "run", model=model(), knowledge=knowledge, source="a test")
    later = {name: tensor + 1 for name, tensor in seen.params.items()}
    rounds = [
        seen,
        dataclasses.replace(seen, index=1),
        dataclasses.replace(seen, index=2, params=later, participants=("a",)),
    ]
    names = []
    for count, part in enumerate(rounds, 1):
        names.append(capture.append([part]))
        read = fp.captures.load(tmp_path / "run")
        assert len(read.rounds) == count
        assert read.source == "a test"
        for name, tensor in part.update.items():
            assert torch.equal(read.rounds[-1].update[name], tensor)
            assert torch.equal(read.rounds[-1].params[name], part.params[name])
    assert names[0] == names[1] != names[2]  # a model that is sent again is not written again
    assert read.rounds[2].participants == ("a",)


def test_stated_examples_stand_in_for_the_batch_size(tmp_path: Path) -> None:
    seen, knowledge = seen_round()
    unsized = dataclasses.replace(knowledge, batch_size=None)
    capture = GrowingCapture(tmp_path / "run", model=model(), knowledge=unsized)
    capture.append([seen])
    capture.append([dataclasses.replace(seen, index=1, examples=(3,))])
    assert fp.captures.load(tmp_path / "run").knowledge.batch_size == (2, 3)
    capture.append([dataclasses.replace(seen, index=2, examples=(2**31,))])  # more than may be computed with
    read = fp.captures.load(tmp_path / "run")
    assert read.knowledge.batch_size is None
    assert read.rounds[2].examples == (2**31,)


def answers(recorded: fp.Round, *names: str) -> tuple[dict[str, Any], list[Answer]]:
    """What clients were sent and sent back, if each made the same step."""
    after = {name: recorded.params[name] + tensor for name, tensor in recorded.update.items()}
    return dict.fromkeys(names, recorded.params), [Answer((name,), after, recorded.examples) for name in names]


def test_a_full_capture_is_left_as_it_is_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen, _ = seen_round()
    recording = Recording(tmp_path / "run", model=model())
    recording.add(facts(1), *answers(seen, "a"))
    recording.wait()
    monkeypatch.setattr("fedprism.captures.growing.MOST_MANIFEST_BYTES", 10)
    recording.add(facts(2), *answers(seen, "a", "b"))
    recording.wait()
    recording.add(facts(3), *answers(seen, "a"))
    recording.wait()
    assert caplog.text.count("no updates are recorded from round 2 on") == 1
    assert len(fp.captures.load(tmp_path / "run").rounds) == 1
    assert [round_.left_out is None for round_ in read_facts(tmp_path / "run")] == [True, False, False]
    assert {path.name for path in (tmp_path / "run").glob("*.safetensors")} == {
        "params-0.safetensors",
        "update-0.safetensors",
    }, "files that the manifest does not name are gone"


def test_updates_that_do_not_fit_the_model_are_refused() -> None:
    before = {name: tensor.detach() for name, tensor in model().named_parameters()}
    name = next(iter(before))
    for after, word in [
        ({"other": torch.zeros(3)}, "no such tensor"),
        ({name: torch.zeros(3)}, "shape"),
        ({name: before[name] * float("inf")}, "infinity"),
        ({name: before[name].to(torch.complex64)}, "real or whole numbers"),
        ({}, "any parameter"),
    ]:
        with pytest.raises(BadInput, match=word):
            round_of(Sent.of(before, ()), Answer(("a",), after), index=0)


def test_lists_of_arrays_are_named_after_the_model() -> None:
    state = model().state_dict()
    places = {str(place): tensor for place, tensor in enumerate(state.values())}
    assert list(named(places, model())) == list(state)
    assert list(named(places, None)) == list(places)
    with pytest.raises(BadInput, match="state_dict"):
        named({"0": torch.zeros(2)}, model())


@pytest.mark.parametrize(("package", "module"), [("flwr", "flower"), ("nvflare", "nvflare")])
def test_a_missing_framework_is_one_sentence(package: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith(f"fedprism.integrations.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(BadInput, match=rf"fedprism\[{module}\]"):
        importlib.import_module(f"fedprism.integrations.{module}")


# --- findings --------------------------------------------------------------------------------------------------------


def facts(index: int = 1, **changes: Any) -> RoundFacts:
    names = changes.pop("replied", ("a", "b"))
    return RoundFacts(index=index, protocol=changes.pop("protocol", "plain"), sampled=names, replied=names, **changes)


def test_a_plain_run_has_no_findings() -> None:
    assert findings([facts(examples={"a": 1, "b": 2}, metrics={"a": {"loss": 0.5}}, norms={"a": 1.0})]) == ()


def test_findings_are_stored_and_read_back(tmp_path: Path) -> None:
    rounds = [
        facts(
            1,
            protocol="secagg+",
            examples={"a": 1, "b": 2},
            metrics={"a": {"loss": 0.5}, "b": {}},
            model="params-0.safetensors",
        )
    ]
    save_findings(tmp_path, rounds)
    assert read_facts(tmp_path) == tuple(rounds)
    found = load_findings(tmp_path)
    assert found == findings(rounds)
    assert [finding.check for finding in found] == ["examples-in-clear", "metrics-in-clear", "participants-in-clear"]
    assert [finding.severity for finding in found] == [Severity.SERIOUS, Severity.SERIOUS, Severity.NOTE]
    assert load_findings(tmp_path / "elsewhere") == ()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"format": "fedprism-findings/2", "rounds": [], "findings": []}',
        b'{"format": "fedprism-findings/1", "rounds": [{"index": 0}], "findings": []}',
        b'{"format": "fedprism-findings/1", "rounds": [], "findings": [], "more": 1}',
        b"\xff\xfe",
        json.dumps(
            {
                "format": "fedprism-findings/1",
                "findings": [],
                "rounds": [
                    {"index": 0, "protocol": "plain", "sampled": [], "replied": ["a"], "examples": {"a": 0}},
                ],
            }
        ).encode(),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(BadCapture, match="beside the capture"):
        load_findings(tmp_path)


def test_which_sums_come_apart_follows_from_the_cohorts() -> None:
    def sums(*cohorts: str, model: str = "params-0") -> list[RoundFacts]:
        return [facts(i, protocol="secagg+", replied=tuple(names), model=model) for i, names in enumerate(cohorts)]

    apart = {finding.check: finding for finding in findings(sums("ab", "bc", "ac"))}
    assert apart["sums-come-apart"].evidence == {"rounds": 3, "clients": 3, "determined": 3}
    one = {finding.check: finding for finding in findings(sums("abc", "ab"))}
    assert one["sums-come-apart"].evidence["determined"] == 1  # only c is alone in a difference
    assert "sums-come-apart" not in {finding.check for finding in findings(sums("ab", "cd"))}
    many = sums("".join(map(chr, range(48, 1100))), "01")
    assert "sums-come-apart" not in {finding.check for finding in findings(many)}  # too many to look at
    other = sums("ab", model="params-0") + sums("bc", model="params-1") + sums("ac", model="params-2")
    assert "sums-come-apart" not in {finding.check for finding in findings(other)}


def test_the_noise_that_counts_is_for_those_who_replied() -> None:
    noise = CentralNoise(clipped_by="client", clipping_norm=0.3, noise_multiplier=0.5, clients=10)
    two = facts(replied=("a", "b"), noise=noise)
    assert effective_multiplier(two) == pytest.approx(0.1)  # 0.5 * 0.3 / 10 where 0.5 * 0.3 / 2 was needed
    ten = facts(2, replied=tuple("abcdefghij"), noise=noise)
    assert effective_multiplier(ten) == pytest.approx(0.5)
    weighted = facts(
        3, replied=tuple("abcdefghij"), noise=noise, examples={n: 1 + 4 * (n == "a") for n in "abcdefghij"}
    )
    assert effective_multiplier(weighted) == pytest.approx(0.5 / 10 * 14 / 5)
    assert findings([ten]) == ()
    (found,) = findings([ten, two, weighted])
    assert found.check == "noise-below-configured"
    assert found.evidence["rounds"] == 2
    assert found.evidence["replied"] == 2


def test_metrics_are_kept_as_plain_values() -> None:
    kept = plain_metrics({"loss": 0.5, "n": 3, "name": "x" * 300, "bad": float("nan"), "many": [1.0], "word": "a"})
    long = findings([facts(protocol="secagg+", metrics={"a": {letter * 200: 1 for letter in "abcdef"}})])
    assert all(len(finding.sentence) < 1000 for finding in long)
    assert kept == {"loss": 0.5, "n": 3, "name": None, "bad": None, "many": None, "word": "a"}
    json.dumps(kept)


# --- the watch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4])
def test_a_small_batch_is_read_off_whole(size: int) -> None:
    seen, knowledge = seen_round(size)
    assert samples_read(seen, model(), knowledge) > 0.99
    assert labels_read(seen, knowledge) == (1.0 if size == 1 else 0.0)  # 4 of 10 classes are too crowded to trust


@pytest.mark.parametrize("size", [1, 4])
def test_noise_is_not_mistaken_for_samples(size: int) -> None:
    seen, knowledge = seen_round(size, fp.defenses.GaussianNoise(0.1))
    assert samples_read(seen, model(), knowledge) == 0.0


def test_what_cannot_be_checked_is_unknown() -> None:
    seen, knowledge = seen_round(1)
    assert samples_read(seen, None, knowledge) is None
    assert samples_read(seen, model(), fp.Knowledge()) is None
    assert labels_read(seen, dataclasses.replace(knowledge, loss="mse")) is None


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("told", [True, False])
def test_steps_of_adam_are_not_mistaken_for_samples(size: int, epochs: int, told: bool) -> None:
    """Their rows agree, because they are nearly signs; the sizes of their entries say nothing about samples."""
    seen, knowledge = seen_round(size, protocol=fp.FedAvg(lr=1e-3, epochs=epochs, optimizer=fp.optimizers.Adam()))
    if not told:
        knowledge = dataclasses.replace(knowledge, local_optimizer=None)
    assert not samples_read(seen, model(), knowledge)


@pytest.mark.parametrize("size", [1, 4])
def test_signs_are_not_mistaken_for_samples(size: int) -> None:
    seen, knowledge = seen_round(size, fp.defenses.SignCompression())
    assert samples_read(seen, model(), knowledge) is None


@pytest.mark.parametrize("defense", [None, fp.defenses.GaussianNoise(0.02), fp.defenses.GaussianNoise(100.0)])
@pytest.mark.parametrize("size", [1, 4])
def test_the_watch_and_the_report_judge_alike(size: int, defense: Any) -> None:
    seen, knowledge = seen_round(size, defense)
    observation = fp.Observation(model=model(), rounds=(seen,), knowledge=knowledge)
    (judged,) = residuals(observation, fp.run(fp.attacks.dense_inversion(), observation))
    assert bool(samples_read(seen, model(), knowledge)) is judged.recovered


def test_the_client_whose_sample_was_read_off_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hidden, knowledge = seen_round(1, fp.defenses.GaussianNoise(100.0))
    open_, _ = seen_round(1)
    (to_a, of_a), (to_b, of_b) = answers(hidden, "a"), answers(open_, "b")
    recording = Recording(tmp_path / "run", model=model(), knowledge=knowledge, watch=Watch())
    recording.add(facts(replied=("a", "b")), {**to_a, **to_b}, [*of_a, *of_b])
    recording.wait()
    assert "leakage 1.00 of samples of b" in caplog.text
    (finding,) = [each for each in load_findings(tmp_path / "run") if each.check == "samples-read-off"]
    assert "100% of the samples behind the update of b" in finding.sentence


def test_the_watch_logs_and_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen, knowledge = seen_round(1)
    seen = dataclasses.replace(seen, participants=("a",))
    quiet = Recording(tmp_path / "logged", model=model(), knowledge=knowledge, watch=Watch())
    quiet.add(facts(replied=("a",)), *answers(seen, "a"))
    assert "leakage 1.00 of samples" in caplog.text
    strict = Recording(tmp_path / "stopped", model=model(), knowledge=knowledge, watch=Watch(stop_above=0.2))
    with pytest.raises(LeakageLimit, match="at most 20%"):
        strict.add(facts(replied=("a",)), *answers(seen, "a"))
    assert len(fp.captures.load(tmp_path / "stopped").rounds) == 1
    (told,) = read_facts(tmp_path / "stopped")
    assert told.norms["a"] == pytest.approx(told.leakage.norm)
    with pytest.raises(BadInput, match="fraction from 0 to 1"):
        Watch(stop_above=2.0)


def test_a_recorder_says_all_that_attacks_will_lack(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = fp.Knowledge(input_shape=(1, 8, 8), loss="cross_entropy", batch_size=1, bounds=(0.0, 1.0))
    with caplog.at_level(logging.WARNING, logger="fedprism"):
        Recording(tmp_path / "told", knowledge=told, uplink="gradient")
        assert caplog.text == ""
        Recording(tmp_path / "untold")
    assert "input_shape and loss and batch_size, which attacks need; bounds and local_lr" in caplog.text
    assert 'knowledge = { input_shape = [3, 32, 32], loss = "cross_entropy"' in caplog.text
