"""Placement of units -> stages, as the cut makes them, with their times and their messages.

A device runs stages and not single units: a stage waits for all that it reads and sends when all of
it is done. This module is `plan.cut` in arrays, for methods that compare thousands of placements; a
test holds the two together. The module does not know an order in time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

from bigbrain_fx.core import Cluster, Overheads
from bigbrain_fx.planning.clock import Message, TimedStages
from bigbrain_fx.planning.device_kinds import bytes_per_s

if TYPE_CHECKING:
    from bigbrain_fx.planning.unit_work import Work
    from bigbrain_fx.planning.units import Value


class Wires:
    """Times of a message from one device to another."""

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        self.cluster, self.names = cluster, names
        self._known: dict[tuple[int, int], tuple[float, float, Overheads, Overheads]] = {}

    def message(self, source: int, target: int, nbytes: int, a: int, b: int) -> Message:
        """Return the message between two stages, on devices a and b."""
        if a == b:
            return Message(source, target, nbytes)
        if (a, b) not in self._known:
            ends = self.names[a], self.names[b]
            there, here = (self.cluster.device[name].overheads for name in ends)
            latency_s = self.cluster.link(*ends).latency_s
            self._known[a, b] = bytes_per_s(self.cluster, *ends), latency_s, there, here
        per_s, latency_s, there, here = self._known[a, b]
        handled_s = there.handling_s(nbytes), here.handling_s(nbytes)
        return Message(source, target, nbytes, nbytes / per_s, latency_s, *handled_s)


def messages(
    values: Iterable[Value],
    known: Work,
    stage_of: Sequence[int],
    device_of: Sequence[int],
    wires: Wires,
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return who gets each value from whom, and the relay of each gradient.

    A second reader on a device gets a value from the first. A gradient goes through the stages that
    give one, last one first, to the maker.

    Args:
        values: in the order of their makers' stages; others than those between stages may be left
            out.
        known: the units.
        stage_of: per unit.
        device_of: per stage.
        wires: what it takes.
    """
    there: list[Message] = []
    back: list[Message] = []
    for value in values:
        maker = stage_of[value.maker]
        readers = sorted({stage_of[unit] for unit in value.readers} - {maker})
        holder = {device_of[maker]: maker}
        for reader in readers:
            source = holder.setdefault(device_of[reader], reader)
            source = maker if source == reader else source
            ends = device_of[source], device_of[reader]
            there.append(wires.message(source, reader, value.nbytes, *ends))
        if value.gradient_bytes and known.trains:
            graded = {stage_of[unit] for unit in known.flows(value)}
            for a, b in pairwise([maker, *(reader for reader in readers if reader in graded)]):
                ends = device_of[b], device_of[a]
                back.append(wires.message(b, a, value.gradient_bytes, *ends))
    return tuple(there), tuple(back)


@dataclass(frozen=True)
class StageCutter:
    """The units of a graph, ready to be cut for one placement after another.

    Attributes:
        known: the units, none of them fused, in the order of the graph.
        cluster: the devices.
    """

    known: Work
    cluster: Cluster

    def stages(self, homes: Sequence[int]) -> TimedStages:
        """Cut a placement: `homes` are numbers of devices, one per unit."""
        return self._timed(stage_lists(self._before, self._after, homes), homes)

    def pieces(self, cuts: Sequence[int], line: Sequence[int]) -> TimedStages:
        """Cut units in order into pieces; `line` is the device of each, which may come again."""
        ends = (0, *cuts, self.known.count)
        stages = [list(range(a, b)) for a, b in pairwise(ends)]
        homes = [device for device, own in zip(line, stages, strict=True) for _ in own]
        return self._timed(stages, homes)

    def _timed(self, stages: Sequence[list[int]], homes: Sequence[int]) -> TimedStages:
        stage_of = [0] * len(homes)
        for number, units in enumerate(stages):
            for unit in units:
                stage_of[unit] = number
        device_of = tuple(homes[units[0]] for units in stages)
        on = [self.known.on[self.cluster.devices[home].name] for home in device_of]
        forward_s = [float(o.forward_s[u].sum()) for o, u in zip(on, stages, strict=True)]
        again_s = forward_s if self.known.recompute else [0.0] * len(stages)
        backward_s = [
            float(o.backward_s[u].sum()) + twice_s
            for o, u, twice_s in zip(on, stages, again_s, strict=True)
        ]
        own = {home: self.cluster.devices[home].overheads for home in device_of}
        return TimedStages(
            device_of,
            tuple(forward_s),
            tuple(backward_s),
            *messages(self._values(stage_of), self.known, stage_of, device_of, self._wires),
            {home: each.step_s for home, each in own.items()},
            {home: each.instruction_s for home, each in own.items()},
            self._once_s(homes),
        )

    @cached_property
    def _before(self) -> list[list[int]]:
        return neighbours(len(self.known.groups), ((b, a) for a, b in self.known.edges))

    @cached_property
    def _after(self) -> list[list[int]]:
        return neighbours(len(self.known.groups), self.known.edges)

    def _values(self, stage_of: Sequence[int]) -> Iterable[Value]:
        return sorted(self.known.values, key=lambda value: stage_of[value.maker])

    @cached_property
    def _wires(self) -> Wires:
        return Wires(self.cluster, [device.name for device in self.cluster.devices])

    def _once_s(self, homes: Sequence[int]) -> dict[int, float]:
        """Return what each device does once a step: the optimizer, gradients of tied weights."""
        devices = self.cluster.devices
        found = dict.fromkeys(homes, 0.0)
        for unit, home in enumerate(homes):
            found[home] += float(self.known.once_s[devices[home].name][unit])
        for weight in self.known.weights:
            holders = sorted({homes[unit] for unit in weight.readers})
            for a in holders if weight.trained_bytes else ():
                others = (self.cluster.wire(devices[a].name, devices[b].name) for b in holders)
                found[a] += sum(link.transfer_s(weight.trained_bytes) for link in others)
        return found


# ------------------------------------------------------------------------- cuts of a line of pieces


Cuts: TypeAlias = tuple[int, ...]
"""Numbers of the units at which a piece begins, but for the first one."""


def shared_cuts(
    work: Sequence[float], device_of: Sequence[int], speed: Sequence[float] | None = None
) -> Cuts:
    """Cut a chain so that devices have work in proportion to their speed, in equal pieces.

    Args:
        work: of each unit, in order; at least as many units as pieces.
        device_of: of each piece.
        speed: of each device; all equal where it is left out.
    """
    share = [
        (1.0 if speed is None else speed[device]) / device_of.count(device) for device in device_of
    ]
    total, every = sum(work) or 1.0, sum(share)
    ends = [part / every for part in accumulate(share)][:-1]
    reached = [done / total for done in accumulate(work)]
    cuts = [1 + min(range(len(work)), key=lambda i: abs(reached[i] - end)) for end in ends]
    return _apart(cuts, len(work))


def _apart(cuts: Sequence[int], units: int) -> Cuts:
    """Leave every piece a unit."""
    found = list(cuts)
    for i, cut in enumerate(found):
        found[i] = max(cut, i + 1, found[i - 1] + 1 if i else 1)
    for i in reversed(range(len(found))):
        found[i] = min(found[i], units - (len(found) - i))
    return tuple(found)


def searched_cuts(
    start: Cuts, units: int, judge: Callable[[Cuts], float], tries: int
) -> tuple[float, Cuts]:
    """Move cuts while that is better; return what the best is worth, and the best. Seeded.

    Args:
        start: where to start.
        units: how many there are.
        judge: seconds of a cut; infinity for one that cannot be.
        tries: cuts to judge, at most.
    """
    dice = random.Random(0)
    known = {start: judge(start)}
    best = start
    for _ in range(4 * tries):  # most of what is drawn late is known
        if len(known) > tries or not start:
            break
        cuts = list(best)
        for _ in range(dice.choice((1, 1, 2, 3))):
            cuts[dice.randrange(len(cuts))] += dice.choice((-1, 1, -2, 2))
        tried = tuple(cuts)
        if tried in known or any(a >= b for a, b in pairwise((0, *tried, units))):
            continue
        known[tried] = judge(tried)
        if known[tried] <= known[best]:
            best = tried
    return known[best], best


# ------------------------------------------------------------------------------------------------
# Units on devices -> stages: each is what one device runs without waiting in the middle.


def stage_lists(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], homes: Sequence[int]
) -> list[list[int]]:
    """Return the units of each stage: the greedy from either end, whichever makes fewer.

    Neither direction always wins; the minimum is hard, so take the better of the two.

    Args:
        before: for each unit, those that it waits for, each once.
        after: for each unit, those that wait for it.
        homes: the device of each unit, as a number.
    """
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


def neighbours(count: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return, for each of so many, the second ends of the edges that begin there."""
    found: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        found[a].append(b)
    return found
