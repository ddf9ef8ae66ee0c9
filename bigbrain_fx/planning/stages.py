"""Placement of units -> stages, as the cut makes them, and their messages.

A device runs stages and not single units: a stage waits for all that it reads and sends when all of
it is done. The module does not know an order in time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

from bigbrain_fx.core import Cluster, Overheads
from bigbrain_fx.planning.clock import Message
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
