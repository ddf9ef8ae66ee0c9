"""Sent messages that devices keep for a replacement, as far as there is memory for them.

Where they were dropped, a replacement cannot compute alone: all devices start again with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LogLoss:
    """The messages that some device has dropped: those up to `step`; -1: none is missing."""

    step: int = -1
    is_told: bool = False  # once is enough, where every step may drop some

    def drop(self, step: int) -> bool:
        """Hear that those up to a step are gone; return whether none was missing before."""
        is_first = self.step < 0 and not self.is_told
        self.step = max(self.step, step)
        return is_first

    def end_step(self) -> None:
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
