"""Replicas, or members, that are placed alike but for names -> cut once, with each one's devices.

It knows stages and names of devices; how a graph is cut is `cut`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigbrain_fx.core import Graph, Placement, Stages
from bigbrain_fx.plan.cut import cut

_Names = tuple[str, ...]


def cut_each(graph: Graph, placement: Placement, rows: int) -> list[Stages]:
    """Cut a graph for each replica of a placement; a thousand that are alike cost one cut."""
    known: dict[object, tuple[_Names, Stages]] = {}
    found = []
    for each in placement.replicas:
        names, pattern = _pattern(graph, each.device_of)
        key = pattern, each.breaks
        if key not in known:
            known[key] = names, cut(graph, Placement(each.device_of), rows, breaks=each.breaks)
        first, stages = known[key]
        found.append(on_devices(stages, dict(zip(first, names, strict=True))))
    return found


def _pattern(graph: Graph, device_of: Mapping[str, str]) -> tuple[_Names, tuple[int, ...]]:
    """Return devices in the order in which ops meet them, and for each op which of them it has."""
    number: dict[str, int] = {}
    pattern = tuple(number.setdefault(device_of[op.name], len(number)) for op in graph.ops)
    return tuple(number), pattern


def on_devices(stages: Stages, to: Mapping[str, str]) -> Stages:
    """Return the same stages on other devices."""
    return replace(
        stages,
        stages=tuple(replace(stage, device=to[stage.device]) for stage in stages.stages),
    )
