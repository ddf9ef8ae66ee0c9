"""Programs under the bytes that devices have: an order that is searched is told its room.

What a device takes beside activations is seen from a step with one micro-batch in flight, whose
ledger is exact; the room is what that leaves. Where a plan still does not fit, the room was told
too large (messages that have not left, workspace), and the order is made again with less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Forecast, Graph, Program, Stages
from bigbrain_fx.plan.memory_check import tensor_bytes, with_data
from bigbrain_fx.plan.schedule import (
    StageCosts,
    build,
    require_sound,
    traits,
    virtual_stages,
)
from bigbrain_fx.plan.simulate import simulate

TRIES = 4
LESS = 0.9
"""Of its room is left for the next try, where a device lacks memory."""


@dataclass(frozen=True)
class Step:
    """What is to be ordered: stages of a graph for so many micro-batches.

    `is_trial`: one of many, not checked. If it is stuck the simulator says so, and who answers with
    it checks it.
    """

    graph: Graph
    stages: Stages
    micro_batches: int
    costs: StageCosts
    trained: frozenset[int]
    cluster: Cluster
    is_trial: bool = False

    def forecast(self, programs: tuple[Program, ...]) -> Forecast:
        """Simulate programs, and count the batch."""
        found = simulate(programs, self.stages, self.costs, timeline=False)
        return with_data(found, self.graph, self.stages, self.micro_batches, self.cluster)

    def programs(
        self,
        schedule: str,
        in_flight: tuple[int, ...] | None = None,
        room: Mapping[str, float] | None = None,
    ) -> tuple[Program, ...]:
        """Order, and check unless it is a trial."""
        given = self.stages, self.micro_batches, self.costs, self.trained
        found = build(schedule, *given, in_flight, room)
        if not self.is_trial:
            require_sound(found, self.stages)
        return found


def scheduled(
    step: Step, schedule: str, in_flight: tuple[int, ...] | None
) -> tuple[tuple[Program, ...], Forecast]:
    """Return the programs and their forecast; whether they fit is for the caller to say."""
    if traits(schedule).searches:
        return _searched(step, schedule, in_flight)[:2]
    programs = step.programs(schedule, in_flight)
    return programs, step.forecast(programs)


def room_of(step: Step, schedule: str) -> Mapping[str, float]:
    """Return the room under which a searched order was found."""
    return _searched(step, schedule, None)[2]


def _searched(
    step: Step, schedule: str, in_flight: tuple[int, ...] | None
) -> tuple[tuple[Program, ...], Forecast, Mapping[str, float]]:
    least, less = _claimed(step), room_bytes(step)
    for _ in range(TRIES):
        room = less
        programs = step.programs(schedule, in_flight, room)
        forecast = step.forecast(programs)
        short = [e.device for e in forecast.devices if e.peak_bytes > _most(step, e.device)]
        less = {d: max(least[d], room[d] * LESS) if d in short else room[d] for d in room}
        if less == room:
            break
    return programs, forecast, room


def room_bytes(step: Step) -> Mapping[str, float]:
    """Return what each device has for what is saved and what waits; enough for one micro-batch."""
    devices, claimed = step.stages.devices, _claimed(step)
    one = step.forecast(step.programs("list", (1,) * len(devices)))
    # with one micro-batch in flight all of it is there at once: what else is, stays
    return {
        name: max(claimed[name], _most(step, name) - (one.of(name).peak_bytes - claimed[name]))
        for name in devices
    }


def _claimed(step: Step) -> dict[str, float]:
    """Return what one micro-batch takes of each device's room."""
    given = virtual_stages(step.stages, step.micro_batches, step.costs, step.trained)
    return {
        name: sum(given.claim_bytes(stage) for stage in given.on[place])
        for place, name in enumerate(step.stages.devices)
    }


def _most(step: Step, device: str) -> float:
    return tensor_bytes(step.cluster.device[device])
