"""Graph and costs -> jobs for list scheduling, and the ledger of what devices still have room for.

Shared by `m_etf` and `m_sct`. It knows facts and devices; it knows no rule of placing.

Source: Baechi (Jeon et al., SoCC'20), section 4: co-location groups, co-placement, fusion; here a
job is an op's forward and backward together, so that what Baechi keeps together is one to start
with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.errors import InputError
from bigbrain_fx.planning import AHEAD, Work, canonical, work
from partitioners.footprint import require_fits
from partitioners.jobs import Jobs, Timetable

SHARE_OF_A_DEVICE = 0.25  # the most that fusing may make one of


@dataclass(frozen=True)
class Prepared:
    """A graph made ready: fused facts, jobs that stand for their groups, micro-batches held."""

    known: Work
    cluster: Cluster
    jobs: Jobs
    flights: Mapping[str, int]

    def placement(self, found: Timetable, name: str) -> Placement:
        """Return the placement of a timetable.

        Raises:
            NoPlanError: some device cannot hold its part; with the arithmetic per device.
        """
        names = [device.name for device in self.cluster.devices]
        if not found.homes:
            return Placement(self.known.placed((), names[0]), "nothing to split")
        homes = [names[home] for home in self._all_placed(found.homes)]
        require_fits(self.known, self.cluster, homes, self.flights, name, one_stage_each=False)
        used = list(dict.fromkeys(homes))
        reason = (
            f"{len(homes)} jobs by earliest start on {', '.join(used)}: one micro-batch alone "
            f"takes about {found.makespan:.4g} s there and back"
        )
        return Placement(self.known.placed(homes, names[0]), reason)

    def _all_placed(self, homes: Sequence[int]) -> list[int]:
        """Give what fits nowhere to the device with the most memory, for the error's arithmetic."""
        memory = [device.memory_bytes for device in self.cluster.devices]
        return [home if home >= 0 else int(np.argmax(memory)) for home in homes]


def prepared(
    graph: Graph,
    cluster: Cluster,
    costs: Costs,
    micro_batches: int,
    in_flight: int | tuple[int, ...] | None,
) -> Prepared:
    """Make a concrete graph ready for list scheduling.

    Args:
        graph: in numbers.
        cluster: the devices.
        costs: of the graph's ops.
        micro_batches: per step; so many are held at once unless `in_flight` says otherwise.
        in_flight: one number for all devices, one per device, or None.

    Raises:
        InputError: no micro-batches.
    """
    if micro_batches < 1:
        raise InputError(f"a step needs at least 1 micro-batch, not {micro_batches}", code="BX1400")
    limits = in_flight if isinstance(in_flight, tuple) else (in_flight or micro_batches,)
    flights = {
        device.name: max(1, min(micro_batches, limits[min(i, len(limits) - 1)]))
        for i, device in enumerate(cluster.devices)
    }
    cluster = canonical(cluster, costs)
    known = work(graph, costs)
    if known.groups:
        known = fused(known, cluster, costs, flights)
    return Prepared(known, cluster, jobs_of(known, cluster, costs), flights)


def jobs_of(known: Work, cluster: Cluster, costs: Costs) -> Jobs:
    """Return a job per unit: its forward and backward; values move there, gradients back."""
    names = [device.name for device in cluster.devices]
    after: list[list[int]] = [[] for _ in known.groups]
    reads: list[list[int]] = [[] for _ in known.groups]
    for number, value in enumerate(known.values):
        for reader in value.readers:
            after[reader].append(value.maker)
            reads[reader].append(number)

    def move(value: int, a: int, b: int) -> float:
        return _moved_s(known, costs, value, names[a], names[b])

    return Jobs(
        np.array([known.seconds[name] for name in names]),
        tuple(map(tuple, after)),
        tuple(value.maker for value in known.values),
        tuple(map(tuple, reads)),
        move,
    )


def _moved_s(known: Work, costs: Costs, value: int, a: str, b: str) -> float:
    there, back = known.values[value].nbytes, known.values[value].gradient_bytes
    return costs.transfer_s(there, a, b) + (costs.transfer_s(back, b, a) if back else 0.0)


# --------------------------------------------------------------------------- fusion


def fused(known: Work, cluster: Cluster, costs: Costs, flights: Mapping[str, int]) -> Work:
    """Make one of units that should not be parted: again and again, a unit and its only reader.

    They are made one when nothing else feeds the reader, or when sending the unit's values takes
    at least as long as the unit. A unit with one reader leads nowhere else, so no cycle can arise.
    Baechi fuses every unit with its only reader, and two branches with the op that joins them.

    Args:
        known: of the units.
        cluster: no fused unit takes more than a quarter of the smallest device.
        costs: for the transfers; the fastest link counts.
        flights: micro-batches held at once, by device.
    """
    limit = SHARE_OF_A_DEVICE * min(device.memory_bytes for device in cluster.devices)
    while True:
        groups = _fuse_once(known, _bytes(known, flights), _least_moved_s(known, costs), limit)
        if len(groups) == len(known.groups):
            return known
        known = known.merged(groups)


def _fuse_once(
    known: Work, nbytes: Sequence[float], moved_s: Sequence[float], limit: float
) -> list[list[int]]:
    """Return the units to make one, in an order to run: by their last member."""
    readers: list[set[int]] = [set() for _ in known.groups]
    makers: list[set[int]] = [set() for _ in known.groups]
    for maker, reader in known.edges:
        readers[maker].add(reader)
        makers[reader].add(maker)
    seconds = np.min([known.seconds[name] for name in sorted(known.seconds)], axis=0)
    joined = {unit: [unit] for unit in range(len(known.groups))}
    end_of = list(range(len(known.groups)))
    held = list(nbytes)
    for unit in range(len(known.groups) - 1, -1, -1):
        if len(readers[unit]) != 1:
            continue
        (reader,) = readers[unit]
        only = makers[reader] == {unit}
        if not only and moved_s[unit] < seconds[unit]:
            continue
        end = end_of[reader]
        if held[unit] + held[end] <= limit:
            end_of[unit] = end
            joined[end] += joined.pop(unit)
            held[end] += held[unit]
    return [sorted(joined[last]) for last in sorted(joined)]


def _bytes(known: Work, flights: Mapping[str, int]) -> list[float]:
    """Return about what each unit holds: weights, gradients, optimizer state, activations."""
    name = max(flights, key=lambda device: flights[device])
    found = (known.kept(flights[name]) * known.saved_bytes[name]).astype(np.float64)
    for weight in known.weights:
        trained = weight.trained_bytes * (2 + known.state_per_byte)
        found[weight.readers[0]] += weight.nbytes + trained
    return [float(nbytes) for nbytes in found]


def _least_moved_s(known: Work, costs: Costs) -> list[float]:
    """Return what sending all that a unit makes takes, over the best link."""
    names = [device.name for device in costs.cluster.devices]
    pairs = [(a, b) for a in names for b in names if a != b]
    found = [0.0] * len(known.groups)
    for number, value in enumerate(known.values):
        found[value.maker] += min(
            (_moved_s(known, costs, number, a, b) for a, b in pairs), default=float("inf")
        )
    return found


# --------------------------------------------------------------------------- memory


class Ledger:
    """What every device holds, job by job: `footprint.needs` for a placement of any shape."""

    def __init__(self, prepared: Prepared) -> None:
        self._known = known = prepared.known
        self._devices = prepared.cluster.devices
        self._flights = [prepared.flights[d.name] if known.trains else 1 for d in self._devices]
        self._held = [0.0] * len(self._devices)
        self._workspace = [0] * len(self._devices)
        self._has: list[set[tuple[str, int]]] = [set() for _ in self._devices]
        self._touches: list[list[tuple[str, int]]] = [[] for _ in known.groups]
        for number, weight in enumerate(known.weights):
            for reader in weight.readers:
                self._touches[reader].append(("weight", number))
        for number, value in enumerate(known.values):
            for unit in (value.maker, *value.readers):
                self._touches[unit].append(("value", number))

    def fits(self, job: int, device: int) -> bool:
        """Whether the job fits besides what the device took already."""
        total = self._held[device] + self._added(job, device)
        workspace = int(self._known.workspace_bytes[self._devices[device].name][job])
        total += max(self._workspace[device], workspace)
        return total <= self._devices[device].memory_bytes

    def take(self, job: int, device: int) -> None:
        """Put the job there."""
        self._held[device] += self._added(job, device)
        self._has[device].update(self._touches[job])
        workspace = int(self._known.workspace_bytes[self._devices[device].name][job])
        self._workspace[device] = max(self._workspace[device], workspace)

    def _added(self, job: int, device: int) -> float:
        new = [touch for touch in self._touches[job] if touch not in self._has[device]]
        saved = int(self._known.saved_bytes[self._devices[device].name][job])
        return self._known.kept(self._flights[device]) * saved + sum(
            self._nbytes(*touch, device) for touch in new
        )

    def _nbytes(self, what: str, number: int, device: int) -> float:
        """Return what a weight, or a value made or received, takes; each stage has a gradient."""
        if what == "weight":
            weight = self._known.weights[number]
            copies = 1 + len(weight.readers)
            return weight.nbytes + weight.trained_bytes * (copies + self._known.state_per_byte)
        value = self._known.values[number]
        ahead = AHEAD * (value.nbytes + value.gradient_bytes)
        return self._flights[device] * value.nbytes + 2 * value.gradient_bytes + ahead
