"""What forward reads of the world is told with its line, and refused where it decides something."""

from __future__ import annotations

import datetime
import functools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic as now

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing.world import WORDS, mentions, watching

START_S = time.time()
LOG = logging.getLogger("world")
_CLOCKS = time.time, datetime.datetime


class Reading(nn.Module):
    """Scales by what a function says."""

    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * self.scale()


class Timer:
    """Holds a clock under a name of its own."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self.clock, self.start_s = clock, clock()

    def __call__(self) -> float:
        return 1.0 if self.clock() - self.start_s < 3_600 else 2.0


def by_minutes() -> float:
    return 1.0 if time.time() - START_S < 36_000 else 2.0


def by_hour() -> float:
    return 1.0 if datetime.datetime.now().hour < 12 else 2.0


def by_day() -> float:
    return float(datetime.date.today().year < 2_030) + 1.0


@pytest.mark.gate("by_day", "by_hour", "by_minutes")
@pytest.mark.parametrize("scale", [by_minutes, by_hour, by_day, Timer()])
def test_a_clock_that_decides_is_refused(scale: Callable[[], float]) -> None:
    with pytest.raises(CaptureError, match=r"goes by the clock: .* s later") as caught:
        capture(Reading(scale), (torch.randn(2, 4),))
    assert (caught.value.at or "").startswith("test_world.py:")
    assert "register_buffer" in (caught.value.help or "")
    assert (time.time, datetime.datetime) == _CLOCKS  # put back


def takes_time() -> float:
    start_s = time.perf_counter()
    LOG.debug("took %s s", time.perf_counter() - start_s)
    return 1.0


def asks_for_a_file() -> float:
    return 1.0 if Path("/proc").exists() or os.listdir("/") else 2.0


def asks_by_os_path() -> float:
    return 1.0 if os.path.exists("/proc") else 2.0  # as users write it


def reads_a_file() -> float:
    return 2.0 if "no such word" in Path(__file__).read_text(encoding="utf-8")[:10] else 1.0


def asks_the_network() -> float:
    with socket.socket() as line:
        line.settimeout(0.1)
        return float(line.connect_ex(("127.0.0.1", 1)) == 0) + 1.0


def asks_a_program() -> float:
    return float(subprocess.call([sys.executable, "-c", ""]) == 0)


@functools.lru_cache
def cached() -> float:
    return 1.0


def asks_a_cache() -> float:
    return cached() if cached.cache_info().hits < 10**9 else 2.0


@pytest.mark.gate("asks_the_network-the network")
@pytest.mark.parametrize(
    ("scale", "what"),
    [
        (takes_time, "the clock"),
        (asks_for_a_file, "files"),
        (asks_by_os_path, "files"),
        (reads_a_file, "files"),
        (asks_the_network, "the network"),
        (asks_a_program, "other programs"),
        (asks_a_cache, "how often a cache was asked"),
    ],
)
def test_what_is_read_and_decides_nothing_is_told(scale: Callable[[], float], what: str) -> None:
    told = [w for w in capture(Reading(scale), (torch.randn(2, 4),)).warnings if " reads " in w]
    line = scale.__code__.co_firstlineno
    assert told
    assert f"reads {what} (test_world.py:" in told[0]
    assert 0 < int(told[0].split("test_world.py:")[1].split(")")[0].split(",")[0]) - line < 5


def test_who_logs_or_writes_is_let_be(tmp_path: Path) -> None:
    def logs() -> float:
        LOG.warning("a record has the time, and the number of the process")
        (tmp_path / "log.txt").open("a").close()
        return 1.0

    assert not [w for w in capture(Reading(logs), (torch.randn(2, 4),)).warnings if "reads" in w]


def test_a_count_in_a_file_is_moved_on(tmp_path: Path) -> None:
    place = tmp_path / "seen.json"
    place.write_text('{"rate": 0.5, "calls": 0}')

    def counted(until: int) -> float:
        held = json.loads(place.read_text())
        held["calls"] += 1
        place.write_text(json.dumps(held))
        return 1.0 if held["calls"] < until else 2.0

    with pytest.raises(CaptureError, match=r"leaves number 2 of seen\.json for the next call"):
        capture(Reading(functools.partial(counted, 150)), (torch.randn(2, 4),))
    place.write_text('{"rate": 0.5, "calls": 0}')
    told = capture(Reading(functools.partial(counted, 10**12)), (torch.randn(2, 4),)).warnings
    assert any("reads files" in w for w in told)


def test_a_number_in_a_text_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_STATE", "step=0")

    def counted() -> float:
        step = int(os.environ["WORLD_STATE"].partition("=")[2]) + 1
        os.environ["WORLD_STATE"] = f"step={step}"
        return 1.0 if step < 60 else 2.0

    with pytest.raises(CaptureError, match="WORLD_STATE"):
        capture(Reading(counted), (torch.randn(2, 4),))


def test_a_model_of_a_library_is_not_watched() -> None:
    assert not mentions(nn.Linear(2, 2), None, WORDS)
    assert mentions(Reading(by_day), None, WORDS)


def test_another_profiler_is_left_alone() -> None:
    def other(*_: object) -> None:
        """Profile."""

    sys.setprofile(other)
    try:
        with watching() as reads:
            time.time()
        assert sys.getprofile() is other
    finally:
        sys.setprofile(None)
    assert not reads.lines


class Scaled(nn.Module):
    """Goes by the gradient that an earlier micro-batch has left, or logs it."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(4, 4), counts
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        scale, left = 1.0, self.linear.weight.grad
        if left is not None:
            self.seen.append(float(left.norm()))
            scale = 0.5 if self.counts else 1.0
        return self.linear(x).square().mean() * scale


def test_gradients_that_a_backward_has_left() -> None:
    with pytest.raises(CaptureError, match=r"left gradients \(p.grad\)") as caught:
        capture(Scaled(counts=True), (torch.randn(2, 4),))
    assert (caught.value.at or "").startswith("test_world.py:")
    model = Scaled(counts=False)
    capture(model, (torch.randn(2, 4),))
    assert model.linear.weight.grad is None
