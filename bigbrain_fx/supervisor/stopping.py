"""A run that ends on request: all devices before the same step, which none of them has begun.

`Stopping` is how far the request has come; `Ending` carries it through.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from .crew import Crew
from .job import OnStep
from .processes import Member
from .snapshots import Snapshots


@dataclass
class Stopping:
    """Progress of a request to stop.

    Attributes:
        asked: when it came, on a monotonic clock in seconds; None: it has not.
        positions: the step that each device is in, -1 if it has begun none; None: they have not
            been asked.
        at: the step before which all stop; None: it is not known yet.
    """

    asked: float | None = None
    positions: dict[str, int] | None = None
    at: int | None = None

    def ask(self, now: float) -> None:
        """Take a request; later ones change nothing. Signal handlers may call this."""
        if self.asked is None:
            self.asked = now

    @property
    def is_under_way(self) -> bool:
        """Whether devices were asked for their positions, and do not know yet where to stop."""
        return self.positions is not None and self.at is None

    def begin(self, fresh: Iterable[str]) -> bool:
        """Return, once only, whether devices are to be asked for their positions.

        Args:
            fresh: devices that have certainly begun no step, and will receive the request first.
        """
        if self.asked is None or self.positions is not None:
            return False
        self.positions = dict.fromkeys(fresh, -1)
        return True

    def hear(self, device: str, step: int) -> None:
        """Take the step that a device is in; of one that was replaced since, the later counts."""
        if self.positions is not None:
            self.positions[device] = max(step, self.positions.get(device, -1))

    def decide(self, devices: Collection[str], least: int) -> bool:
        """Return, once only, whether it is now known where to stop.

        All can reach that step: a device waits before the next one until it is known.

        Args:
            devices: all; each must have said where it is.
            least: they have a snapshot of this step, or reported the loss of the one before.
        """
        if self.positions is None or self.at is not None or set(devices) - self.positions.keys():
            return False
        self.at = max(least, *(step + 1 for step in self.positions.values()))
        return True


class Stops(Protocol):
    """A stoppable thing: a supervisor, or the agent of another host."""

    def ask_to_stop(self) -> None:
        """End the run after the step that it is in; signal handlers may call this."""


@contextmanager
def stopped_by_sigterm(supervisor: Stops) -> Iterator[None]:
    """Let SIGTERM, or the end of the terminal, stop the run after its step.

    Only the main thread can take signals; who ignores the terminal's end (nohup) goes on doing so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        supervisor.ask_to_stop()

    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    for kind in kinds:
        if kind == signal.SIGTERM or before[kind] == signal.SIG_DFL:
            signal.signal(kind, stop)
    try:
        yield
    finally:
        for kind, handler in before.items():
            if handler is not None:  # it is Python's to give back
                signal.signal(kind, handler)


class ToldSteps:
    """Report steps, once each.

    Args:
        on_step: receives each as soon as its loss is known.

    Attributes:
        newest: the last that was reported; -1: none was.
    """

    def __init__(self, on_step: OnStep | None) -> None:
        self.on_step = on_step
        self.newest = -1

    def tell(self, step: int, loss: float, step_s: float) -> None:
        """Report a step, if it was not reported before."""
        if step > self.newest:
            self.newest = step
            if self.on_step is not None:
                self.on_step(step, loss, step_s)


class Ending:
    """Bring a run to the step before which it stops.

    Args:
        crew: the processes.
        stopping: how far the request has come.
        snapshots: it stops at their newest step or later.
        told: and after the last step that the caller knows of.
    """

    def __init__(
        self, crew: Crew, stopping: Stopping, snapshots: Snapshots, told: ToldSteps
    ) -> None:
        self.crew, self.stopping = crew, stopping
        self.snapshots, self.told = snapshots, told

    def look(self) -> None:
        """Ask devices where they are, once."""
        fresh = [str(m.device) for m in self.crew.at_work() if m.ready[0] < 0]
        if self.stopping.begin(fresh):
            self.crew.tell("pause")
            self.look_where()

    def look_where(self) -> None:
        """Tell all where to stop, as soon as that is known."""
        least = max(self.snapshots.epoch, self.told.newest + 1)
        if self.stopping.decide(self.crew.devices, least):
            self.crew.report("stopping", step=self.stopping.at)
            self.crew.tell("stop_at", step=self.stopping.at)

    def hear_at(self, member: Member, step: int) -> None:
        """Receive the step that a device is in."""
        self.stopping.hear(str(member.device), step)
        self.look_where()
