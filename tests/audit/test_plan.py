"""Plans: what is written is checked key by key, and whatever is written gives a plan or one clear sentence."""

from __future__ import annotations

import errno
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedprism import cli
from fedprism.audit import Plan, Setup, checked_plan, lay_out, load_plan, parse_plan, prepare, proposing, template
from fedprism.audit.entries import chains
from fedprism.errors import BadPlan, FedprismError

START = '[model]\nname = "fc2"\nkwargs = { hidden = 8 }\n[data]\nname = "photos"\noptions = { size = 8, crops = 4 }\n'
NUMBERS = list(range(1, 101))


def grid(text: str) -> str:
    return f"{START}[grid]\n{text}\n"


# --- what is right ---------------------------------------------------------------------------------------------------


def test_a_model_and_data_are_a_plan() -> None:
    plan = parse_plan(START)
    assert plan.grid.attacks is None
    assert plan.grid.seeds == (0, 1, 2)


def test_several_strengths_are_several_chains() -> None:
    plan = parse_plan(
        grid(
            'defenses = ["none", {name = "prune", ratio = [0.5, 0.9]}, '
            '[{name = "clip", norm = [1, 2]}, {name = "gaussian-noise", std = [0.1, 0.2]}]]'
        )
    )
    found = [[(entry.name, *entry.settings.values()) for entry in c] for e in plan.grid.defenses for c in chains(e)]
    assert found == [
        [],
        [("prune", 0.5)],
        [("prune", 0.9)],
        [("clip", 1), ("gaussian-noise", 0.1)],
        [("clip", 1), ("gaussian-noise", 0.2)],
        [("clip", 2), ("gaussian-noise", 0.1)],
        [("clip", 2), ("gaussian-noise", 0.2)],
    ]


def test_settings_of_an_attack_reach_it() -> None:
    (entry,) = parse_plan(grid('attacks = [{name = "idlg", iterations = 7, labels = "known"}]')).grid.attacks or ()
    attack: Any = entry.method
    assert attack.iterations == 7
    assert attack.labels.value == "known"


def test_a_plan_survives_json() -> None:
    plan = parse_plan(template.text())
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["[model] and [data]"]),
        ('[modl]\nname = "fc2"', ["'modl'", "did you mean model?"]),
        (
            '[model]\nname = "fc3"\n[data]\nname = "photos"',
            ["'model.name' (a model of", "'fc3'", "fc2"],
        ),
        ('[model]\n[data]\nname = "photos"', ["give either name or factory"]),
        ('[model]\nfactory = "os.system"\n[data]\nname = "photos"', ["model.factory", "pkg.module:function"]),
        ('[model]\nname = "fc2"\n[data]\nname = "photos"\nfolder = "x"', ["not name and folder"]),
        ('[model]\nname = "fc2"\n[data]\ncsv = "x.csv"', ["label"]),
        ('[captures]\nfolders = ["a"]\ntruths = ["b", "c"]', ["ground truth for each of 1"]),
        ('[captures]\nfolders = ["a"]\n[data]\nname = "photos"', ["an audit of captures has no [data]"]),
        (grid('atacks = ["dlg"]'), ["[grid]", "did you mean attacks?"]),
        (grid('attacks = ["dgl"]'), ["grid.attacks.0", "methods of attack", "did you mean dlg"]),
        (grid("attacks = []"), ["grid.attacks", "methods of attack"]),
        (grid('attacks = [{name = "idlg", iteratons = 3}]'), ["'iteratons'", "did you mean iterations?"]),
        (grid('attacks = [{name = "idlg", iterations = 2.5}]'), ["iterations", "whole number", "2.5"]),
        (grid('attacks = [{name = "idlg", iterations = 0}]'), ["iterations"]),
        (grid('attacks = [{name = "idlg", then = "dlg"}]'), ["then", "disaggregation"]),
        (
            grid(
                f'attacks = [{{name = "disaggregation", count_tolerance = {NUMBERS}, '
                f'then = {{name = "idlg", iterations = {NUMBERS}}}}}]'
            ),
            ["more than 1000 combinations"],
        ),
        (grid('defenses = ["prune"]'), ["grid.defenses.0", "ratio"]),
        (grid('defenses = [{name = "prune", ratio = [0.5, 2]}]'), ["grid.defenses.0.0", "ratio", "2.0"]),
        (grid('threats = ["honest"]'), ["grid.threats.0", "honest_but_curious"]),
        (grid('threats = [{name = "eavesdropper", granting = ["label"]}]'), ["did you mean labels?"]),
        (grid('threats = [{name = "eavesdropper", grants = ["labels"]}]'), ["did you mean granting?"]),
        (grid('protocols = [{name = "fedavg", epochs = 0}]'), ["epochs"]),
        (grid('protocols = [{name = "fedsgd", lr = -1}]'), ["lr", "above 0"]),
        (grid("batch_sizes = [1, 0]"), ["grid.batch_sizes.1", "samples each client trains on", "0"]),
        (grid("seeds = [1, 1]"), ["1 is given twice"]),
        (grid("when = 1979-05-27"), ["date"]),
        (
            f'{START}[scores]\nmetrics = ["psmr"]',
            ["scores.metrics", "compared with the ground truth", "did you mean psnr?"],
        ),
        (f"{START}[federation]\nwindow = 3", ["a window has at most 1 rounds, not 3"]),
        (f'{START}[federation]\ncounts = "laplace"', ["federation.counts", "epsilon"]),
        (f'{START}[federation]\ncounts = {{name = "laplace", epsilon = 1}}', ["counts need a window"]),
        (f'{START}[federation]\ncounts = {{name = "laplac", epsilon = 1}}', ["did you mean laplace?"]),
        ("title = ", ["TOML"]),
        ("a = [" + "[" * 5000, ["TOML"]),
    ],
)
def test_a_wrong_key_is_named_in_one_sentence(text: str, words: list[str]) -> None:
    with pytest.raises(BadPlan) as caught:
        parse_plan(text)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    for word in words:
        assert word in sentence


def test_a_plan_that_is_not_there_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match="fedprism init"):
        load_plan(tmp_path / "missing.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(BadPlan, match="larger than 1048576 bytes"):
        load_plan(tmp_path / "huge.toml")


def test_a_grid_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    many = ", ".join(map(str, range(400)))
    plan = parse_plan(grid(f'seeds = [{many}]\ndefenses = [{{name = "prune", ratio = [{", ".join(["0.5"] * 300)}]}}]'))
    with pytest.raises(BadPlan, match="the limit is 100000"):
        lay_out(prepare(plan))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('name = "photos"', "64 are needed for 1 clients"),
        ('name = "photoz"', "did you mean photos"),
        ('folder = "missing"', "no such folder"),
        ('npz = "missing.npz"', "missing.npz"),
        ('csv = "missing.csv"\nlabel = "a"', "missing.csv"),
    ],
)
def test_data_that_do_not_do_are_told_before_anything_runs(tmp_path: Path, change: str, words: str) -> None:
    options = "options = { size = 8, crops = 4 }" if "photos" in change else ""
    (tmp_path / "plan.toml").write_text(
        f'[model]\nname = "fc2"\n[data]\n{change}\n{options}\n[grid]\nbatch_sizes = [64]'
    )
    with pytest.raises(FedprismError, match=words):
        lay_out(prepare(tmp_path / "plan.toml"))


# --- what init writes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "lenet", "vgg16", "my.code:network"])
@pytest.mark.parametrize("data", [None, "digits", "patients", "some/images", "a.npz", "b.csv"])
def test_a_written_plan_is_valid(model: str | None, data: str | None) -> None:
    plan = parse_plan(template.text(model, data))
    assert plan.model is not None
    assert plan.model.name == (model or "fc2") or plan.model.factory == model


def test_proposed_strengths_follow_the_model_s_updates(tmp_path: Path) -> None:
    materials = prepare(parse_plan(template.text("lenet", "digits"))).materials()
    strengths = proposing.measured(materials)
    network, batch = materials.network(0), materials.batch(torch.arange(8))
    loss = torch.nn.functional.cross_entropy(network(batch.inputs), batch.labels)
    gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, [*network.parameters()])])
    length = gradient.norm().item()
    assert 0.4 * length < strengths.update < 2.5 * length, "a typical batch is not far from the median"
    assert strengths.update < strengths.sample, "gradients of a batch cancel in part"
    assert strengths.entry == pytest.approx(strengths.update / gradient.numel() ** 0.5, rel=0.06)
    written = parse_plan(proposing.proposed("lenet", "digits", tmp_path))
    clip, noise = written.grid.defenses[3]
    assert clip.settings["norm"] == strengths.update
    assert noise.settings["std"] == (strengths.weak, strengths.entry)
    assert written.utility is not None
    assert written.utility.lr == "search"


def test_a_model_that_is_not_there_yet_gets_usual_strengths(tmp_path: Path) -> None:
    assert proposing.proposed("no.such:network", "images", tmp_path) == template.text("no.such:network", "images")


OWN_CODE = """
import torch
from torch import nn


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, OUTPUTS))


def normalised():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, OUTPUTS))


def samples():
    rng = torch.Generator().manual_seed(0)
    return torch.rand(40, 6, generator=rng) * 3 - 1, LABELS
"""


@pytest.mark.parametrize(
    ("outputs", "labels", "loss", "costed"),
    [
        (3, "torch.arange(40) % 3", "cross_entropy", True),
        (1, "torch.arange(40) % 2", "binary_cross_entropy", True),
        (1, "(torch.arange(40) % 2).float()", "binary_cross_entropy", True),
        (3, "torch.randint(2, (40, 3), generator=rng).float()", "binary_cross_entropy", True),
        (3, "torch.eye(3)[torch.arange(40) % 3]", "cross_entropy", True),
        (1, "torch.rand(40, generator=rng)", "mse", False),
    ],
)
def test_a_proposed_plan_trains_with_a_loss_that_fits(
    outputs: int, labels: str, loss: str, costed: bool, tmp_path: Path
) -> None:
    name = f"proposed_{tmp_path.name}".replace("-", "_")
    code = OWN_CODE.replace("OUTPUTS", str(outputs)).replace("LABELS", labels)
    (tmp_path / f"{name}.py").write_text(code)
    text = proposing.proposed(f"{name}:network", f"{name}:samples", tmp_path)
    written = parse_plan(text)
    assert written.grid.losses == (loss,)
    assert (written.utility is not None) == costed
    assert "measured: the median update" in text
    assert written.utility is None or written.utility.epochs == 30, "one step a pass over 30 samples"
    assert written.data is not None
    low, high = written.data.bounds
    assert -1.02 < low <= -0.99
    assert 1.99 <= high < 2.02
    assert lay_out(Setup(written, tmp_path)).cells
    with pytest.raises(BadPlan, match=r"has values from -1 to 2, outside data.bounds \[0, 1\]"):
        lay_out(
            Setup(written.model_copy(update={"data": written.data.model_copy(update={"bounds": (0, 1)})}), tmp_path)
        )


def test_a_model_with_batch_norm_is_offered_no_dp_sgd(tmp_path: Path) -> None:
    name = f"proposed_{tmp_path.name}".replace("-", "_")
    code = OWN_CODE.replace("OUTPUTS", "3").replace("LABELS", "torch.arange(40) % 3")
    (tmp_path / f"{name}.py").write_text(code)
    text = proposing.proposed(f"{name}:normalised", f"{name}:samples", tmp_path)
    names = [entry.name for chain in parse_plan(text).grid.defenses for entry in chain]
    assert "dp-sgd" not in names
    assert "GroupNorm" in text
    assert "measured: the median update" in text
    assert parse_plan(text).grid.batch_sizes == (2, 8)


def test_a_written_plan_explains_every_key() -> None:
    text = template.text()
    for name, field in Plan.model_fields.items():
        assert re.search(rf"^(# )?(\[{name}\]|{name} =)", text, re.MULTILINE), name
        part = next(
            (t for t in getattr(field.annotation, "__args__", [field.annotation]) if hasattr(t, "model_fields")), None
        )
        for key in part.model_fields if part is not None else ():
            assert re.search(rf"\b{key} =", text) or key == "factory", f"{name}.{key}"


def test_the_written_defaults_are_the_defaults() -> None:
    """Every line behind a # that is a default can be uncommented, and the plan stays valid."""
    text = template.text()
    for line in [line for line in text.splitlines() if re.match(r"# [a-z_]+ = ", line)]:
        assert tomllib.loads(line.removeprefix("# "))


def test_init_leaves_an_existing_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    assert cli.main(["init", "-o", str(file), "--model", "lenet"]) == 0
    written = file.read_text()
    assert load_plan(file).model is not None
    assert cli.main(["init", "-o", str(file)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert file.read_text() == written


def test_a_full_disk_leaves_no_empty_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes | str, *_: Any, **__: Any) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "plan.toml"
    with monkeypatch.context() as planted:
        planted.setattr(Path, "write_bytes", full)
        planted.setattr(Path, "write_text", full)
        assert cli.main(["init", "-o", str(file), "--model", "lenet"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["init", "-o", str(file), "--model", "lenet"]) == 0
    assert load_plan(file).model is not None


# --- what nobody thought of ------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["fc2", "photos", "none", "prune", "idlg", "fedavg", "mse", "../x", "a:b", "", "x" * 300, "é\u2028", "eavesdropper"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.sampled_from([2**31, 2**63, -(2**70), 10**30])
    | st.floats()
    | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | st.sampled_from(["name", "ratio", "then"]), inner, max_size=3)
    ),
    max_leaves=6,
)
DOCUMENT = tomllib.loads(f"""{START}
[federation]
rounds = 3
window = 2
counts = {{name = "rounded", step = 2}}
drift = 100
[grid]
clients = [1, 2]
attacks = [{{name = "idlg", iterations = 3}}]
defenses = ["none", {{name = "prune", ratio = [0.5, 0.9]}}]
threats = [{{name = "eavesdropper", granting = ["labels"]}}]
protocols = [{{name = "fedavg", lr = 0.1, epochs = 2}}]
[scores]
metrics = ["psnr"]
[utility]
epochs = 2
[limits]
seconds = 5
""")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def assert_a_plan_or_a_sentence(build: Any) -> None:
    try:
        plan = build()
    except BadPlan as error:
        sentence = str(error)
        assert "\n" not in sentence
        assert len(sentence) < 2000
    else:
        assert isinstance(plan, Plan)
        assert Plan.model_validate_json(plan.model_dump_json()) == plan


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(place=st.sampled_from(places(DOCUMENT)), value=VALUES, key=st.none() | WORDS)
def test_a_spoilt_plan_is_a_plan_or_a_sentence(place: tuple[Any, ...], value: Any, key: str | None) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    target: Any = {"root": document}
    for step in ("root", *place)[:-1]:
        target = target[step]
    last = ("root", *place)[-1]
    if key is not None and isinstance(target[last], dict):
        target[last][key] = value
    else:
        target[last] = value
    spoilt = document if last != "root" else target["root"]
    assert_a_plan_or_a_sentence(lambda: checked_plan(spoilt))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(position=st.integers(0, 5000), noise=st.binary(max_size=8), length=st.integers(0, 40))
def test_spoilt_text_is_a_plan_or_a_sentence(position: int, noise: bytes, length: int) -> None:
    text = template.text().encode()
    position %= len(text)
    spoilt = text[:position] + noise + text[position + length :]
    assert_a_plan_or_a_sentence(lambda: parse_plan(spoilt))
