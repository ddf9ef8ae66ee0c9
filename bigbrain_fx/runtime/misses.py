"""Commits that could not be written: training goes on, and whoever watches hears what is at risk.

This file is stdlib only and writes nothing but words.
"""

from __future__ import annotations

from collections.abc import Callable

OnEvent = Callable[[str, int, dict[str, object]], None]  # event, step, facts


def no_event(event: str, step: int, facts: dict[str, object]) -> None:
    """Tell nobody: there is no supervisor."""


class Misses:
    """How many commits in a row were missed, and what is said of it.

    Args:
        say: prints a line.
        tell: hears of events: missed, committed_again, at_risk; on the device that leads.
    """

    def __init__(self, say: Callable[[str], None], tell: OnEvent = no_event) -> None:
        self.say = say
        self.tell = tell
        self.count = 0  # in a row
        self.newest = -1  # step of the newest commit

    def miss(self, step: int, why: str) -> None:
        """Hear that a commit was not written."""
        self.count += 1
        self.say(f"WARNING: no commit at step {step}: {why}; training goes on, older ones stay")
        facts = {"step": step, "text": why, "row": self.count, "newest": self.newest}
        self.tell("missed", step, facts)

    def hit(self, step: int) -> None:
        """Hear that a commit was written."""
        if self.count:
            self.say(f"commits are written again: step {step}, after {self.count} were missed")
            self.tell("committed_again", step, {"step": step, "missed": self.count})
        self.count, self.newest = 0, step

    def end(self, step: int) -> None:
        """Hear that the run ends at a step; warn of what is on no disk."""
        if not self.count or self.newest == step:
            return
        kept = f"the newest is of step {self.newest}" if self.newest >= 0 else "there is none"
        self.say(
            f"WARNING: the last {self.count} commits were missed and {kept}: what was trained up "
            f"to step {step} is in the files of --save only, or nowhere"
        )
        self.tell("at_risk", step, {"step": step, "missed": self.count, "newest": self.newest})
