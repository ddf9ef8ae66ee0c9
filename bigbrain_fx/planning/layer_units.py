"""Units joined so that no cut goes through a layer of the model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bigbrain_fx.core import Graph
from bigbrain_fx.planning.unit_work import Work


def whole_layers(graph: Graph, known: Work) -> Work:
    """Return the work whose units are the runs of units of one layer each."""
    return known.merged(layers(graph, known.groups))


def layers(graph: Graph, groups: Sequence[Sequence[str]]) -> list[range]:
    """Return the runs of units that belong to one layer: `blocks.3` and all below it."""
    firsts = [graph.op[group[0]] for group in groups]
    layers = [op.layer or op.module_path.partition(".")[0] for op in firsts]
    starts = [i for i, layer in enumerate(layers) if i == 0 or not layer or layer != layers[i - 1]]
    return [range(a, b) for a, b in pairwise([*starts, len(groups)])]
