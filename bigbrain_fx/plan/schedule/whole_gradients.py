"""Gradients that are parts of a larger one, as those of what `cat` reads: each keeps all of it.

It knows graph and stages; of time and of what else is held it knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bigbrain_fx.core import Dim, Edge, Graph, Op, Stages


def wholes(graph: Graph, stages: Stages, edges: Iterable[Edge]) -> Iterator[tuple[Edge, int]]:
    """Yield the edges of gradients that no message copies, each a part that keeps the whole.

    The whole counts once for all parts, of which `edges` have those of a stage together.
    So the first of several that are parts of one has what the others leave of it.
    """
    parts: dict[tuple[str, int], list[Edge]] = {}
    for edge in edges:
        is_local = stages.stages[edge.source].device == stages.stages[edge.target].device
        whole = divided(graph, stages, edge) if edge.kind == "gradient" and is_local else None
        if whole is not None:
            parts.setdefault((whole.name, edge.source), []).append(edge)
    for (name, _), alike in parts.items():
        others = sum(edge.nbytes for edge in alike[1:])
        yield alike[0], _int(graph.op[name].outputs[0].nbytes) - others


def divided(graph: Graph, stages: Stages, edge: Edge) -> Op | None:
    """Return the only reader of a gradient's value whose gradient it is a part of, as of `cat`."""
    here = set(stages.stages[edge.source].ops) & graph.graded
    readers = [graph.op[name] for name in graph.consumers[edge.value] if name in here]
    if len(readers) != 1 or readers[0].saves is None:
        return None
    whole, part = readers[0].outputs[0], graph.op[edge.value].outputs[0]
    passed = readers[0].refs.index(edge.value) in readers[0].saves.passed
    larger = len(whole.shape) == len(part.shape) and whole.numel > part.numel
    return readers[0] if passed and larger else None


def _int(size: Dim) -> int:
    assert isinstance(size, int), "costs are added up over a concrete graph, graph.at(rows)"
    return size
