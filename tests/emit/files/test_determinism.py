"""The same plan gives, byte for byte, the same bundle: under any hash seed and in any process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import samples
from tests.support.bundles import MODEL

HASH_SEEDS = ("0", "1", "42", "random")
DEADLINE_S = 120


@pytest.mark.nightly
def test_four_processes_write_the_same_bytes(tmp_path: Path) -> None:
    """Scattered: the placement with most stages, channels and names."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.json").write_text(samples.cluster_text(3))
    runs = [start(tmp_path, number, seed) for number, seed in enumerate(HASH_SEEDS)]
    outputs = [run.communicate(timeout=DEADLINE_S)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), outputs
    first, *others = [digests(tmp_path / f"bundle{n}") for n in range(len(runs))]
    assert {"device_d2.py", "plan.json", "weights/d0.safetensors", "runtime/__init__.py"} <= set(
        first
    )
    for other in others:
        assert other == first


def start(folder: Path, number: int, hash_seed: str) -> subprocess.Popen[str]:
    """Run the command line, as a user would, in a process of its own."""
    command = [
        sys.executable,
        "-c",
        "from bigbrain_fx.cli import main; main()",
        "split",
        "model.py",
    ]
    options = ["--devices", "cluster.json", "--partitioner", "scattered", "--micro-batches", "2"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(samples.ROOT)}
    return subprocess.Popen(
        [*command, *options, "--out", f"bundle{number}"],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
