"""Rows of a served bundle on emulated devices, and whose processes are started there."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tools.emulation import Network
from tools.serving_emulated import INSIDE, SpeedRow, cluster_of, inside


def test_a_row_has_the_middle_and_what_nine_of_ten_took() -> None:
    times = tuple(float(n) for n in range(1, 11))
    row = SpeedRow((2, 1), True, 8, (30.0, 10.0, 20.0), times)
    assert str(row) == "| 2:1 | yes | 8 | 20.0 (10.0 to 30.0) | 5.50 | 9.90 |"
    alone = SpeedRow((2,), False, 1, (1.0, 1.0, 1.0), times)
    assert str(alone).startswith("| 1, one process | no | 1 |")


def test_devices_differ_as_the_speeds_say() -> None:
    first, second = cluster_of((2, 1)).devices
    assert first.flops_per_s == 2 * second.flops_per_s
    assert first.host != second.host


def test_only_device_processes_are_started_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = SimpleNamespace(process=("group",), compute="quota")
    net = SimpleNamespace(
        namespaces={"d0": "space0", "d1": "space1"},
        cpus={"d0": (0,), "d1": (1,)},
        groups=SimpleNamespace(of={"d0": joined, "d1": joined}),
    )
    seen: list[tuple[Any, Any]] = []

    class Seen:
        def __init__(self, words: Any, **options: Any) -> None:
            seen.append((words, options))

    monkeypatch.setattr(subprocess, "Popen", Seen)
    with inside(cast("Network", net), ["d1", "d0"]):
        start: Any = subprocess.Popen
        start([sys.executable, "infer.py", "--serve", "3,4"], env={"RANK": "1"})
        start(["ls"], env={})
    (words, options), (others, _) = seen
    assert words[:2] == [sys.executable, str(INSIDE)]
    assert json.loads(words[2])["namespace"] == "space0"
    assert options["env"] == {
        "RANK": "1",
        "MASTER_ADDR": "10.213.0.2",
        "GLOO_SOCKET_IFNAME": "wire",
    }
    assert others == ["ls"]
