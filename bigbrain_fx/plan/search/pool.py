"""Lines x settings -> the splits that are worth simulating, with what to keep in flight.

It knows dynamic programming and the pace of chains; it simulates nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bigbrain_fx.core import Cluster, Link
from bigbrain_fx.search.cutter import Cutter
from bigbrain_fx.search.line import Line, Setting, Split
from bigbrain_fx.search.pace import chain_of, falling, in_flights, step_s

GAP = 1e-3
_TAPERED = 3
"""Sequences of devices for which a split that ends together is made, too."""
_PACED = 2
"""Splits whose pace is looked at, for each that is simulated."""


@dataclass(frozen=True)
class Found:
    """A split, how many micro-batches to keep in flight, and about what a step would take."""

    line: Line
    split: Split
    micro_batches: int
    in_flight: tuple[int, ...]
    recompute: tuple[int, ...]
    step_s: float


def splits(
    line: Line, setting: Setting, sequences: Iterable[Sequence[str]], steps: int
) -> tuple[list[Split], int]:
    """Return the splits that the search for the best one met, the best first.

    Best-first over intervals of `most_s`, for all sequences of devices at once: in an interval
    (low, high), no step is shorter than (least sum under `high`) + (M - 1) low, and the one with
    the least bound is halved next.

    Args:
        line: the units in one order.
        setting: cluster and micro-batches.
        sequences: the devices along the pipeline.
        steps: how many stages may be solved; reaching it is no error.

    Returns:
        The splits, and how many were compared.
    """
    cutter, micro = Cutter(line, setting), setting.micro_batches
    known: dict[tuple[tuple[str, ...], tuple[int, ...]], Split] = {}
    heap: list[tuple[float, int, float, float, float, Sequence[str]]] = []
    best_s, compared = float("inf"), 0

    def consider(sequence: Sequence[str], low_s: float, limit_s: float) -> None:
        nonlocal best_s, compared
        compared += 1
        split = cutter.solve(sequence, limit_s)
        if split is not None:
            known.setdefault((split.sequence, split.cuts), split)
            best_s = min(best_s, split.step_s(micro))
            bound_s = split.sum_s + (micro - 1) * low_s
            entry = (bound_s, compared, low_s, split.most_s, split.sum_s, sequence)
            heapq.heappush(heap, entry)

    for sequence in sequences:
        if cutter.steps < max(steps // 2, 1):
            consider(sequence, cutter.least_busy_s(sequence), float("inf"))
    while heap and cutter.steps < steps and heap[0][0] < best_s * (1 - GAP):
        _, _, low_s, high_s, sum_s, sequence = heapq.heappop(heap)
        if high_s <= low_s * (1 + 1e-9):
            continue
        middle_s = (low_s + high_s) / 2
        consider(sequence, low_s, middle_s)
        compared += 1
        upper = (sum_s + (micro - 1) * middle_s, compared, middle_s, high_s, sum_s, sequence)
        heapq.heappush(heap, upper)
    ranked = sorted(known.values(), key=lambda s: (s.step_s(micro), s.sequence, s.cuts))
    return [*_tapered(cutter, ranked), *ranked], compared


def _tapered(cutter: Cutter, ranked: Sequence[Split]) -> Iterator[Split]:
    """Yield, for the best sequences of devices, a split whose later stages have less to do."""
    for sequence in list(dict.fromkeys(split.sequence for split in ranked))[:_TAPERED]:
        split = cutter.tapered(sequence)
        if split is not None:
            yield split


def paced(
    line: Line, setting: Setting, ranked: Sequence[Split], most: int, wanted: tuple[int, ...] | None
) -> Iterator[Found]:
    """Yield the most promising splits, each with the two best choices of what to keep in flight.

    Args:
        line: that they are of.
        setting: for which they were made; the pace is that of its cluster.
        ranked: the best first.
        most: how many splits to yield.
        wanted: what to keep in flight, where that was asked for.
    """
    found = [list(_choices(line, setting, split, wanted)) for split in ranked[: _PACED * most]]
    for choices in sorted(found, key=lambda each: each[0].step_s)[:most]:
        yield from choices


def _choices(
    line: Line, setting: Setting, split: Split, wanted: tuple[int, ...] | None
) -> list[Found]:
    micro, trains = setting.micro_batches, line.work.trains
    again = _again(line, setting, split) if setting.recompute else ()
    chain = chain_of(line, split, setting, again)
    if not trains:
        in_flight = (micro,) * len(split.sequence)
        return [Found(line, split, micro, in_flight, (), step_s(chain, micro, in_flight, False))]
    room = _room(line, setting, split, again)
    options = in_flights(chain, micro, room)
    if wanted is not None and len(wanted) == len(split.sequence):
        options = iter([falling(wanted, micro, wanted)])
    found = [Found(line, split, micro, n, again, step_s(chain, micro, n)) for n in options]
    found.sort(key=lambda entry: (round(entry.step_s, 12), sum(entry.in_flight)))
    return found[:2]


def polished(cutter: Cutter, found: Found, visits: int) -> Found:
    """Shift the cuts, one at a time, by ever smaller steps, while the pace improves.

    Args:
        cutter: of the found split's line and setting.
        found: where to begin.
        visits: forwards and backwards that may be played.
    """
    setting, line = cutter.setting, found.line
    best, left = found, visits
    each = 2 * len(found.split.sequence) * found.micro_batches
    step = max(1, line.count // (4 * len(found.split.sequence)))
    while step >= 1 and left > each:
        improved = False
        for cuts in _shifted(best.split.cuts, step):
            left -= each
            other = _repaced(cutter, best, cuts) if left > 0 else None
            if other is not None and other.step_s < best.step_s * (1 - 1e-7):
                best, improved = other, True
                break
        step = step if improved else step // 2
    if best is found or best.line.work.trains is False:
        return best
    choices = _choices(line, setting, best.split, None)
    return min([best, *choices], key=lambda entry: entry.step_s)


def _shifted(cuts: tuple[int, ...], step: int) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one of them, or all from one on, moved by a step either way."""
    for change in (-step, step):
        for i in range(1, len(cuts) - 1):
            for upto in dict.fromkeys((i + 1, len(cuts) - 1)):
                moved = (*cuts[:i], *(c + change for c in cuts[i:upto]), *cuts[upto:])
                if all(a < b for a, b in pairwise(moved)):
                    yield moved


def _repaced(cutter: Cutter, found: Found, cuts: tuple[int, ...]) -> Found | None:
    """Return what was found with other cuts; None when a stage would not fit."""
    line, setting = found.line, cutter.setting
    sequence = found.split.sequence
    for stage, device in enumerate(sequence):
        flight = min(setting.micro_batches, len(sequence) - stage)
        if not line.reach(device, flight, setting).has(cuts[stage], cuts[stage + 1]):
            return None
    split = cutter.measure(sequence, cuts)
    chain = chain_of(line, split, setting, found.recompute)
    room = _room(line, setting, split, found.recompute)
    in_flight = falling(found.in_flight, found.micro_batches, room)
    trains = line.work.trains
    paced_s = step_s(chain, found.micro_batches, in_flight, trains)
    return replace(found, split=split, in_flight=in_flight, step_s=paced_s)


def _room(line: Line, setting: Setting, split: Split, again: Sequence[int]) -> list[int]:
    """Return how many micro-batches each stage's memory has room for."""
    memory = [setting.cluster.device[device].memory_bytes for device in split.sequence]
    pieces = zip(split.sequence, split.cuts[:-1], split.cuts[1:], memory, strict=True)
    return [
        line.most_in_flight(device, a, b, has, stage in again)
        for stage, (device, a, b, has) in enumerate(pieces)
    ]


def _again(line: Line, setting: Setting, split: Split) -> tuple[int, ...]:
    """Return the stages that must recompute: those that could not keep what 1F1B has in flight."""
    room = _room(line, setting, split, ())
    count = len(room)
    return tuple(s for s in range(count) if room[s] < min(setting.micro_batches, count - s))


# --------------------------------------------------------------------------- settings


def settings(
    cluster: Cluster, micro_batches: int, recompute: bool, tight: bool, for_memory: bool
) -> list[Setting]:
    """Return for what to cut: the cluster, and poorer ones.

    A split that was made for slower links or less memory may turn out better than the one made for
    the cluster itself, since the objective is not the simulator's time. So links at a half and an
    eighth are tried and, where memory is tight, memory at three quarters and a half.
    """
    own = Setting(cluster, micro_batches)
    found = [own]
    if len(cluster.devices) > 1:
        found += [replace(own, cluster=_poorer(cluster, links=share)) for share in (1 / 2, 1 / 8)]
    if tight and recompute:
        found.append(replace(own, recompute=True))
    shares = (0.75, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08) if for_memory else (0.75, 0.5)
    if tight or for_memory:
        found += [replace(own, cluster=_poorer(cluster, memory=share)) for share in shares]
    return found


def _poorer(cluster: Cluster, links: float = 1.0, memory: float = 1.0) -> Cluster:
    def slower(link: Link) -> Link:
        return Link(link.latency_s / links, link.bytes_per_s * links)

    devices = (replace(d, memory_bytes=int(d.memory_bytes * memory)) for d in cluster.devices)
    return replace(
        cluster,
        devices=tuple(devices),
        default_link=slower(cluster.default_link),
        links=tuple((a, b, slower(link)) for a, b, link in cluster.links),
    )


def is_tight(line: Line, setting: Setting) -> bool:
    """Whether some device could not hold the whole model with every micro-batch in flight."""
    return any(
        not line.reach(device, setting.micro_batches, setting).has(0, line.count)
        for device in sorted(line.work.on)
    )
