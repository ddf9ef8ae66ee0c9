"""`measured`: op times from a profile database that `bigbrain-fx profile` filled.

A profile holds for the machine it was taken on. A device of other rates gets the op's time scaled:
what starting costs by the devices' launch times, the rest by their products' rates or by their
memory's, whichever bounds the op (the roofline of `analytical`). What is absent is `analytical`'s,
and so is memory; `Costs.measured` says what was there.

A sum of gradients that several readers send back is in the profile of a reader, where it happens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from bigbrain_fx.core import Cluster, Costs, Device, Graph, Op, OpCost
from bigbrain_fx.errors import InputError
from bigbrain_fx.profiles import (
    Machine,
    OpProfile,
    ProfileStore,
    mode_of,
    region_mode,
    signature,
)
from estimators.analytical import BACKWARD_LAUNCHES, FORWARD_LAUNCHES, Analytical

VARIABLE = "BIGBRAIN_PROFILES"


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
        self.tables()

    def tables(self) -> Mapping[Machine, Mapping[str, OpProfile]]:
        """Return the profiles by machine and signature; a file is read again when it changes."""
        path = self.profiles or os.environ.get(VARIABLE, "")
        if not path:
            raise InputError(
                "the estimator 'measured' needs a profile database, and none was named",
                notes=(f"the environment has no {VARIABLE}",),
                help="bigbrain-fx profile model.py --db profiles.sqlite; "
                f"then {VARIABLE}=profiles.sqlite",
            )
        return _read(path, _state(Path(path)))

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """Estimate every op of a concrete graph (`graph.at(rows)`) on every device.

        Devices with equal rates share their figures. A region is measured when all its ops are.
        """
        tables, known = self.tables(), Analytical().estimate(graph, cluster)
        keys = _keys(graph)
        found = {d.name: _found(graph, keys, tables, d) for d in cluster.devices}
        return replace(
            known,
            ops={
                name: {op: _timed(cost, found[name].get(op)) for op, cost in of_device.items()}
                for name, of_device in known.ops.items()
            },
            optimizer_s_per_byte={
                d.name: _optimizer(tables, d) or known.optimizer_s_per_byte[d.name]
                for d in cluster.devices
            },
            measured={name: tuple(ops) for name, ops in found.items()},
        )


@dataclass(frozen=True)
class _Seconds:
    """What one op takes on one device."""

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
def _read(path: str, state: tuple[int, int]) -> Mapping[Machine, Mapping[str, OpProfile]]:
    tables: dict[Machine, dict[str, OpProfile]] = {}
    store = ProfileStore(path, read_only=True)
    for machine in store.machines():
        tables[machine] = {p.signature.key: p for _, p in store.rows(machine.key)}
    return tables


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
    table, scale = tables[machine], _Scale(machine, device)
    return {
        op.name: sum((scale.of(table[key]) for key in keys[op.name]), _Seconds())
        for op in graph.ops
        if all(key in table for key in keys[op.name])
    }


def _nearest(tables: Mapping[Machine, Mapping[str, OpProfile]], device: Device) -> Machine | None:
    """Return the machine most like a device: of its kind and threads, then of rates next to its."""

    def unlike(machine: Machine) -> tuple[bool, float, str]:
        ratios = (
            device.flops_per_s / machine.flops_per_s,
            device.memory_bytes_per_s / machine.memory_bytes_per_s,
        )
        far = sum(abs(math.log(ratio)) for ratio in ratios)
        return machine.threads != device.threads, far, machine.key

    return min((m for m in tables if m.kind == device.kind), key=unlike, default=None)


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


def _optimizer(tables: Mapping[Machine, Mapping[str, OpProfile]], device: Device) -> float:
    """Return the seconds of an optimizer step per byte; 0.0 when that was not measured."""
    machine = _nearest(tables, device)
    if machine is None:
        return 0.0
    ratio = machine.memory_bytes_per_s / device.memory_bytes_per_s
    return machine.optimizer_s_per_byte * ratio


def _timed(known: OpCost, found: _Seconds | None) -> OpCost:
    """Put measured times in; memory stays."""
    if found is None:
        return known
    return replace(
        known,
        forward_s=found.forward_s,
        backward_s=found.input_s + found.weight_s,
        backward_input_s=found.input_s,
    )
