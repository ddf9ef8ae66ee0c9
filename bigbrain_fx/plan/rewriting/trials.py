"""A place -> two small graphs, as it is and rewritten, with the same inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bigbrain_fx.core import Graph, Input, Op, RewritePlace, RewriteTrial


def rewrite_trial(graph: Graph, place: RewritePlace, rows: int) -> RewriteTrial:
    """Return a place of a graph both ways, in numbers of so many rows."""
    ops = [graph.op[name] for name in place.ops]
    kept = {op.name for op in place.made}.intersection(place.ops)
    before = _part(graph, ops, kept, rows)
    return RewriteTrial(before, _part(graph, place.made, kept, rows))


def _part(graph: Graph, ops: Iterable[Op], outputs: set[str], rows: int) -> Graph:
    own = tuple(replace(op, modules=(), lines=(), saves=None) for op in ops)
    made = {op.name for op in own}
    read = sorted({name for op in own for name in op.refs} - made)
    params = sorted({name for op in own for name in op.params})
    return Graph(
        name="trial",
        ops=own,
        inputs=tuple(_input(graph, name) for name in read),
        params=tuple(graph.param[name] for name in params),
        outputs=tuple(sorted(outputs)),
        loss=None,
        batch=rows,
        training=graph.training,
        autocast=graph.autocast,
    ).at(rows)


def _input(graph: Graph, name: str) -> Input:
    spec = graph.input[name].spec if name in graph.input else graph.op[name].outputs[0]
    return Input(name, (name,), spec)
