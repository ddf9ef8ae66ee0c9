"""The wheel, installed where the repository is not, splits the starter model and runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0


def done(words: list[str], folder: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    found = subprocess.run(
        words,
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="the wheel is built without a network: `make venv`")
    folder = tmp_path_factory.mktemp("wheel")
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    done([sys.executable, "-m", "pip", "wheel", "-q", *offline, "-w", str(folder), "."], ROOT)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it; what it depends on is that of this one."""
    home = tmp_path_factory.mktemp("fresh") / "venv"
    done([sys.executable, "-m", "venv", "--without-pip", str(home)], home.parent)
    python = home / "bin" / "python"
    offline = ["--no-deps", "--no-index", "-q"]
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    done([*pip, "install", *offline, str(wheel)], home.parent)
    (site,) = home.glob("lib/python*/site-packages")
    # A path alone: .pth files in it, such as that of an editable install, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_all_three_packages_are_typed(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{room}/py.typed" for room in ("bigbrain_fx", "partitioners", "estimators")} <= names


@pytest.mark.nightly
def test_it_splits_and_runs_the_starter(fresh: Path, tmp_path: Path) -> None:
    where = "import bigbrain_fx, partitioners; print(bigbrain_fx.__file__, partitioners.__file__)"
    places = done([str(fresh / "python"), "-c", where], tmp_path).split()
    assert all(place.startswith(str(fresh.parent)) for place in places), places
    program = str(fresh / "bigbrain-fx")
    done([program, "init", "."], tmp_path)
    split = [program, "split", "model.py", "--devices", "cluster.json", "--out", "bundle"]
    done(split, tmp_path)
    lines = done([program, "run", "bundle", "--steps", "2", "--json"], tmp_path).splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"step"' in line and '"loss"' in line]
    assert steps == [0, 1]
