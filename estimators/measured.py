"""`measured`: op times from a profile database that `bigbrain-fx profile` filled.

A profile holds for the machine it was taken on. For a device of other rates the op's time is
scaled: its start by launch times, its work by rates of products or memory. The rate that bounds the
op counts (the roofline of `analytical`). What is absent is `analytical`'s, and so is memory;
`Costs.measured` says what was there.

On the processor that was profiled, which `doctor` names in the cluster file, times are scaled only
by what its host's devices share. Rates of one machine differ between two processes, a CPU's memory
by half, and launch times would count four or five times for every op. A
GPU without a name whose three rates are all within 15 % of the machine's is taken for it, too.

A sum of gradients that several readers send back is in the profile of a reader, where it happens.
The optimizer's step is that of the measured model which has the most of the graph's ops. It is
scaled like an op: seconds per tensor by launch times, seconds per byte by memory's rates.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from bigbrain_fx.core import Cluster, Costs, Device, Graph, Op, OpCost
from bigbrain_fx.costs import (
    Machine,
    OpProfile,
    ProfileStore,
    Session,
    mode_of,
    region_mode,
    signature,
)
from bigbrain_fx.errors import InputError

from .analytical import Analytical
from .op_rules import BACKWARD_LAUNCHES, FORWARD_LAUNCHES

VARIABLE = "BIGBRAIN_PROFILES"
_SAME_CARD = 0.15  # how far rates of one GPU may be apart


@dataclass(frozen=True)
class Measured:
    """Estimate every op by what was measured of it.

    Attributes:
        profiles: the database; when left out, what the environment's BIGBRAIN_PROFILES names.

    Raises:
        InputError: no database is named, or the file is none.
    """

    profiles: str = ""

    name = "measured"

    def __post_init__(self) -> None:
        """Refuse now, and not when a model has been captured."""
        self.known()

    def known(self) -> Known:
        """Return what the database has; a file is read again when it changes."""
        path = self.profiles or os.environ.get(VARIABLE, "")
        if not path:
            raise InputError(
                "the estimator 'measured' needs a profile database, and none was named",
                code="BX1430",
                notes=(f"the environment has no {VARIABLE}",),
                help="bigbrain-fx profile model.py --db profiles.sqlite; "
                f"then {VARIABLE}=profiles.sqlite",
            )
        return _read(path, _state(Path(path)))

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """Estimate every op of a concrete graph (`graph.at(rows)`) on every device.

        Devices with equal rates share their figures. A region is measured when all its ops are.
        """
        base, known = self.known(), Analytical().estimate(graph, cluster)
        keys = _keys(graph)
        found = {d.name: _found(graph, keys, base.tables, d) for d in cluster.devices}
        every = frozenset(key for several in keys.values() for key in several)
        rates = {d.name: _optimizer(base, every, d) for d in cluster.devices}
        return replace(
            known,
            ops={
                name: {op: _timed(cost, found[name].get(op)) for op, cost in of_device.items()}
                for name, of_device in known.ops.items()
            },
            optimizer_s_per_tensor={
                name: rate[0] if rate else known.optimizer_s_per_tensor[name]
                for name, rate in rates.items()
            },
            optimizer_s_per_byte={
                name: rate[1] if rate else known.optimizer_s_per_byte[name]
                for name, rate in rates.items()
            },
            measured={name: tuple(ops) for name, ops in found.items()},
            scaled=dict(_scaled(base.tables, cluster)),
        )


@dataclass(frozen=True)
class Known:
    """A database, read.

    Attributes:
        tables: by machine and signature key. sessions: by machine key, the latest first.
        origins: by signature key, the models that have ops of it.
    """

    tables: Mapping[Machine, Mapping[str, OpProfile]]
    sessions: Mapping[str, tuple[Session, ...]]
    origins: Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class _Seconds:
    """Seconds of one op on one device."""

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0

    def __add__(self, other: _Seconds) -> _Seconds:
        return _Seconds(
            self.forward_s + other.forward_s,
            self.input_s + other.input_s,
            self.weight_s + other.weight_s,
        )


def _state(path: Path) -> tuple[int, int]:
    if not path.is_file():
        return (0, 0)  # the store says what is wrong
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4)
def _read(path: str, state: tuple[int, int]) -> Known:
    store = ProfileStore(path, read_only=True)
    machines = store.machines()
    return Known(
        {m: {p.signature.key: p for _, p in store.rows(m.key)} for m in machines},
        {m.key: store.sessions(m.key) for m in machines},
        store.origins(),
    )


def _keys(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Map each op to the signatures that make it up: its own, or those of a region's ops."""
    return {op.name: tuple(_op_keys(graph, op, (), mode_of(graph))) for op in graph.ops}


def _op_keys(graph: Graph, op: Op, outer: tuple[Graph, ...], mode: str) -> Iterator[str]:
    if op.body is None:
        yield signature(graph, op, outer, mode).key
        return
    for inner in op.body.ops:
        yield from _op_keys(op.body, inner, (graph, *outer), region_mode(op, mode))


def _found(
    graph: Graph,
    keys: Mapping[str, tuple[str, ...]],
    tables: Mapping[Machine, Mapping[str, OpProfile]],
    device: Device,
) -> Mapping[str, _Seconds]:
    """Return the ops that are measured for a device, scaled to it."""
    machine = _nearest(tables, device)
    if machine is None:
        return {}
    table, scale = tables[machine], _Scale(machine, _as_measured(machine, device))
    return {
        op.name: sum((scale.of(table[key]) for key in keys[op.name]), _Seconds())
        for op in graph.ops
        if all(key in table for key in keys[op.name])
    }


def _scaled(
    tables: Mapping[Machine, Mapping[str, OpProfile]], cluster: Cluster
) -> Iterator[tuple[str, str]]:
    """Name the machine whose times a device gets, where the device says that it is another."""
    for device in cluster.devices:
        machine = _nearest(tables, device)
        if machine is not None and device.processor and not _is_of(machine, device):
            yield device.name, machine.key


def _nearest(tables: Mapping[Machine, Mapping[str, OpProfile]], device: Device) -> Machine | None:
    """Return the machine most like a device: of its kind, then of rates next to its.

    A CPU with as many threads is nearer than any other; a GPU's ops do not depend on its host's.
    """

    def unlike(machine: Machine) -> tuple[bool, bool, float, str]:
        ratios = (
            device.flops_per_s / machine.flops_per_s,
            device.memory_bytes_per_s / machine.memory_bytes_per_s,
        )
        far = sum(abs(math.log(ratio)) for ratio in ratios)
        other_threads = device.kind == "cpu" and machine.threads != device.threads
        return not _is_of(machine, device), other_threads, far, machine.key

    return min((m for m in tables if m.kind == device.kind), key=unlike, default=None)


def _is_of(machine: Machine, device: Device) -> bool:
    """Whether a device names the processor that was profiled; a CPU with as many threads."""
    threads = device.kind == "cuda" or machine.threads == device.threads
    return bool(device.processor) and device.processor == machine.processor and threads


def _as_measured(machine: Machine, device: Device) -> Device:
    """Return the device; with the machine's rates if it is the same as far as anything tells."""
    if _is_of(machine, device):
        return replace(
            device,
            flops_per_s=machine.flops_per_s * device.core_share,
            memory_bytes_per_s=machine.memory_bytes_per_s * device.memory_share,
            launch_s=machine.launch_s / device.core_share,
        )
    ratios = (
        device.flops_per_s / machine.flops_per_s,
        device.memory_bytes_per_s / machine.memory_bytes_per_s,
        device.launch_s / machine.launch_s,
    )
    if (
        device.processor
        or device.kind != "cuda"
        or any(abs(ratio - 1) > _SAME_CARD for ratio in ratios)
    ):
        return device
    return replace(
        device,
        flops_per_s=machine.flops_per_s,
        memory_bytes_per_s=machine.memory_bytes_per_s,
        launch_s=machine.launch_s,
    )


@dataclass(frozen=True)
class _Scale:
    """From the machine that was measured to a device."""

    machine: Machine
    device: Device

    def of(self, profile: OpProfile) -> _Seconds:
        """Return a profile's times on the device."""
        per_second = self._slowdown(profile)
        passes = (profile.backward_input_s > 0) + (profile.backward_weight_s > 0)
        launches = BACKWARD_LAUNCHES / max(1, passes)
        return _Seconds(
            self._seconds(profile.forward_s, per_second, FORWARD_LAUNCHES),
            self._seconds(profile.backward_input_s, per_second, launches),
            self._seconds(profile.backward_weight_s, per_second, launches),
        )

    def _slowdown(self, profile: OpProfile) -> float:
        """Return the device's seconds for each second of the machine, once an op has started."""
        moved = profile.reads_bytes + profile.writes_bytes
        compute_s = profile.flops / self.machine.flops_per_s
        if compute_s > moved / self.machine.memory_bytes_per_s:
            return self.machine.flops_per_s / self.device.flops_per_s
        return self.machine.memory_bytes_per_s / self.device.memory_bytes_per_s

    def _seconds(self, measured_s: float, slowdown: float, launches: float) -> float:
        starting_s = min(measured_s, launches * self.machine.launch_s)
        slower_start = self.device.launch_s / self.machine.launch_s
        return starting_s * slower_start + (measured_s - starting_s) * slowdown


def _optimizer(base: Known, keys: frozenset[str], device: Device) -> tuple[float, float] | None:
    """Return an optimizer's seconds per tensor and per byte; None when none was measured."""
    machine = _nearest(base.tables, device)
    if machine is None:
        return None
    found, like = _session_machine(base, keys, machine), _as_measured(machine, device)
    starting = like.launch_s / machine.launch_s
    moving = machine.memory_bytes_per_s / like.memory_bytes_per_s
    pair = found.optimizer_s_per_tensor * starting, found.optimizer_s_per_byte * moving
    return pair if found.knows_optimizer else None


def _session_machine(base: Known, keys: frozenset[str], machine: Machine) -> Machine:
    """Return whose pair to take: see `bigbrain_fx.costs.profiles.store`."""
    shared = Counter(model for key in keys for model in base.origins.get(key, ()))
    known = [s for s in base.sessions[machine.key] if s.machine.knows_optimizer]
    best = max(known, key=lambda session: shared[session.model], default=None)
    return best.machine if best is not None and shared[best.model] else machine


def _timed(known: OpCost, found: _Seconds | None) -> OpCost:
    """Put measured times in, which have what starting an op took; memory stays."""
    if found is None:
        return known
    return replace(
        known,
        forward_s=found.forward_s,
        backward_s=found.input_s + found.weight_s,
        backward_input_s=found.input_s,
        host_forward_s=0.0,
        host_backward_s=0.0,
    )
