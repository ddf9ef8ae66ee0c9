"""Plan: everything that is decided before a process starts; and the search for a good one.

This room knows graph, cluster, plug-ins, cut, schedules and the simulator. It knows nothing of
torch, of emitted text, or of how a plan is run. `plan.json` is the noun `Plan`, field by field.

    Options ──make_plan──▶ one plan for each number of micro-batches, or Judge ⇄ search ──▶ Plan
"""

from __future__ import annotations

from bigbrain_fx.plan.by_hand import (
    read_pins,
    read_placement,
    require_placeable,
    write_placement,
)
from bigbrain_fx.plan.cut import holders, live_ops, norms_spec, owners, roots, updating
from bigbrain_fx.plan.deferring import LAYERS, defer_text, read_defer
from bigbrain_fx.plan.explain import Explanation, compared_text, explain, measured_text, size_text
from bigbrain_fx.plan.half_sums import half_sums, half_sums_text
from bigbrain_fx.plan.making import (
    costs_of,
    make_plan,
    measured_share,
    plan_placed,
    replan,
    timeline,
    with_placement,
)
from bigbrain_fx.plan.measured import MeasuredRun, MeasuredStep, run_trace, typical_step
from bigbrain_fx.plan.nouns import AUTO, FORMAT, Options, Plan, Source, micro_text, to_json
from bigbrain_fx.plan.offloading import offload_text, read_offload, require_stores
from bigbrain_fx.plan.packing import PackedJob, Packing, PackJob, pack, part_of
from bigbrain_fx.plan.reading import from_json, read_plan, write_plan
from bigbrain_fx.plan.recompute import read_recompute, recompute_text
from bigbrain_fx.plan.recovery import (
    Assumptions,
    FailureTrial,
    Recovery,
    choose,
    closed_form,
    restart_all,
    tried,
)
from bigbrain_fx.plan.remedy import plan_or_remedy
from bigbrain_fx.plan.replica_text import replicas_text
from bigbrain_fx.plan.report import report
from bigbrain_fx.plan.reuse import place_like
from bigbrain_fx.plan.schedule import SCHEDULES, SEARCHED, SPLIT, begun_at, early_takes, messages
from bigbrain_fx.plan.search import Candidate, Compared, Search
from bigbrain_fx.plan.shard import (
    axes,
    chosen_axes,
    exchanges,
    priced_axes,
    ruleless,
    sharded,
    sound_axes,
    trials,
)
from bigbrain_fx.plan.simulate import chrome_trace
from bigbrain_fx.plan.spread import Spread, spread
from bigbrain_fx.plan.tensor import (
    PartChannel,
    answering,
    norm_specs,
    part_channels,
    require_no_groups,
    require_possible,
    tensor_text,
    wanted_axes,
    wants_tensor,
)

__all__ = [
    "AUTO",
    "FORMAT",
    "LAYERS",
    "SCHEDULES",
    "SEARCHED",
    "SPLIT",
    "Assumptions",
    "Candidate",
    "Compared",
    "Explanation",
    "FailureTrial",
    "MeasuredRun",
    "MeasuredStep",
    "Options",
    "PackJob",
    "PackedJob",
    "Packing",
    "PartChannel",
    "Plan",
    "Recovery",
    "Search",
    "Source",
    "Spread",
    "answering",
    "axes",
    "begun_at",
    "choose",
    "chosen_axes",
    "chrome_trace",
    "closed_form",
    "compared_text",
    "costs_of",
    "defer_text",
    "early_takes",
    "exchanges",
    "explain",
    "from_json",
    "half_sums",
    "half_sums_text",
    "holders",
    "live_ops",
    "make_plan",
    "measured_share",
    "measured_text",
    "messages",
    "micro_text",
    "norm_specs",
    "norms_spec",
    "offload_text",
    "owners",
    "pack",
    "part_channels",
    "part_of",
    "place_like",
    "plan_or_remedy",
    "plan_placed",
    "priced_axes",
    "read_defer",
    "read_offload",
    "read_pins",
    "read_placement",
    "read_plan",
    "read_recompute",
    "recompute_text",
    "replan",
    "replicas_text",
    "report",
    "require_no_groups",
    "require_placeable",
    "require_possible",
    "require_stores",
    "restart_all",
    "roots",
    "ruleless",
    "run_trace",
    "sharded",
    "size_text",
    "sound_axes",
    "spread",
    "tensor_text",
    "timeline",
    "to_json",
    "trials",
    "tried",
    "typical_step",
    "updating",
    "wanted_axes",
    "wants_tensor",
    "with_placement",
    "write_placement",
    "write_plan",
]
