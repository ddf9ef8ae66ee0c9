"""Stages -> what a step takes: the schedules of the project, on arrays, and the kernel's clock.

Which schedule: 1F1B for one stage per device, the list scheduler for anything else, and micro-batch
after micro-batch where nothing is trained. Messages do not wait for others on a shared NIC;
otherwise the figure is that of `bigbrain_fx.plan.simulate`, which a test holds it to.

Source: Graham 1969 (list scheduling), Narayanan et al., SOSP'19 (1F1B).
"""

from __future__ import annotations

from bigbrain_fx.planning import (
    InFlight,
    Play,
    TimedStages,
    alternating,
    forwards,
    in_flight_to_fill,
    played_s,
)


def step_s(stages: TimedStages, micro_batches: int, in_flight: InFlight, trains: bool) -> float:
    """Return the seconds that one step takes."""
    if not stages.device_of:
        return 0.0
    if not trains:
        orders = forwards(stages, micro_batches)
    elif stages.is_chain:
        orders = alternating(stages, micro_batches, _warm_ups(stages, in_flight))
    else:
        orders = Play(stages, micro_batches, _limits(stages, micro_batches, in_flight)).orders()
    return played_s(stages, orders, trains)


def _warm_ups(stages: TimedStages, in_flight: InFlight) -> list[int]:
    count = len(stages.device_of)
    if in_flight is None:
        return list(range(count, 0, -1))
    numbers = (in_flight,) if isinstance(in_flight, int) else in_flight
    return [numbers[min(stage, len(numbers) - 1)] for stage in range(count)]


def _limits(stages: TimedStages, micro_batches: int, in_flight: InFlight) -> dict[int, int]:
    """Return how many micro-batches may be on each device: as told, or enough to fill it."""
    devices = stages.devices
    if in_flight is not None:
        numbers = (in_flight,) if isinstance(in_flight, int) else in_flight
        return {d: numbers[min(i, len(numbers) - 1)] for i, d in enumerate(devices)}
    return dict(zip(devices, in_flight_to_fill(stages, micro_batches), strict=True))
