"""A bundle takes along what its files and its plan's features lead to, and nothing else."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import bigbrain_fx
from bigbrain_fx.emit.files.copied import door, room_files, runtime_files, supervisors_door
from bigbrain_fx.emit.files.parts import PARTS, Copied, Part, left_out, ways_into
from tests.support import samples

ROOMS = Path(bigbrain_fx.__file__).parent
RUNTIME = ROOMS / "runtime"
TRAIN = "from runtime import Bundle, Hooks, Training, main\n"


def test_training_takes_no_inference_along() -> None:
    found = runtime_files(RUNTIME, [TRAIN, "from .runtime import Device, Stage\n"])
    assert {"__init__.py", "train.py", "device.py", "replay.py", "board.py"} <= found
    assert not {"infer.py", "rows.py", "pipelining.py", "kept.py"} & found


def test_inference_takes_no_training_along() -> None:
    found = runtime_files(RUNTIME, ["from runtime import InferenceDevice, Stage, infer_main\n"])
    assert {"infer.py", "rows.py", "forward_device.py"} <= found
    assert not {"train.py", "checkpoint_store.py", "replay.py", "member.py"} & found
    assert not {"device.py", "pipeline_device.py", "gradients.py", "loss_scale.py"} & found


def test_no_file_imports_one_that_is_left_out() -> None:
    """Each file alone, with all that it leads to: what it imports when it runs is there."""
    for file in RUNTIME.glob("*.py"):
        found = runtime_files(RUNTIME, [], [file.stem])
        for name in found:
            asked = runtime_files(RUNTIME, [], [name.removesuffix(".py")])
            assert asked <= found


def test_imports_of_the_runtimes_init_are_in_every_bundle() -> None:
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


STEPS = "from runtime import Bundle, Hooks, Training, main, Device, Stage, adamw\n"
# a part that is there only beside another
BESIDE = {
    "weights in stores": "stores",
    "activations in stores": "stores",
    "opaque modules with state": "random generators of the model file's own",
}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("room", ["runtime", "supervisor"])
def test_no_file_needs_a_part_that_is_left_out(room: str, part: Part) -> None:
    """What a module imports as it is imported is there, whichever part a bundle lacks."""
    gone = [each for each in PARTS if part.name in (each.name, BESIDE.get(each.name))]
    without = ways_into(gone, room)
    texts = [STEPS] if room == "runtime" else []
    held = runtime_files(ROOMS / room, texts, without=without)
    for name in held:
        assert imported_at_once(room, name) <= held, name


@cache
def imported_at_once(room: str, name: str) -> set[str]:
    """Return the files that one of a room's imports as it is imported."""
    own_door = (room, name) == ("supervisor", "__init__.py")
    text = supervisors_door(ROOMS / room) if own_door else (ROOMS / room / name).read_text()
    top = [n for n in ast.parse(text).body if isinstance(n, ast.ImportFrom) and n.level == 1]
    return {f"{n.module}.py" for n in top if n.module}


@pytest.mark.parametrize("supervised", [True, False])
def test_a_plain_pipeline_has_the_checked_device_only(supervised: bool) -> None:
    plan = samples.plan("digits")
    without = left_out(Copied(plan, supervised=supervised), "runtime")
    held = runtime_files(ROOMS / "runtime", [STEPS], without=without)
    assert "checked_device.py" in held
    assert not held & {"device.py", "planned_device.py", "planned_sums.py"}
    assert "import CheckedDevice as Device" in door(ROOMS / "runtime", [STEPS], held)


def test_plain_inference_has_nothing_of_other_plans() -> None:
    text = "from runtime import Inference, InferenceDevice, Stage, infer_main\n"
    without = left_out(Copied(samples.plan("digits"), supervised=False), "runtime")
    held = runtime_files(RUNTIME, [text], without=without)
    assert not held & {"feature.py", "planned_device.py", "planned_infer.py"}
    assert "EvalDevice as InferenceDevice" in door(RUNTIME, [text], held)
    assert "planned_infer.py" in runtime_files(RUNTIME, [text])


@pytest.mark.parametrize(("supervised", "most"), [(True, 11_120), (False, 6_150)])
def test_a_plain_pipeline_copies_few_lines(supervised: bool, most: int) -> None:
    """Fewer is better: lower the number when there are; 7,500 and 4,500 are the goals."""
    bundle = Copied(samples.plan("gpt"), supervised=supervised)
    held = {"runtime": runtime_files(RUNTIME, [STEPS], without=left_out(bundle, "runtime"))}
    if supervised:
        held["supervisor"] = room_files(
            ROOMS / "supervisor", without=left_out(bundle, "supervisor")
        )
    paths = [ROOMS / room / name for room, names in held.items() for name in names]
    lines = sum(len(path.read_text().splitlines()) for path in paths if path.stem != "__init__")
    assert most - 100 < lines <= most


def test_a_feature_of_steps_brings_the_whole_device() -> None:
    plan = samples.plan("digits")
    asked = Copied(plan, supervised=False, extras=("pipelining",))
    assert "device" not in left_out(asked, "runtime")
    assert "device" in left_out(Copied(plan, supervised=False, extras=("mpi",)), "runtime")


def test_only_a_watch_brings_what_minds_dropped_messages() -> None:
    plan = samples.plan("digits")
    asked = [left_out(Copied(plan, True, extras), "supervisor") for extras in ((), ("watch",))]
    assert ["watch" in left for left in asked] == [True, False]


def test_only_a_plan_of_several_hosts_asks_where_they_meet() -> None:
    plan = samples.plan("digits")
    assert "addresses" in left_out(Copied(plan, supervised=False), "runtime")
    apart = tuple(replace(device, host=device.name) for device in plan.cluster.devices)
    plan = replace(plan, cluster=replace(plan.cluster, devices=apart))
    without = left_out(Copied(plan, supervised=False), "runtime")
    assert "addresses.py" in runtime_files(ROOMS / "runtime", [STEPS], without=without)
