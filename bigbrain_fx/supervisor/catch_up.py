"""Devices that repeat the steps of dead processes; steps that are reported to the caller, once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .job import OnStep


@dataclass(frozen=True)
class CaughtUp:
    """A device that is where its dead process was; the fields of the event `caught_up`.

    Attributes:
        step: the next one, which nobody has done before.
        after_s: since the process died.
        steps: how many it did again.
    """

    device: str
    step: int
    after_s: float
    steps: int


@dataclass(frozen=True)
class _Lag:
    """Steps to replay: from `start` to before `goal`."""

    start: int
    goal: int
    since: float


@dataclass
class CatchUp:
    """Devices that lag behind; times are of a monotonic clock, in seconds."""

    ways: dict[str, _Lag] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether any device is behind."""
        return bool(self.ways)

    def fall_back(self, device: str, done: int, start: int, now: float) -> None:
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

    def begin(self, device: str, start: int) -> None:
        """Note from which step a device goes on: not from the one that was said of its death."""
        if device in self.ways:
            self.ways[device] = replace(self.ways[device], start=start)

    def reach(self, device: str, step: int, now: float) -> CaughtUp | None:
        """Note that a device is before `step`; None: it still is behind, or never was."""
        way = self.ways.get(device)
        if way is None or step < way.goal:
            return None
        del self.ways[device]
        return CaughtUp(device, way.goal, now - way.since, max(way.goal - way.start, 0))

    def reach_start(self, now: float) -> list[CaughtUp]:
        """Note that all are connected: some have nothing to do again."""
        found = [self.reach(name, way.start, now) for name, way in list(self.ways.items())]
        return [one for one in found if one is not None]


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
