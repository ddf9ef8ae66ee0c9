"""Stages x micro-batches -> Programs: who computes what and when; and a checker for programs.

All schedules are in `SCHEDULES`; each decides only the order of forwards and backwards,
and `messages` puts the messages around them. `check` returns named faults, `require_sound` raises
them. This package imports no torch and knows nothing of how programs are written as text or run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from bigbrain_fx.core import Backward, BackwardWeight, Compute, Program, Stages
from bigbrain_fx.errors import InputError, ScheduleError
from bigbrain_fx.plan.schedule.again import (
    Choice as Choice,
    choices as choices,
    may_run_again as may_run_again,
    with_saved_in_stores as with_saved_in_stores,
)
from bigbrain_fx.plan.schedule.check import check as check, require_sound as require_sound
from bigbrain_fx.plan.schedule.costs import (
    StageCosts as StageCosts,
    StageTimes as StageTimes,
    stage_costs as stage_costs,
)
from bigbrain_fx.plan.schedule.faults import (
    BackwardBeforeForward as BackwardBeforeForward,
    Deadlock as Deadlock,
    DuplicateMessage as DuplicateMessage,
    Finding as Finding,
    MicroOrder as MicroOrder,
    Misplaced as Misplaced,
    MissingCompute as MissingCompute,
    MissingInput as MissingInput,
    NothingDeferred as NothingDeferred,
    OutOfMemory as OutOfMemory,
    UnmatchedRecv as UnmatchedRecv,
    UnmatchedSend as UnmatchedSend,
    WeightBeforeBackward as WeightBeforeBackward,
    table as table,
)
from bigbrain_fx.plan.schedule.gathers import (
    begun_at as begun_at,
    early_takes as early_takes,
    nodes as nodes,
    parts as parts,
)
from bigbrain_fx.plan.schedule.memory import (
    Held as Held,
    fixed_bytes as fixed_bytes,
    held as held,
    optimizes as optimizes,
)
from bigbrain_fx.plan.schedule.messages import (
    Orders,
    messages as messages,
    order_replicas,
    with_messages,
)
from bigbrain_fx.plan.schedule.orders import (
    DualPipeV as DualPipeV,
    ForwardOnly as ForwardOnly,
    Gems as Gems,
    GPipe as GPipe,
    Interleaved as Interleaved,
    ListScheduler as ListScheduler,
    OneForwardOneBackward as OneForwardOneBackward,
    Synthesised as Synthesised,
    ZeroBubbleH1 as ZeroBubbleH1,
    ZeroBubbleV as ZeroBubbleV,
    goes_in_row as goes_in_row,
)
from bigbrain_fx.plan.schedule.stage_part import (
    Part as Part,
    library_bytes as library_bytes,
    rounded as rounded,
)
from bigbrain_fx.plan.schedule.virtual import (
    Fold as Fold,
    Schedule as Schedule,
    virtual_stages as virtual_stages,
)

InFlight: TypeAlias = tuple[int, ...] | None


SCHEDULES: Mapping[str, type[Schedule]] = {
    GPipe.name: GPipe,
    OneForwardOneBackward.name: OneForwardOneBackward,
    ListScheduler.name: ListScheduler,
    ZeroBubbleH1.name: ZeroBubbleH1,
    Interleaved.name: Interleaved,
    ZeroBubbleV.name: ZeroBubbleV,
    DualPipeV.name: DualPipeV,
    Synthesised.name: Synthesised,
    Gems.name: Gems,
    ForwardOnly.name: ForwardOnly,
}
"""Every schedule by its name; each takes `in_flight`. All but "forward" train."""


def traits(name: str | None) -> type[Schedule]:
    """Return what a schedule of this name is; of none, or an unknown one, nothing special."""
    return SCHEDULES.get(name or "", Schedule)


def build(
    name: str,
    stages: Stages,
    micro_batches: int,
    costs: StageCosts,
    trained: frozenset[int],
    in_flight: InFlight = None,
    room_bytes: Mapping[str, float] | None = None,
) -> tuple[Program, ...]:
    """Schedule one step.

    Args:
        name: one of `SCHEDULES`.
        stages: the cut graph; `gpipe`, `1f1b` and `zb-h1` need one stage per device, and
            `gems` one of each of two replicas.
        micro_batches: how many a step has, at least 1.
        costs: of the same stages; only the list scheduler looks at them.
        trained: indices of the stages that have a Backward. Empty for inference: there are only
            forwards, no gradient, tied or norm messages and no OptimizerStep.
        in_flight: the most micro-batches on each device at once, in the order of `stages.devices`.
        room_bytes: by device, for what is saved and what waits; for one that searches.

    Returns:
        One program per device, in the order of `stages.devices`.

    Raises:
        InputError: no such schedule, it cannot run these stages, or a number is out of range.
        ScheduleError: a gradient edge starts or ends at a stage without a Backward.
    """
    if name not in SCHEDULES:
        raise InputError(
            f"there is no schedule '{name}'",
            code="BX1302",
            help=f"choose one of {', '.join(sorted(SCHEDULES))}",
        )
    if micro_batches < 1:
        raise InputError(f"a step needs at least 1 micro-batch, not {micro_batches}", code="BX1303")
    _require_in_flight(name, stages, in_flight)
    _require_gradients_between(stages, trained)

    def order(
        part: Stages, count: int, own: StageCosts, has: frozenset[int], most: InFlight
    ) -> Orders:
        searches = Synthesised(most, room_bytes) if traits(name).searches else None
        return (searches or SCHEDULES[name](most)).order(part, count, own, has)

    if not stages.micros or traits(name).joins:
        orders = order(stages, micro_batches, costs, trained, in_flight)
        return with_messages(stages, with_weights(stages, orders), trained)

    orders = order_replicas(order, stages, costs, trained, in_flight)
    return with_messages(stages, with_weights(stages, orders), trained)


def with_weights(stages: Stages, orders: Orders) -> Orders:
    """Put each BackwardWeight that an order leaves out right after its Backward.

    Deferred gradients are then held for a short time; gradients of inputs leave before those of
    weights are made.
    """
    return {device: tuple(_weighted(stages, order)) for device, order in orders.items()}


def _weighted(stages: Stages, order: tuple[Compute, ...]) -> Iterator[Compute]:
    placed = {compute.stage for compute in order if isinstance(compute, BackwardWeight)}
    for compute in order:
        yield compute
        left_out = compute.stage not in placed and stages.stages[compute.stage].deferred
        if isinstance(compute, Backward) and left_out:
            yield BackwardWeight(compute.stage, compute.micro)


def _require_in_flight(name: str, stages: Stages, in_flight: InFlight) -> None:
    if in_flight is None:
        return
    if len(in_flight) != len(stages.devices) or min(in_flight) < 1:
        raise InputError(
            f"in_flight needs one number of at least 1 for each of {len(stages.devices)} devices, "
            f"but is {list(in_flight)}",
            code="BX1304",
            help=f"the devices are {', '.join(stages.devices)}, in this order",
        )
    if not SCHEDULES[name].takes_in_flight:
        raise InputError(
            f"schedule '{name}' says itself how many micro-batches are in flight, and takes no "
            "in_flight",
            code="BX1309",
            help="use --schedule list, or leave in_flight out",
        )


def _require_gradients_between(stages: Stages, trained: frozenset[int]) -> None:
    """Raise when a gradient would come from, or go to, a stage that has no Backward."""
    for edge in stages.edges if trained else ():
        if edge.kind == "gradient" and not trained.issuperset((edge.source, edge.target)):
            without = edge.source if edge.source not in trained else edge.target
            raise ScheduleError(
                f"edge '{edge}' carries a gradient, but stage {without} has no Backward",
                code="BX1305",
                notes=(f"stages with a Backward: {sorted(trained)}",),
                help="cut gradient edges only between stages that are trained",
            )
