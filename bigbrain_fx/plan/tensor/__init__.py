"""Tensor parallelism: groups of devices compute each stage together, along axes of `plan.shard`.

    cluster ──grouped──▶ groups; graph, axes ──sharded──▶ a graph for each rank
    one rank of each group is planned as a pipeline of its own ──columns──▶ all of them

This package knows what goes together and what does not; how a graph is divided is `plan.shard`'s.
"""

from __future__ import annotations

from bigbrain_fx.plan.tensor.asked import (
    axes_of_replicas as axes_of_replicas,
    named_axes as named_axes,
    require_grid as require_grid,
    require_no_groups as require_no_groups,
    tensor_is_open as tensor_is_open,
    wanted_axes as wanted_axes,
    with_tables as with_tables,
)
from bigbrain_fx.plan.tensor.choices import (
    AxisChoice as AxisChoice,
    axis_choices as axis_choices,
    cheaper_whole as cheaper_whole,
    group_warnings as group_warnings,
    grouped_plan as grouped_plan,
    tensor_text as tensor_text,
)
from bigbrain_fx.plan.tensor.costs import Prices as Prices
from bigbrain_fx.plan.tensor.crossings import answering as answering, norm_specs as norm_specs
from bigbrain_fx.plan.tensor.divisible import (
    DivisibleAxis as DivisibleAxis,
    divisible_axes as divisible_axes,
)
from bigbrain_fx.plan.tensor.make import (
    GroupMaker as GroupMaker,
    group_maker as group_maker,
    plan_tensor as plan_tensor,
    tensor_costs as tensor_costs,
    tensor_forecast as tensor_forecast,
)
from bigbrain_fx.plan.tensor.messages import (
    PartChannel as PartChannel,
    part_channels as part_channels,
)
