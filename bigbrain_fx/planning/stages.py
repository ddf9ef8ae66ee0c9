"""Placement of units -> stages, as the cut makes them, with their times and their messages.

What a device really runs is not unit by unit: it is a stage, which waits for all that it reads and
sends when all of it is done. This is `bigbrain_fx.cut` in arrays, for placing methods that compare
thousands of placements; a test holds the two together. It knows no order in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from bigbrain_fx.core import Cluster, Costs
from partitioners.facts import Facts, Seconds


@dataclass(frozen=True, slots=True)
class Message:
    """A value on its way to a later stage, or its gradient to an earlier one."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class Staged:
    """Stages in an order in which they can run; devices are numbers in the cluster.

    Attributes:
        device_of: per stage.
        forward_s, backward_s: per stage, of one micro-batch.
        values, gradients: what goes between stages, those on one device included.
        once_s: per device: what happens once a step.
    """

    device_of: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    values: tuple[Message, ...]
    gradients: tuple[Message, ...]
    once_s: dict[int, float]

    @property
    def is_chain(self) -> bool:
        """Whether every device has exactly one stage."""
        return len(set(self.device_of)) == len(self.device_of)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The devices in use, in order of their first stage."""
        return tuple(dict.fromkeys(self.device_of))


@dataclass(frozen=True)
class Cutter:
    """The units of a graph, ready to be cut for one placement after another.

    Attributes:
        known: the units, none of them fused, in the order of the graph.
        cluster: the devices.
        forward: device -> forward seconds of one micro-batch, per unit.
    """

    known: Facts
    cluster: Cluster
    forward: dict[str, Seconds]

    @staticmethod
    def of(known: Facts, cluster: Cluster, costs: Costs) -> Cutter:
        """Read the forward times of every unit from the costs."""
        paid = [list(group) for group in known.groups]
        for name, unit in known.copies.items():
            if unit >= 0:
                paid[unit].append(name)
        forward = {
            d.name: np.array([sum(costs.ops[d.name][n].forward_s for n in names) for names in paid])
            for d in cluster.devices
        }
        return Cutter(known, cluster, forward)

    def staged(self, homes: Sequence[int]) -> Staged:
        """Cut a placement: `homes` are numbers of devices, one per unit."""
        stages = stage_lists(self._before, self._after, homes)
        stage_of = [0] * len(homes)
        for number, units in enumerate(stages):
            for unit in units:
                stage_of[unit] = number
        device_of = tuple(homes[units[0]] for units in stages)
        names = [self.cluster.devices[home].name for home in device_of]
        forward_s = tuple(
            float(self.forward[n][u].sum()) for n, u in zip(names, stages, strict=True)
        )
        both_s = [float(self.known.seconds[n][u].sum()) for n, u in zip(names, stages, strict=True)]
        values, gradients = self._messages(stage_of, device_of)
        return Staged(
            device_of,
            forward_s,
            tuple(both - there for both, there in zip(both_s, forward_s, strict=True)),
            values,
            gradients,
            self._once_s(homes),
        )

    @cached_property
    def _before(self) -> list[list[int]]:
        return _neighbours(len(self.known.groups), ((b, a) for a, b in self.known.edges))

    @cached_property
    def _after(self) -> list[list[int]]:
        return _neighbours(len(self.known.groups), self.known.edges)

    def _messages(
        self, stage_of: Sequence[int], device_of: Sequence[int]
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Return who gets each value from whom, and the relay of each gradient.

        A second reader on a device gets a value from the first; a gradient goes through the
        readers, last one first, to the maker.
        """
        there: list[Message] = []
        back: list[Message] = []
        for value in sorted(self.known.values, key=lambda value: stage_of[value.maker]):
            maker = stage_of[value.maker]
            readers = sorted({stage_of[unit] for unit in value.readers} - {maker})
            holder = {device_of[maker]: maker}
            for reader in readers:
                source = holder.setdefault(device_of[reader], reader)
                source = maker if source == reader else source
                there.append(Message(source, reader, value.nbytes))
            if value.gradient_bytes:
                relay = pairwise([maker, *readers])
                back += (Message(b, a, value.gradient_bytes) for a, b in relay)
        return tuple(there), tuple(back)

    def _once_s(self, homes: Sequence[int]) -> dict[int, float]:
        """Return what each device does once a step: the optimizer, gradients of tied weights."""
        devices = self.cluster.devices
        found = dict.fromkeys(homes, 0.0)
        for unit, home in enumerate(homes):
            found[home] += float(self.known.once_s[devices[home].name][unit])
        for weight in self.known.weights:
            holders = sorted({homes[unit] for unit in weight.readers})
            for a in holders if weight.trained_bytes else ():
                others = (self.cluster.link(devices[a].name, devices[b].name) for b in holders)
                found[a] += sum(link.transfer_s(weight.trained_bytes) for link in others)
        return found


def stage_lists(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], homes: Sequence[int]
) -> list[list[int]]:
    """Return the units of each stage: the greedy from either end, whichever makes fewer."""
    early = _greedy(before, after, homes)
    late = [sorted(stage) for stage in reversed(_greedy(after, before, homes))]
    return early if len(early) <= len(late) else late


def _greedy(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], homes: Sequence[int]
) -> list[list[int]]:
    """Emit, again and again, all that one device can run now: one that it finishes, or the most."""
    devices = list(dict.fromkeys(homes))
    place = {device: -i for i, device in enumerate(devices)}
    left = {device: 0 for device in devices}
    waiting = [len(each) for each in before]
    ready: dict[int, set[int]] = {device: set() for device in devices}
    for unit, home in enumerate(homes):
        left[home] += 1
        if not waiting[unit]:
            ready[home].add(unit)
    closures = {d: _closure(after, homes, waiting, ready[d]) for d in devices}
    stages: list[list[int]] = []
    while left:
        best = max(left, key=lambda d: (len(closures[d]) == left[d], len(closures[d]), place[d]))
        units = sorted(closures[best])
        stages.append(units)
        ready[best].clear()
        stale = {best}
        for unit in units:
            for later in after[unit]:
                waiting[later] -= 1
                stale.add(homes[later])
                if not waiting[later] and later not in closures[best]:
                    ready[homes[later]].add(later)
        left[best] -= len(units)
        if not left[best]:
            del left[best]
        for device in stale & left.keys():
            closures[device] = _closure(after, homes, waiting, ready[device])
    return stages


def _closure(
    after: Sequence[Sequence[int]],
    homes: Sequence[int],
    waiting: Sequence[int],
    ready: Iterable[int],
) -> set[int]:
    """Return what a device can run with nothing more from the others."""
    met: dict[int, int] = {}
    pending = list(ready)
    closure = set(pending)
    while pending:
        unit = pending.pop()
        for later in after[unit]:
            met[later] = met.get(later, 0) + 1
            if homes[later] == homes[unit] and met[later] == waiting[later]:
                closure.add(later)
                pending.append(later)
    return closure


def _neighbours(count: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        found[a].append(b)
    return found


def ends(staged: Staged, messages: Sequence[Message]) -> Iterator[tuple[Message, int, int]]:
    """Yield each message that is one, with the devices at its ends."""
    for message in messages:
        a, b = staged.device_of[message.source], staged.device_of[message.target]
        if a != b:
            yield message, a, b
