"""Graph and names of rewrites -> places; graph and places -> the graph that computes them so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from bigbrain_fx.core import Graph, Input, Op, Rewrite, RewritePlace, RewriteTrial, Rewritten
from bigbrain_fx.plan.rewriting import linears, scales

_FIND: Mapping[Rewrite, Callable[[Graph], Iterator[RewritePlace]]] = {
    "linears": linears.find,
    "scales": scales.find,
}


def rewrite_places(graph: Graph, names: Iterable[Rewrite]) -> tuple[RewritePlace, ...]:
    """Return the places of these rewrites; an op is of one place at most."""
    taken: set[str] = set()
    found: list[RewritePlace] = []
    for name in names:
        for place in _FIND[name](graph):
            if taken.isdisjoint(place.ops):
                taken.update(place.ops)
                found.append(place)
    return tuple(found)


def rewritten_graph(graph: Graph, chosen: Sequence[RewritePlace]) -> Graph:
    """Return the graph with other ops at these places; what they give keeps its names."""
    made = {place.at: place.made for place in chosen}
    left_out = {name for place in chosen for name in place.ops}
    return replace(graph, ops=tuple(_ops(graph, made, left_out)))


def _ops(graph: Graph, made: Mapping[str, Sequence[Op]], left_out: set[str]) -> Iterator[Op]:
    for op in graph.ops:
        if op.name in made:
            yield from made[op.name]
        elif op.name not in left_out:
            yield op


def places_again(graph: Graph, known: Iterable[Rewritten]) -> tuple[RewritePlace, ...]:
    """Return the places that a plan rewrote, in the graph as it is captured anew."""
    wanted = {(each.rewrite, each.ops) for each in known}
    names = dict.fromkeys(each.rewrite for each in known)
    return tuple(p for p in rewrite_places(graph, names) if (p.rewrite, p.ops) in wanted)


# --------------------------------------------------------------------------- trials


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
