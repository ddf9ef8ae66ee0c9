"""The benchmarks as a user meets them: saved figures, compared by pytest-benchmark itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANNING = ("tests/benchmarks/test_planning.py", "-k", "chain and (naive or m-topo)", "-q")


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    """Run some benchmarks as `make bench` does."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--benchmark-only", *words],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Figures saved under a name, in pytest-benchmark's own format."""
    folder = tmp_path_factory.mktemp("figures")
    done = bench(*PLANNING, f"--benchmark-storage={folder}", "--benchmark-save=before")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.rglob("*_before.json")
    return found


def figures(path: Path) -> Mapping[str, Any]:
    return {entry["params"]["name"]: entry for entry in json.loads(path.read_text())["benchmarks"]}


@pytest.mark.nightly
def test_a_saved_file_has_times_and_forecasts(saved: Path) -> None:
    found = figures(saved)
    assert set(found) == {"naive", "m-topo"}
    for entry in found.values():
        assert entry["stats"]["rounds"] == 3
        assert 0.0 < entry["stats"]["min"] <= entry["stats"]["median"]
        assert entry["extra_info"]["forecast_step_s"] > 0.0
    machine = json.loads(saved.read_text())["machine_info"]
    assert set(machine) == {"cpu", "node", "python_version", "system", "torch"}


def test_the_makefile_runs_a_folder_that_exists() -> None:
    (folder,) = re.findall(r"pytest (\S+) --benchmark-only", (ROOT / "Makefile").read_text())
    assert sorted((ROOT / folder).glob("test_*.py"))
