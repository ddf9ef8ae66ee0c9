"""Warm processes that wait to become a device: every host has its own, as snapshots stay there."""

from __future__ import annotations

from .crew import Crew, StartError
from .processes import Member


class Spares:
    """Keep spares among the processes of a crew.

    Attributes:
        lost: how many ended, one after another, without that one came to be warm.
    """

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.lost = 0

    def fill(self) -> None:
        """Start as many as are missing, unless they end again and again."""
        job = self.crew.job
        if self.lost > job.spares:
            return
        for host in sorted({job.host_of(device) for device in self.crew.devices}):
            for _ in range(job.spares - len(self.crew.spares(host))):
                self._start(host)

    def _start(self, host: str) -> None:
        try:
            self.crew.order(self.crew.start("spare", host), "be", device=None)
        except StartError as error:  # the run goes on without
            self.lost += 1
            self.crew.report("no_spare", text=str(error))

    def take(self, device: str) -> Member:
        """Return a spare of a device's host, a warm one if there is; else a new process."""
        host = self.crew.job.host_of(device)
        spares = sorted(self.crew.spares(host), key=lambda member: not member.is_warm)
        return spares[0] if spares else self.crew.start(device, host)

    def hear_warm(self, member: Member) -> None:
        """Hear that a process could become a device at once."""
        member.is_warm = True
        if member.device is None:
            self.lost = 0
            self.crew.report("spare_ready", device=member.name, pid=member.process.pid)

    def hear_end(self, spare: Member, code: int) -> None:
        """Hear that a spare has ended; another is started when devices are next connected."""
        self.lost += 1
        self.crew.report(
            "died",
            device="spare",
            pid=spare.process.pid,
            step=-1,
            how=f"ended with exit code {code}",
            silent_s=0.0,
        )
