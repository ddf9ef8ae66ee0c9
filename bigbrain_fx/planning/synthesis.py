"""Virtual stages -> an order for each device: the best of named orders and of list schedules.

Of a step in a row, or of a step alone. Work is counted in jobs that are played; equal input gives
equal orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.planning.clock import (
    Kind,
    OrderClock,
    OrdersOf,
    VirtualStages,
    loop_line,
    v_line,
)
from bigbrain_fx.planning.known_orders import Ranked, interleaved, one_f_one_b, zb_h1, zb_v
from bigbrain_fx.planning.listing import list_orders, tastes

WORK = 3_000_000
"""Jobs to play for one order, about: two seconds."""
_LISTING = 15
"""A list schedule takes as long as playing so many."""


@dataclass(frozen=True)
class Synthesis:
    """The order that was found for a pipeline.

    Attributes:
        orders: what each device computes, in order.
        step_s: of a step alone. row_s: of one more step in a row.
        start: the named order that it is, or "list".
        bound_s: no order of these stages goes below, for the same objective.
        peak_bytes: what each device holds at most of what is saved and what waits.
        played: jobs that were played: the work of it.
    """

    orders: OrdersOf
    step_s: float
    row_s: float
    start: str
    bound_s: float
    peak_bytes: dict[int, float]
    played: int


def synthesise(stages: VirtualStages, *, in_row: bool, work: int = WORK) -> Synthesis:
    """Find an order for each device.

    Args:
        stages: the pipeline.
        in_row: make a step in a row short, which is what training takes where nothing is clipped;
            among equals, and otherwise, a step alone.
        work: jobs to play, about; the first order that fits in memory is found in any case.

    Raises:
        NoPlanError: a device has no memory for one micro-batch.
    """
    _require_possible(stages)
    clock, bound = OrderClock(stages), bound_s(stages, in_row=in_row)
    best: tuple[tuple[float, float], str, OrdersOf] | None = None
    for name, orders in _every_order(stages):
        clock.played += _LISTING * clock.count
        judged = _judged(clock, orders, in_row=in_row)
        if judged is not None and (best is None or judged < best[0]):
            best = judged, name, orders
        if best is not None and (clock.played > work or best[0][0] <= bound * (1 + 1e-9)):
            break
    if best is None:
        raise _no_room()
    _, start, orders = best
    row_s, step_s = clock.row_s(orders)
    peaks = dict(stages.peaks(orders))
    return Synthesis(orders, step_s, row_s, start, bound, peaks, clock.played)


def _judged(clock: OrderClock, orders: OrdersOf, *, in_row: bool) -> tuple[float, float] | None:
    """Return what is least of the best order; None of one that blocks, or has no room."""
    if not clock.fits(orders):
        return None
    judged = clock.row_s(orders) if in_row else (clock.step_s(orders), 0.0)
    return judged if judged[0] < float("inf") else None


def _every_order(stages: VirtualStages) -> Iterator[tuple[str, OrdersOf]]:
    """Yield named orders of such a placement, then list schedules, each with its name."""
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
        f"device {device}: one micro-batch saves {need:.0f} bytes, {room:.0f} are free"
        for device, own in stages.on.items()
        for need in [sum(stages.saved_bytes[stage] for stage in own)]
        for room in [stages.memory_bytes.get(device, float("inf"))]
        if need > room
    )


def _no_room(notes: tuple[str, ...] = ()) -> NoPlanError:
    return NoPlanError(
        "no order has memory for the saved activations",
        code="BX1121",
        notes=notes,
        help="use more micro-batches, --activation-checkpointing, or more devices",
    )


# --------------------------------------------------------------------------- the bound of an order


def bound_s(stages: VirtualStages, *, in_row: bool) -> float:
    """Return seconds that no order of these stages goes below, split or not as they are.

    In a row: the busiest device's work, and the busiest link's. Alone besides: what comes before a
    device's first job, and after its last Backward.
    """
    return max(_bounds(stages, in_row))


def _links_s(stages: VirtualStages) -> Iterable[float]:
    """Return for how long a micro-batch takes each link."""
    timed = stages.timed
    found: dict[tuple[int, int], float] = {}
    for message in filter(timed.crosses, (*timed.values, *timed.gradients)):
        ends = timed.device_of[message.source], timed.device_of[message.target]
        found[ends] = found.get(ends, 0.0) + message.wire_s
    return found.values()


def _bounds(stages: VirtualStages, in_row: bool) -> Iterator[float]:
    timed, micros = stages.timed, stages.micro_batches
    yield micros * max(_links_s(stages), default=0.0)
    heads, tails = _heads(stages), _tails(stages)
    for device, own in stages.on.items():
        before_s, after_s = timed.begin_s[device], timed.once_s[device]
        by_kind = [
            micros * sum(taken_s(stages, kind, s) for s in own if kind in stages.kinds(s))
            for kind in Kind
        ]
        if in_row:
            yield before_s + sum(by_kind) + after_s
            continue
        head = max(before_s, min(heads[stage] for stage in own))
        yield head + sum(by_kind) + after_s
        ends = [tails[stage] for stage in own if stage not in stages.untrained]
        yield head + by_kind[Kind.FORWARD] + by_kind[Kind.BACKWARD] + min(ends, default=0.0)


def taken_s(stages: VirtualStages, kind: Kind, stage: int) -> float:
    """Return what a job takes of its device, messages' handling too."""
    timed = stages.timed
    messages = {Kind.FORWARD: timed.values, Kind.BACKWARD: timed.gradients}.get(kind, ())
    crossing = list(filter(timed.crosses, messages))
    return (
        stages.job_s[kind][stage]
        + sum(message.sent_s for message in crossing if message.source == stage)
        + sum(message.received_s for message in crossing if message.target == stage)
    )


def _heads(stages: VirtualStages) -> list[float]:
    """Return when each stage's first Forward can begin, its messages not yet handled."""
    found = [0.0] * stages.count
    for message in sorted(stages.timed.values, key=lambda message: message.source):
        source = message.source
        end_s = found[source] + stages.job_s[Kind.FORWARD][source] + message.way_s
        found[message.target] = max(found[message.target], end_s)
    return found


def _tails(stages: VirtualStages) -> list[float]:
    """Return what comes after each stage's last Backward at least: the way back, and a W."""
    found = [0.0] * stages.count
    for stage in range(stages.count):
        later = stages.backward_weight_s[stage]
        own = [0.0 if later is None else stages.job_s[Kind.BACKWARD_WEIGHT][stage]]
        own += [
            message.way_s + stages.job_s[Kind.BACKWARD][message.target] + found[message.target]
            for message in stages.timed.gradients
            if message.source == stage
        ]
        found[stage] = max(own)
    return found
