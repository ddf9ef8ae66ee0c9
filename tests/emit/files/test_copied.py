"""A bundle takes along of the runtime what its own files lead to, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import bigbrain_fx
from bigbrain_fx.emit.files.copied import door, runtime_files

RUNTIME = Path(bigbrain_fx.__file__).parent / "runtime"
TRAIN = "from runtime import Bundle, Hooks, Training, main\n"


def test_training_takes_no_inference_along() -> None:
    found = runtime_files(RUNTIME, [TRAIN, "from .runtime import Device, Stage\n"])
    assert {"__init__.py", "train.py", "device.py", "replay.py", "board.py"} <= found
    assert not {"infer.py", "rows.py", "pipelining.py", "kept.py"} & found


def test_inference_takes_no_training_along() -> None:
    found = runtime_files(RUNTIME, ["from runtime import InferenceDevice, Stage, infer_main\n"])
    assert {"infer.py", "rows.py", "forward_device.py"} <= found
    assert not {"train.py", "commits.py", "replay.py", "member.py"} & found
    assert not {"device.py", "pipeline_device.py", "gradients.py", "loss_scale.py"} & found


def test_what_is_asked_for_comes_along() -> None:
    assert "pipelining.py" in runtime_files(RUNTIME, [TRAIN], ["pipelining"])


def test_no_file_imports_one_that_is_left_out() -> None:
    """Each file alone, with all that it leads to: what it imports when it runs is there."""
    for file in RUNTIME.glob("*.py"):
        found = runtime_files(RUNTIME, [], [file.stem])
        for name in found:
            asked = runtime_files(RUNTIME, [], [name.removesuffix(".py")])
            assert asked <= found


def test_names_that_are_not_the_runtimes_lead_nowhere() -> None:
    nothing = runtime_files(RUNTIME, [])
    assert runtime_files(RUNTIME, ["from torch import nn\nimport math\n"]) == nothing


def test_what_the_door_itself_imports_is_there_in_every_bundle() -> None:
    door = ast.parse((RUNTIME / "__init__.py").read_text())
    first = [n for n in door.body if isinstance(n, ast.ImportFrom) and n.level and not n.module]
    assert first
    wanted = {f"{alias.name}.py" for node in first for alias in node.names}
    assert wanted <= runtime_files(RUNTIME, [], without=("control", "member"))


def test_a_bundles_door_has_what_its_files_import_and_nothing_else() -> None:
    files = runtime_files(RUNTIME, [TRAIN])
    text = door(RUNTIME, [TRAIN, "from .runtime import Device\n"], files)
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
    found = {a.name: n.module for n in nodes for a in n.names if n.module and n.level == 1}
    assert found.keys() == {"Bundle", "Device", "Hooks", "Training", "main", "run_in_process"}
    assert all(f"{module}.py" in files for module in found.values())
