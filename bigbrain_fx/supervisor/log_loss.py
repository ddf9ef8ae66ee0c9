"""Sent messages that took too much memory, and were dropped: a death then takes all devices back.

Processes are told how much of sent messages they may keep; see `watch.Watch.limits`.
"""

from __future__ import annotations

from .crew import Crew
from .policies import Acts
from .processes import Member


class LogLoss:
    """The messages that some device has dropped: those up to `step`; -1: none is missing."""

    def __init__(self, crew: Crew | None = None) -> None:
        self.crew = crew
        self.step = -1
        self.is_told = False  # once is enough, where every step may drop some

    def acts(self) -> Acts:
        """Return the methods that follow from messages of processes, by message."""
        return {"log_dropped": self.hear_dropped}

    def hear_dropped(self, member: Member, step: int, bytes: int) -> None:
        """Hear that a device has dropped messages up to a step."""
        if member.recalled:  # an old word of one that starts again anyway
            return
        if self.drop(step) and self.crew is not None:
            self.crew.report("log_dropped", device=member.device, step=step, bytes=bytes)

    def drop(self, step: int) -> bool:
        """Hear that those up to a step are gone; return whether none was missing before."""
        is_first = self.step < 0 and not self.is_told
        self.step = max(self.step, step)
        return is_first

    def forget_log(self) -> None:
        """Hear that nobody wants a message of the step that ends, nor of those before it."""
        self.is_told = self.is_told or self.step >= 0
        self.step = -1

    def snapshot(self, step: int) -> bool:
        """Hear of a snapshot of all devices; return whether it makes up for what was missing."""
        if not 0 <= self.step < step:
            return False
        self.step = -1
        return True

    def take_back(self, step: int) -> bool:
        """Return whether all must start again with one that starts at `step`.

        They then send all that was missing again.
        """
        if self.step < step:
            return False
        self.step = -1
        return True
