"""A public instance as arrays: what nodes cost on each kind of device, what crosses, what fits.

The files of three collections become this noun, so that one algorithm serves all. It knows no
method, no model and no file format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices that are alike: how many there are, and what each can hold."""

    name: str
    count: int
    memory_bytes: float = float("inf")


@dataclass(frozen=True, slots=True)
class Net:
    """A value: its maker, then the nodes that read it.

    When they are on several devices, each device that has one of them spends `times[kind]` on it:
    the maker's to send it, a reader's to receive it, once however many readers it has.
    """

    members: tuple[int, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class Problem:
    """Nodes to place, in a topological order of `edges`.

    Attributes:
        times: [kind, node]: what a node takes; infinite where it cannot run.
        nbytes: [node]: what a node holds on its device, in bytes.
        edges: pairs (earlier, later) of nodes; a contiguous placement goes along them.
        nets: what is sent between devices.
        kinds: the devices; device numbers count through them, kind by kind.
    """

    times: Times
    nbytes: Times
    edges: tuple[tuple[int, int], ...]
    nets: tuple[Net, ...]
    kinds: tuple[Kind, ...]

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return int(self.times.shape[1])

    @cached_property
    def kind_of_device(self) -> tuple[int, ...]:
        """The kind of every device."""
        return tuple(i for i, kind in enumerate(self.kinds) for _ in range(kind.count))

    def loads(self, homes: Sequence[int]) -> Times:
        """Return what each device spends on one sample: its nodes, and what crosses its boundary.

        Args:
            homes: the device of each node.

        Source: Tarnawski et al., NeurIPS'20, section 3 (communication is not overlapped).
        """
        kinds = self.kind_of_device
        found = np.zeros(len(kinds))
        for node, home in enumerate(homes):
            found[home] += self.times[kinds[home], node]
        for net in self.nets:
            touched = sorted({homes[node] for node in net.members})
            if len(touched) > 1:
                for home in touched:
                    found[home] += net.times[kinds[home]]
        return found

    def max_load(self, homes: Sequence[int]) -> float:
        """Return the largest load: the time per sample of a full pipeline."""
        return float(self.loads(homes).max())

    def fits(self, homes: Sequence[int]) -> bool:
        """Whether every device can hold and run its nodes."""
        held = np.zeros(len(self.kind_of_device))
        np.add.at(held, np.asarray(homes, dtype=np.intp), self.nbytes)
        limits = [self.kinds[kind].memory_bytes for kind in self.kind_of_device]
        runs = all(
            np.isfinite(self.times[self.kind_of_device[home], node])
            for node, home in enumerate(homes)
        )
        return runs and all(h <= limit * (1 + 1e-12) for h, limit in zip(held, limits, strict=True))

    def merged(self, group_of: Sequence[int]) -> Problem:
        """Return the problem with nodes made one: `group_of[node]`, numbered in an order to run."""
        groups = np.asarray(group_of, dtype=np.intp)
        count = int(groups.max()) + 1 if len(groups) else 0
        times = np.zeros((len(self.kinds), count))
        nbytes = np.zeros(count)
        np.add.at(times.T, groups, self.times.T)
        np.add.at(nbytes, groups, self.nbytes)
        edges = {(group_of[a], group_of[b]) for a, b in self.edges}
        return Problem(
            times,
            nbytes,
            tuple(sorted((a, b) for a, b in edges if a != b)),
            joined(Net(tuple(group_of[n] for n in net.members), net.times) for net in self.nets),
            self.kinds,
        )


def joined(nets: Iterable[Net]) -> tuple[Net, ...]:
    """Return the nets with those between the same nodes made one, and those within one left out."""
    totals: dict[tuple[int, ...], Times] = {}
    for net in nets:
        members = net.members[:1] + tuple(sorted(set(net.members[1:]) - {net.members[0]}))
        if len(members) > 1 and any(net.times):
            totals[members] = totals.get(members, np.zeros(len(net.times))) + np.array(net.times)
    return tuple(Net(members, tuple(map(float, times))) for members, times in totals.items())
