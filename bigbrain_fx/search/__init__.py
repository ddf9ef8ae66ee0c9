"""Partitioner x devices x schedule x micro-batches: the best plan by simulation, and a bound.

`search` asks a judge (the plan room, with the simulator) what each trial takes. It knows units,
costs and memory; it knows nothing of how a plan is cut, of text, torch or processes.

    units ──work──▶ lines ──dynamic program──▶ splits ──pace──▶ shortlist ──judge──▶ best
                                          partitioners, moves op by op ──judge──┘
"""

from bigbrain_fx.search.find import search
from bigbrain_fx.search.nouns import (
    EFFORTS,
    MEMORY_SLACK,
    OBJECTIVES,
    Ask,
    Bound,
    Candidate,
    Effort,
    Objective,
    Score,
    Search,
    Trial,
)

__all__ = [
    "EFFORTS",
    "MEMORY_SLACK",
    "OBJECTIVES",
    "Ask",
    "Bound",
    "Candidate",
    "Effort",
    "Objective",
    "Score",
    "Search",
    "Trial",
    "search",
]
