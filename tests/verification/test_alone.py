"""A bundle is trained as its process was before the model file was run there."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from bigbrain_fx.core import Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan
from bigbrain_fx.verification import alone as room
from bigbrain_fx.verification.trace import Trace

BUNDLE = ModuleType("train")
STEPS = 2


class Seeded:
    """What of a plan is asked for."""

    seed = 0
    stages = Stages((), ())


PLAN = cast("Plan", Seeded())


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a made-up bundle goes by: a number, and whether it fails with that."""
    what: dict[str, Any] = {"number": 1.0, "fails with": ()}

    def run(_bundle: object, _plan: Plan, steps: int, _seed: int) -> Trace:
        if what["number"] in what["fails with"]:
            raise ValueError(f"no {what['number']}")
        losses = [torch.tensor(what["number"], dtype=torch.float64)] * steps
        return Trace(losses, {"w": torch.ones(2)}, {"w": torch.full((2,), 3.0)}, {"w"})

    monkeypatch.setattr(room, "run_bundle", run)
    monkeypatch.setattr(room, "import_bundle", lambda _folder: BUNDLE)
    monkeypatch.setattr(room, "read_plan", lambda _folder: PLAN)
    return what


def test_settings_made_afterwards_are_not_set_there(held: dict[str, Any], tmp_path: Path) -> None:
    with room.Alone() as made:
        held["number"] = 2.0
        found = made.train(tmp_path, PLAN, STEPS)
    assert [float(loss) for loss in found.losses] == [1.0, 1.0]
    assert torch.equal(found.tensors["w"], torch.full((2,), 3.0))
    assert torch.equal(found.gradients["w"], torch.ones(2))
    assert found.unlike == {"w"}


def test_a_failure_of_the_other_process_alone_is_reported(
    held: dict[str, Any], tmp_path: Path
) -> None:
    held["fails with"] = (1.0,)
    with room.Alone() as made:
        held["number"] = 2.0
        with pytest.raises(InputError, match=r"fails in a process of its own: ValueError: no 1\.0"):
            made.train(tmp_path, PLAN, STEPS)


def test_a_failure_of_both_processes_is_raised_as_it_is(
    held: dict[str, Any], tmp_path: Path
) -> None:
    held["fails with"] = (1.0,)
    with room.Alone() as made, pytest.raises(ValueError, match=r"no 1\.0"):
        made.train(tmp_path, PLAN, STEPS)


def test_nobody_who_asks_is_no_error(held: dict[str, Any], tmp_path: Path) -> None:
    with room.Alone():
        held["number"] = 5.0
