"""The planning kernel, shared by the search and by plug-ins; plug-ins may import it.

The package imports core and errors, and numpy when arrays are first used. The package imports
neither torch nor plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door
from bigbrain_fx.planning.device_kinds import (
    Crowds as Crowds,
    bytes_per_s as bytes_per_s,
    canonical as canonical,
    crowded as crowded,
    interchangeable as interchangeable,
    looked_at as looked_at,
    nameless as nameless,
    near_first as near_first,
    of_how_many as of_how_many,
)
from bigbrain_fx.planning.device_orders import device_orders as device_orders
from bigbrain_fx.planning.given import (
    Given as Given,
    asked as asked,
    is_own as is_own,
    label as label,
)
from bigbrain_fx.planning.registry import (
    CHOSEN_ELSEWHERE as CHOSEN_ELSEWHERE,
    Choice as Choice,
    Plugin as Plugin,
    estimator as estimator,
    names as names,
    options_of as options_of,
    partitioner as partitioner,
    preset as preset,
    read_settings as read_settings,
    registered as registered,
    require_ready as require_ready,
    settable as settable,
)
from bigbrain_fx.planning.units import (
    AHEAD as AHEAD,
    GraphMemo as GraphMemo,
    concrete as concrete,
    is_size as is_size,
    live_ops as live_ops,
    saves_of as saves_of,
    unit_orders as unit_orders,
    units as units,
)

if TYPE_CHECKING:
    from bigbrain_fx.planning.chain import (
        Line as Line,
        Split as Split,
    )
    from bigbrain_fx.planning.clock import (
        JobOf as JobOf,
        Kind as Kind,
        Message as Message,
        OrderClock as OrderClock,
        OrdersOf as OrdersOf,
        TimedStages as TimedStages,
        VirtualStages as VirtualStages,
        loop_line as loop_line,
        v_line as v_line,
    )
    from bigbrain_fx.planning.cutter import (
        BestFirst as BestFirst,
        Cutter as Cutter,
        least_busy_s as least_busy_s,
        nearest as nearest,
    )
    from bigbrain_fx.planning.known_orders import (
        Ranked as Ranked,
        dualpipe_v as dualpipe_v,
        fills_both_ways as fills_both_ways,
        interleaved as interleaved,
        makes_rounds as makes_rounds,
        one_f_one_b as one_f_one_b,
        zb_h1 as zb_h1,
        zb_v as zb_v,
    )
    from bigbrain_fx.planning.listing import (
        Taste as Taste,
        in_flight_to_fill as in_flight_to_fill,
        list_orders as list_orders,
    )
    from bigbrain_fx.planning.pace import (
        Found as Found,
        chain_of as chain_of,
        falling as falling,
        in_flights as in_flights,
        polished as polished,
        room_of as room_of,
        shifted_cuts as shifted_cuts,
        step_s as step_s,
    )
    from bigbrain_fx.planning.piece_memory import (
        InFlight as InFlight,
        PieceMemory as PieceMemory,
        Setting as Setting,
        in_flight_at as in_flight_at,
    )
    from bigbrain_fx.planning.stages import (
        Cuts as Cuts,
        neighbours as neighbours,
        searched_cuts as searched_cuts,
        shared_cuts as shared_cuts,
        stage_lists as stage_lists,
    )
    from bigbrain_fx.planning.synthesis import (
        Synthesis as Synthesis,
        bound_s as bound_s,
        synthesise as synthesise,
    )
    from bigbrain_fx.planning.unit_work import (
        Array as Array,
        Work as Work,
        whole_layers as whole_layers,
        work as work,
    )
else:
    __getattr__ = door(__name__)
