"""Devices that repeat the steps of dead processes: bundles of `split --with watch` have this file.

An event says when each is where its dead process was.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from .crew import Crew
from .processes import Member


@dataclass(frozen=True)
class _Lag:
    """Steps to replay: from `start` to before `goal`."""

    start: int
    goal: int
    since: float


class CatchUp:
    """Devices that lag behind; times are of a monotonic clock, in seconds."""

    def __init__(self, crew: Crew | None = None) -> None:
        self.crew = crew
        self.ways: dict[str, _Lag] = {}

    def falls_back(self, device: str, done: int, start: int, now: float) -> None:
        """Note a death.

        Args:
            device: whose process it was.
            done: the last step that it had finished.
            start: the step from which the device goes on.
            now: when.
        """
        before = self.ways.get(device)
        goal = max(done + 1, start, before.goal if before else 0)
        self.ways[device] = _Lag(start, goal, before.since if before else now)

    def begins(self, member: Member, step: int) -> None:
        """Note from which step a device goes on: not from the one that was said of its death."""
        device = str(member.device)
        if device in self.ways:
            self.ways[device] = replace(self.ways[device], start=step)

    def all_begin(self, now: float) -> None:
        """Note that all are connected: some have nothing to do again."""
        for name, way in list(self.ways.items()):
            self._report(self.reach(name, way.start, now))

    def has_done(self, member: Member, step: int, now: float) -> None:
        """Note that a device has done a step."""
        self._report(self.reach(str(member.device), step + 1, now))

    def reach(self, device: str, step: int, now: float) -> dict[str, Any] | None:
        """Note that a device is before `step`; return the event, None: it is behind, or never was.

        The event has the next step, which nobody has done before, the seconds since the process
        died, and how many steps the device did again.
        """
        way = self.ways.get(device)
        if way is None or step < way.goal:
            return None
        del self.ways[device]
        steps = max(way.goal - way.start, 0)
        return {"device": device, "step": way.goal, "after_s": now - way.since, "steps": steps}

    def _report(self, found: dict[str, Any] | None) -> None:
        if found is not None and self.crew is not None:
            self.crew.report("caught_up", **found)

    def forget_devices(self, lost: Collection[str]) -> None:
        """Note devices that the run goes on without."""
        self.ways = {name: way for name, way in self.ways.items() if name not in lost}
