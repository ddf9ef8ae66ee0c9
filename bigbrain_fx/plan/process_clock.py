"""What planners see of a GPU that waits for the process which starts its ops: that process's clock.

    GPU      |f |   |f |   |f |        each op ends before the next is started:
    process  |f    |f     |f    |      what a stage takes is what its process takes

Planners know one clock of a device. On one that its process holds up over the whole model, the
process's is the one to divide. It knows costs; it knows no graph and no placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigbrain_fx.core import Costs, OpCost

_Table = Mapping[str, OpCost]


def held_up(costs: Costs) -> Costs | None:
    """Return costs in which GPUs that wait for their processes take those's time; None: none does.

    Args:
        costs: of a graph's ops on every device.
    """
    alone = None if costs.alone is None else held_up(costs.alone)
    known: dict[int, _Table] = {}  # devices of one kind have one table: keep it so
    for table in costs.ops.values():
        if id(table) not in known:
            known[id(table)] = _by_process(table) if _waits(table) else table
    if alone is None and not any(map(_waits, costs.ops.values())):
        return None
    ops = {device: known[id(table)] for device, table in costs.ops.items()}
    return replace(costs, ops=ops, alone=alone or costs.alone)


def _waits(table: _Table) -> bool:
    """Whether starting all ops takes longer than computing them."""
    started_s = sum(cost.host_forward_s + cost.host_backward_s for cost in table.values())
    return started_s > sum(cost.forward_s + cost.backward_s for cost in table.values())


def _by_process(table: _Table) -> _Table:
    return {name: _started(cost) for name, cost in table.items()}


def _started(cost: OpCost) -> OpCost:
    """Return an op that takes what starting it takes; its gradients of inputs in proportion."""
    share = cost.backward_input_s / cost.backward_s if cost.backward_s else 0.0
    return replace(
        cost,
        forward_s=cost.host_forward_s,
        backward_s=cost.host_backward_s,
        backward_input_s=share * cost.host_backward_s,
    )
