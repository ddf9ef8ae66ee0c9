"""What units hold on a device, for any placement; `planning.piece_memory` has it for chains.

The figures are an upper bound of what `bigbrain_fx.plan.schedule.memory` books, instruction by
instruction, when at most `in_flight` micro-batches are between their forward and backward:

    weights + optimizer state + 2 x gradients (those of one micro-batch, and their sum so far)
    + in_flight x (saved activations + received values + sent values)
      (where stages run their forward again, saved activations of one micro-batch)
    + gradients of sent and received values, of one micro-batch, + the largest workspace

It knows no method and no schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.planning import AHEAD, InFlight, Weight, Work, in_flight_at


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
    return f"{nbytes:.0f} byte{'' if round(nbytes) == 1 else 's'}"


def in_flight_by_device(
    known: Work, device_of_unit: Sequence[str], micro_batches: int, in_flight: InFlight
) -> dict[str, int]:
    """Return the most micro-batches that each device of a pipeline may hold.

    A stage can run as early as the stages that it depends on allow: where two do not depend on
    each other (two towers, say), either may come first, and each is counted as if it did.
    """
    devices = list(dict.fromkeys(device_of_unit))
    before: dict[str, set[str]] = {device: set() for device in devices}
    edges = {(device_of_unit[maker], device_of_unit[reader]) for maker, reader in known.edges}
    for device in devices:  # in an order in which they can run
        for maker, reader in sorted(edges):
            if reader == device and maker != device:
                before[device] |= {maker, *before[maker]}
    return {
        device: in_flight_at(len(before[device]), len(devices), micro_batches, in_flight)
        for device in devices
    }


def needs(
    known: Work,
    device_of_unit: Sequence[str],
    in_flight: Mapping[str, int],
    one_stage_each: bool = True,
) -> dict[str, Need]:
    """Return what each device in use holds under any placement of the units.

    Args:
        known: of the graph.
        device_of_unit: one device per unit.
        in_flight: micro-batches held at once, by device.
        one_stage_each: whether the units of a device make one stage; otherwise each may be one, and
            what goes from one to the next counts as a message.
    """
    devices = list(dict.fromkeys(device_of_unit))
    return {
        device: _need(known, device, device_of_unit, in_flight[device], one_stage_each)
        for device in devices
    }


def _need(known: Work, device: str, homes: Sequence[str], in_flight: int, one_stage: bool) -> Need:
    devices = len(set(homes))
    here = [unit for unit, home in enumerate(homes) if home == device]
    mine = frozenset(here)
    flight = in_flight if known.trains else 1
    weights = [w for w in known.weights if not mine.isdisjoint(w.readers)]
    trained = sum(w.trained_bytes for w in weights)
    own = mine if one_stage else frozenset[int]()
    sent = [v for v in known.values if v.maker in mine and not own.issuperset(v.readers)]
    received = [v for v in known.values if v.maker not in mine and not mine.isdisjoint(v.readers)]
    crossing = (*sent, *received)
    extra = sum(extra_ties(w, devices) for w in weights)
    if not one_stage:  # each stage has a gradient of its own of a weight that several read
        extra = sum(w.trained_bytes * (len(w.readers) - 1) for w in weights)
    return Need(
        weights=sum(w.nbytes for w in weights),
        gradients=2 * trained + extra,
        optimizer=int(trained * known.state_per_byte),
        activations=known.kept(flight) * int(known.saved_bytes[device][here].sum())
        + int(known.workspace_bytes[device][here].max()),
        messages=flight * sum(v.nbytes for v in crossing)
        + sum(v.gradient_bytes for v in (*sent, *received, *(received if one_stage else crossing)))
        + AHEAD * sum(v.nbytes + v.gradient_bytes for v in (received if one_stage else crossing))
        + AHEAD * sum(v.gradient_bytes for v in (sent if one_stage else ())),
    )


def extra_ties(weight: Weight, devices: int) -> int:
    """Count the gradients that come from other holders: their receives are posted all the time."""
    return weight.trained_bytes * max(0, min(len(weight.readers), devices) - 1)


def require_fits(
    known: Work,
    cluster: Cluster,
    device_of_unit: Sequence[str],
    in_flight: Mapping[str, int],
    name: str,
    one_stage_each: bool = True,
) -> None:
    """Raise when a device may not hold its part.

    Raises:
        NoPlanError: with what every device needs at most, and has, and the placement.
    """
    found = needs(known, device_of_unit, in_flight, one_stage_each)
    if all(need.total <= cluster.device[device].memory_bytes for device, need in found.items()):
        return
    error = NoPlanError(
        f"the {name} split does not fit into the devices' memory",
        code="BX1403",
        notes=tuple(note(device, need, cluster) for device, need in found.items()),
        help="use --partitioner analytical, which splits by memory too, or more micro-batches",
    )
    error.nearest = known.placed(device_of_unit, device_of_unit[0])
    raise error


def note(device: str, need: Need, cluster: Cluster) -> str:
    """Return the arithmetic of one device as a line: what it needs, of what, and what it has."""
    available = cluster.device[device].memory_bytes
    verb = "and" if need.total <= available else "but"
    has = readable(available) if available > 1 else "no room for tensors"  # the process takes all
    return f"{device} needs {readable(need.total)} ({need}) {verb} has {has}"
