"""Weights of others: there while a stage runs, and never longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bigbrain_fx.runtime.buckets import bucket_channels, buckets_of, read_buckets
from bigbrain_fx.runtime.modules import WeightsError
from bigbrain_fx.runtime.released import is_released, release
from bigbrain_fx.runtime.replicas import Replicas
from bigbrain_fx.runtime.unsharded import Unsharded
from tests.runtime.test_replicas import LISTED, Wire

GATHERS = [
    [2, "gather", [0, 1], ["d0", "d1"], 2, 4],
    [3, "gather", [1, 0], ["d1", "d0"], 3, 4],
]


def unsharded(folder: Path, wire: Wire, sends: object) -> tuple[Unsharded, Replicas]:
    """Return a device that keeps "b"; another keeps "a"."""
    entry = {**LISTED["bucket0"], "waits": (), "sends": sends}
    entry["channels"] = [*LISTED["bucket0"]["channels"][:2], *GATHERS]
    (folder / "buckets.json").write_text(json.dumps({"bucket0": entry}))
    channels = bucket_channels(str(folder / "device_d0.py"), "d0")
    listed = read_buckets(folder)
    parameters = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.tensor([1.0, 2.0]))}
    buckets = [*buckets_of(listed, "d0", (0,), channels)]
    replicas = Replicas(buckets, "micro", ((0, 2), (1, 3)), parameters, wire, True)  # type: ignore[arg-type]  # as much of a Transport as is used
    release([parameters["a"]])
    return Unsharded(replicas, listed), replicas


def test_a_weight_is_there_in_forward_and_backward_only(tmp_path: Path) -> None:
    wire = Wire(torch.tensor([2.0, 3.0, 4.0]), torch.tensor([2.0, 3.0, 4.0]))
    found, replicas = unsharded(tmp_path, wire, {"2": [0, 1, 2, 2]})
    weight, x = replicas.parameters["a"], torch.ones(3, requires_grad=True)
    found.begin()
    assert wire.sent == [(2, [1.0, 2.0])]
    with found.whole(0):
        y = (x * weight).sum()
    assert is_released(weight)
    assert len(wire.sent) == 2
    with found.whole(0):
        given, made = torch.autograd.grad(y, (x, weight))
    assert is_released(weight)
    assert len(wire.sent) == 4
    assert (given.tolist(), made.tolist()) == ([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])


def test_views_of_a_weight_are_copied_before_it_goes(tmp_path: Path) -> None:
    wire = Wire(torch.tensor([2.0, 3.0, 4.0]))
    found, replicas = unsharded(tmp_path, wire, {"2": [1, 1, 1, 1]})
    with found.whole(0):
        kept = found.apart((replicas.parameters["a"].detach()[1:], torch.zeros(1)))
    assert kept[0].tolist() == [3.0, 4.0]


def test_a_file_without_sends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="lacks sends"):
        unsharded(tmp_path, Wire(), {"2": [0]})
