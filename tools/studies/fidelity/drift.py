"""A forecast for processors that are faster or slower today than when it was made.

Between a profile and a run the machine may change: a shared host's processors by 20 %. What they do
takes so much longer or shorter then; a link does not. So a forecast is simulated again with all
processor time as it is while the runs are measured, by the reference product of both moments.
Dividing the whole step by the product, as if links slowed down with processors, made forecasts of
link-bound cells 10 % too short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bigbrain_fx.core import Cluster, Costs, Device, OpCost
from bigbrain_fx.plan import Plan
from tools.studies.fidelity.steady import steady_s, step_s

Simulation = Callable[[Plan, Costs], float]


@dataclass(frozen=True)
class Ground:
    """What a forecast rests on; `simulated` says how long a step of it takes."""

    plan: Plan
    costs: Costs
    simulated: Simulation = step_s

    def forecast_s(self, slower: float = 1.0) -> float:
        """Return a step's seconds on processors that take `slower` times as long."""
        return self.simulated(self.plan, at_speed(self.costs, slower))


def grounds(
    devices: tuple[Plan, Costs], others: Mapping[str, tuple[Plan, Costs]]
) -> dict[str, Ground]:
    """Return the ground of each forecast; "steady" has that of "devices"."""
    found = {"devices": Ground(*devices), "steady": Ground(*devices, steady_s)}
    return found | {name: Ground(*ground) for name, ground in others.items()}


def at_speed(costs: Costs, slower: float) -> Costs:
    """Return costs with all that processors do taking `slower` times as long; links stay."""

    def taking(cost: OpCost) -> OpCost:
        return replace(
            cost,
            forward_s=cost.forward_s * slower,
            backward_s=cost.backward_s * slower,
            backward_input_s=cost.backward_input_s * slower,
        )

    def each(seconds: Mapping[str, float]) -> dict[str, float]:
        return {name: taken_s * slower for name, taken_s in seconds.items()}

    return replace(
        costs,
        ops={d: {op: taking(c) for op, c in ops.items()} for d, ops in costs.ops.items()},
        cluster=slower_cluster(costs.cluster, slower),
        optimizer_s_per_byte=each(costs.optimizer_s_per_byte),
        optimizer_s_per_tensor=each(costs.optimizer_s_per_tensor),
    )


def slower_cluster(cluster: Cluster, slower: float) -> Cluster:
    """Return the cluster with all that its processors do for messages taking so much longer."""

    def device(known: Device) -> Device:
        own, rate = known.overheads, known.overheads.message_bytes_per_s
        return replace(
            known,
            overheads=replace(
                own,
                message_s=own.message_s * slower,
                message_bytes_per_s=None if rate is None else rate / slower,
                instruction_s=own.instruction_s * slower,
                step_s=own.step_s * slower,
            ),
        )

    return replace(cluster, devices=tuple(map(device, cluster.devices)))
