"""Partitioner x devices x schedule x micro-batches: the best plan by simulation, and a bound.

`search` asks a judge (package plan, with the simulator) for the step of each trial. The search
knows units, costs and memory; it knows nothing of how a plan is cut, of text, torch or processes.

    units ──work──▶ lines ──dynamic program──▶ splits ──pace──▶ shortlist ──judge──▶ best
                                                           naive ──judge──┘
"""

from __future__ import annotations

from bigbrain_fx.plan.search.nouns import (
    MANY_DEVICES as MANY_DEVICES,
    MEMORY_SLACK as MEMORY_SLACK,
    MOST_OTHERS as MOST_OTHERS,
    Ask as Ask,
    Candidate as Candidate,
    Compared as Compared,
    CutAt as CutAt,
    Effort as Effort,
    Objective as Objective,
    Score as Score,
    Search as Search,
    Trial as Trial,
    most_micro_batches as most_micro_batches,
    numbers as numbers,
)


def search(ask: Ask) -> tuple[Trial, Search]:
    """Find the best plan for an objective, as the simulator judges it.

    Returns:
        What to do, and what was tried.

    Raises:
        NoPlanError: nothing fits; with the arithmetic of the first that did not.
        InputError: no such objective or effort.
    """
    from bigbrain_fx.plan.search.pipeline_search import (
        search_pipelines,  # numpy is loaded by who searches, and by nobody else
    )

    return search_pipelines(ask)
