"""The direction of each replica's chain, where links differ: which stages add up gradients.

    links a-c slow, b-c quick; weights in the first stage    a -> b | c -> d   ==>   b -> a | c -> d

A replica alone takes as long in both directions. All together do not: stages with the same weights
send each other gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.replicas.as_another import is_plain
from bigbrain_fx.planning import nameless

SAME = 1e-9
"""Of a step: no difference."""


def with_directions(alone: Sequence[Plan], join: Callable[[Sequence[Plan]], Plan]) -> Plan:
    """Join replicas, and reverse one chain after another while all together are faster.

    Args:
        alone: a plan of each replica.
        join: plans all together.

    Raises:
        BigBrainError: as they are, they cannot be joined.
    """
    best, is_better = join(alone), True
    while is_better:
        is_better = False
        for number, plan in enumerate(alone):
            turned = reversed_chain(plan)
            if turned is None:
                continue
            tried = [*alone[:number], turned, *alone[number + 1 :]]
            with suppress(NoPlanError, InputError):
                found = join(tried)
                if found.forecast.step_s < best.forecast.step_s * (1 - SAME):
                    best, alone, is_better = found, tried, True
    return best


def reversed_chain(plan: Plan) -> Plan | None:
    """Return a replica with its chain along the same devices, the last one's first.

    None where devices differ, or some device has no stage or several.
    """
    stages, devices = plan.stages, plan.stages.devices
    kinds = {nameless(plan.cluster.device[name]) for name in devices}
    if len(devices) == 1 or not stages.is_chain or len(kinds) > 1 or not is_plain(plan):
        return None
    to = dict(zip(devices, reversed(devices), strict=True))
    homes = {op: to.get(device, device) for op, device in plan.placement.device_of.items()}
    return replace(plan, placement=replace(plan.placement, device_of=homes))
