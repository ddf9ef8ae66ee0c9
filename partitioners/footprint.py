"""What a set of units holds on a device: for any placement, and for all contiguous pieces at once.

The figures are an upper bound of what `bigbrain_fx.schedule.memory` books, instruction by
instruction, when at most `in_flight` micro-batches are between their forward and backward:

    weights + optimizer state + 2 x gradients (those of one micro-batch, and their sum so far)
    + in_flight x (saved activations + received values + sent values)
      (where stages run their forward again, saved activations of one micro-batch)
    + gradients of sent and received values, of one micro-batch, + the largest workspace

It knows no method and no schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.tensors import AHEAD, Weight
from partitioners.facts import Facts

Matrix = NDArray[np.float64]  # [first unit, unit after the last]; only first < after means anything


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one device has to hold at its worst moment."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    messages: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.messages

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "activations": self.activations,
            "messages": self.messages,
        }
        return ", ".join(f"{name} {readable(nbytes)}" for name, nbytes in parts.items() if nbytes)


def readable(nbytes: float) -> str:
    """Write bytes for people: "17.2 GiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def in_flight_at(
    stage: int, stages: int, micro_batches: int, in_flight: int | tuple[int, ...] | None
) -> int:
    """Return how many micro-batches a stage holds at once.

    Args:
        stage: from 0.
        stages: how many the pipeline has.
        micro_batches: in one step.
        in_flight: a number for every stage (GPipe: `micro_batches`), one per stage from the first,
            or None for classic 1F1B: the last stage holds one, the one before it two, and so on.
    """
    if in_flight is None:
        return max(1, min(micro_batches, stages - stage))
    wanted = in_flight if isinstance(in_flight, int) else in_flight[min(stage, len(in_flight) - 1)]
    return max(1, min(micro_batches, wanted))


def in_flight_by_device(
    facts: Facts,
    device_of_unit: Sequence[str],
    micro_batches: int,
    in_flight: int | tuple[int, ...] | None,
) -> dict[str, int]:
    """Return the most micro-batches that each device of a pipeline may hold.

    A stage can run as early as the stages that it depends on allow: where two do not depend on
    each other (two towers, say), either may come first, and each is counted as if it did.

    Args:
        facts: of the graph.
        device_of_unit: one device per unit; one stage per device.
        micro_batches: in one step.
        in_flight: see `in_flight_at`.
    """
    devices = list(dict.fromkeys(device_of_unit))
    before: dict[str, set[str]] = {device: set() for device in devices}
    edges = {(device_of_unit[maker], device_of_unit[reader]) for maker, reader in facts.edges}
    for device in devices:  # in an order in which they can run
        for maker, reader in sorted(edges):
            if reader == device and maker != device:
                before[device] |= {maker, *before[maker]}
    return {
        device: in_flight_at(len(before[device]), len(devices), micro_batches, in_flight)
        for device in devices
    }


def needs(
    facts: Facts,
    device_of_unit: Sequence[str],
    in_flight: Mapping[str, int],
    one_stage_each: bool = True,
) -> dict[str, Need]:
    """Return what each device in use holds under any placement of the units.

    Args:
        facts: of the graph.
        device_of_unit: one device per unit.
        in_flight: micro-batches held at once, by device.
        one_stage_each: whether the units of a device make one stage; otherwise each may be one, and
            what goes from one to the next counts as a message.
    """
    devices = list(dict.fromkeys(device_of_unit))
    return {
        device: _need(facts, device, device_of_unit, in_flight[device], one_stage_each)
        for device in devices
    }


def _need(facts: Facts, device: str, homes: Sequence[str], in_flight: int, one_stage: bool) -> Need:
    devices = len(set(homes))
    here = [unit for unit, home in enumerate(homes) if home == device]
    mine = frozenset(here)
    flight = in_flight if facts.trains else 1
    weights = [w for w in facts.weights if not mine.isdisjoint(w.readers)]
    trained = sum(w.trained_bytes for w in weights)
    own = mine if one_stage else frozenset[int]()
    sent = [v for v in facts.values if v.maker in mine and not own.issuperset(v.readers)]
    received = [v for v in facts.values if v.maker not in mine and not mine.isdisjoint(v.readers)]
    crossing = (*sent, *received)
    extra = sum(extra_ties(w, devices) for w in weights)
    if not one_stage:  # each stage has a gradient of its own of a weight that several read
        extra = sum(w.trained_bytes * (len(w.readers) - 1) for w in weights)
    return Need(
        weights=sum(w.nbytes for w in weights),
        gradients=2 * trained + extra,
        optimizer=int(trained * facts.state_per_byte),
        activations=facts.kept(flight) * int(facts.saved_bytes[device][here].sum())
        + int(facts.workspace_bytes[device][here].max()),
        messages=flight * sum(v.nbytes for v in crossing)
        + sum(v.gradient_bytes for v in (*sent, *received, *(received if one_stage else crossing)))
        + AHEAD * sum(v.nbytes + v.gradient_bytes for v in (received if one_stage else crossing))
        + AHEAD * sum(v.gradient_bytes for v in (sent if one_stage else ())),
    )


def extra_ties(weight: Weight, devices: int) -> int:
    """Count the gradients that come from other holders: their receives are posted all the time."""
    return weight.trained_bytes * max(0, min(len(weight.readers), devices) - 1)


def require_fits(
    facts: Facts,
    cluster: Cluster,
    device_of_unit: Sequence[str],
    in_flight: Mapping[str, int],
    name: str,
    one_stage_each: bool = True,
) -> None:
    """Raise when a device cannot hold its part.

    Raises:
        NoPlanError: with what every device needs and has.
    """
    found = needs(facts, device_of_unit, in_flight, one_stage_each)
    if all(need.total <= cluster.device[device].memory_bytes for device, need in found.items()):
        return
    raise NoPlanError(
        f"the {name} split does not fit into the devices' memory",
        notes=tuple(note(device, need, cluster) for device, need in found.items()),
        help="use --partitioner analytical, which splits by memory too, or more micro-batches",
    )


def note(device: str, need: Need, cluster: Cluster) -> str:
    """Return the arithmetic of one device as a line: what it needs, of what, and what it has."""
    available = cluster.device[device].memory_bytes
    verb = "and" if need.total <= available else "but"
    return f"{device} needs {readable(need.total)} ({need}) {verb} has {readable(available)}"


# --------------------------------------------------------------------------- contiguous pieces


@dataclass(frozen=True)
class Pieces:
    """What every contiguous piece of the units, in their order, needs: element [first, after].

    `devices` is the most devices a plan may use (gradients of tied parameters come from each).
    """

    facts: Facts
    devices: int

    def bytes_needed(self, device: str, in_flight: int) -> Matrix:
        """Return the bytes of every piece on a device; units are numbered from 0."""
        flight = in_flight if self.facts.trains else 1
        found = self._once + flight * self._per_micro_batch
        saved = np.concatenate(([0], np.cumsum(self.facts.saved_bytes[device])))
        found += self.facts.kept(flight) * (saved[None, :] - saved[:-1, None])
        found += _running_maximum(self.facts.workspace_bytes[device])
        return found

    @cached_property
    def _once(self) -> Matrix:
        facts = self.facts
        rectangles = _Rectangles(len(facts.groups))
        for weight in facts.weights:
            trained = weight.trained_bytes
            nbytes = weight.nbytes + trained * (2 + facts.state_per_byte)
            rectangles.reads(weight.readers, -1, nbytes + extra_ties(weight, self.devices))
        for value in facts.values:
            ahead = AHEAD * (value.nbytes + value.gradient_bytes)
            rectangles.reads(value.readers, value.maker, 2 * value.gradient_bytes + ahead)
            rectangles.makes(value.maker, value.readers[-1], (1 + AHEAD) * value.gradient_bytes)
        return rectangles.summed()

    @cached_property
    def _per_micro_batch(self) -> Matrix:
        rectangles = _Rectangles(len(self.facts.groups))
        for value in self.facts.values:
            rectangles.reads(value.readers, value.maker, value.nbytes)
            rectangles.makes(value.maker, value.readers[-1], value.nbytes)
        return rectangles.summed()


class _Rectangles:
    """Sums of constants over rectangles of a matrix: differences at corners, then two cumsums."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._corners: list[tuple[int, int, float]] = []

    def reads(self, readers: Iterable[int], maker: int, nbytes: float) -> None:
        """Add `nbytes` to pieces that begin after `maker` and contain a reader."""
        before = maker
        for reader in readers:  # pieces whose first reader is this one: each piece counts once
            self._add(before + 1, reader + 1, reader + 1, self.count + 1, nbytes)
            before = reader

    def makes(self, maker: int, last_reader: int, nbytes: float) -> None:
        """Add `nbytes` to pieces that contain `maker` and end before its last reader."""
        self._add(0, maker + 1, maker + 1, last_reader + 1, nbytes)

    def summed(self) -> Matrix:
        found = np.zeros((self.count + 1, self.count + 2))
        if self._corners:
            rows, columns, amounts = zip(*self._corners, strict=True)
            np.add.at(found, (np.array(rows), np.array(columns)), np.array(amounts))
        return found.cumsum(axis=0).cumsum(axis=1)[: self.count, : self.count + 1]

    def _add(self, top: int, bottom: int, left: int, right: int, nbytes: float) -> None:
        if nbytes:
            self._corners += [
                (top, left, nbytes),
                (bottom, left, -nbytes),
                (top, right, -nbytes),
                (bottom, right, nbytes),
            ]


def _running_maximum(each: NDArray[np.int64]) -> Matrix:
    """Return [first, after] -> the largest entry of the piece."""
    count = len(each)
    found = np.zeros((count, count + 1))
    found[:, 1:] = np.where(np.tri(count, dtype=bool).T, each[None, :], 0)
    return np.maximum.accumulate(found, axis=1)
