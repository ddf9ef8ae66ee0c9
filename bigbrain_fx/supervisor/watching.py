"""Processes that take too long: those that hang are ended, those that are slow are reported."""

from __future__ import annotations

import time

from .crew import Crew
from .hanging import hung, locked, slow
from .processes import Member


class Watch:
    """Look after the processes of a crew from time to time; times are of a monotonic clock."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.looked = time.monotonic()

    def look(self, now: float) -> None:
        """End what hangs, and report what is slow."""
        self._leave_out_own_pause(now)
        self._end_hung(now)
        self._report_slow(now)
        self._end_late(now)

    def is_locked(self, now: float) -> bool:
        """Return whether all devices wait for each other."""
        pulses = {str(m.device): m.pulse for m in self.crew.at_work()}
        return locked(pulses, now, self.crew.job.hang_s)

    def _leave_out_own_pause(self, now: float) -> None:
        """Count no time in which this process, or all, were stopped or starved."""
        pause_s = now - self.looked
        if pause_s > max(0.5 * self.crew.job.hang_s, 2 * self.crew.job.beat_s):
            for member in self.crew.members:
                member.pulse.shift(pause_s)
        self.looked = now

    def _end_hung(self, now: float) -> None:
        greeted = {m.name: m for m in self.crew.members if m.greeted}
        pulses = {name: member.pulse for name, member in greeted.items()}
        for name in hung(pulses, now, self.crew.job.hang_s):
            self._end(greeted[name], now)

    def _report_slow(self, now: float) -> None:
        """Report each slow instruction once."""
        members = {str(m.device): m for m in self.crew.at_work()}
        pulses = {name: member.pulse for name, member in members.items()}
        for name in slow(pulses, now, self.crew.job.hang_s):
            member, pulse = members[name], pulses[name]
            if member.warned != pulse.instruction:
                member.warned = pulse.instruction
                self.crew.report("slow", device=name, seconds=now - pulse.moved)

    def _end_late(self, now: float) -> None:
        """End devices that have never come to their first step."""
        for member in self.crew.at_work():
            if member.formed < 0 and now - member.since > self.crew.job.start_s:
                self._end(member, now)

    def _end(self, member: Member, now: float) -> None:
        """End a process; that it has ended is then heard as of any other."""
        seconds = now - min(member.pulse.heard, member.pulse.moved)
        name = member.device or member.name
        self.crew.report("hang", device=name, seconds=seconds)
        member.kill()
        member.pulse.heard = member.pulse.moved = member.since = now
