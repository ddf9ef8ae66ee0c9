"""Plan -> Recovery: every how many steps each device keeps a snapshot, and all of them commit.

A device that dies goes on from its own snapshot in its host's memory, and is sent again what it was
sent since: its peers keep that in their logs. Often means copying, seldom means long logs and long
replays. `replay.md`, fact 12, has the rule; Young (1974) and Daly (2006) that of the commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, sqrt

from bigbrain_fx.core import Device, Send
from bigbrain_fx.plan import Plan

COPY_SHARE = 0.01  # of a step's time that snapshots may take
PCIE_BYTES_PER_S = 12e9  # a GPU's memory is copied over 16 lanes of PCIe 3, which most hosts have
MOST_STEPS = 1000  # between two snapshots, where nothing that is sent would ask for fewer


@dataclass(frozen=True)
class Assumptions:
    """What a failure takes beside replaying, in seconds, and how fast a disk writes.

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
        log_bytes: the most that its senders hold for it.
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
    """

    devices: tuple[DeviceRecovery, ...]
    step_s: float
    commit_every: int | None
    commit_s: float
    overhead: float
    assumptions: Assumptions

    def __str__(self) -> str:
        """Show it as plain text, a line per device."""
        lines = [
            f"  {d.device}: snapshot of {d.state_bytes / 2**20:.1f} MiB every {d.snapshot_every} "
            f"steps in {d.snapshot_s * 1e3:.1f} ms; its senders keep up to "
            f"{d.log_bytes / 2**20:.1f} MiB; replays at most {d.replay_s:.2f} s"
            for d in self.devices
        ]
        commit = f"commit every {self.commit_every} steps; " if self.commit_every else ""
        return "\n".join([f"{commit}snapshots add {100 * self.overhead:.2f} % to a step", *lines])


def choose(plan: Plan, assumptions: Assumptions | None = None) -> Recovery:
    """Choose how often each device keeps a snapshot, and how often all commit.

    Snapshots: log and snapshot take the same memory at k = W / l (state over log bytes a step); k
    is at least what keeps copying within 1 % of a step, unless W <= l, and at most what the
    senders' free memory holds. Commits: Young's sqrt(2 * C * MTBF) for the loss of a host, with C
    the whole writing time, although it is done in the background: disks and processors are shared.
    """
    assumptions = assumptions or Assumptions()
    room = dict(_room(plan))
    devices = tuple(_device(plan, name, room) for name in plan.stages.devices)
    step_s = plan.forecast.step_s
    overhead = max(d.snapshot_s / d.snapshot_every for d in devices) / step_s if step_s else 0.0
    commit_s = _commit_s(plan, devices, assumptions)
    return Recovery(
        devices, step_s, _commit_every(step_s, commit_s, assumptions), commit_s, overhead,
        assumptions,
    )  # fmt: skip


def interval(state: int, log: int, copy_s: float, step_s: float, room: int) -> int:
    """Return the steps between two snapshots of `state` bytes, for `log` bytes a step."""
    if state <= log:
        return 1
    if not log:
        return MOST_STEPS
    least = ceil(copy_s / (COPY_SHARE * step_s)) if step_s else 1
    wanted = min(max(round(state / log), least), MOST_STEPS)
    return max(1, min(wanted, room // log))


def _device(plan: Plan, name: str, room: Mapping[str, int]) -> DeviceRecovery:
    entry = plan.forecast.of(name)
    state = entry.weights_bytes + entry.optimizer_bytes
    sent = _sent_to(plan, name)
    log = sum(sent.values())
    copy_s = state / copy_bytes_per_s(plan.cluster.device[name])
    fits = min((room[peer] * log // nbytes for peer, nbytes in sent.items() if nbytes), default=0)
    every = interval(state, log, copy_s, plan.forecast.step_s, fits)
    return DeviceRecovery(name, state, log, every, copy_s, every * log, every * entry.busy_s)


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
    return found


def _room(plan: Plan) -> Iterator[tuple[str, int]]:
    """Yield what each device has free, for each of those that it keeps a log for."""
    receivers = {name: _sent_to(plan, name) for name in plan.stages.devices}
    for name in plan.stages.devices:
        count = sum(1 for senders in receivers.values() if name in senders)
        peak = plan.forecast.of(name).peak_bytes
        yield name, max(0, plan.cluster.device[name].memory_bytes - peak) // max(1, count)


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
