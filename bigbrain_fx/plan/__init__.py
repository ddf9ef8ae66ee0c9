"""Plan: every decision that falls before a process starts; and the search for a good plan.

The package knows graph, cluster, plug-ins, cut, schedules and the simulator. The package knows
nothing of torch, of emitted text, or of how a plan is run. `plan.json` is the class `Plan`, field
by field.

    Options ──make_plan──▶ one plan for each number of micro-batches, or Judge ⇄ search ──▶ Plan
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door

if TYPE_CHECKING:
    from bigbrain_fx.plan.availability import (
        OverTime as OverTime,
        Stretch as Stretch,
        over_time as over_time,
    )
    from bigbrain_fx.plan.by_hand import (
        read_pins as read_pins,
        require_placeable as require_placeable,
        with_frozen as with_frozen,
        write_placement as write_placement,
    )
    from bigbrain_fx.plan.compatibility import (
        RULES as RULES,
        Request as Request,
        require_compatible as require_compatible,
    )
    from bigbrain_fx.plan.cut import (
        holders as holders,
        live_ops as live_ops,
        roots as roots,
        updating as updating,
    )
    from bigbrain_fx.plan.explanation import (
        Explanation as Explanation,
        compared_text as compared_text,
        explain as explain,
        measured_text as measured_text,
        size_text as size_text,
    )
    from bigbrain_fx.plan.fastest import telling as telling
    from bigbrain_fx.plan.features import (
        plain_params as plain_params,
        require_float as require_float,
        require_no_overlap as require_no_overlap,
        widening as widening,
    )
    from bigbrain_fx.plan.lightening import room_of_all as room_of_all
    from bigbrain_fx.plan.making import (
        costs_of as costs_of,
        make_plan as make_plan,
        measured_share as measured_share,
        plan_placed as plan_placed,
        timeline as timeline,
    )
    from bigbrain_fx.plan.measured import (
        MeasuredRun as MeasuredRun,
        Spread as Spread,
        run_trace as run_trace,
        spread as spread,
        typical_step as typical_step,
    )
    from bigbrain_fx.plan.nouns import (
        AUTO as AUTO,
        Options as Options,
        Plan as Plan,
        Source as Source,
        to_json as to_json,
    )
    from bigbrain_fx.plan.offloading import read_offload as read_offload
    from bigbrain_fx.plan.packing import (
        PackedJob as PackedJob,
        Packing as Packing,
        PackJob as PackJob,
        pack as pack,
        part_of as part_of,
    )
    from bigbrain_fx.plan.plan_report import report as report
    from bigbrain_fx.plan.prices import (
        money as money,
        per_step as per_step,
        require_countable as require_countable,
        steps_for as steps_for,
        tokens as tokens,
        unit as unit,
    )
    from bigbrain_fx.plan.reading import (
        from_json as from_json,
        read_plan as read_plan,
        write_plan as write_plan,
    )
    from bigbrain_fx.plan.recompute import (
        LAYERS as LAYERS,
        read_defer as read_defer,
        read_recompute as read_recompute,
    )
    from bigbrain_fx.plan.recovery import (
        Assumptions as Assumptions,
        Recovery as Recovery,
        choose as choose,
        closed_form as closed_form,
        restart_all as restart_all,
    )
    from bigbrain_fx.plan.remedy import plan_or_remedy as plan_or_remedy
    from bigbrain_fx.plan.replanning import (
        place_like as place_like,
        replan as replan,
        with_placement as with_placement,
    )
    from bigbrain_fx.plan.replica_cut import piece_messages as piece_messages
    from bigbrain_fx.plan.replica_text import left_out_text as left_out_text
    from bigbrain_fx.plan.schedule import (
        SCHEDULES as SCHEDULES,
        begun_at as begun_at,
        early_takes as early_takes,
        messages as messages,
        traits as traits,
    )
    from bigbrain_fx.plan.search import (
        Candidate as Candidate,
        Compared as Compared,
        Search as Search,
    )
    from bigbrain_fx.plan.search.nouns import Goals as Goals, Offer as Offer
    from bigbrain_fx.plan.shard import (
        alone as alone,
        axes as axes,
        chosen_axes as chosen_axes,
        of_layers as of_layers,
        priced_axes as priced_axes,
        ruleless as ruleless,
        sharded as sharded,
        sound_axes as sound_axes,
        trials as trials,
    )
    from bigbrain_fx.plan.simulate import chrome_trace as chrome_trace
    from bigbrain_fx.plan.sums_in_half import (
        half_sums as half_sums,
        half_sums_text as half_sums_text,
        half_values as half_values,
        in_turn_text as in_turn_text,
        may_be_ungiven as may_be_ungiven,
        stage_format as stage_format,
        turned_text as turned_text,
        turned_weights as turned_weights,
    )
    from bigbrain_fx.plan.tensor import (
        PartChannel as PartChannel,
        answering as answering,
        divisible_axes as divisible_axes,
        group_warnings as group_warnings,
        norm_specs as norm_specs,
        part_channels as part_channels,
        require_no_groups as require_no_groups,
        tensor_text as tensor_text,
        wanted_axes as wanted_axes,
    )
    from bigbrain_fx.plan.wide_on_gpus import require_sent_types as require_sent_types
else:
    __getattr__ = door(__name__)
