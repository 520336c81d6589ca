"""The folder of an audit is hostile until checked: spoilt records are run again, spoilt results are one sentence."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture_literals import LITERALS, PLACE, places
from fedprism import report
from fedprism.audit import load_audit, parse_plan, prepare, run_audit
from fedprism.audit.grid import Cell
from fedprism.audit.materials import Setup
from fedprism.cli import main
from fedprism.errors import BadInput, FedprismError
from fedprism.experiments import Outcome, ResultStore, execution
from fedprism.experiments.execution import Runnable
from hostility import Mutation, assert_sentence, contents, flipped, replace_file

PLAN = """
[model]
name = "fc2"
kwargs = { hidden = 8 }
[data]
name = "patients"
[grid]
attacks = ["dense-inversion", "bn-exact"]
threats = [{ name = "honest_but_curious", granting = ["batchnorm_exact"] }]
batch_sizes = [1]
defenses = ["none", { name = "prune", ratio = 0.9 }]
seeds = [0, 1]
[utility]
epochs = 1
seeds = [0]
timed_steps = 0
[scores]
metrics = ["mse"]
pictures = 1
"""

PROFILE = settings(
    max_examples=int(os.environ.get("FEDPRISM_EXAMPLES", "60")),
    deadline=None,
    derandomize="FEDPRISM_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "whole"
    run_audit(prepare(parse_plan(PLAN)), folder)
    report.write(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def quick(whole: Path) -> Iterator[list[str]]:
    """A cell that is run again is looked up: what is tested is which ones are."""
    patch = pytest.MonkeyPatch()
    known = {cell.key: cell for cell in (ResultStore(whole).get(name.stem) for name in whole.glob("records/*"))}
    tensors = {path.stem: path.read_bytes() for path in whole.glob("samples/*")}
    again: list[str] = []

    def looked_up(trial: Runnable, **options: Any) -> Outcome:
        again.append(trial.key)
        return replace(known[trial.key], tensors=tensors.get(trial.key))

    patch.setattr(execution, "run_trial", looked_up)
    yield again
    patch.undo()


# --- mutations -------------------------------------------------------------------------------------------------------


def chosen(folder: Path, kind: str, place: int) -> Path:
    files = sorted(folder.glob(kind))
    return files[place % len(files)]


def edit_bytes(kind: str, place: int, positions: list[tuple[float, int]], folder: Path) -> None:
    path = chosen(folder, kind, place)
    path.write_bytes(flipped(positions, path.read_bytes()))


def cut(kind: str, place: int, share: float, folder: Path) -> None:
    path = chosen(folder, kind, place)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def edit_value(kind: str, place: int, where: int, literal: str | None, folder: Path) -> None:
    """Another value at some place of the document, or none."""
    path = chosen(folder, kind, place)
    document = json.loads(path.read_bytes())
    found = [way for way in places(document) if way]
    *parents, key = found[where % len(found)]
    parent = document
    for step in parents:
        parent = parent[step]
    if literal is None:
        del parent[key]
    else:
        parent[key] = "MUTATED"
    path.write_bytes(json.dumps(document).replace('"MUTATED"', literal or "").encode(errors="surrogatepass"))


def swap(place: int, folder: Path) -> None:
    first, second = chosen(folder, "records/*.json", place), chosen(folder, "records/*.json", place + 1)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def bytes_of(kind: str) -> st.SearchStrategy[Mutation]:
    flips = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=3)
    return st.one_of(
        st.builds(partial, st.just(edit_bytes), st.just(kind), PLACE, flips),
        st.builds(partial, st.just(cut), st.just(kind), PLACE, st.floats(0, 0.99)),
    )


def of(kind: str) -> st.SearchStrategy[Mutation]:
    where, literal = st.integers(0, 10_000), st.none() | st.sampled_from(LITERALS)
    return bytes_of(kind) | st.builds(partial, st.just(edit_value), st.just(kind), PLACE, where, literal)


def spoilt(whole: Path, mutate: Mutation, place: str) -> Path:
    folder = Path(shutil.copytree(whole, Path(place) / "audit"))
    mutate(folder)
    return folder


# --- what must hold --------------------------------------------------------------------------------------------------

RECORDS = st.one_of(of("records/*.json"), st.builds(partial, st.just(swap), PLACE), of("clock/*.json"))


@PROFILE
@given(mutate=RECORDS)
def test_a_spoilt_record_is_run_again(whole: Path, quick: list[str], mutate: Mutation) -> None:
    """Whatever is done to records, finishing the audit gives the results that it had."""
    with tempfile.TemporaryDirectory() as place:
        folder = spoilt(whole, mutate, place)
        changed = {
            path.stem
            for path in whole.glob("records/*.json")
            if json_of(folder / "records" / path.name) != json_of(path)
        }
        quick.clear()
        run_audit(prepare(parse_plan(PLAN)), folder, resume=True)
        assert set(quick) == changed, "what is as it was is not run again"
        assert (folder / "results.json").read_bytes() == (whole / "results.json").read_bytes()


def json_of(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


@PROFILE
@given(mutate=st.one_of(RECORDS, of("results.json"), bytes_of("samples/*.safetensors")))
def test_spoilt_results_are_a_page_or_a_sentence(whole: Path, mutate: Mutation) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = spoilt(whole, mutate, place)
        before = contents(folder)
        try:
            audit = load_audit(folder)
            report.render(audit, show_images=True)
            report.render_comparison(audit, audit)
        except FedprismError as error:
            assert_sentence(error)
        assert contents(folder) == before


@PROFILE
@given(mutate=of("plan.json"))
def test_a_spoilt_plan_of_the_folder_is_a_sentence_or_the_same_audit(whole: Path, mutate: Mutation) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = spoilt(whole, mutate, place)
        try:
            run_audit(prepare(parse_plan(PLAN)), folder, resume=True)
            assert (folder / "results.json").read_bytes() == (whole / "results.json").read_bytes()
        except BadInput as error:
            assert_sentence(error)


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "dangling", "device", "missing"])
@pytest.mark.parametrize("file", ["results.json", "records/*.json"])
def test_what_is_no_file_is_not_read(
    kind: str, file: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "audit"))
    path = chosen(folder, file, 0)
    only = tmp_path / "only"
    only.mkdir()
    shutil.move(path, only / path.name)
    replace_file(kind, 0, only)
    if os.path.lexists(only / path.name):
        os.rename(only / path.name, path)
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr().err.count("error: ") == 1
    try:
        run_audit(prepare(parse_plan(PLAN)), folder, resume=True)
        assert (folder / "results.json").read_bytes() == (whole / "results.json").read_bytes()
    except BadInput as error:
        assert kind == "folder", "a file cannot take its place"
        assert_sentence(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [("format", "fedprism-audit/3"), ("format", 1), ("versions", {"fedprism": "99"}), ("fingerprint", {})],
)
def test_another_version_is_not_continued(key: str, value: object, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "audit"))
    document = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**document, key: value}))
    with pytest.raises(BadInput, match=f"the plan changed.*{key}"):
        run_audit(prepare(parse_plan(PLAN)), folder, resume=True)


def test_every_kind_of_outcome_is_among_them(whole: Path) -> None:
    """The mutations start from something worth spoiling."""
    audit = load_audit(whole)
    assert {finished.state for finished in audit} >= {"done", "skipped"}
    assert {finished.description["kind"] for finished in audit} == {"attack", "ceiling", "utility"}
    assert audit.columns is not None
    assert list(whole.glob("samples/*"))
