"""Tensor parallelism: groups of devices compute each stage together, along axes of `plan.shard`.

    cluster ──grouped──▶ groups; graph, axes ──sharded──▶ a graph for each member
    one member of each group is planned as a pipeline of its own ──columns──▶ all of them

This room knows what goes together and what does not; how a graph is divided is `plan.shard`'s.
"""

from __future__ import annotations

from bigbrain_fx.plan.tensor.asked import (
    not_yet,
    require_no_groups,
    require_possible,
    tensor_is_open,
    wanted_axes,
    wants_tensor,
)
from bigbrain_fx.plan.tensor.choices import AxisChoice, axis_choices
from bigbrain_fx.plan.tensor.make import (
    GroupMaker,
    plan_tensor,
    tensor_costs,
    tensor_forecast,
)
from bigbrain_fx.plan.tensor.messages import PartChannel, part_channels
from bigbrain_fx.plan.tensor.norms import answering, norm_specs
from bigbrain_fx.plan.tensor.text import tensor_text
from bigbrain_fx.plan.tensor.tries import GroupTry, tensor_tries

__all__ = [
    "AxisChoice",
    "GroupMaker",
    "GroupTry",
    "PartChannel",
    "answering",
    "axis_choices",
    "norm_specs",
    "not_yet",
    "part_channels",
    "plan_tensor",
    "require_no_groups",
    "require_possible",
    "tensor_costs",
    "tensor_forecast",
    "tensor_is_open",
    "tensor_text",
    "tensor_tries",
    "wanted_axes",
    "wants_tensor",
]
