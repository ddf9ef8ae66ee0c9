"""Stopwatches: what passes between two marks, on a processor or on a CUDA device.

Marks are taken while something runs, seconds are read once it is over. Waiting for a CUDA device
after each op would count launches that overlap its computing. This file knows devices; it knows
no ops.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

Mark: TypeAlias = Any  # a moment; only the stopwatch that made it knows what it is
_MARKS = 200
_BEHIND_CYCLES = 20_000_000  # about 10 ms, in which the host records so many


class Stopwatch(Protocol):
    """Take marks, settle, then ask what passed between two of them."""

    @property
    def device(self) -> torch.device:
        """Clock by which the stopwatch goes."""

    def mark(self) -> Mark:
        """Note this moment, with as little work as possible."""

    def settle(self) -> None:
        """Wait until every mark has come to pass; before that nobody may ask for seconds."""

    def between_s(self, begin: Mark, end: Mark, cost_s: float = 0.0) -> float:
        """Return the seconds between two marks."""


def stopwatch(device: torch.device, threads: int) -> Stopwatch:
    """Return the stopwatch to measure with, in a process of so many threads."""
    return CudaStopwatch(device) if device.type == "cuda" else ClockStopwatch(clock(threads))


def clock(threads: int) -> Callable[[], float]:
    """Return the clock of a processor to measure with.

    One thread's own processor time does not count what other processes take, nor a control group's
    quota; several threads have only the wall's time.
    """
    return time.thread_time if threads == 1 else time.perf_counter


class ClockStopwatch:
    """Read a clock: a mark is what it says. `mark` is the clock itself, with nothing around it."""

    def __init__(self, mark: Callable[[], float]) -> None:
        self.mark = mark
        self.device = torch.device("cpu")

    def settle(self) -> None:
        """Do nothing: what was marked is over."""

    def between_s(self, begin: float, end: float, cost_s: float = 0.0) -> float:
        """Subtract; to look at a clock delays everything after it."""
        return end - begin - cost_s


class CudaMark(NamedTuple):
    """An event on the stream; whether the device had come to the mark before when it was made."""

    event: torch.cuda.Event
    device_waits: bool


class CudaStopwatch:
    """Record events on a device's stream: an interval is what the device took, kernels or waiting.

    All events go to the stream that is current when the stopwatch is made. Autograd runs a CUDA
    node in a thread of its own but on the stream of its forward, which is that one: hooks may mark.

    What recording costs the host makes an interval longer only where the device waits for the host,
    so only there it is taken off. While the device is behind, that is hidden. An event takes the
    device a moment, too (1 to 2.5 us), which the stopwatch measures at its start.

    Sources: "CUDA semantics" in torch's documentation (asynchronous execution; stream semantics of
    backward passes); github.com/NVIDIA/NVTX/issues/3 (what an event takes). Events resolve about
    half a microsecond.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.current_stream(device)
        self._last = torch.cuda.Event(enable_timing=True)
        self._last.record(self._stream)
        self._event_s = self._measured_event_s()

    def _measured_event_s(self) -> float:
        """Return what an event takes the device; 0.0 where it does not stay behind the host."""
        sleep = getattr(torch.cuda, "_sleep", None)  # private: it may go
        if sleep is None:
            return 0.0
        sleep(_BEHIND_CYCLES)
        events = [self.mark().event for _ in range(_MARKS)]
        if events[0].query():  # it woke up before the host had recorded all
            return 0.0
        self.settle()
        return float(events[0].elapsed_time(events[-1])) / 1e3 / (_MARKS - 1)

    def mark(self) -> CudaMark:
        """Record an event; ask first whether the device has come to the last one."""
        waits = self._last.query()
        self._last = torch.cuda.Event(enable_timing=True)
        self._last.record(self._stream)
        return CudaMark(self._last, waits)

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def between_s(self, begin: CudaMark, end: CudaMark, cost_s: float = 0.0) -> float:
        """Ask the device for the milliseconds between two events."""
        taken_s: float = begin.event.elapsed_time(end.event) / 1e3
        return taken_s - cost_s if end.device_waits else max(0.0, taken_s - self._event_s)
