"""Captures round-trip, captures written by other software load, and a capture is written whole or not at all."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedprism as fp
from fedprism.errors import BadCapture, BadInput
from fedprism.files.tensors import Selection, TensorFile
from fedprism.inputs import tensors_of
from fedprism.types import KNOWLEDGE_FIELDS
from planted_inputs import KINDS, Kind, scenario

INPUT_SHAPE = (1, 6, 6)
CLASSES = 4


def tiny(name: str = "fc2") -> nn.Module:
    own = {"fc2": {"hidden": 5}, "lenet": {"width": 2}}[name]
    return fp.models.build(name, input_shape=INPUT_SHAPE, classes=CLASSES, seed=1, **own)


class Normalised(nn.Module):
    """A network with batch-norm buffers, an integer one among them, and a second name for one of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.out = nn.Linear(32, CLASSES)
        self.same = self.out

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.norm(self.conv(images)).relu().flatten(1))
        return outputs


def normalised() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Normalised()


def batch(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> fp.Batch:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.rand(size, *INPUT_SHAPE, generator=rng, dtype=dtype)
    return fp.Batch(inputs, torch.randint(CLASSES, (size,), generator=rng))


def observe(threat: fp.ThreatModel = fp.threats.honest_but_curious, **changes: Any) -> fp.Observation:
    chosen = {"model": tiny(), "clients": [batch(3)], **changes}
    if threat.sees == "aggregate":
        chosen["clients"] = chosen["clients"] * 2  # a participant needs someone else to look at
    scenario = fp.Scenario(**chosen)
    return fp.simulate(scenario, threat, seed=4)[0]


def same(first: Any, second: Any) -> bool:
    """Equality that looks into tensors, mappings, sequences and dataclasses."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping):
        return (
            isinstance(second, Mapping) and set(first) == set(second) and all(same(first[k], second[k]) for k in first)
        )
    if isinstance(first, tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, fp.Round | fp.Knowledge | fp.Batch):
        return type(first) is type(second) and all(
            same(getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(first)
        )
    return bool(first == second)


def assert_same(first: fp.Observation, second: fp.Observation) -> None:
    assert second.knowledge.granted() == first.knowledge.granted()
    for name in KNOWLEDGE_FIELDS:
        assert same(getattr(first.knowledge, name), getattr(second.knowledge, name)), name
    assert len(first.rounds) == len(second.rounds)
    for one, other in zip(first.rounds, second.rounds, strict=True):
        for field in dataclasses.fields(fp.Round):
            assert same(getattr(one, field.name), getattr(other, field.name)), field.name
    assert same(first.trapdoor, second.trapdoor)
    participants = {name for seen in first.rounds for name in seen.participants or ()}
    assert second.subject == (participants.pop() if len(participants) == 1 else None)
    assert first.subject in (None, second.subject)
    assert first.source == second.source
    assert (first.model is None) == (second.model is None)
    if first.model is not None and second.model is not None:
        assert fp.models.spec_of(first.model) == fp.models.spec_of(second.model)
        assert first.model.training == second.model.training


THREATS = {
    **fp.threats.THREATS,
    "everything": fp.threats.honest_but_curious.granting("labels", "defense", "examples", "public_data"),
    "participation": fp.threats.secure_aggregation.granting("participation", "examples", "labels"),
    "no model": fp.threats.eavesdropper.withholding("model"),
    "nothing": fp.ThreatModel("nothing", frozenset()),
}
NAMED = [kind for kind in KINDS if isinstance(kind.loss, str)]
SCENARIOS: dict[str, dict[str, Any]] = {
    "one client": {},
    "several clients": {"clients": [batch(2, 1), batch(3, 2)], "rounds": 2},
    "federated averaging": {"protocol": fp.FedAvg(lr=0.1, epochs=2, batch_size=2, momentum=0.5)},
    "another optimizer": {"protocol": fp.FedAvg(lr=0.1, epochs=2, optimizer=fp.optimizers.AdamW(beta1=0.5))},
    "weighted": {"clients": [batch(1, 1), batch(3, 2)], "aggregation": "weighted_mean"},
    "eval mode": {"model": tiny("lenet"), "training": False, "loss": "mse", "bounds": (-1.0, 1.0)},
    "defended": {"defense": fp.chain(fp.defenses.Prune(0.5), fp.defenses.GaussianNoise(1e-3))},
    "one defense": {"defense": fp.defenses.LaplaceNoise(1)},
    "normalised pixels": {"normalization": ((0.5,), (0.25,))},
    "double precision": {"model": tiny().double(), "clients": [batch(3, dtype=torch.float64)]},
    "soft labels": {"clients": [fp.Batch(batch(2).inputs, torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0, 1.0]]))]},
}


@pytest.mark.parametrize("threat", THREATS.values(), ids=THREATS)
@pytest.mark.parametrize("changes", SCENARIOS.values(), ids=SCENARIOS)
def test_an_observation_comes_back_as_it_was(threat: fp.ThreatModel, changes: dict[str, Any], tmp_path: Path) -> None:
    observation = observe(threat, **changes)
    folder = fp.captures.save(observation, tmp_path / "capture")
    loaded = fp.captures.load(folder)
    assert_same(observation, loaded)
    assert_same(observation, fp.captures.load(fp.captures.save(loaded, tmp_path / "again")))


@pytest.mark.parametrize(
    "types",
    [
        ((torch.float32, torch.float32), (torch.float64, torch.float64)),
        ((torch.float64, torch.float64), (torch.float32, torch.float32)),
        ((torch.float32, torch.float64), (torch.float64, torch.float32)),
        ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)),
        ((torch.float16, torch.float16), (torch.float64, torch.float16)),
    ],
    ids=str,
)
def test_rounds_of_several_number_formats_are_attacked(types: Any, tmp_path: Path) -> None:
    """Servers that average in double precision send other formats from their second round on."""
    observation = observe(fp.threats.honest_but_curious, rounds=2, protocol=fp.FedAvg(lr=0.1))

    def cast(update: fp.types.Update, dtype: torch.dtype) -> fp.types.Update:
        return {name: tensor.to(dtype) for name, tensor in update.items()}

    rounds = tuple(
        dataclasses.replace(round, params=cast(round.params, sent), update=cast(round.update, received))
        for round, (sent, received) in zip(observation.rounds, types, strict=True)
    )
    mixed = dataclasses.replace(observation, rounds=rounds)
    loaded = fp.captures.load(fp.captures.save(mixed, tmp_path / "capture"))
    matching = dataclasses.replace(fp.attacks.inverting_gradients(), iterations=2, starts=fp.attacks.Starts())
    for attack in (fp.attacks.dense_inversion(), fp.attacks.cocktail_party(), matching):
        answer = fp.run(attack, loaded)
        assert len(answer.per_update or ()) == 2
        assert fp.residual(loaded, answer) is not None


@pytest.mark.parametrize("kind", NAMED, ids=[kind.name for kind in NAMED])
def test_inputs_and_labels_of_every_kind_come_back(kind: Kind, tmp_path: Path) -> None:
    planted = scenario(kind)
    federation = dataclasses.replace(planted, public_data=fp.Batch(kind.inputs(2), kind.labels(2)))
    threat = fp.threats.honest_but_curious.granting("labels", "public_data")
    observation, truth = fp.simulate(federation, threat, seed=0)
    fp.captures.save(observation, tmp_path / "capture")
    loaded = fp.captures.load(tmp_path / "capture", model=planted.model)
    known = loaded.knowledge
    assert known.input_shape == observation.knowledge.input_shape
    assert known.input_types == observation.knowledge.input_types
    assert isinstance(known.labels, Tensor)
    assert torch.equal(known.labels, truth.labels)
    assert known.public_data is not None
    pairs = zip(tensors_of(known.public_data.inputs), tensors_of(kind.inputs(2)), strict=True)
    assert all(torch.equal(read, written) for read, written in pairs)


@pytest.mark.parametrize(
    ("knowledge", "words"),
    [
        ({"input_shape": [4], "input_types": ["int64"]}, "have the structure of input_shape"),
        ({"input_shape": [[4], [2]], "input_types": "int64"}, "have the structure of input_shape"),
        ({"input_shape": {"a": [4]}, "input_types": {"b": "int64"}}, "have the structure of input_shape"),
        ({"input_types": "int64"}, "have the structure of input_shape"),
        ({"input_shape": [4], "input_types": "object"}, "input_types"),
        ({"input_shape": [[4096, 4096], [4096, 4096]]}, "one input holds at most"),
    ],
)
def test_types_and_shapes_that_do_not_fit_together_are_refused(
    knowledge: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = fp.captures.save(observe(fp.threats.eavesdropper), tmp_path / "capture")
    manifest = json.loads((folder / "capture.json").read_text())
    manifest["knowledge"] = knowledge
    (folder / "capture.json").write_text(json.dumps(manifest))
    with pytest.raises(BadCapture, match=words):
        fp.captures.load(folder)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_come_back_whole_numbers_included(training: bool, tmp_path: Path) -> None:
    observation = observe(model=normalised(), training=training, clients=[batch(3), batch(2)])
    seen = observation.rounds[0]
    after = {name: b + 1 for name, b in (seen.buffers_before or {}).items()}
    rounds = (dataclasses.replace(seen, buffers_after=after), *observation.rounds[1:])
    observation = dataclasses.replace(observation, rounds=rounds)
    fp.captures.save(observation, tmp_path / "capture")
    model = normalised().train(not training)
    loaded = fp.captures.load(tmp_path / "capture", model=model)
    assert_same(observation, loaded)
    assert loaded.rounds[0].buffers_after is not None
    assert loaded.rounds[0].buffers_after["norm.num_batches_tracked"].dtype == torch.int64
    assert loaded.model is not None
    assert loaded.model.training == training
    assert model.training != training, "the caller's model is left as it was"


def test_every_tensor_of_knowledge_comes_back(tmp_path: Path) -> None:
    knowledge = fp.Knowledge(
        windows=torch.tensor([[1, 0], [1, 1]]),
        counts=torch.tensor([[1.0, torch.nan], [0.0, -1.0]]),
        participation=torch.tensor([[True, False]]),
        cohort_sizes=torch.tensor([2, 3]),
        batchnorm_exact={"norm.mean": torch.rand(3), "norm.var": torch.rand(3)},
        batchnorm_running={"norm.mean": torch.rand(3)},
        mixing={
            "mapping": torch.tensor([[0, 1], [1, 0]]),
            "coefficients": torch.rand(2, 2),
            "updates": torch.tensor([0, 0]),
        },
        public_data=batch(2),
        defense=fp.chain(),
        count_release=fp.defenses.LaplaceCounts(0.5),
    )
    observation = dataclasses.replace(
        observe(), knowledge=knowledge, trapdoor={"bins": torch.rand(3), "n": torch.tensor(4)}
    )
    loaded = fp.captures.load(fp.captures.save(observation, tmp_path / "capture"))
    assert loaded.knowledge.counts is not None
    assert torch.equal(loaded.knowledge.counts.isnan(), knowledge.counts.isnan())  # type: ignore[union-attr]
    without = [
        dataclasses.replace(o, knowledge=dataclasses.replace(o.knowledge, counts=None)) for o in (observation, loaded)
    ]
    assert_same(*without)


def test_rounds_that_share_parameters_share_a_file(tmp_path: Path) -> None:
    folder = fp.captures.save(observe(clients=[batch(2, 1), batch(2, 2)]), tmp_path / "capture")
    assert sorted(path.name for path in folder.iterdir()) == [
        "capture.json",
        "params-0.safetensors",
        "update-0.safetensors",
        "update-1.safetensors",
    ]
    first, second = fp.captures.load(folder).rounds
    assert first.params is second.params


# --- written by other software ---------------------------------------------------------------------------------------


def example() -> dict[str, Any]:
    """The example of the design page, word for word."""
    return json.loads("""
        {"format": "fedprism-capture/1",
         "model": {"name": "fc2", "kwargs": {"input_shape": [3, 32, 32], "hidden": 256, "classes": 10}},
         "knowledge": {"input_shape": [3, 32, 32], "bounds": [0.0, 1.0], "batch_size": 32, "loss": "cross_entropy"},
         "rounds": [{"kind": "gradient", "clients": 1,
                     "params": "params-0.safetensors", "update": "update-0.safetensors"}],
         "source": "free text"}
    """)


def by_hand(folder: Path, manifest: dict[str, Any], **files: Mapping[str, Tensor]) -> Path:
    """A capture as any software could write it."""
    folder.mkdir(exist_ok=True)
    (folder / "capture.json").write_text(json.dumps(manifest))
    for name, tensors in files.items():
        save_file(
            {key: tensor.clone() for key, tensor in tensors.items()}, folder / f"{name.replace('_', '-')}.safetensors"
        )
    return folder


def test_the_example_of_the_design_loads_and_can_be_attacked(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10))
    inputs, labels = torch.rand(32, 3, 32, 32), torch.arange(32) % 10
    nn.functional.cross_entropy(model(inputs), labels).backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    observation = fp.captures.load(by_hand(tmp_path, example(), params_0=model.state_dict(), update_0=gradient))
    assert observation.source == "free text"
    assert observation.knowledge == fp.Knowledge(
        input_shape=(3, 32, 32), bounds=(0.0, 1.0), batch_size=32, loss="cross_entropy"
    )
    assert (observation.rounds[0].index, observation.rounds[0].reduction) == (0, "mean")
    found = fp.run(fp.attacks.dense_inversion(), observation)
    assert found.inputs is not None
    assert found.inputs.shape[1:] == (3, 32, 32)


@pytest.mark.parametrize("entry", [None, {}, {"name": None}], ids=str)
def test_a_capture_may_name_no_model(entry: dict[str, Any] | None, tmp_path: Path) -> None:
    tensors = tiny().state_dict()
    manifest = {**example(), "model": entry, "knowledge": {"input_shape": INPUT_SHAPE}}
    folder = by_hand(tmp_path, manifest, params_0=tensors, update_0=tensors)
    assert fp.captures.load(folder).model is None
    assert fp.captures.load(folder, model=tiny()).model is not None
    with pytest.raises(fp.MissingKnowledge, match="'model'"):
        fp.run(fp.attacks.dense_inversion(), fp.captures.load(folder))


def whole_state_capture(folder: Path, model: nn.Module, kind: str, **keys: str) -> Path:
    """What software that records whole state dicts writes: buffers and second names among the parameters."""
    before = copy.deepcopy(model.state_dict())
    model(batch(4).inputs)  # moves the batch-norm statistics
    after = model.state_dict()
    difference = {name: after[name] - tensor for name, tensor in before.items()}
    difference["conv.weight"] += 1
    manifest = {
        **example(),
        "model": None,
        "knowledge": {},
        "rounds": [{"kind": kind, "params": "params-0.safetensors", "update": "update-0.safetensors", **keys}] * 2,
    }
    return by_hand(folder, manifest, params_0=before, update_0=difference)


def test_whole_state_dicts_are_split(tmp_path: Path) -> None:
    model = normalised()
    before = copy.deepcopy(dict(model.named_buffers()))
    first, second = fp.captures.load(whole_state_capture(tmp_path, model, "delta"), model=model).rounds
    assert set(first.params) == set(first.update) == {name for name, _ in model.named_parameters()}
    assert same(first.buffers_before, before)
    assert first.buffers_after is not None
    for name, expected in model.named_buffers():
        assert first.buffers_after[name].dtype == expected.dtype
        torch.testing.assert_close(first.buffers_after[name], expected)
    assert int(first.buffers_after["norm.num_batches_tracked"]) == 1
    assert first.params is second.params


def test_a_gradient_says_nothing_about_buffers_afterwards(tmp_path: Path) -> None:
    seen = fp.captures.load(whole_state_capture(tmp_path, normalised(), "gradient"), model=normalised()).rounds[0]
    assert seen.buffers_before is not None
    assert seen.buffers_after is None
    assert not any("norm.running" in name for name in seen.update)


def test_buffers_in_a_file_of_their_own_come_first(tmp_path: Path) -> None:
    folder = whole_state_capture(tmp_path, normalised(), "delta", buffers_before="buffers.safetensors")
    buffers = {name: torch.full_like(b, 7) for name, b in normalised().named_buffers()}
    save_file(buffers, folder / "buffers.safetensors")
    assert same(fp.captures.load(folder, model=normalised()).rounds[0].buffers_before, buffers)


def test_files_may_lie_in_folders_of_the_capture(tmp_path: Path) -> None:
    tensors = tiny().state_dict()
    manifest = {**example(), "model": None, "knowledge": {}}
    manifest["rounds"] = [{"kind": "delta", "params": "sent/0.safetensors", "update": "sent/../back/0.safetensors"}]
    (tmp_path / "sent").mkdir()
    (tmp_path / "back").mkdir()
    save_file(tensors, tmp_path / "sent/0.safetensors")
    (tmp_path / "back/0.safetensors").symlink_to(tmp_path / "sent/0.safetensors")
    loaded = fp.captures.load(by_hand(tmp_path, manifest))
    assert same(dict(loaded.rounds[0].update), dict(tensors))


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    fp.captures.save(observe(), tmp_path / "capture")
    (tmp_path / "link").symlink_to(tmp_path / "capture")
    assert_same(observe(), fp.captures.load(tmp_path / "link"))


# --- lazily ----------------------------------------------------------------------------------------------------------


def test_tensors_are_read_when_asked_for_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fp.captures.load(fp.captures.save(observe(), tmp_path / "capture")).rounds[0]
    assert isinstance(seen.update, TensorFile)
    read: list[str] = []
    original = TensorFile._mapped
    monkeypatch.setattr(TensorFile, "_mapped", lambda self, name: (read.append(name), original(self, name))[1])
    assert len(seen.update) == 4
    assert "1.weight" in seen.update
    assert seen.update.shape("1.weight") == (5, 36)
    assert read == []
    first, second = seen.update["1.weight"], seen.update["1.weight"]
    assert read == ["1.weight"] * 2
    assert first.data_ptr() != second.data_ptr()
    first.zero_()
    assert torch.equal(seen.update["1.weight"], second), "a reader's changes stay the reader's"
    with pytest.raises(KeyError):
        seen.update["2.weight"]


def test_split_state_dicts_stay_lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fp.captures.load(whole_state_capture(tmp_path, normalised(), "gradient"), model=normalised()).rounds[0]
    assert isinstance(seen.params, Selection)
    monkeypatch.setattr(TensorFile, "__getitem__", lambda self, name: name)
    assert len(seen.params) == 6
    assert seen.params["conv.weight"] == "conv.weight"
    with pytest.raises(KeyError):
        seen.params["norm.running_mean"]


def test_loading_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    folder = fp.captures.save(observe(), tmp_path / "capture")
    before = torch.random.get_rng_state()
    fp.captures.load(folder)
    assert torch.equal(before, torch.random.get_rng_state())


# --- whole or not at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_nothing_that_exists_is_written_over(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "capture"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"'capture' already exists\. Choose another name"):
        fp.captures.save(observe(), target)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_that_fills_up_leaves_nothing(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, calls = os.replace, iter(range(100))

    def full(source: str, target: str) -> None:
        if next(calls) == after:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BadInput, match="cannot be written: No space left on device"):
        fp.captures.save(observe(), tmp_path / "some" / "where" / "capture")
    assert list(tmp_path.iterdir()) == []
    fp.captures.save(observe(), tmp_path / "some" / "where" / "capture")


def test_a_write_cut_short_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(BadInput, match="File too large"):
            fp.captures.save(observe(), tmp_path / "capture")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fp.captures.save(observe(), tmp_path / "capture")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_no_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="the capture 'capture' cannot be written: "):
        fp.captures.save(observe(), tmp_path / "file" / "capture")


class Own(fp.defenses.Defense):
    """A defense that is in no table."""


@pytest.mark.parametrize(
    ("knowledge", "words"),
    [
        (fp.Knowledge(loss=lambda outputs, labels: outputs.sum()), "not a function. Withhold the loss"),
        (fp.Knowledge(defense=Own()), "only the defenses prune"),
        (fp.Knowledge(bounds=(0.0, float("inf"))), "'knowledge.bounds.1'"),
        (fp.Knowledge(batch_size=(1, 2)), "one value for each of 1 rounds, not 2"),
        (fp.Knowledge(local_lr=torch.tensor(0.1)), "JSON cannot hold this knowledge"),  # type: ignore[arg-type]
    ],
)
def test_what_could_not_be_read_back_is_not_written(knowledge: fp.Knowledge, words: str, tmp_path: Path) -> None:
    with pytest.raises((BadInput, BadCapture), match=words):
        fp.captures.save(dataclasses.replace(observe(), knowledge=knowledge), tmp_path / "capture")
    assert list(tmp_path.iterdir()) == []
