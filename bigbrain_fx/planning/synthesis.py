"""Virtual stages -> an order for each device: list schedules, local search, the periodic form.

    list schedules, named orders ──best──▶ local search ──▶ free order ─┐
    offsets, as soon as possible and near it ──search──▶ periodic order ┴▶ the one that is written

The periodic order is written where it is within 2 % of the free one: its program is short. Work is
counted in jobs that are played; equal input gives equal orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.planning.known_orders import Ranked, interleaved, one_f_one_b, zb_h1, zb_v
from bigbrain_fx.planning.listing import list_orders, tastes
from bigbrain_fx.planning.order_bound import bound_s
from bigbrain_fx.planning.order_clock import OrderClock
from bigbrain_fx.planning.order_search import Coded, Score, climbed, scorer
from bigbrain_fx.planning.periodic import as_soon_as_possible, from_orders, searched
from bigbrain_fx.planning.virtual_stages import OrdersOf, VirtualStages, loop_line, v_line

READABLE = 1.02
"""The periodic order may take this much of the free one."""
WORK = 3_000_000
"""Jobs to play for one order, about: two seconds."""
_OFFSETS_FOR = 12
"""Micro-batches for which offsets are searched, where a step has more."""
_EACH = 10_000
"""Times that the orders of a pipeline are played at most: of a small one there are few."""
_STRETCHES = (1.0, 1.01, 1.03, 1.08)
_LISTING = 15
"""A list schedule takes as long as playing so many."""


@dataclass(frozen=True)
class Synthesis:
    """The order that was found for a pipeline.

    Attributes:
        orders: what each device computes, in order: the one to write.
        form: whether that is the periodic one.
        step_s: of a step alone. row_s: of one more step in a row.
        free_s: what the objective of the free search came to; `periodic_s` that of the periodic
            order, None where none has room.
        start: from what the free search started.
        bound_s: no order of these stages goes below, for the same objective.
        peak_bytes: what each device holds at most of what is saved and what waits.
        played: jobs that were played: the work of it.
    """

    orders: OrdersOf
    form: Literal["free", "periodic"]
    step_s: float
    row_s: float
    free_s: float
    periodic_s: float | None
    start: str
    bound_s: float
    peak_bytes: dict[int, float]
    played: int


def synthesise(stages: VirtualStages, *, in_row: bool, work: int = WORK) -> Synthesis:
    """Find an order for each device.

    Args:
        stages: the pipeline.
        in_row: make a step in a row short, which is what training takes where nothing is clipped;
            else a step alone.
        work: jobs to play, about; the first list schedule is made in any case.

    Raises:
        NoPlanError: a device has no room for one micro-batch.
    """
    _require_possible(stages)
    clock = OrderClock(stages)
    work = min(work, _EACH * clock.count)
    score = scorer(clock, in_row)
    begun, name, start = _best_start(clock, score, work // 3)
    bound = bound_s(stages, in_row=in_row)
    periodic = _periodic(clock, start, in_row, (work - clock.played) // 2)
    free = min((begun, start), periodic) if periodic else (begun, start)
    if free[0][0] > bound * (1 + 1e-9):
        free = climbed(clock, free[1], score, work - clock.played)
    is_periodic = periodic is not None and periodic[0][0] <= READABLE * free[0][0]
    chosen = periodic[1] if periodic is not None and is_periodic else free[1]
    row_s, step_s = clock.row_s(chosen)
    orders = clock.named(chosen)
    return Synthesis(
        orders,
        "periodic" if is_periodic else "free",
        step_s,
        row_s,
        free[0][0],
        periodic[0][0] if periodic else None,
        name,
        bound,
        dict(stages.peaks(orders)),
        clock.played,
    )


def _best_start(
    clock: OrderClock, score: Callable[[Coded], Score], work: int
) -> tuple[Score, str, Coded]:
    """Return the best of what to start from; when the work is done, of what was looked at."""
    best: tuple[Score, str, Coded] | None = None
    for name, orders in _starts(clock.stages):
        coded = clock.numbered(orders)
        clock.played += _LISTING * clock.count
        if clock.all_fit(coded):
            judged = score(coded)
            if judged[0] < float("inf") and (best is None or judged < best[0]):
                best = judged, name, coded
        if best is not None and clock.played > work:
            break
    if best is None:
        raise _no_room()
    return best


def _starts(stages: VirtualStages) -> Iterator[tuple[str, OrdersOf]]:
    """Yield what to start from: named orders of such a placement, then list schedules."""
    for name, ranked in _named(stages):
        yield name, dict(zip(stages.timed.devices, ranked, strict=True))
    for taste in tastes(stages.splits):
        orders = list_orders(stages, taste)
        if orders is not None:
            yield "list", orders


def _named(stages: VirtualStages) -> Iterator[tuple[str, Ranked]]:
    devices, count, micro = len(stages.timed.devices), stages.count, stages.micro_batches
    places = {device: i for i, device in enumerate(stages.timed.devices)}
    line = tuple(places[device] for device in stages.timed.device_of)
    split = [seconds is not None for seconds in stages.backward_weight_s]
    if stages.untrained or (any(split) and not all(split)):
        return
    if line == v_line(devices) and all(split):
        yield "zb-v", zb_v(devices, micro)
    if line == tuple(range(devices)):
        yield (
            ("zb-h1", zb_h1(devices, micro))
            if all(split)
            else ("1f1b", one_f_one_b(devices, micro))
        )
    elif line == loop_line(devices, count // devices) and not any(split):
        try:
            yield "interleaved", interleaved(devices, micro, count // devices)
        except InputError:
            return


def _periodic(
    clock: OrderClock, start: Coded, in_row: bool, work: int
) -> tuple[Score, Coded] | None:
    """Search offsets, with fewer micro-batches where a step has many; what they give for all."""
    stages = clock.stages
    few = replace(stages, micro_batches=min(stages.micro_batches, _OFFSETS_FOR))
    small = OrderClock(few)
    near = from_orders(stages, clock.named(start))
    soon = [as_soon_as_possible(few, stretch) for stretch in _STRETCHES]
    _, found = searched(small, [*soon, near], scorer(small, in_row), work)
    clock.played += small.played
    coded = clock.numbered(found.orders(stages))
    if not clock.all_fit(coded):
        return None
    judged = scorer(clock, in_row)(coded)
    return (judged, coded) if judged[0] < float("inf") else None


def _require_possible(stages: VirtualStages) -> None:
    """Raise NoPlanError where no order can end: before any is looked for."""
    never = [m for m in (*stages.timed.values, *stages.timed.gradients) if m.way_s == float("inf")]
    if never:
        ends = [stages.timed.device_of[end] for end in (never[0].source, never[0].target)]
        raise NoPlanError(
            f"no order ends: a message from device {ends[0]} to device {ends[1]} never arrives",
            code="BX1120",
            help="give their link a bandwidth, or place nothing across it",
        )
    short = _short(stages)
    if short:
        raise _no_room(short)


def _short(stages: VirtualStages) -> tuple[str, ...]:
    """Return the devices that cannot hold what one micro-batch saves, a line each."""
    return tuple(
        f"device {device}: one micro-batch saves {need:.0f} bytes, room is {room:.0f}"
        for device, own in stages.on.items()
        for need in [sum(stages.saved_bytes[stage] for stage in own)]
        for room in [stages.memory_bytes.get(device, float("inf"))]
        if need > room
    )


def _no_room(notes: tuple[str, ...] = ()) -> NoPlanError:
    return NoPlanError(
        "no order has room for what is saved from forward to backward",
        code="BX1121",
        notes=notes,
        help="use more micro-batches, --activation-checkpointing, or more devices",
    )
