"""A model far larger than all devices is refused before anything is captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bigbrain_fx as bb
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.frontend.room import Room, require_room
from tests.support.command_line import write_cluster
from tests.support.messages import refused

MIB = 2**20


class Wide(nn.Module):
    """A weight and a frozen weight of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 512, bias=False)
        self.kept = nn.Linear(512, 512, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it is captured")


@pytest.mark.parametrize(("room_mib", "trains"), [(1.6, True), (1.0, False), (2.0, True)])
def test_a_model_within_twice_the_room_is_let_be(room_mib: float, trains: bool) -> None:
    require_room(Wide(), Room(room_mib * MIB, ()), trains=trains)


@pytest.mark.parametrize(("room_mib", "trains"), [(1.4, True), (0.9, False)])
def test_a_model_beyond_twice_the_room_is_refused(room_mib: float, trains: bool) -> None:
    with refused("BX1343a", NoPlanError):
        require_room(Wide(), Room(room_mib * MIB, ("d0 has little",)), trains=trains)


def test_split_refuses_before_the_capture(tmp_path: Path) -> None:
    """Its forward raises, and is not reached."""
    small = write_cluster(tmp_path, memory="40MiB")
    with refused("BX1343a", NoPlanError):
        bb.split(Wide(), small, tmp_path / "out", example_batch={"x": torch.ones(2, 512)})
    assert not (tmp_path / "out").exists()
