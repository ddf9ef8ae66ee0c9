"""Tensor parallelism: groups of devices compute each stage together, along axes of `plan.shard`.

    cluster ──grouped──▶ groups; graph, axes ──sharded──▶ a graph for each member
    one member of each group is planned as a pipeline of its own ──columns──▶ all of them

This room knows what goes together and what does not; how a graph is divided is `plan.shard`'s.
"""

from __future__ import annotations

from bigbrain_fx.plan.tensor.asked import (
    require_no_groups,
    require_possible,
    wanted_axes,
    wants_tensor,
)
from bigbrain_fx.plan.tensor.make import plan_tensor, tensor_costs, tensor_forecast
from bigbrain_fx.plan.tensor.messages import PartChannel, part_channels
from bigbrain_fx.plan.tensor.norms import answering, norm_specs
from bigbrain_fx.plan.tensor.text import tensor_text

__all__ = [
    "PartChannel",
    "answering",
    "norm_specs",
    "part_channels",
    "plan_tensor",
    "require_no_groups",
    "require_possible",
    "tensor_costs",
    "tensor_forecast",
    "tensor_text",
    "wanted_axes",
    "wants_tensor",
]
