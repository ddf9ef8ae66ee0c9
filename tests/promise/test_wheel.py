"""The wheel, installed where the repository is not, splits the starter model and runs it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import entry_points
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


def test_only_bigbrain_fx_is_put_into_site_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"bigbrain_fx"}
    typed = {"bigbrain_fx", "bigbrain_fx/partitioners", "bigbrain_fx/estimators"}
    assert {f"{package}/py.typed" for package in typed} <= names
    assert not names & {"bigbrain_fx/partitioners.py", "bigbrain_fx/estimators.py"}


RESOLVE = """
from importlib.metadata import entry_points
for kind in ("partitioners", "estimators"):
    for point in entry_points(group=f"bigbrain_fx.{kind}"):
        print(point.load().name)
"""


@pytest.mark.nightly
def test_every_entry_point_resolves_in_a_wheel(fresh: Path, tmp_path: Path) -> None:
    found = done([str(fresh / "python"), "-c", RESOLVE], tmp_path).split()
    assert {"naive", "chain-dp", "analytical", "learned"} <= set(found)


def test_an_entry_point_is_the_module_of_the_checkout() -> None:
    for kind in ("partitioners", "estimators"):
        for point in entry_points(group=f"bigbrain_fx.{kind}"):
            assert point.load() is getattr(
                importlib.import_module(point.module.removeprefix("bigbrain_fx.")), point.attr
            )


@pytest.mark.nightly
def test_wheel_splits_verifies_and_runs_the_starter(fresh: Path, tmp_path: Path) -> None:
    where = "import bigbrain_fx.partitioners as p; print(p.__file__)"
    place = done([str(fresh / "python"), "-c", where], tmp_path)
    assert place.startswith(str(fresh.parent)), place
    program = str(fresh / "bigbrain-fx")
    done([program, "init", "."], tmp_path)
    split = [program, "split", "model.py", "--devices", "cluster.json", "--out", "bundle"]
    done(split, tmp_path)
    done([program, "verify", "bundle", "--steps", "2"], tmp_path)
    lines = done([program, "run", "bundle", "--steps", "2", "--json"], tmp_path).splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"step"' in line and '"loss"' in line]
    assert steps == [0, 1]
