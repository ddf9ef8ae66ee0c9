"""The share of time that is training, by trial: failures drawn at random, event by event.

Unlike the closed form it knows where in its snapshot interval the dying device is, and that a
second death during a recovery does not undo what the first one's replacement has replayed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from bigbrain_fx.plan.recovery.choice import Recovery


@dataclass(frozen=True)
class FailureTrial:
    """What happened in some hours: all times in seconds.

    Attributes:
        useful_s: steps that count, at their undisturbed speed.
        failures: process deaths and lost hosts; `hosts_lost` of them.
        recovering_s: the pipeline stood still.
        undone_s: steps that were done and lost with a host.
    """

    total_s: float
    useful_s: float
    failures: int
    hosts_lost: int
    recovering_s: float
    undone_s: float

    @property
    def effective(self) -> float:
        """Useful seconds per second."""
        return self.useful_s / self.total_s


@dataclass
class _JobClock:
    """A job as it goes: `done` steps, the clock, and until when who is recovering."""

    recovery: Recovery
    draw: random.Random
    rate: float
    now_s: float = 0.0
    done: float = 0.0
    failures: int = 0
    hosts_lost: int = 0
    recovering_s: float = 0.0
    undone: float = 0.0
    until_s: dict[str, float] = field(default_factory=dict)

    @property
    def taken_s(self) -> float:
        """Of one step, with its share of the snapshots."""
        return self.recovery.step_s * (1 + self.recovery.overhead)

    def go(self, end_s: float) -> None:
        """Train until the clock says `end_s`."""
        while self.now_s < end_s:
            fails_s = min(end_s, self.now_s + self.draw.expovariate(self.rate))
            self._pass(fails_s)
            if fails_s < end_s:
                self._fail()

    def _pass(self, to_s: float) -> None:
        """Finish what recovers, then train, up to a time."""
        ready_s = min(to_s, max(self.until_s.values(), default=self.now_s))
        self.recovering_s += ready_s - self.now_s
        if ready_s < to_s or not self.until_s:
            self.until_s = {}
        self.done += (to_s - ready_s) / self.taken_s
        self.now_s = to_s

    def _fail(self) -> None:
        self.failures += 1
        share = self.recovery.assumptions.host_share if self.recovery.commit_every else 0.0
        if self.draw.random() < share:
            self._lose_host()
        else:
            self._lose_process(self.draw.randrange(len(self.recovery.devices)))

    def _lose_host(self) -> None:
        """All go back to the last commit."""
        assert self.recovery.commit_every is not None
        self.hosts_lost += 1
        lost = self.done % self.recovery.commit_every
        self.undone, self.done = self.undone + lost, self.done - lost
        self.until_s = {"all": self.now_s + self.recovery.assumptions.cold_s}

    def _lose_process(self, number: int) -> None:
        """One goes on from its snapshot, alone; those that were recovering wait for the group."""
        device, reform_s = self.recovery.devices[number], self.recovery.assumptions.reform_s
        since = self.done % device.snapshot_every / device.snapshot_every
        for other in self.until_s:
            self.until_s[other] += reform_s
        own_s = reform_s + device.snapshot_s + since * device.replay_s
        self.until_s[device.device] = self.now_s + own_s


def tried(recovery: Recovery, mtbf_s: float, hours: float, seed: int = 0) -> FailureTrial:
    """Let a job run for some hours, with failures every `mtbf_s` seconds on average."""
    job = _JobClock(recovery, random.Random(seed), 1 / mtbf_s)
    job.go(hours * 3600)
    useful_s = job.done * recovery.step_s
    undone_s = job.undone * recovery.step_s
    return FailureTrial(
        hours * 3600, useful_s, job.failures, job.hosts_lost, job.recovering_s, undone_s
    )  # fmt: skip
