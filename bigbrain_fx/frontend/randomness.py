"""Give each random op of a graph a place that any split of the graph agrees on.

This module knows module paths only: places must not depend on stages or devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from bigbrain_fx.core import Graph


def draw_places(graph: Graph) -> Mapping[str, tuple[str, int]]:
    """Return, for each random op, its module's path and the draws of that module before it."""
    seen: Counter[str] = Counter()
    places = {}
    for op in graph.ops:
        if op.random:
            places[op.name] = (op.module_path, seen[op.module_path])
            seen[op.module_path] += 1
    return places


def place_name(path: str, ordinal: int) -> str:
    """Return the text that goes into the key of a draw, as the runtime builds it."""
    return f"{path}#{ordinal}" if ordinal else path
