"""Processes that take too long: those that hang are ended, those that are slow are reported."""

from __future__ import annotations

from .crew import Crew
from .job import FailedError
from .judging import Failure
from .processes import END_S, Member
from .pulse import hung, locked, slow

LEAVE_S = 30.0  # a process that has finished is silent as it leaves; a busy host makes that long


class Watch:
    """Look after the processes of a crew from time to time; times are of its clock."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.looked = crew.clock.now()

    def look(self, now: float) -> float:
        """End what hangs, and report what is slow, or has no processor.

        Returns:
            For how many seconds a process had none since the last look.

        Raises:
            FailedError: a device's process was ended, and is still there.
        """
        starved_s = self._excuse_starved(now)
        self._end_hung(now)
        self._end_stopped(now)
        self._report_slow(now)
        self._end_late(now)
        self._require_ended(now)
        return starved_s

    def is_locked(self, now: float) -> bool:
        """Return whether all devices wait for each other."""
        pulses = {str(m.device): m.pulse for m in self.crew.at_work()}
        return locked(pulses, now, self.crew.job.hang_s)

    def _excuse_starved(self, now: float) -> float:
        """Give processes the time that a busy host did not; return the longest of it."""
        if now - self.looked < self.crew.job.beat_s:
            return 0.0
        self.looked = now
        return max((self._excuse(member, now) for member in self.crew.members), default=0.0)

    def _excuse(self, member: Member, now: float) -> float:
        """Give one process its time, and report each such instruction once."""
        before, member.starved_s = member.starved_s, member.starving.look()
        seconds, pulse = member.starved_s - before, member.pulse
        member.since = min(now, member.since + seconds)
        pulse.excuse(seconds, now)
        self._see_stopped(member, now)
        is_long = pulse.computes and pulse.starved_s > self.crew.job.hang_s
        if is_long and member.excused != pulse.instruction:
            member.excused, name = pulse.instruction, member.device or member.name
            self.crew.report("starved", device=name, seconds=pulse.starved_s)
        return seconds

    def _see_stopped(self, member: Member, now: float) -> None:
        """Note since when a process is stopped whose heart does not beat yet."""
        if member.greeted or not member.starving.is_stopped():
            member.stopped_at = None
        elif member.stopped_at is None:
            member.stopped_at = now

    def _end_stopped(self, now: float) -> None:
        """End processes that were stopped as they started: `start_s` is for those that are slow."""
        for member in self.crew.members:
            at = member.stopped_at
            if at is not None and now - at > self.crew.job.hang_s:
                self._end(member, now)

    def _end_hung(self, now: float) -> None:
        greeted = {m.name: m for m in self.crew.members if m.greeted}
        pulses = {name: member.pulse for name, member in greeted.items()}
        limit_s = self.crew.job.hang_s
        for name in hung(pulses, now, max(limit_s, LEAVE_S) if self.crew.ending else limit_s):
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
        """End a process, once; that it has ended is then heard as of any other."""
        if member.ended_at is not None:
            return
        seconds = now - min(member.pulse.heard, member.pulse.moved)
        name = member.device or member.name
        self.crew.report("hang", device=name, seconds=seconds)
        member.kill()
        member.ended_at = now

    def _require_ended(self, now: float) -> None:
        """Give up a process that the kernel does not let end, or whose host does not do it."""
        for member in self.crew.at_work():
            if member.ended_at is not None and now - member.ended_at > END_S:
                what = f"the process of device {member.device} hangs"
                failure = Failure(member.device, what, str(member.log))
                why = f"{END_S:g} s after it was ended it is still there"
                raise FailedError(failure, why, code="BX6028", moves=True)
