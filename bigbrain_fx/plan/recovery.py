"""Plan -> Recovery: intervals of both kinds of checkpoints, and what a failure loses.

A dead device resumes from its snapshot in its host's memory; its peers send the messages since
then again, from their logs. Frequent snapshots cost copying, rare ones long logs and replays. All
devices need one interval, as devices that die together have lost both logs. Snapshots take the same
memory at any interval, so the least that copying allows is best. Commits: Young (1974) and Daly
(2006). Of failures at random (exponential times), also while recovering, `closed_form` gives the
share of time that is training. This file knows plans and forecasts; of processes it knows
`Assumptions`, measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp, expm1, sqrt

from bigbrain_fx.core import Device, Send
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.tensor import part_channels
from bigbrain_fx.planning import crowded

COPY_SHARE = 0.01  # of a step's time that snapshots may take; as in supervisor/snapshots.py
LONGEST_REPLAY_S = 1.0  # that rare failures may bring about; copying may
PCIE_BYTES_PER_S = 12e9  # a GPU's memory is copied over 16 lanes of PCIe 3, which most hosts have
MOST_STEPS = 1000  # between two snapshots, however short a step is


@dataclass(frozen=True)
class Assumptions:
    """Costs of a failure beside replaying, in seconds, and the write rate of a disk.

    Attributes:
        mtbf_s: between two failures of the whole job, on average; None: no commits are planned.
        host_share: of failures take a whole host, with the snapshots in its memory.
        reform_s: from a death until the group is formed again, with a warm spare.
        cold_s: until processes on another host have started.
        disk_bytes_per_s: of one host, with fsync.
    """

    mtbf_s: float | None = None
    host_share: float = 0.1
    reform_s: float = 1.0
    cold_s: float = 15.0
    disk_bytes_per_s: float = 100e6


@dataclass(frozen=True)
class DeviceRecovery:
    """How one device's process recovers.

    Attributes:
        state_bytes: weights, optimizer state and buffers: one snapshot.
        log_bytes_per_step: of what it is sent in a step, kept by those who sent it.
        snapshot_every: steps between two snapshots (k_ram).
        snapshot_s: to copy one.
        log_bytes: that its senders hold for it, over one interval.
        replay_s: to compute again what it had done since its snapshot, at most.
    """

    device: str
    state_bytes: int
    log_bytes_per_step: int
    snapshot_every: int
    snapshot_s: float
    log_bytes: int
    replay_s: float


@dataclass(frozen=True)
class Recovery:
    """The intervals of a plan, and what they cost.

    Attributes:
        step_s: of a step without any of this.
        commit_every: steps between two commits to disk; None where no MTBF was given.
        commit_s: to write one, on the host that has the most to write.
        overhead: share that snapshots add to a step.
        by_peers: none are taken: a peer in another replica has each device's state, and replays
            are of one step. The message to the supervisor in each step is not counted.
    """

    devices: tuple[DeviceRecovery, ...]
    step_s: float
    commit_every: int | None
    commit_s: float
    overhead: float
    assumptions: Assumptions
    by_peers: bool = False

    def __str__(self) -> str:
        """Show it as plain text, a line per device."""
        lines = [
            f"  {d.device}: {self._source(d)}; its senders keep up to "
            f"{d.log_bytes / 2**20:.1f} MiB; replays at most {d.replay_s:.2f} s"
            for d in self.devices
        ]
        commit = f"checkpoint every {self.commit_every} steps; " if self.commit_every else ""
        cost = "no in-memory checkpoints: peers have all states"
        if not self.by_peers:
            cost = f"in-memory checkpoints add {100 * self.overhead:.2f} % to a step"
        return "\n".join([f"{commit}{cost}", *lines])

    def _source(self, device: DeviceRecovery) -> str:
        mib = device.state_bytes / 2**20
        if self.by_peers:
            return f"state of {mib:.1f} MiB from a peer"
        copied_s = device.snapshot_s
        every = device.snapshot_every
        return (
            f"in-memory checkpoint of {mib:.1f} MiB every {every} steps in {copied_s * 1e3:.1f} ms"
        )


def choose(plan: Plan, assumptions: Assumptions | None = None) -> Recovery:
    """Choose how often all devices keep a snapshot, and how often they commit.

    Snapshots: the fewest steps with which copying takes at most 1 % of a step on every device. Logs
    of two intervals must fit where they are kept. With an MTBF also Young's interval for
    copying against replaying, as long as no replay takes over a second. Commits: Young's
    sqrt(2 * C * MTBF) for the loss of a host, with C the whole writing time. Writing is done in the
    background, but disks and processors are shared.
    """
    assumptions = assumptions or Assumptions()
    step_s, names = plan.forecast.step_s, plan.stages.devices
    there = crowded(plan.cluster).device  # all devices copy at once
    by_peers = plan.stages.have_peers
    copies_s = {n: _state(plan, n) / copy_bytes_per_s(there[n]) for n in names}
    copies_s = dict.fromkeys(names, 0.0) if by_peers else copies_s
    longest_s = max(copies_s.values())
    replayed_s = max(plan.forecast.of(name).busy_s for name in names)
    rare = _rare(longest_s, step_s, replayed_s, assumptions)
    every = interval(longest_s, step_s, min(_fitting(plan), default=MOST_STEPS), rare)
    devices = tuple(_device(plan, name, every, copies_s[name]) for name in names)
    overhead = max(d.snapshot_s for d in devices) / every / step_s if step_s else 0.0
    commit_s = _commit_s(plan, devices, assumptions)
    return Recovery(
        devices,
        step_s,
        _commit_every(step_s, commit_s, assumptions),
        commit_s,
        overhead,
        assumptions,
        by_peers,
    )


def interval(copy_s: float, step_s: float, most: int, rare: int = 1) -> int:
    """Return the steps between two snapshots that take `copy_s`; `most` steps' logs fit.

    `rare` is what failures would ask for; copying may ask for more.
    """
    least = ceil(copy_s / (COPY_SHARE * step_s)) if step_s else 1
    return max(1, min(max(least, rare), most, MOST_STEPS))


def _rare(copy_s: float, step_s: float, replayed_s: float, assumptions: Assumptions) -> int:
    """Return the k with the least of copy / (k step) + k replayed / (2 MTBF).

    No replay that it brings about is long.
    """
    if assumptions.mtbf_s is None or not step_s * replayed_s:
        return 1
    young = sqrt(2 * copy_s * assumptions.mtbf_s / (step_s * replayed_s))
    return int(min(young, LONGEST_REPLAY_S / replayed_s))


def _device(plan: Plan, name: str, every: int, copy_s: float) -> DeviceRecovery:
    state, log = _state(plan, name), sum(_sent_to(plan, name).values())
    replay_s = every * plan.forecast.of(name).busy_s
    return DeviceRecovery(name, state, log, every, copy_s, every * log, replay_s)


def _state(plan: Plan, name: str) -> int:
    entry = plan.forecast.of(name)
    return entry.weights_bytes + entry.optimizer_bytes


def copy_bytes_per_s(device: Device) -> float:
    """Return how fast a device's state gets into its host's memory: it is read and written."""
    own = device.memory_bytes_per_s / 2
    return min(own, PCIE_BYTES_PER_S) if device.kind == "cuda" else own


def _sent_to(plan: Plan, receiver: str) -> dict[str, int]:
    """Return what each other device sends to one in a step, in bytes."""
    found: dict[str, int] = {}
    for program in plan.programs:
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                edge = instruction.edge
                if plan.stages.stages[edge.target].device == receiver:
                    found[program.device] = found.get(program.device, 0) + edge.nbytes
    for part in part_channels(plan):
        if part.receiver == receiver:
            found[part.sender] = found.get(part.sender, 0) + part.nbytes
    return found


def _fitting(plan: Plan) -> Iterator[int]:
    """Yield how long an interval each device has memory for: logs reach back over two of them."""
    for name in plan.stages.devices:
        sent = sum(_sent_to(plan, other).get(name, 0) for other in plan.stages.devices)
        free = plan.cluster.device[name].memory_bytes - plan.forecast.of(name).peak_bytes
        if sent:
            yield max(0, free) // (2 * sent)


def _commit_s(plan: Plan, devices: tuple[DeviceRecovery, ...], assumptions: Assumptions) -> float:
    by_host: dict[str, int] = {}
    for entry in devices:
        host = plan.cluster.device[entry.device].host
        by_host[host] = by_host.get(host, 0) + entry.state_bytes
    return max(by_host.values()) / assumptions.disk_bytes_per_s


def _commit_every(step_s: float, commit_s: float, assumptions: Assumptions) -> int | None:
    if assumptions.mtbf_s is None or not assumptions.host_share or not step_s:
        return None
    wanted_s = sqrt(2 * commit_s * assumptions.mtbf_s / assumptions.host_share)
    return max(1, ceil(commit_s / step_s), round(wanted_s / step_s))


def closed_form(recovery: Recovery, mtbf_s: float) -> float:
    """Return useful seconds per second, for replay: useful is a step without any overhead.

    Process deaths: up for 1/r on average, then a recovery of R must pass undisturbed. That takes
    (exp(r R) - 1) / r, so exp(-r R) of the time is up. R is uniform between re-forming alone and
    re-forming with the longest replay, as a death falls anywhere between two snapshots. Hosts:
    Daly's complete model, for segments from commit to commit.
    """
    rate, host_share = 1 / mtbf_s, _host_share(recovery)
    within = _processes(recovery, rate * (1 - host_share)) / (1 + recovery.overhead)
    if not host_share:
        return within
    assert recovery.commit_every is not None
    segment_s = recovery.commit_every * recovery.step_s
    return _segments(segment_s, segment_s / within, rate * host_share, recovery.assumptions.cold_s)


def restart_all(recovery: Recovery, mtbf_s: float, restart_s: float, every_s: float) -> float:
    """Return the same for restarting all processes from a commit made every `every_s` seconds."""
    return _segments(every_s, every_s + recovery.commit_s, 1 / mtbf_s, restart_s)


def _host_share(recovery: Recovery) -> float:
    return recovery.assumptions.host_share if recovery.commit_every else 0.0


def _processes(recovery: Recovery, rate: float) -> float:
    """Return the share of time that no process is being recovered; each dies as often."""
    reform_s, count = recovery.assumptions.reform_s, len(recovery.devices)
    mean = sum(_mean_exp(rate, reform_s + d.snapshot_s, d.replay_s) for d in recovery.devices)
    return count / mean


def _mean_exp(rate: float, fixed_s: float, replay_s: float) -> float:
    """Return E[exp(rate * R)] for R = fixed + uniform(0, replay)."""
    span = rate * replay_s
    return exp(rate * fixed_s) * (expm1(span) / span if span > 1e-12 else 1.0)


def _segments(useful_s: float, segment_s: float, rate: float, restart_s: float) -> float:
    """Return useful / expected time of a segment that is done again after each failure.

    Daly, A higher order estimate of the optimum checkpoint interval (2006), equation 20 less the
    last segment's end: exp(rate R) * (exp(rate T) - 1) / rate.
    """
    if rate * segment_s > 700:  # nothing will ever be finished
        return 0.0
    return useful_s * rate / (exp(rate * restart_s) * expm1(rate * segment_s))
