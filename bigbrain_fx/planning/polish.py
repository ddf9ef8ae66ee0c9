"""A split, played through as it is -> a better one: cuts are shifted while a step gets shorter.

What the dynamic program minimises is not quite what a step takes; from its best splits on, the
clock decides. It knows chains under 1F1B, and simulates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bigbrain_fx.planning.chain import Line, Split
from bigbrain_fx.planning.cut_setting import Setting
from bigbrain_fx.planning.cutter import Cutter
from bigbrain_fx.planning.pace import chain_of, falling, step_s


@dataclass(frozen=True)
class Found:
    """A split, how many micro-batches to keep in flight, and about what a step would take."""

    line: Line
    split: Split
    micro_batches: int
    in_flight: tuple[int, ...]
    recompute: tuple[int, ...]
    step_s: float


def polished(cutter: Cutter, found: Found, visits: int) -> Found:
    """Shift the cuts, one at a time, by ever smaller steps, while the pace improves.

    Args:
        cutter: of the found split's line and setting.
        found: where to begin.
        visits: forwards and backwards that may be played, and units that may be looked at.
    """
    line = found.line
    best, left = found, visits
    each = 2 * len(found.split.sequence) * found.micro_batches + 2 * line.work.count
    step = max(1, line.count // (4 * len(found.split.sequence)))
    while step >= 1 and left > each:
        improved = False
        for cuts in shifted_cuts(best.split.cuts, step):
            left -= each
            other = _repaced(cutter, best, cuts) if left > 0 else None
            if other is not None and other.step_s < best.step_s * (1 - 1e-7):
                best, improved = other, True
                break
        step = step if improved else step // 2
    return best


def shifted_cuts(cuts: tuple[int, ...], step: int) -> Iterator[tuple[int, ...]]:
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
    if not cutter.fits(sequence, cuts):
        return None
    split = cutter.measure(sequence, cuts)
    chain = chain_of(line, split, setting, found.recompute)
    room = room_of(line, setting, split, found.recompute)
    in_flight = falling(found.in_flight, found.micro_batches, room)
    trains = line.work.trains
    paced_s = step_s(chain, found.micro_batches, in_flight, trains)
    return replace(found, split=split, in_flight=in_flight, step_s=paced_s)


def room_of(line: Line, setting: Setting, split: Split, again: Sequence[int]) -> list[int]:
    """Return how many micro-batches each stage's memory has room for."""
    pieces = zip(split.sequence, split.cuts[:-1], split.cuts[1:], strict=True)
    return [
        line.memory.most_in_flight(device, a, b, setting, stage in again)
        for stage, (device, a, b) in enumerate(pieces)
    ]
