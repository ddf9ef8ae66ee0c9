"""Graph and costs -> jobs for list scheduling.

Shared by `m_etf` and `m_sct`; `jobs` has the rule of placing.

Source: Baechi (Jeon et al., SoCC'20), section 4: co-location groups, co-placement, fusion. Here a
job is an op's forward and backward together, which Baechi joins later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.planning import AHEAD, InFlight, Work, canonical, work

from .jobs import Jobs, Timetable

SHARE_OF_A_DEVICE = 0.25  # the most that fusing may make one of


@dataclass(frozen=True)
class Prepared:
    """A graph made ready: jobs that stand for fused groups, and the memory that they take.

    Attributes:
        flight: micro-batches that a device may hold at once.
    """

    jobs: Jobs
    known: Work
    cluster: Cluster
    flight: int

    def ledger(self) -> Ledger:
        """Return the memory of all devices, on which no job is yet."""
        return Ledger(self.known, self.cluster, self.flight)

    def placement(self, found: Timetable, name: str) -> Placement:
        """Return the placement of a timetable.

        Raises:
            NoPlanError: some jobs fit nowhere; the nearest has them where most memory is.
        """
        known, names = self.known, [device.name for device in self.cluster.devices]
        if not found.homes:
            return Placement(known.placed((), names[0]), "nothing to split")
        roomiest = int(np.argmax([device.memory_bytes for device in self.cluster.devices]))
        homes = [names[home if home >= 0 else roomiest] for home in found.homes]
        if min(found.homes) < 0:
            raise NoPlanError(
                f"the {name} split does not fit into the devices' memory",
                code="BX1403",
                help="use --partitioner analytical, or more micro-batches",
                nearest=known.placed(homes, names[0]),
            )
        used = list(dict.fromkeys(homes))
        reason = (
            f"{len(homes)} jobs by earliest start on {', '.join(used)}: one micro-batch alone "
            f"takes about {found.makespan:.4g} s there and back"
        )
        return Placement(known.placed(homes, names[0]), reason)


def prepared(
    graph: Graph, cluster: Cluster, costs: Costs, micro_batches: int, in_flight: InFlight
) -> Prepared:
    """Make a concrete graph ready for list scheduling.

    Args:
        graph: in numbers.
        cluster: the devices.
        costs: of the graph's ops.
        micro_batches: per step; so many are held at once unless `in_flight` says otherwise.
        in_flight: as in `planning.in_flight_at`; the largest counts.
    """
    known, cluster = work(graph, costs), canonical(cluster, costs)
    most = max(in_flight) if isinstance(in_flight, tuple) else in_flight or micro_batches
    flight = max(1, min(micro_batches, most)) if known.trains else 1
    if known.groups:
        known = fused(known, cluster, costs, flight)
    return Prepared(jobs_of(known, cluster, costs), known, cluster, flight)


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


def fused(known: Work, cluster: Cluster, costs: Costs, flight: int) -> Work:
    """Merge units that should not be parted: repeatedly join a unit and its only reader.

    A pair is merged when nothing else feeds the reader, or when sending the unit's values takes at
    least as long as the unit. A unit with one reader leads nowhere else, hence no cycle can arise.
    Baechi fuses every unit with its only reader, and two branches with the op that joins them.

    Args:
        known: of the units.
        cluster: no fused unit takes more than a quarter of the smallest device.
        costs: for the transfers; the fastest link counts.
        flight: micro-batches held at once on a device.
    """
    limit = SHARE_OF_A_DEVICE * min(device.memory_bytes for device in cluster.devices)
    while True:
        groups = _fuse_once(known, _bytes(known, flight), _least_moved_s(known, costs), limit)
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


def _bytes(known: Work, flight: int) -> list[float]:
    """Return about what each unit holds: weights, gradients, optimizer state, activations."""
    name = next(iter(sorted(known.saved_bytes)))
    return bytes_by_unit(known, known.kept(flight) * known.saved_bytes[name])


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


# ------------------------------------------------------------------------------------------------
# An upper bound of what units take on devices: each may be a stage of its own, in any order.
#
#     weights + optimizer state + a gradient for each reader, and their sum
#     + in_flight x (saved activations + values made or read)
#     + gradients of these values + receives posted ahead + the largest workspace


def bytes_by_unit(known: Work, saved_bytes: NDArray[np.float64]) -> list[float]:
    """Return about what each unit adds to a device: weights, all that goes with them, and saved.

    A weight that several units read counts at the first.
    """
    found = saved_bytes.astype(np.float64)
    for weight in known.weights:
        trained = weight.trained_bytes * (2 + known.state_per_byte)
        found[weight.readers[0]] += weight.nbytes + trained
    return [float(nbytes) for nbytes in found]


class Ledger:
    """Memory of devices where each unit may be a stage of its own, unit by unit: mutable.

    Args:
        known: the units.
        cluster: the devices.
        flight: micro-batches that a device may hold at once.
    """

    def __init__(self, known: Work, cluster: Cluster, flight: int) -> None:
        devices = cluster.devices
        self.homes = [-1] * known.count
        self._limits = [device.memory_bytes for device in devices]
        kept = known.kept(flight)
        self._own = [[kept * int(n) for n in known.saved_bytes[d.name]] for d in devices]
        self._work = [[int(n) for n in known.workspace_bytes[d.name]] for d in devices]
        self._shared: list[int] = []  # a weight, or a value made or read: once a device
        self._touches: list[list[int]] = [[] for _ in known.groups]
        for weight in known.weights:
            copies = 1 + len(weight.readers) + known.state_per_byte
            self._share(weight.readers, weight.nbytes + math.ceil(weight.trained_bytes * copies))
        for value in known.values:
            ahead = AHEAD * (value.nbytes + value.gradient_bytes)
            nbytes = flight * value.nbytes + 2 * value.gradient_bytes + ahead
            self._share((value.maker, *value.readers), nbytes)
        self._here = [[0] * len(self._shared) for _ in devices]
        self._held, self._most = [0] * len(devices), [0] * len(devices)

    def move(self, unit: int, to: int) -> None:
        """Put a unit that is nowhere yet on a device."""
        self.homes[unit] = to
        here, held = self._here[to], self._held[to] + self._own[to][unit]
        for number in self._touches[unit]:
            held += 0 if here[number] else self._shared[number]
            here[number] += 1
        self._held[to] = held
        self._most[to] = max(self._most[to], self._work[to][unit])

    def total(self, device: int) -> int:
        """Return what a device holds, its largest workspace included."""
        return self._held[device] + self._most[device]

    def fits(self, device: int) -> bool:
        """Whether a device can hold what it has."""
        return self.total(device) <= self._limits[device]

    def has_room(self, unit: int, device: int) -> bool:
        """Whether a device can hold a unit besides what it has."""
        here, most = self._here[device], max(self._most[device], self._work[device][unit])
        new = sum(self._shared[number] for number in self._touches[unit] if not here[number])
        held = self._held[device] + self._own[device][unit] + new
        return held + most <= self._limits[device]

    def _share(self, units: Iterable[int], nbytes: int) -> None:
        for unit in set(units):
            self._touches[unit].append(len(self._shared))
        self._shared.append(nbytes)


# ------------------------------------------------------------------------------------------------
# Jobs -> favorite children: which job should follow which on one device, by a linear program.
#
# scipy's HiGHS solves the program.
#
# Source: Hanen and Munier (ETFA'95) as used by Baechi (SoCC'20), section 3.3. Baechi rounds each
# edge on its own and keeps the last where two claim a job; here edges are taken from the surest
# on, so that the favorites are a matching.


SURE = 0.5  # an edge below this, of 0 (kept together) to 1 (cut), makes a favorite


def favorite_children(jobs: Jobs) -> dict[int, int]:
    """Return the favorite child of every job that has one; no job is the favorite of two."""
    edges, moves = _edges(jobs)
    if not edges:
        return {}
    together = _relaxed(_typical(jobs.times), edges, moves)
    found: dict[int, int] = {}
    taken: set[int] = set()
    for number in np.argsort(together, kind="stable").tolist():
        parent, child = edges[number]
        if together[number] < SURE and parent not in found and child not in taken:
            found[parent] = child
            taken.add(child)
    return found


def _typical(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the devices where each job can run."""
    finite = np.isfinite(times)
    total = np.where(finite, times, 0.0).sum(axis=0)
    return np.asarray(total / np.maximum(finite.sum(axis=0), 1), dtype=np.float64)


def _edges(jobs: Jobs) -> tuple[list[tuple[int, int]], NDArray[np.float64]]:
    """Return who waits for whom, and what moving the values between them takes on average."""
    devices = range(jobs.times.shape[0])
    pairs = [(a, b) for a in devices for b in devices if a != b]
    mean: dict[int, float] = {}
    cost: dict[tuple[int, int], float] = {
        (before, job): 0.0 for job, befores in enumerate(jobs.after) for before in befores
    }
    for job, values in enumerate(jobs.reads):
        for value in values:
            if value not in mean:
                total = sum(jobs.move(value, a, b) for a, b in pairs)
                mean[value] = total / max(1, len(pairs))
            edge = jobs.makers[value], job
            cost[edge] = cost.get(edge, 0.0) + mean[value]
    edges = sorted(cost)
    return edges, np.array([cost[edge] for edge in edges])


def _relaxed(
    times: NDArray[np.float64], edges: Sequence[tuple[int, int]], moves: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solve the relaxation; return per edge 0 (the reader follows at once) to 1 (it is sent).

    Minimise w over starts s and x in [0, 1]. For each edge s_u + p_u + c_uv x_uv <= s_v, and for
    each job s_v + p_v <= w. All but one of a job's edges out, and of its edges in, are sent.
    """
    from scipy import optimize, sparse

    count, many = len(times), len(edges)
    makers, readers = np.array(edges).T
    rows = np.arange(many)
    one = np.ones(many)
    columns = (many, count, 1)  # x, s, w
    before = sparse.csr_matrix((one, (rows, makers)), (many, count))
    after = sparse.csr_matrix((one, (rows, readers)), (many, count))
    moved = sparse.diags_array(moves)
    blocks = [
        [moved, before - after, None],
        [None, sparse.eye_array(count), sparse.csr_matrix(-np.ones((count, 1)))],
        [-before.T, None, None],
        [-after.T, None, None],
    ]
    degrees = [1.0 - before.sum(axis=0), 1.0 - after.sum(axis=0)]
    upper = np.concatenate([-times[makers], -times, *(np.asarray(d).ravel() for d in degrees)])
    found = optimize.linprog(
        np.repeat([0.0, 0.0, 1.0], columns),
        A_ub=sparse.block_array(blocks, format="csr"),
        b_ub=upper,
        bounds=[(0.0, 1.0)] * many + [(0.0, None)] * (count + 1),
        method="highs",
    )
    if found.status != 0:
        raise AssertionError(f"the relaxation has a solution, but HiGHS says: {found.message}")
    return np.asarray(found.x[:many], dtype=np.float64)
