"""A bundle has the files of its plan's features, and no file that these do not need."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import bigbrain_fx
from bigbrain_fx.emit.files.copied import door, room_files, runtime_files
from bigbrain_fx.emit.files.parts import PARTS, UNIMPORTED, Copied, Part, left_out, ways_into
from tests.support import samples

TRAIN = "from runtime import Bundle, Hooks, Training, main, Device, Stage, adamw\n"
ROOMS = Path(bigbrain_fx.__file__).parent
# a part that is there only beside another
BESIDE = {"weights in stores": "stores", "activations in stores": "stores"}
OF_HOSTS = {"multi_host.py", "hosts.py", "secured.py", "admission.py", "remaining.py"}


def _supervisor(*extras: str) -> frozenset[str]:
    plan = samples.plan("digits")
    without = left_out(Copied(plan, supervised=True, extras=extras), "supervisor")
    return room_files(ROOMS / "supervisor", UNIMPORTED["supervisor"], without)


def test_only_who_asks_has_the_files_of_several_hosts() -> None:
    assert not OF_HOSTS & _supervisor()
    assert _supervisor("hosts") - _supervisor() == OF_HOSTS


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("room", ["runtime", "supervisor"])
def test_no_file_needs_a_part_that_is_left_out(room: str, part: Part) -> None:
    """What a module imports as it is imported is there, whichever part a bundle lacks."""
    gone = [each for each in PARTS if part.name in (each.name, BESIDE.get(each.name))]
    without = ways_into(gone, room)
    texts = [TRAIN] if room == "runtime" else []
    held = runtime_files(ROOMS / room, texts, without=without)
    for name in held:
        tree = ast.parse((ROOMS / room / name).read_text())
        top = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.level == 1]
        assert {f"{n.module}.py" for n in top if n.module} <= held, name


@pytest.mark.parametrize("supervised", [True, False])
def test_a_plain_pipeline_has_the_checked_device_only(supervised: bool) -> None:
    plan = samples.plan("digits")
    without = left_out(Copied(plan, supervised=supervised), "runtime")
    held = runtime_files(ROOMS / "runtime", [TRAIN], without=without)
    assert "checked_device.py" in held
    assert not held & {"device.py", "planned_device.py", "planned_sums.py", "loss_shares.py"}
    assert "import CheckedDevice as Device" in door(ROOMS / "runtime", [TRAIN], held)


def test_a_feature_of_steps_brings_the_whole_device() -> None:
    plan = samples.plan("digits")
    asked = Copied(plan, supervised=False, extras=("pipelining",))
    assert "device" not in left_out(asked, "runtime")
    assert "device" in left_out(Copied(plan, supervised=False, extras=("mpi",)), "runtime")


def test_only_a_plan_of_several_hosts_asks_where_they_meet() -> None:
    plan = samples.plan("digits")
    assert "addresses" in left_out(Copied(plan, supervised=False), "runtime")
    apart = tuple(replace(device, host=device.name) for device in plan.cluster.devices)
    plan = replace(plan, cluster=replace(plan.cluster, devices=apart))
    without = left_out(Copied(plan, supervised=False), "runtime")
    assert "addresses.py" in runtime_files(ROOMS / "runtime", [TRAIN], without=without)
