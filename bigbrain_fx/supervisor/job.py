"""The job of a supervisor, and its result: dataclasses only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .coded import CodedError
from .judging import Death, Failure

BEATS = 8  # heartbeats within the time after which a process is said to hang
LEAST_BEAT_S, MOST_BEAT_S = 0.05, 1.0

OnStep = Callable[[int, float, float], None]  # step, loss, seconds
Rescue = Callable[[int, Mapping[str, int]], None]  # step, device -> file descriptor


@dataclass(frozen=True)
class Job:
    """A job for this host: processes, limits and times.

    Attributes:
        devices: their names, by rank.
        words: the program of every process, which asks its connection for its device.
        folder, environment: for every process.
        logs: folder of the output of each.
        spares: number of warm standby workers.
        restarts, window_s: so many within so many seconds are allowed.
        hang_s: a process without progress for so long is ended. Time in which the process was ready
            to run and had no processor does not count, here and below.
        start_s: longest time from a process's start to its first step.
        every: steps between snapshots in memory; None chooses after two steps.
        snapshots: a folder where they lie instead, on a disk.
        suspect: the share of the devices' steps that spares compute again, and compare.
        log_bytes: of sent messages that a device keeps at most; beyond it forgets them, and a death
            takes all devices back. None: its share of half of the memory that is free.
        grace_s: longest time from a request to stop to the end of a step, and then between signs of
            progress. None: as long as recent steps took three times, and 30 s at least.
        elastic: it goes on without a replica that is lost for good, where its program can.
        replicas: its program may have several, of which one may take over another's state.
        hosts: where each device is; empty: all are on this host. Snapshots stay on their host, so
            every host has spares of its own.
    """

    devices: tuple[str, ...]
    words: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    logs: Path
    spares: int = 1
    restarts: int = 20
    window_s: float = 600.0
    hang_s: float = 60.0
    start_s: float = 300.0
    every: int | None = None
    suspect: float = 0.0
    log_bytes: int | None = None
    grace_s: float | None = None
    hosts: tuple[str, ...] = ()
    elastic: bool = False
    replicas: bool = True
    snapshots: Path | None = None

    @property
    def beat_s(self) -> float:
        """Seconds from one heartbeat of a process to the next."""
        return min(MOST_BEAT_S, max(LEAST_BEAT_S, self.hang_s / BEATS))

    def host_of(self, device: str) -> str:
        """Return where a device is; "" is this host."""
        return self.hosts[self.devices.index(device)] if self.hosts else ""

    def local_rank(self, device: str) -> int:
        """Return its number among the devices of its host."""
        host, rank = self.host_of(device), self.devices.index(device)
        return sum(self.host_of(other) == host for other in self.devices[:rank])


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `stopped_at` is the step before which it was stopped; None: it finished."""

    stopped_at: int | None
    restarts: int


class FailedError(CodedError):
    """Report a run that ended before its time: what failed, and why the run does not go on.

    Attributes:
        death: how a process ended; or the failure of a run whose processes have not.
        moves: the run could go on without that device.
        is_short: this host has no memory, or no file, for another process.
        left_out: devices that it had gone on without before.
    """

    left_out: tuple[str, ...] = ()

    def __init__(
        self,
        death: Death | Failure,
        reason: str,
        *,
        code: str,
        moves: bool = False,
        is_short: bool = False,
    ) -> None:
        super().__init__(f"{death.what}: {reason}", code=code)
        self.death = death
        self.reason = reason
        self.moves, self.is_short = moves, is_short
