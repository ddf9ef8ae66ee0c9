"""A run that ends on request: all devices before the same step, which none of them has begun."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass
class Stopping:
    """How far a request to stop has come.

    Attributes:
        asked: when it came, on a monotonic clock in seconds; None: it has not.
        positions: the step that each device is in; None: they have not been asked.
        at: the step before which all stop; None: it is not known yet.
    """

    asked: float | None = None
    positions: dict[str, int] | None = None
    at: int | None = None

    def ask(self, now: float) -> None:
        """Take a request; later ones change nothing. Signal handlers may call this."""
        self.asked = self.asked or now

    def begin(self) -> bool:
        """Return, once only, whether devices are to be asked for their positions."""
        if self.asked is None or self.positions is not None:
            return False
        self.positions = {}
        return True

    def is_late(self, now: float, grace_s: float) -> bool:
        """Return whether devices should have stopped by now."""
        return self.asked is not None and now - self.asked > grace_s

    def hear(self, device: str, step: int, running: Set[str]) -> bool:
        """Hear the step that a device is in; return whether that says where to stop.

        All can reach that step: a device waits before the next one until it is known.

        Args:
            device: says it.
            step: is the one.
            running: all devices that will say it.
        """
        if self.positions is None or self.at is not None:
            return False
        self.positions[device] = step
        if not running <= set(self.positions):
            return False
        self.at = max(self.positions.values()) + 1
        return True
