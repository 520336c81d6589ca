"""What is shipped: the wheel, built and installed aside, works without the source folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import fedprism

ROOT = Path(__file__).parents[2]


def python(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed") / "site"
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    python(*pip, "--target", str(target), str(wheel), cwd=wheel.parent)
    return target


@pytest.fixture
def environment(site: Path) -> dict[str, str]:
    """Only the installed wheel on the path; packages it depends on come from this environment."""
    dependencies = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    # -S in the commands keeps the environment's own .pth files, and with them an editable install, out.
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *dependencies]), "OMP_NUM_THREADS": "1"}


def test_holds_everything_and_says_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    source = ROOT / "src"
    shipped = [path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    templates = [path for path in shipped if path.suffix == ".j2"]
    assert templates
    assert "fedprism/py.typed" in names
    assert {path.relative_to(source).as_posix() for path in shipped} <= names
    assert "License-Expression: Apache-2.0" in text
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert f"Version: {fedprism.__version__}\n" in text


def test_runs_without_the_source_folder(site: Path, environment: dict[str, str], tmp_path: Path) -> None:
    def installed(*arguments: str) -> str:
        return python("-S", *arguments, cwd=tmp_path, env=environment)

    where = "import fedprism, fedprism.simulation.federation as s; print(fedprism.__file__); print(s.__file__)"
    for line in installed("-c", where).splitlines():
        assert Path(line).is_relative_to(site)
    assert installed("-m", "fedprism", "--version").strip() == f"fedprism {fedprism.__version__}"
    assert "dense-inversion" in installed("-m", "fedprism", "list", "attacks")
