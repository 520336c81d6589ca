"""The command line: what it answers, what it writes and how it fails. Captures are written as other software would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import fedprism
from fedprism import cli, runner
from fedprism.cli.list import Table

SHAPE = (3, 8, 8)
CLASSES = 10


def network() -> nn.Module:
    """What a user's own code would build: the layers of fc2, without fedprism."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def private_batch(size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.rand(size, *SHAPE, generator=rng), torch.arange(3, 3 + size)


def write_capture(folder: Path, *, batch: int = 2, named: bool = True, **knowledge: object) -> Path:
    """A capture out of plain json and safetensors, with a gradient out of plain torch."""
    model = network()
    inputs, labels = private_batch(batch)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradient = torch.autograd.grad(loss, parameters)
    folder.mkdir()
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "params-0.safetensors")
    save_file(dict(zip(names, gradient, strict=True)), folder / "update-0.safetensors")
    spec = {"name": "fc2", "kwargs": {"input_shape": list(SHAPE), "hidden": 32, "classes": CLASSES}}
    known = {"input_shape": list(SHAPE), "bounds": [0.0, 1.0], "batch_size": batch, "loss": "cross_entropy"}
    manifest = {
        "format": "fedprism-capture/1",
        "model": spec if named else {"name": None},
        "knowledge": {**known, **knowledge},
        "rounds": [
            {"kind": "gradient", "clients": 1, "params": "params-0.safetensors", "update": "update-0.safetensors"}
        ],
        "source": "written by hand",
    }
    (folder / "capture.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_capture(tmp_path / "capture")


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr that every refusal consists of."""
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    return printed.err


# --- starting --------------------------------------------------------------------------------------------------------


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("arguments", [["--help"], ["attack", "--help"], ["list", "--help"], ["--version"], []])
def test_help_and_version_answer_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys, fedprism, fedprism.cli; "
        f"assert fedprism.cli.main({arguments!r}) == 0; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "fedprism" in done.stdout
    assert done.stderr == ""


def test_python_m_is_the_command_line() -> None:
    done = python("-m", "fedprism", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fedprism {fedprism.__version__}\n", "")


def test_a_terminal_without_unicode_is_no_error() -> None:
    done = python("-m", "fedprism", "list", "defenses", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "N(0, std?)" in done.stdout


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m fedprism list metrics | true",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("table", list(Table))
def test_list_names_every_row(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    from fedprism.attacks import ATTACKS
    from fedprism.data import DATASETS
    from fedprism.defenses import DEFENSES
    from fedprism.metrics import METRICS
    from fedprism.models import MODELS
    from fedprism.threats import THREATS

    recipes = pytest.importorskip("fedprism_papers").RECIPES
    tables = (ATTACKS, DEFENSES, METRICS, MODELS, DATASETS, THREATS, recipes)
    rows = dict(zip(Table, tables, strict=True))[table]
    assert cli.main(["list", table]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in rows:
        described = [line.split()[1:] for line in lines if line.split()[:1] == [name]]
        assert described, name
        assert described[0], f"{name} has no description"


# --- attacking -------------------------------------------------------------------------------------------------------


def test_attack_writes_tensors_record_and_pictures(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs, labels = private_batch()
    assert cli.main(["attack", str(capture), "--attack", "dense-inversion", "--device", "cpu"]) == 0
    written = Path("fedprism-attack")
    assert sorted(file.name for file in written.iterdir()) == [
        "reconstruction.safetensors",
        "record.json",
        "recovered-0.png",
        "recovered-1.png",
    ]
    found = load_file(written / "reconstruction.safetensors")
    torch.testing.assert_close(found["inputs"], inputs, atol=1e-4, rtol=0)
    assert torch.equal(found["labels"], labels)
    picture = Image.open(written / "recovered-0.png")
    assert (picture.mode, picture.size) == ("RGB", (8, 8))
    assert picture.getpixel((0, 0)) == tuple(round(float(value) * 255) for value in inputs[0, :, 0, 0])
    record = json.loads((written / "record.json").read_text())
    assert record["kind"] == "attack"
    assert record["run"] == {"attack": "dense-inversion", "settings": "DenseInversion()", "source": "written by hand"}
    assert record["knowledge_used"] == ["batch_size", "input_shape", "loss", "model"]
    assert record["residual"] < 1e-4
    assert set(record["versions"]) == {"fedprism", "torch", "python"}
    shown = capsys.readouterr()
    assert "batch_size, input_shape, loss, model" in shown.out
    assert shown.err == ""


def test_scalar_fields_are_flags_in_any_place(capture: Path) -> None:
    flags = ["--iterations", "5", "--restarts=2", "--lr", "0.05", "--no-unroll", "--adaptive", "false"]
    assert (
        cli.main(["attack", *flags, "--attack", "inverting-gradients", str(capture), "-o", "out", "--seed", "7"]) == 0
    )
    record = json.loads(Path("out/record.json").read_text())
    assert record["seed"] == 7
    for setting in ("iterations=5", "restarts=2", "lr=0.05", "unroll=False", "adaptive=False"):
        assert setting in record["run"]["settings"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--iteration", "5"], "did you mean --iterations, or use one of --distance, --total-variation"),
        (["--sed", "5"], "did you mean --seed"),
        (["-x"], "no flag '-x'"),
        (["--iterations", "many"], "--iterations must be a whole number, not 'many'"),
        (["--iterations"], "--iterations must be followed by a whole number"),
        (["--lr", "nan"], "--lr must be a finite number, not 'nan'"),
        (["--labels", "guessed"], "--labels must be known or inferred or joint or refined, not 'guessed'"),
        (["--unroll=maybe"], "--unroll must be true or false, not 'maybe'"),
        (["--restarts", "0"], "restarts must be at least one"),
        (["--labels", "known"], "needs to know 'labels'"),
        (["other"], "give one capture folder"),
        (["--device", "toaster"], "this machine has no device"),
        (["--seed", "-1"], "--seed"),
        (["--model", "nothing_of_the_sort:make"], "ModuleNotFoundError"),
        (["--model", "json:dumps"], "It takes pkg.module:factory"),
        (["--model", "builtins:dict"], "must return a torch.nn.Module, not dict"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    flags: list[str], expected: str, capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["attack", str(capture), "--attack", "idlg", *flags]) == 2
    assert expected in sentence(capsys)
    assert not Path("fedprism-attack").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["attack", "capture", "--attack", "dense-inversoin"], "did you mean dense-inversion?"),
        (["attack", "capture"], "--attack"),
        (["attack", "--attack", "idlg"], "CAPTURE"),
        (["attack", "nowhere", "--attack", "idlg"], "capture.json"),
        (["list", "nothing"], "'attacks', 'defenses'"),
        (["prism"], "prism"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_usage_errors_are_one_sentence(
    arguments: list[str], expected: str, capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert expected in sentence(capsys)


def test_a_hostile_name_cannot_speak_to_the_terminal(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((capture / "capture.json").read_text())
    (capture / "capture.json").write_text(json.dumps({**manifest, "\x1b[2J\nfake line": 1}))
    assert cli.main(["attack", str(capture), "--attack", "idlg"]) == 2
    assert "\x1b" not in sentence(capsys)


def test_the_users_model_stands_in_where_the_capture_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    capture = write_capture(tmp_path / "capture", named=False)
    Path("handmade.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))\n"
    )
    path = list(sys.path)
    assert cli.main(["attack", str(capture), "--attack", "dense-inversion"]) == 2
    assert "needs to know 'model'" in sentence(capsys)
    assert cli.main(["attack", str(capture), "--attack", "dense-inversion", "--model", "handmade:make"]) == 0
    found = load_file("fedprism-attack/reconstruction.safetensors")["inputs"]
    torch.testing.assert_close(found, private_batch()[0], atol=1e-4, rtol=0)
    assert sys.path == path


def test_pixels_follow_the_normalization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    normalization = [[0.1, 0.2, 0.3], [0.5, 0.25, 0.5]]
    capture = write_capture(tmp_path / "capture", normalization=normalization)
    assert cli.main(["attack", str(capture), "--attack", "dense-inversion"]) == 0
    pixel = private_batch()[0][0, :, 0, 0]
    expected = pixel * torch.tensor(normalization[1]) + torch.tensor(normalization[0])
    shown = torch.tensor(Image.open("fedprism-attack/recovered-0.png").getpixel((0, 0)))
    torch.testing.assert_close(shown.float(), expected.clamp(0, 1) * 255, atol=1.0, rtol=0)


def test_without_a_pixel_range_pictures_are_stretched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    capture = write_capture(tmp_path / "capture", bounds=None)
    assert cli.main(["attack", str(capture), "--attack", "dense-inversion"]) == 0
    extremes = Image.open("fedprism-attack/recovered-0.png").getextrema()
    assert min(low for low, _ in extremes) == 0
    assert max(high for _, high in extremes) == 255


def test_several_updates_are_attacked_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits = fedprism.data.load("digits")
    model = fedprism.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)
    scenario = fedprism.Scenario(model=model, clients=[digits.batch([0]), digits.batch([1])])
    observation, _ = fedprism.simulate(scenario, fedprism.threats.honest_but_curious, seed=0)
    fedprism.captures.save(observation, tmp_path / "both")
    assert cli.main(["attack", "both", "--attack", "dense-inversion", "-o", "out"]) == 0
    assert json.loads((tmp_path / "out" / "record.json").read_text())["run"]["owners"] == ["client-0", "client-1"]


def test_an_attack_behind_a_reduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits = fedprism.data.load("digits")
    model = fedprism.models.build("fc2", input_shape=(1, 8, 8), hidden=16, classes=10, seed=0)
    scenario = fedprism.Scenario(
        model=model,
        clients=[digits.batch([0]), digits.batch([1])],
        rounds=3,
        participation=torch.tensor([[1, 0], [0, 1], [1, 1]]).bool(),
        aggregation="sum",
        frozen=True,
    )
    threat = fedprism.threats.secure_aggregation.granting("participation")
    observation, _ = fedprism.simulate(scenario, threat, seed=0)
    fedprism.captures.save(observation, tmp_path / "sums")
    behind = ["attack", "sums", "--attack", "disaggregation", "--then", "dense-inversion", "-o", "out"]
    assert cli.main([*behind, "--floor", "0.5", "--time-limit=9"]) == 0
    cell = json.loads((tmp_path / "out" / "record.json").read_text())["run"]
    assert (cell["attack"], cell["then"]) == ("disaggregation", "dense-inversion")
    assert cell["settings"] == "then(Disaggregation(time_limit=9.0), DenseInversion(floor=0.5))"
    assert (tmp_path / "out" / "recovered-0.png").is_file()
    assert cli.main(["attack", "sums", "--attack", "dlg", "--then", "dense-inversion"]) == 2


def test_a_second_run_leaves_nothing_of_the_first(capture: Path, tmp_path: Path) -> None:
    smaller = write_capture(tmp_path / "smaller", batch=1)
    assert cli.main(["attack", str(capture), "--attack", "dense-inversion", "-o", "out"]) == 0
    Path("out/notes.txt").write_text("mine")
    assert cli.main(["attack", str(smaller), "--attack", "dense-inversion", "-o", "out"]) == 0
    assert sorted(file.name for file in Path("out").iterdir()) == [
        "notes.txt",
        "reconstruction.safetensors",
        "record.json",
        "recovered-0.png",
    ]


def test_same_seed_same_files(capture: Path) -> None:
    for folder in ("first", "second"):
        assert cli.main(["attack", str(capture), "--attack", "dlg", "--iterations", "3", "-o", folder]) == 0
    for file in Path("first").iterdir():
        assert file.read_bytes() == Path("second", file.name).read_bytes(), file.name


def test_a_folder_that_cannot_be_written_is_one_sentence(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("a file")
    for folder in ("taken", "taken/below"):
        assert cli.main(["attack", str(capture), "--attack", "dense-inversion", "-o", folder]) == 2
        assert "cannot be written" in sentence(capsys)
    assert Path("taken").read_text() == "a file"


def test_a_full_disk_leaves_the_earlier_run(
    capture: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    assert cli.main(["attack", str(capture), "--attack", "dense-inversion", "-o", "out"]) == 0
    before = {file.name: file.stat().st_mtime_ns for file in Path("out").iterdir()}
    capsys.readouterr()
    monkeypatch.setattr(Path, "write_bytes", full)
    for folder in ("out", "new"):
        assert cli.main(["attack", str(capture), "--attack", "dense-inversion", "-o", folder]) == 2
        assert "No space left on device" in sentence(capsys)
    assert {file.name: file.stat().st_mtime_ns for file in Path("out").iterdir()} == before
    assert not Path("new").exists()


# --- failing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", ["0", "1"])
def test_an_internal_error_says_so(
    debug: str, capture: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scope: dict[str, object] = {}
    text = 'def broken(*arguments, **options): raise ZeroDivisionError("division by\\nzero")'
    exec(compile(text, runner.__file__, "exec"), scope)  # as if it stood in fedprism: elsewhere it is a user's
    monkeypatch.setattr("fedprism.runner.run", scope["broken"])
    monkeypatch.setenv("FEDPRISM_DEBUG", debug)
    assert cli.main(["attack", str(capture), "--attack", "idlg"]) == 3
    printed = capsys.readouterr().err
    assert "this is a bug in fedprism, please report it (ZeroDivisionError: division by zero)" in printed
    assert ("Traceback" in printed) == (debug == "1")
    assert not Path("fedprism-attack").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (EOFError("file ends too soon"), 2),
        (PermissionError(13, "Permission denied", "secret"), 2),
        (MemoryError(), 2),
        (torch.OutOfMemoryError("CUDA out of memory"), 2),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    capture: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("fedprism.runner.run", fail)
    assert cli.main(["attack", str(capture), "--attack", "idlg"]) == code
    assert "Traceback" not in capsys.readouterr().err
    assert not Path("fedprism-attack").exists()


def test_names_of_files_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The title of the window, colours and what else an escape sequence does, in a path that is printed."""
    assert cli.main(["init", "--model", "lenet", "-o", str(tmp_path / "a\x1b]0;owned\x07\x1b[31mred\x9bm.toml")]) == 0
    told = "".join(capsys.readouterr())
    assert "red" in told
    assert not {"\x1b", "\x07", "\x9b"} & set(told)


def test_sigterm_ends_a_command_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun is ended by its `finally`, as on Ctrl-C, and the handler of before is there again."""
    from fedprism.cli import auditing

    ended, before = [], signal.getsignal(signal.SIGTERM)

    def work(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append(True)

    monkeypatch.setattr(auditing, "write_plan", work)
    assert cli.main(["init", "-o", str(tmp_path / "plan.toml")]) == 143
    assert ended == [True]
    assert signal.getsignal(signal.SIGTERM) is before
    assert "".join(capsys.readouterr()) == ""
