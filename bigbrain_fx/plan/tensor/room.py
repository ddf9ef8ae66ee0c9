"""A forecast of groups -> less room for the first member, where another member lacks memory.

What runs again is chosen by the first member's ledger, and all members do as it does. So who lacks
memory is told as the first one's lack. This file knows forecasts and devices; it chooses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from bigbrain_fx.core import Cluster, Costs, Device, Forecast
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.tensor.groups import Groups

Make: TypeAlias = Callable[[Costs], tuple[Plan, Forecast, Forecast]]


def with_room_for_all(
    make: Make, costs: Costs, cluster: Cluster, groups: Groups
) -> tuple[Plan, Forecast]:
    """Return a plan in which more runs again until all members fit, or no more can.

    Args:
        make: plans all members by the room of the first ones; gives their forecast, and that of the
            first ones by which it went, which knows no messages of groups.
        costs: of the first member, with the first devices.
        cluster: with all devices.
        groups: whose first devices these are.
    """
    plan, forecast, first = make(costs)
    while True:
        less = with_less_room(costs, first, forecast, cluster, groups)
        if less.cluster == costs.cluster:
            return plan, forecast
        other, *others = make(less)
        if other.stages == plan.stages:
            return plan, forecast
        costs, plan, (forecast, first) = less, other, others


def with_less_room(
    costs: Costs, first: Forecast, forecast: Forecast, cluster: Cluster, groups: Groups
) -> Costs:
    """Return the first members' costs, with less memory where one of their groups lacks some.

    Args:
        costs: of the first member, with the first devices.
        first: of them alone.
        forecast: of all members.
        cluster: with all devices.
        groups: whose first devices these are.
    """
    used = {entry.device for entry in forecast.devices}
    first_of = {group[0]: [name for name in group if name in used] for group in groups}

    def less(device: Device) -> Device:
        members = first_of.get(device.name, [])
        lacking = max((_lacking(name, device, forecast, cluster) for name in members), default=0)
        if lacking <= 0:
            return device
        needed = needed_bytes(first.of(device.name), device)
        room = min(device.memory_bytes, needed) - lacking
        return replace(device, memory_bytes=max(1, room))

    found = tuple(map(less, costs.cluster.devices))
    return replace(costs, cluster=replace(costs.cluster, devices=found))


def _lacking(name: str, first: Device, forecast: Forecast, cluster: Cluster) -> int:
    """Return what a member lacks, in bytes of the first one, who has other parts of tensors."""
    device, entry = cluster.device[name], forecast.of(name)
    lacking = needed_bytes(entry, device) - device.memory_bytes
    parts = forecast.of(first.name).peak_bytes / max(1, entry.peak_bytes)
    return int(lacking * parts) + 1 if lacking > 0 else 0
