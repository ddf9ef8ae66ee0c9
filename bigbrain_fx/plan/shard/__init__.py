"""Shards inside an op: graph -> axes -> one graph for each rank of a tensor group.

`axes` finds what can be split together by following every dimension through every op. `sharded`
writes the ranks' graphs, with what they exchange as ops. `alone` makes one that a rank can run for
itself, to be timed. This package knows ops and shares, and nothing of devices, schedules or torch:
`frontend` tries rules, and runs `trials`.
"""

from __future__ import annotations

from bigbrain_fx.plan.shard.find import family as family, ruleless as ruleless
from bigbrain_fx.plan.shard.parted import (
    again_name as again_name,
    divisible as divisible,
    own_name as own_name,
    part_dim as part_dim,
    with_parts as with_parts,
)
from bigbrain_fx.plan.shard.pieces import (
    axes as axes,
    between as between,
    chosen_axes as chosen_axes,
    of_layers as of_layers,
    priced_axes as priced_axes,
    table_axes as table_axes,
)
from bigbrain_fx.plan.shard.rewrite import lengths as lengths, sharded as sharded
from bigbrain_fx.plan.shard.trials import (
    alone as alone,
    sound_axes as sound_axes,
    trials as trials,
    without as without,
)
