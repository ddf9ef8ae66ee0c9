"""Orders for devices of speeds 4:2:1:1, simulated: the best 1F1B, and the order found.

    python -m tools.studies.unlike_orders [--micro 4 8 16] [--mbit 100 1000] [--work 3000000]
        [--tight]

An 8-block GPT in half blocks, milliseconds of one micro-batch as a split backward was measured on
a processor core, messages of 256 KiB. 1F1B is the best of every cut, sequence and number
of devices; the others have the room that its fullest device needs. `page` is what a
prototype had for the same row. With --tight every device has half of that room, and 1F1B all of it
(the prototype's figure there is of the best whole chain with half).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, combinations, pairwise, permutations

from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.planning import (
    Kind,
    OrderClock,
    OrdersOf,
    Synthesis,
    Taste,
    VirtualStages,
    list_orders,
    searched_cuts,
    shared_cuts,
    synthesise,
)
from tests.support.virtual_line import virtual_line

SPEED = (4.0, 2.0, 1.0, 1.0)
BLOCK_MS = 65 / 4, 70 / 4, 61 / 4
HALVES = ((0.38, 0.45), (0.62, 0.55))  # of a block's time, of its bytes: attention, MLP
HEAD = 5.0, 6.0, 4.0, 0.4, 0.1
MESSAGE_BYTES = 256 * 1024
LATENCY_MS = 0.2
PAGE = {
    (100, 4): (345, 301),
    (100, 8): (622, 552),
    (100, 16): (1077, 990),
    (1000, 4): (296, 251),
    (1000, 8): (536, 428),
    (1000, 16): (962, 863),
}
"""(Mbit/s, micro-batches) -> best 1F1B and best order that a prototype found."""
PAGE_TIGHT = {(1000, 8): (710, 468), (100, 8): (845, 639)}
"""The same with half the room: best whole chain, best order."""
JUDGES = Taste(), Taste(patience=0.7), Taste(deep=False)
CUTS = 150


def units() -> list[tuple[float, float, float, float, float]]:
    """Return F, B, W in milliseconds at speed 1, what is saved and what waits, of half blocks."""
    found = [
        (*(ms * share for ms in BLOCK_MS), saved, 0.99 * saved)
        for _ in range(8)
        for share, saved in HALVES
    ]
    last = tuple(a + b for a, b in zip(found[-1], HEAD, strict=True))
    return [*found[:-1], last]  # type: ignore[list-item]  # five numbers each


UNITS = units()
SUMS = [[0.0, *accumulate(column)] for column in zip(*UNITS, strict=True)]


@dataclass(frozen=True)
class Setting:
    """One row: the links, the micro-batches, the room of each device."""

    mbit: int
    micro: int
    room: float = float("inf")

    @property
    def wire_ms(self) -> float:
        """For how long a message takes its link."""
        return MESSAGE_BYTES * 8 / (self.mbit * 1e3)

    def stages(self, cuts: Sequence[int], line: Sequence[int]) -> VirtualStages:
        """Return the pipeline of a cut."""
        ends = (0, *cuts, len(UNITS))
        of = [[sums[b] - sums[a] for a, b in pairwise(ends)] for sums in SUMS]
        forward, backward, later = (
            [x / SPEED[d] for x, d in zip(column, line, strict=True)] for column in of[:3]
        )
        return virtual_line(
            line,
            forward,
            backward,
            later,
            self.micro,
            wire_s=self.wire_ms,
            latency_s=LATENCY_MS,
            saved_bytes=of[3],
            waiting_bytes=of[4],
            memory_bytes=self.room,
        )


def best_1f1b(setting: Setting) -> tuple[float, tuple[int, ...], float]:
    """Return the seconds, the devices and the fullest device's bytes of the best 1F1B."""
    best: tuple[float, tuple[int, ...], float] = float("inf"), (), 0.0
    for line in sequences():
        for cuts in combinations(range(1, len(UNITS)), len(line) - 1):
            stages = setting.stages(cuts, line).whole()
            if least_ms(stages, setting) >= best[0]:
                continue
            clock = OrderClock(stages)
            for orders in alternations(stages, setting):
                taken = clock.step_s(orders)
                if taken < best[0] - 1e-9:
                    best = taken, line, max(stages.peaks(orders).values())
    return best


def sequences() -> Iterator[tuple[int, ...]]:
    """Yield the devices of every pipeline, alike ones once."""
    seen = set()
    for count in range(1, 5):
        for line in permutations(range(4), count):
            speeds = tuple(SPEED[d] for d in line)
            if speeds not in seen:
                seen.add(speeds)
                yield line


def least_ms(stages: VirtualStages, setting: Setting) -> float:
    """Return what no order of a chain of whole backwards goes below."""
    hop, head, least = setting.wire_ms + LATENCY_MS, 0.0, 0.0
    each = zip(stages.timed.forward_s, stages.timed.backward_s, strict=True)
    for forward, backward in each:
        least = max(least, head + setting.micro * (forward + backward))
        head += forward + backward + 2 * hop
    return least


def alternations(stages: VirtualStages, setting: Setting) -> Iterator[OrdersOf]:
    """Yield 1F1B with classic in-flight numbers, and with those that fill."""
    yield orders_1f1b(stages, range(stages.count, 0, -1))
    both = [f + b for f, b in zip(stages.timed.forward_s, stages.timed.backward_s, strict=True)]
    hop = setting.wire_ms + LATENCY_MS
    cycle = max(*both, setting.wire_ms if stages.count > 1 else 0.0)
    fill = [1]
    for ms in reversed(both[:-1]):
        fill.insert(0, fill[0] + max(1, -int(-(ms + 2 * hop - 1e-9) // cycle)))
    yield orders_1f1b(stages, fill)


def orders_1f1b(stages: VirtualStages, in_flight: Sequence[int]) -> OrdersOf:
    """Return 1F1B with so many in flight at each stage."""
    found = {}
    for stage, most in enumerate(in_flight):
        warm_up = min(most, stages.micro_batches)
        jobs = [(int(Kind.FORWARD), stage, micro) for micro in range(warm_up)]
        for micro in range(stages.micro_batches):
            jobs.append((int(Kind.BACKWARD), stage, micro))
            if warm_up + micro < stages.micro_batches:
                jobs.append((int(Kind.FORWARD), stage, warm_up + micro))
        found[stages.timed.device_of[stage]] = tuple(jobs)
    return found


def listed_ms(setting: Setting, line: tuple[int, ...], cuts: tuple[int, ...]) -> float:
    """Return the best of a few list schedules of a cut."""
    stages = setting.stages(cuts, line)
    clock = OrderClock(stages)
    every = (list_orders(stages, taste) for taste in JUDGES)
    return min((clock.step_s(o) for o in every if o), default=float("inf"))


def best_order(
    setting: Setting, lines: Sequence[tuple[int, ...]], work: int
) -> tuple[tuple[int, ...], tuple[int, ...], Synthesis]:
    """Search cuts for every line of devices, and an order for the two best."""
    costs = [sum(unit[:3]) for unit in UNITS]
    found = []
    for line in dict.fromkeys(lines):
        start = shared_cuts(costs, line, SPEED)
        judge = partial(listed_ms, setting, line)
        found.append((*searched_cuts(start, len(UNITS), judge, CUTS), line))
    every = []
    for _, cuts, line in sorted(found)[:2]:
        try:
            found_order = synthesise(setting.stages(cuts, line), in_row=False, work=work)
        except NoPlanError:
            continue
        every.append((line, cuts, found_order))
    return min(every, key=lambda each: each[2].step_s)


def row(mbit: int, micro: int, work: int, tight: bool) -> str:
    """Return one line of the table."""
    began = time.process_time()
    loose = Setting(mbit, micro)
    first, line, bytes_ = best_1f1b(loose)
    setting = Setting(mbit, micro, bytes_ / 2 if tight else bytes_)
    full = (0, 1, 2, 3)
    lines = [each for base in (line, full) for each in (base, (*base, *base[::-1]))]
    where, cuts, order = best_order(setting, lines, work)
    page = (PAGE_TIGHT if tight else PAGE).get((mbit, micro), ("-", "-"))
    names = ":".join(f"{SPEED[d]:.0f}" for d in where)
    cells = (
        f"{mbit} Mbit/s, {micro}",
        f"{first:.0f} ({page[0]})",
        f"{order.step_s:.0f} ({page[1]})",
        order.start,
        f"{order.step_s / first:.3f}",
        f"{order.bound_s:.0f}",
        f"{names} at {cuts}",
        f"{time.process_time() - began:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--micro", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--work", type=int, default=3_000_000, help="jobs to play for an order")
    parser.add_argument("--tight", action="store_true", help="half the room")
    asked = parser.parse_args()
    print(
        "| link, M | best 1F1B (page) | found (page) | from | found / 1F1B "
        "| bound of the cut | devices, cuts | processor time |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for mbit in asked.mbit:
        for micro in asked.micro:
            print(row(mbit, micro, asked.work, asked.tight), flush=True)


if __name__ == "__main__":
    main()
