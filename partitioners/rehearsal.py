"""Stages -> what a step takes: the schedules and the clock of the project's simulator, on arrays.

Which schedule: 1F1B for one stage per device, the list scheduler for anything else, and micro-batch
after micro-batch where nothing is trained. The programs are then followed instruction by
instruction, with links, latencies and what messages cost processes. Shared NICs are left out, and
every reader of a value is taken to give a gradient back; otherwise the figure is that of
`bigbrain_fx.simulate`, which a test holds it to.

Source: as `bigbrain_fx.schedule.greedy` and `bigbrain_fx.simulate.clock`, which plug-ins may not
import; Graham 1969 (list scheduling), Narayanan et al., SOSP'19 (1F1B).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from bigbrain_fx.core import Cluster, Overheads
from partitioners.list_play import Job, Orders, Play, wire_s
from partitioners.room import InFlight
from partitioners.stagewise import Staged, ends


def step_s(
    staged: Staged, cluster: Cluster, micro_batches: int, in_flight: InFlight, trains: bool
) -> float:
    """Return the seconds that one step takes.

    Args:
        staged: the stages.
        cluster: the devices and links.
        micro_batches: per step.
        in_flight: as in `footprint.in_flight_at`.
        trains: whether there is a backward pass.
    """
    if not staged.device_of:
        return 0.0
    if not trains:
        orders = _forwards(staged, micro_batches)
    elif staged.is_chain:
        orders = _alternating(staged, micro_batches, in_flight)
    else:
        limits = _limits(staged, cluster, micro_batches, in_flight)
        orders = Play(staged, cluster, micro_batches, limits).orders()
    return _Followed(staged, cluster, orders).end_s(trains)


def _forwards(staged: Staged, micro_batches: int) -> Orders:
    cells = (
        (stage + micro, stage, micro, device)
        for stage, device in enumerate(staged.device_of)
        for micro in range(micro_batches)
    )
    orders = defaultdict(list)
    for _, stage, micro, device in sorted(cells):
        orders[device].append((True, stage, micro))
    return orders


def _alternating(staged: Staged, micro_batches: int, in_flight: InFlight) -> Orders:
    count = len(staged.device_of)
    return {
        device: _one_f_one_b(stage, micro_batches, _warm_up(stage, count, in_flight))
        for stage, device in enumerate(staged.device_of)
    }


def _warm_up(stage: int, stages: int, in_flight: InFlight) -> int:
    if in_flight is None:
        return stages - stage
    if isinstance(in_flight, int):
        return in_flight
    return in_flight[min(stage, len(in_flight) - 1)]


def _one_f_one_b(stage: int, micro_batches: int, in_flight: int) -> list[Job]:
    warm_up = min(in_flight, micro_batches)
    order = [(True, stage, micro) for micro in range(warm_up)]
    for micro in range(micro_batches):
        order.append((False, stage, micro))
        if warm_up + micro < micro_batches:
            order.append((True, stage, warm_up + micro))
    return order


# --------------------------------------------------------------------------- the list scheduler


def _limits(
    staged: Staged, cluster: Cluster, micro_batches: int, in_flight: InFlight
) -> dict[int, int]:
    """Return how many micro-batches may be on each device: as told, or enough to fill it."""
    devices = staged.devices
    if isinstance(in_flight, int):
        return dict.fromkeys(devices, in_flight)
    if in_flight is not None:
        numbers = (in_flight[min(i, len(in_flight) - 1)] for i in range(len(devices)))
        return dict(zip(devices, numbers, strict=True))
    cycle_s = max(_loads_s(staged, cluster))
    if cycle_s <= 0:
        return dict.fromkeys(devices, micro_batches)
    alone = Play(staged, cluster, 1, dict.fromkeys(devices, 1))
    alone.orders()
    rounds = {d: ceil((alone.last_s[d] - alone.first_s[d]) / cycle_s - 1e-9) for d in devices}
    return {d: max(1, min(micro_batches, max(0, n) + 1)) for d, n in rounds.items()}


def _loads_s(staged: Staged, cluster: Cluster) -> Iterator[float]:
    """Yield what one micro-batch brings to each device and each link."""
    loads: dict[tuple[int, int], float] = defaultdict(float)
    for stage, device in enumerate(staged.device_of):
        loads[device, device] += staged.forward_s[stage] + staged.backward_s[stage]
    for message, a, b in ends(staged, (*staged.values, *staged.gradients)):
        loads[a, b] += wire_s(cluster, a, b, message.nbytes)[0]
    yield from loads.values()


# --------------------------------------------------------------------------- the clock


_Ends = tuple[int, int, int, int]  # number of the message, devices at its ends, bytes


@dataclass
class _Followed:
    """Devices that run their jobs in order, with messages around them: mutable, used once."""

    staged: Staged
    cluster: Cluster
    orders: Orders
    _arrives_s: dict[tuple[int, bool, int], float] = field(default_factory=dict)
    _free_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def end_s(self, trains: bool) -> float:
        """Return when the last device is done."""
        self._into, self._out = self._crossing(by_source=False), self._crossing(by_source=True)
        self._now_s = {device: self._own(device).step_s for device in self.orders}
        left = {device: list(reversed(jobs)) for device, jobs in self.orders.items()}
        while any(left.values()):
            for device, jobs in left.items():
                while jobs and self._has_inputs(jobs[-1]):
                    self._run(device, jobs.pop())
        once_s = self.staged.once_s if trains else {}
        return max(end_s + once_s.get(device, 0.0) for device, end_s in self._now_s.items())

    def _crossing(self, by_source: bool) -> dict[tuple[bool, int], list[_Ends]]:
        """Return the messages of each (is it a forward, stage), in the order of sending."""
        found: dict[tuple[bool, int], list[_Ends]] = defaultdict(list)
        for way, messages in ((True, self.staged.values), (False, self.staged.gradients)):
            for number, (message, a, b) in enumerate(ends(self.staged, messages)):
                stage = message.source if by_source else message.target
                found[way, stage].append((number, a, b, message.nbytes))
        return found

    def _has_inputs(self, job: Job) -> bool:
        way, stage, micro = job
        numbers = (entry[0] for entry in self._into.get((way, stage), ()))
        return all((number, way, micro) in self._arrives_s for number in numbers)

    def _run(self, device: int, job: Job) -> None:
        way, stage, micro = job
        own, now_s = self._own(device), self._now_s[device]
        for number, _, _, nbytes in self._into.get((way, stage), ()):
            now_s = max(now_s, self._arrives_s[number, way, micro]) + own.handling_s(nbytes)
        now_s += (self.staged.forward_s if way else self.staged.backward_s)[stage]
        now_s += own.instruction_s
        for number, a, b, nbytes in self._out.get((way, stage), ()):
            now_s += own.handling_s(nbytes)
            occupied_s, latency_s = wire_s(self.cluster, a, b, nbytes)
            free_s = max(now_s, self._free_s.get((a, b), 0.0)) + occupied_s
            self._free_s[a, b] = free_s
            self._arrives_s[number, way, micro] = free_s + latency_s
        self._now_s[device] = now_s

    def _own(self, device: int) -> Overheads:
        return self.cluster.devices[device].overheads
