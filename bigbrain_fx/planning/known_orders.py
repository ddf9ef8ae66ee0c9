"""Orders that have a name, as jobs of each device: 1F1B, ZB-H1, interleaved, ZB-V, DualPipe-V.

The orders hold for equal stages without messages; for other stages they are known answers and
places to start. The same orders are in torch.distributed.pipelining; a test compares them job by
job. Where torch says FULL_BACKWARD, a Backward and its BackwardWeight stand side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from bigbrain_fx.errors import InputError
from bigbrain_fx.planning.clock import JobOf, Kind, one_f_one_b_of

Jobs: TypeAlias = tuple[JobOf, ...]
Ranked: TypeAlias = tuple[Jobs, ...]
"""The jobs of each device, in the order of the pipeline."""

_F, _B, _W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT


def one_f_one_b(devices: int, micro_batches: int, in_flight: Sequence[int] | None = None) -> Ranked:
    """Return 1F1B: a whole backward as soon as one may run; device d has devices - d in flight.

    On slow links more micro-batches may be `in_flight`, by device.

    Source: Narayanan et al., PipeDream, 2019; Fan et al., DAPPLE, 2021.
    """
    flights = in_flight or range(devices, 0, -1)
    warm_ups = (min(n, micro_batches) for n in flights)
    return tuple(one_f_one_b_of(rank, micro_batches, n) for rank, n in enumerate(warm_ups))


def zb_h1(devices: int, micro_batches: int, in_flight: Sequence[int] | None = None) -> Ranked:
    """Return ZB-H1: 1F1B with its memory, device d runs each BackwardWeight d micro-batches later.

    The last device, which 1F1B leaves idle at the end of a step, has most of them to do then.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 2.1; torch calls it ZB1P.
    """

    def of(rank: int, order: Jobs) -> Iterator[JobOf]:
        for kind, stage, micro in order:
            yield kind, stage, micro
            if kind == _B and micro >= rank:
                yield _W, rank, micro - rank
        late = max(0, micro_batches - rank)
        yield from ((_W, rank, micro) for micro in range(late, micro_batches))

    whole = one_f_one_b(devices, micro_batches, in_flight)
    return tuple(tuple(of(rank, order)) for rank, order in enumerate(whole))


def makes_rounds(devices: int, micro_batches: int) -> bool:
    """Whether `interleaved` takes so many micro-batches: all of its rounds have equally many."""
    return micro_batches % _rounds(devices, micro_batches) == 0


def fills_both_ways(devices: int, micro_batches: int) -> bool:
    """Whether `dualpipe_v` takes so many micro-batches: there is one for each stage."""
    return micro_batches >= 2 * devices


def _rounds(devices: int, micro_batches: int) -> int:
    return max(1, micro_batches // devices)


def interleaved(devices: int, micro_batches: int, pieces: int) -> Ranked:
    """Return interleaved 1F1B with whole backwards: stage = piece * devices + device.

    Source: Narayanan et al., Megatron-LM, 2021, section 2.2. As in torch, a round has as many
    micro-batches as divide a step evenly; Megatron has one for each device.

    Raises:
        InputError: the micro-batches do not make even rounds.
    """
    rounds = _rounds(devices, micro_batches)
    if not makes_rounds(devices, micro_batches):
        raise InputError(
            f"interleaved needs rounds of equally many micro-batches, but {micro_batches} on "
            f"{devices} devices make {rounds} rounds",
            code="BX1106",
            help=f"use --micro-batches {micro_batches - micro_batches % devices} or "
            f"{micro_batches - micro_batches % devices + devices}",
        )
    each, total = micro_batches // rounds, micro_batches * pieces

    def at(number: int, rank: int, back: bool) -> tuple[int, int]:
        turn, place = divmod(number, each * pieces)
        piece, micro = divmod(place, each)
        return (pieces - 1 - piece if back else piece) * devices + rank, turn * each + micro

    def of(rank: int) -> Iterator[JobOf]:
        warm_up = min(total, (pieces - 1) * each + 2 * (devices - 1 - rank))
        for number in range(warm_up):
            yield _F, *at(number, rank, back=False)
        for number in range(total):
            if warm_up + number < total:
                yield _F, *at(warm_up + number, rank, back=False)
            yield _B, *at(number, rank, back=True)

    return _each(devices, of)


def zb_v(devices: int, micro_batches: int) -> Ranked:
    """Return ZB-V: two stages a device in a V, 1F1B's memory, no bubble between steps in a row.

    With fewer than 2 * devices - 1 micro-batches it is the order for so many, those left out.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024; torch's
    ScheduleZBVZeroBubble.
    """
    count = max(2 * devices - 1, micro_batches)

    def of(rank: int) -> Iterator[JobOf]:
        return (job for job in _zb_v(devices, count, rank) if job[2] < micro_batches)

    return _each(devices, of)


def _zb_v(devices: int, count: int, rank: int) -> Iterator[JobOf]:
    down, up = rank, 2 * devices - 1 - rank
    run = _Counters()
    yield from run.times(2 * (devices - rank) - 1, (_F, down))
    yield from run.times(rank, (_F, up), (_F, down))
    yield from run.times(devices - rank, (_F, up), (_B, up), (_W, up))
    while run.made(_F, up) < run.made(_F, down) or run.made(_F, down) < count:
        if run.made(_F, down) < count:
            yield from run.times(1, (_F, down))
        yield from run.times(1, (_B, down), (_W, down), (_F, up), (_B, up), (_W, up))
    yield from run.times(rank, (_B, down), (_B, up))
    yield from run.times(devices - rank, (_B, down), (_W, down))
    for stage in (up, down):
        yield from run.times(count - run.made(_W, stage), (_W, stage))


def dualpipe_v(devices: int, micro_batches: int) -> Ranked:
    """Return DualPipe-V: two stages a device in a V; its pairs of F and B run one after the other.

    Source: DeepSeek, DualPipe, 2025 (github.com/deepseek-ai/DualPipe), and torch's
    ScheduleDualPipeV, which runs such a pair on two streams of a GPU.

    Raises:
        InputError: fewer micro-batches than stages.
    """
    if not fills_both_ways(devices, micro_batches):
        raise InputError(
            f"dualpipe-v needs at least as many micro-batches as stages, {2 * devices}, "
            f"not {micro_batches}",
            code="BX1107",
            help=f"use --micro-batches {2 * devices}, or --schedule zb-v",
        )
    return _each(devices, lambda rank: iter(_dualpipe_v(devices, micro_batches, rank)))


def _dualpipe_v(devices: int, micro_batches: int, rank: int) -> list[JobOf]:
    down, up = rank, 2 * devices - 1 - rank
    after = devices - rank - 1
    run, late, found = _Counters(), list[JobOf](), list[JobOf]()

    def do(*whats: tuple[Kind, int]) -> None:
        found.extend(run.times(1, *whats))

    def split(stage: int) -> None:
        do((_B, stage))
        late.append((_W, stage, found[-1][2]))

    def weight() -> None:
        if late:
            run.made(*late[0][:2], more=1)
            found.append(late.pop(0))

    found.extend(run.times(2 * after, (_F, down)))
    found.extend(run.times(rank + 1, (_F, down), (_F, up)))
    for _ in range(after):
        split(up)
        weight()
        do((_F, up))
    for _ in range(micro_batches - 2 * devices + rank + 1):
        do((_F, down), (_B, up), (_W, up), (_F, up), (_B, down), (_W, down))
    for _ in range(after):
        do((_B, up), (_W, up), (_F, up), (_B, down), (_W, down))
    # half of what is left is split: from a Backward of `down` on, on odd devices of `up`
    first = 2 * ((rank + 1) // 2) + (rank + 1) % 2
    for place in range(2 * (rank + 1)):
        stage = (up, down)[place % 2]
        if place < first:
            do((_B, stage), (_W, stage))
        else:
            split(stage)
    for _ in range(after):
        weight()
        split(down)
    while late:
        weight()
    return found


class _Counters:
    """The next micro-batch of every kind and stage: mutable."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

    def times(self, count: int, *whats: tuple[Kind, int]) -> Iterator[JobOf]:
        """Yield the next job of each, so many times over."""
        for kind, stage in chain.from_iterable([whats] * count):
            yield kind, stage, self.made(kind, stage, more=1)

    def made(self, kind: int, stage: int, more: int = 0) -> int:
        """Return how many there were, and count more."""
        count = self._next.get((kind, stage), 0)
        self._next[kind, stage] = count + more
        return count


def _each(devices: int, of: Callable[[int], Iterator[JobOf]]) -> Ranked:
    return tuple(tuple(of(rank)) for rank in range(devices))
