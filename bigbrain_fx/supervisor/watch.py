"""Processes that take too long: those that hang are ended, those that are slow are reported.

Devices that wait for a hung one make no progress either; ending them would help nobody. Bundles of
`split --with watch` have this file, and those that it imports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .crew import Crew
from .grace import Grace
from .host_memory import MemoryKills, available_bytes
from .job import FailedError
from .judging import Failure
from .policies import Acts
from .processes import END_S, LOG_BYTES, LOG_SHARERS, Member
from .protocol import BATCH, Wait, wait_of
from .snapshots import Snapshots
from .starving import Starves, starving_of
from .stopping import Stopping

LEAVE_S = 30.0  # a process that has finished is silent as it leaves; a busy host makes that long
SLOW_SHARE = 0.25  # of the limit: a device this long within one instruction is called slow


@dataclass
class Pulse:
    """Progress of a process; times are of a monotonic clock, in seconds.

    Attributes:
        heard: when it last said anything: a stopped process says nothing.
        moved: when its main thread last began an instruction.
        instruction: the number of that.
        waits_for: what it waits for; None while it computes.
        is_at_work: whether it runs steps: before and after that no progress is expected.
        starved_s: how long it has had no processor, though ready to run, since it moved.
    """

    heard: float
    moved: float
    instruction: int = -1
    waits_for: Wait | None = None
    is_at_work: bool = False
    starved_s: float = 0.0

    @property
    def computes(self) -> bool:
        """Whether it is up to this process alone that something happens."""
        return self.is_at_work and self.waits_for is None

    def beat(self, now: float, instruction: int, waits_for: Wait | None) -> None:
        """Take note of a heartbeat."""
        if instruction != self.instruction or waits_for != self.waits_for:
            self.moved, self.starved_s = now, 0.0
        self.heard, self.instruction, self.waits_for = now, instruction, waits_for

    def excuse(self, seconds: float, now: float) -> None:
        """Take no account of time in which it had no processor."""
        self.starved_s += seconds
        self.heard = min(now, self.heard + seconds)
        self.moved = min(now, self.moved + seconds)


@dataclass
class Watched:
    """Observations of one process.

    Attributes:
        pulse: its progress.
        starving, starved_s: measures how long it had no processor; its last figure.
        excused: the instruction of which that was reported.
        warned: the instruction that was reported as slow.
        stopped_at: since when it is stopped, of one that has not greeted yet; None: it is not.
    """

    pulse: Pulse
    starving: Starves
    starved_s: float = 0.0
    excused: int = -2
    warned: int = -1
    stopped_at: float | None = None


class Watch:
    """Look after the processes of a crew from time to time; times are of its clock."""

    def __init__(self, crew: Crew, stopping: Stopping) -> None:
        self.crew = crew
        self.looked = crew.clock.now()
        self.watched: dict[Member, Watched] = {}
        self.memory_kills = MemoryKills()
        self.grace = Grace(crew, stopping, self.pulse_of)

    def look(self, now: float) -> None:
        """End what hangs, and report what is slow, or has no processor.

        Raises:
            FailedError: a device's process was ended, and is still there.
        """
        self.watched = {member: self._seen(member) for member in self.crew.members}
        starved_s = self._excuse_starved(now)
        self._end_hung(now)
        self._end_stopped(now)
        self._report_slow(now)
        self._end_late(now)
        self._require_ended(now)
        self.memory_kills.look(now)
        self.grace.wait_longer(starved_s, now)

    def _seen(self, member: Member) -> Watched:
        if member not in self.watched:
            pulse = Pulse(member.heard, member.heard)
            self.watched[member] = Watched(pulse, starving_of(member.process))
        return self.watched[member]

    def pulse_of(self, member: Member) -> Pulse:
        """Return the progress of a process."""
        return self._seen(member).pulse

    def hears(self, member: Member, now: float) -> None:
        """Note that a process has said something."""
        self.pulse_of(member).heard = now

    def beats(self, member: Member, n: int, waiting: Sequence[str] | None, now: float) -> None:
        """Take note of a heartbeat: at which instruction a process is, and what it waits for."""
        self.pulse_of(member).beat(now, n, wait_of(waiting) if waiting else None)

    def connected(self, member: Member, now: float) -> None:
        """Note that a device runs steps from now on."""
        pulse = self.pulse_of(member)
        pulse.is_at_work, pulse.moved, pulse.starved_s = not member.finished, now, 0.0

    def has_finished(self, member: Member) -> None:
        """Note that a device runs no steps any more."""
        self.pulse_of(member).is_at_work = False

    def is_locked(self, now: float) -> bool:
        """Return whether all devices wait for each other."""
        pulses = {str(m.device): self.pulse_of(m) for m in self.crew.at_work()}
        return locked(pulses, now, self.crew.job.hang_s)

    def meant(self, code: int, now: float) -> bool:
        """Whether a process that ended with this code was ended for want of memory."""
        return self.memory_kills.meant(code, now)

    def limits(self, host: str) -> dict[str, str]:
        """Say how much a process may keep of sent messages, or with how many it shares a host."""
        job = self.crew.job
        if job.log_bytes is not None:
            return {LOG_BYTES: str(job.log_bytes)}
        alike = [name for name in job.devices if job.host_of(name) == host]
        return {LOG_SHARERS: str(max(1, len(alike)))}

    def left_bytes(self) -> int:
        """Return the memory that can still be taken."""
        return available_bytes()

    def mind(self, snapshots: Snapshots, left: int) -> None:
        """Say where second slots take more than half of this host's memory: it may run out."""
        here = [n for n in snapshots.slots if not self.crew.job.host_of(n)]
        wanted = sum(snapshots.costs[name].state for name in here)  # first slots have theirs
        if snapshots.in_memory and 2 * wanted > left:
            self.crew.report("snapshots_large", bytes=2 * wanted, left=left)

    def move(self, now: float) -> None:
        """Note something that brings the end of a run nearer."""
        self.grace.move(now)

    def step_took(self, step_s: float, now: float) -> None:
        """Note that a device has ended a step."""
        self.grace.step_took(step_s, now)

    def require_end(self, now: float) -> None:
        """Refuse to wait any longer for the end of a run that is to stop.

        Raises:
            FailedError: a device does not come to its end.
        """
        self.grace.look(now)

    # ------------------------------------------------------------------ what hangs, what is slow

    def _excuse_starved(self, now: float) -> float:
        """Give processes the time that a busy host did not; return the longest of it."""
        if now - self.looked < self.crew.job.beat_s:
            return 0.0
        self.looked = now
        found = (self._excuse(member, seen, now) for member, seen in self.watched.items())
        return max(found, default=0.0)

    def _excuse(self, member: Member, seen: Watched, now: float) -> float:
        """Give one process its time, and report each such instruction once."""
        before, seen.starved_s = seen.starved_s, seen.starving.look()
        seconds, pulse = seen.starved_s - before, seen.pulse
        member.since = min(now, member.since + seconds)
        pulse.excuse(seconds, now)
        self._see_stopped(member, seen, now)
        is_long = pulse.computes and pulse.starved_s > self.crew.job.hang_s
        if is_long and seen.excused != pulse.instruction:
            seen.excused, name = pulse.instruction, member.device or member.name
            self.crew.report("starved", device=name, seconds=pulse.starved_s)
        return seconds

    def _see_stopped(self, member: Member, seen: Watched, now: float) -> None:
        """Note since when a process is stopped whose heart does not beat yet."""
        if member.greeted or not seen.starving.is_stopped():
            seen.stopped_at = None
        elif seen.stopped_at is None:
            seen.stopped_at = now

    def _end_stopped(self, now: float) -> None:
        """End processes that were stopped as they started: `start_s` is for those that are slow."""
        for member, seen in self.watched.items():
            if seen.stopped_at is not None and now - seen.stopped_at > self.crew.job.hang_s:
                self._end(member, now)

    def _end_hung(self, now: float) -> None:
        greeted = {m.name: m for m in self.crew.members if m.greeted}
        pulses = {name: self.pulse_of(member) for name, member in greeted.items()}
        limit_s = self.crew.job.hang_s
        for name in hung(pulses, now, max(limit_s, LEAVE_S) if self.crew.ending else limit_s):
            self._end(greeted[name], now)

    def _report_slow(self, now: float) -> None:
        """Report each slow instruction once."""
        members = {str(m.device): m for m in self.crew.at_work()}
        pulses = {name: self.pulse_of(member) for name, member in members.items()}
        for name in slow(pulses, now, self.crew.job.hang_s):
            seen, pulse = self.watched[members[name]], pulses[name]
            if seen.warned != pulse.instruction:
                seen.warned = pulse.instruction
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
        pulse = self.pulse_of(member)
        seconds = now - min(pulse.heard, pulse.moved)
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


def hung(pulses: Mapping[str, Pulse], now: float, limit_s: float) -> list[str]:
    """Return the devices to end: silent ones, and those within one instruction for too long."""
    return [
        name
        for name, pulse in pulses.items()
        if now - pulse.heard > limit_s or (pulse.computes and now - pulse.moved > limit_s)
    ]


def locked(pulses: Mapping[str, Pulse], now: float, limit_s: float) -> bool:
    """Return whether all wait for each other: a message was lost; idle ones wait for the caller."""
    rests = any(p.waits_for and p.waits_for.kind == BATCH for p in pulses.values())
    return (
        bool(pulses)
        and not rests
        and all(
            pulse.waits_for is not None and pulse.is_at_work and now - pulse.moved > limit_s
            for pulse in pulses.values()
        )
    )


def slow(pulses: Mapping[str, Pulse], now: float, limit_s: float) -> list[str]:
    """Return the devices that others wait for, and that have long been in one instruction."""
    waited_for = {pulse.waits_for.device for pulse in pulses.values() if pulse.waits_for}
    return [
        name
        for name, pulse in pulses.items()
        if name in waited_for and pulse.computes and now - pulse.moved > SLOW_SHARE * limit_s
    ]


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
        """Note that a device has dropped messages up to a step."""
        if member.recalled:  # an old word of one that starts again anyway
            return
        if self.drop(step) and self.crew is not None:
            self.crew.report("log_dropped", device=member.device, step=step, bytes=bytes)

    def drop(self, step: int) -> bool:
        """Note that those up to a step are gone; return whether none was missing before."""
        is_first = self.step < 0 and not self.is_told
        self.step = max(self.step, step)
        return is_first

    def forget_log(self) -> None:
        """Note that nobody wants a message of the step that ends, nor of those before it."""
        self.is_told = self.is_told or self.step >= 0
        self.step = -1

    def snapshot(self, step: int) -> bool:
        """Note a snapshot of all devices; return whether it makes up for what was missing."""
        if not 0 <= self.step < step:
            return False
        self.step = -1
        return True

    def take_back(self, step: int) -> bool:
        """Return whether all must start again with a process that starts at `step`.

        All processes then send every missing message again.
        """
        if self.step < step:
            return False
        self.step = -1
        return True
