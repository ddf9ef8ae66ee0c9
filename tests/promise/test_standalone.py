"""A bundle needs torch and nothing of ours: it trains where bigbrain-fx cannot be imported."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch import RunOptions, free_port, run
from tests.promise.conftest import Outside

STEPS = 3
ALLOWED = {"torch", "safetensors"}


@pytest.fixture(scope="module")
def losses(letters: Path) -> list[float]:
    """What `bigbrain-fx run` gives."""
    done = run(letters / "bundle", RunOptions(STEPS, deadline_s=60.0))
    return [line.loss for line in done.steps]


def reported(text: str) -> list[float]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines] == list(range(STEPS))
    return [line["loss"] for line in lines]


def test_the_blocker_blocks(outside: Outside, tmp_path: Path) -> None:
    """Otherwise this file would show nothing."""
    for name in ("bigbrain_fx", "bigbrain_fx.runtime", "partitioners", "pydantic", "click"):
        code = f"try:\n import {name}\nexcept ImportError as error:\n print(error)"
        assert outside.python(tmp_path, "-c", code) == f"{name.split('.')[0]} is blocked\n"


@pytest.mark.nightly
def test_under_torchrun(letters: Path, outside: Outside, losses: list[float]) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = ["--master-port", str(free_port())]
    words = ["train.py", "--json", "--steps", str(STEPS), "--deadline", "60"]
    found = outside.python(letters / "bundle", *launcher, *port, *words)
    assert reported(found) == losses


@pytest.mark.nightly
def test_with_rank_and_world_size(letters: Path, outside: Outside, losses: list[float]) -> None:
    """As any cluster's own launcher starts processes."""
    port = str(free_port())
    processes: list[subprocess.Popen[str]] = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        words = ["train.py", "--json", "--steps", str(STEPS), "--deadline", "60"]
        more = {**place, "MASTER_PORT": port}
        processes.append(outside.start(letters / "bundle", words, more))
    first, second = outside.results(*processes)
    assert first == ""  # the device without the loss has nothing to report
    assert reported(second) == losses


@pytest.mark.nightly
def test_in_one_process_and_from_another_folder(
    letters: Path, outside: Outside, losses: list[float], tmp_path: Path
) -> None:
    train = str(letters / "bundle" / "train.py")
    found = outside.python(tmp_path, train, "--in-process", "--json", "--steps", str(STEPS))
    assert reported(found) == losses


@pytest.mark.nightly
def test_another_number_of_processes_is_refused(letters: Path, outside: Outside) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": str(free_port())}
    process = outside.start(letters / "bundle", ["train.py"], place)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "this bundle needs 2 processes, one per device; found 3" in err


def imports(bundle: Path) -> set[str]:
    """Return the top-level names that any file of a bundle imports, its own left out."""
    found: set[str] = set()
    for path in sorted(bundle.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").partition(".")[0])
    own = {path.stem for path in bundle.iterdir()}
    return found - own - set(sys.stdlib_module_names)


def test_imports_are_torch_safetensors_and_the_standard_library(letters: Path, three: Path) -> None:
    for folder in (letters, three):
        assert imports(folder / "bundle") == ALLOWED


def test_nothing_in_a_bundle_names_bigbrain_fx_as_a_module(letters: Path) -> None:
    for path in sorted((letters / "bundle").rglob("*.py")):
        assert "bigbrain_fx" not in path.read_text(), path.name
