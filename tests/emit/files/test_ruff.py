"""Every emitted file of Python passes ruff with the repository's own rules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.plan import Options, make_plan
from tests.support import samples

# As in tools/conformance/zoo a method's class says what it does; tables of a class are read, and
# plain dicts.
NO_DOCS = 'lint.per-file-ignores={"*"=["D102", "RUF012"]}'
FOLDERS = 'src=["*"]'  # what stands beside a file of a bundle is its own
GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = {
    "plain": Options("naive", micro_batches=4),
    "one": Options("naive", micro_batches=1),
    "replica": Options("naive", micro_batches=4, replicas=2, zero_stage=1),
    "tensor": Options("naive", micro_batches=2, tensor=2),
    "zb-v": Options("naive", schedule="zb-v", micro_batches=4),
    "ops": Options("naive", micro_batches=4, recompute="ops"),
    "whole": Options("naive", micro_batches=4, recompute="all"),
}


def complaints(folder: Path, bundles: Mapping[str, Mapping[str, str]]) -> str:
    """Write bundles side by side; return what ruff says."""
    for name, texts in bundles.items():
        for file, text in texts.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (folder / name / "runtime").mkdir()
        (folder / name / "runtime" / "__init__.py").write_text('"""Stands in."""\n')
    options = ["--config", str(samples.ROOT / "pyproject.toml"), "--config", NO_DOCS]
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        *options,
        "--config",
        FOLDERS,
        "--quiet",
        ".",
    ]
    ran = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=60)
    return ran.stdout + ran.stderr


def of_gpt(kind: str) -> Mapping[str, str]:
    found = samples.sample("gpt")
    devices = samples.cluster(4 if kind == "replica" else 2)
    return bundle_texts(make_plan(found.graph, devices, found.source, KINDS[kind]))


def test_golden_files_pass(tmp_path: Path) -> None:
    bundles = {
        model.name: {path.name: path.read_text() for path in model.glob("*.py")}
        for model in GOLDEN.iterdir()
    }
    assert "device_d0.py" in bundles["gpt"]
    assert complaints(tmp_path, bundles) == ""


@pytest.mark.nightly
def test_bundles_of_every_kind_pass(tmp_path: Path) -> None:
    assert complaints(tmp_path, {kind: of_gpt(kind) for kind in KINDS}) == ""


def test_lines_that_ruff_refuses_are_named(tmp_path: Path) -> None:
    assert "F401" in complaints(tmp_path, {"bundle": {"a.py": '"""A."""\n\nimport torch\n'}})
