"""Where the outputs of a model without a loss are collected.

The device of the last stage has them all: it makes them, receives them for a stage of its own, or
gets them sent for nothing else (`cut.gathered`). This file knows stages; it writes no text.
"""

from __future__ import annotations

from bigbrain_fx.core import Graph, Stage, Stages


def collected(graph: Graph, stages: Stages, stage: Stage) -> list[tuple[str, str]]:
    """Return (name, value) of the outputs that are collected when a stage has run.

    Each is collected once: at the first stage of the device that has it; what only comes to be
    collected, or is an entry of the batch, at the last.
    """
    if graph.training or stage.device != stages.stages[-1].device:
        return []
    own = stages.of(stage.device)
    first = {value: s.index for s in reversed(own) for value in (*s.receives, *_made(s))}
    last = stages.stages[-1].index
    return [
        (name, value) for name, value in graph.output_names if first.get(value, last) == stage.index
    ]


def _made(stage: Stage) -> frozenset[str]:
    return frozenset(stage.ops) - frozenset(stage.recomputed)
