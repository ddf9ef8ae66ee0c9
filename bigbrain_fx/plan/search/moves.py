"""Placements op by op, contiguous or not: all of a small graph's, or the neighbours of a good one.

Each is simulated as it is. Of a small graph the placements are taken in the order of a lower bound,
until that reaches the best step known: then the best of all is known, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import Array, Work

Homes = tuple[str, ...]
Evaluate = Callable[[Homes], float]
"""Device of every unit -> seconds a step; infinity when it is no plan."""

MOST_PLACEMENTS = 20_000


def placements(work: Work, cluster: Cluster) -> NDArray[np.intp] | None:
    """Return every placement, [placement, unit] -> number of a device; None: too many."""
    devices, count = len(cluster.devices), work.count
    if count == 0 or devices**count > MOST_PLACEMENTS:
        return None
    grid = np.indices((devices,) * count).reshape(count, -1).T
    return grid.astype(np.intp)


@dataclass(frozen=True)
class Floor:
    """Lower bounds of the step of many placements at once."""

    work: Work
    cluster: Cluster
    micro_batches: int

    def of(self, homes: NDArray[np.intp]) -> Array:
        """Return seconds, one for each row of `homes`.

        Each device's load, after the first value can have come and before the last gradient can
        have gone back; each link's; and the longest path there and back.
        """
        forward = self._seconds(homes, lambda on: on.forward_s)
        backward = self._seconds(homes, lambda on: on.backward_s)
        there, back, both = (np.zeros(homes.shape) for _ in range(3))
        makers = self._makers()
        for unit in range(self.work.count):
            for maker, nbytes, gradient in makers[unit]:
                trip = self._trip_s(homes, maker, unit, nbytes)
                arrives = there[:, maker] + forward[:, maker] + trip
                there[:, unit] = np.maximum(there[:, unit], arrives)
                if gradient is not None:
                    returns = self._trip_s(homes, unit, maker, gradient)
                    leaves = back[:, maker] + backward[:, maker] + returns
                    back[:, unit] = np.maximum(back[:, unit], leaves)
                    path = both[:, maker] + forward[:, maker] + backward[:, maker]
                    both[:, unit] = np.maximum(both[:, unit], path + trip + returns)
        path = (both + forward + backward).max(axis=1)
        found: Array = np.maximum(path, self._busiest(homes, forward + backward, there, back))
        return found

    def _busiest(self, homes: NDArray[np.intp], unit_s: Array, there: Array, back: Array) -> Array:
        found = np.zeros(len(homes))
        for number in range(len(self.cluster.devices)):
            here = homes == number
            load = self.micro_batches * np.where(here, unit_s, 0.0).sum(axis=1)
            first = np.where(here, there, np.inf).min(axis=1)
            last = np.where(here, back, np.inf).min(axis=1)
            total = load + np.where(here.any(axis=1), first + last, 0.0)
            found = np.maximum(found, np.where(here.any(axis=1), total, 0.0))
        return found

    def _seconds(self, homes: NDArray[np.intp], of: Callable[..., Array]) -> Array:
        each = np.stack([of(self.work.on[device.name]) for device in self.cluster.devices])
        found: Array = each[homes, np.arange(self.work.count)[None, :]]
        return found

    def _makers(self) -> list[list[tuple[int, int, int | None]]]:
        found: list[list[tuple[int, int, int | None]]] = [[] for _ in range(self.work.count)]
        for value in self.work.values:
            flows = set(self.work.flows(value)) if self.work.trains else set()
            for reader in value.readers:
                gradient = value.gradient_bytes if reader in flows else None
                found[reader].append((value.maker, value.nbytes, gradient))
        return found

    def _trip_s(self, homes: NDArray[np.intp], a: int, b: int, nbytes: int) -> Array:
        names = [device.name for device in self.cluster.devices]
        table = np.array(
            [[self.cluster.wire(x, y).transfer_s(nbytes) for y in names] for x in names]
        )
        found: Array = table[homes[:, a], homes[:, b]]
        return found


def climb(
    work: Work, cluster: Cluster, start: Homes, start_s: float, evaluate: Evaluate, budget: int
) -> None:
    """Move units, one or a run of them, to a neighbour's device while that is faster.

    `evaluate` remembers what it saw; nothing is returned.
    """
    best, best_s, left = start, start_s, budget
    names = [device.name for device in cluster.devices]
    improved = True
    while improved and left > 0:
        improved = False
        for homes in _neighbours(work, names, best):
            if left <= 0:
                return
            left -= 1
            found_s = evaluate(homes)
            if found_s < best_s * (1 - 1e-9):
                best, best_s, improved = homes, found_s, True
                break


def _neighbours(work: Work, names: Sequence[str], homes: Homes) -> Iterator[Homes]:
    """Yield what is one move away: a unit goes to a device that it reads from or writes to.

    Small graphs try every device.
    """
    wanted: dict[tuple[int, str], None] = {}
    for maker, reader in work.edges:
        if homes[maker] != homes[reader]:
            wanted[maker, homes[reader]] = None
            wanted[reader, homes[maker]] = None
    if work.count * len(names) <= 200:
        wanted.update(dict.fromkeys((u, d) for u in range(work.count) for d in names))
    for unit, device in wanted:
        if homes[unit] != device:
            yield (*homes[:unit], device, *homes[unit + 1 :])
