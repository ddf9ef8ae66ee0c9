"""Slices of one value that stand end to end: together they are what a split into pieces is.

`qkv[..., :24]`, `qkv[..., 24:32]` and `qkv[..., 32:]` are three ops, and a rule sees one at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from bigbrain_fx.core import Arg, Dim, Graph, Op, ParamRef, Ref

_Span = tuple[int, int]
_CUTS = {
    "aten.slice.Tensor": ("dim", "start", "end", "step"),
    "aten.narrow.default": ("dim", "start", "length"),
}


def end_to_end(graph: Graph) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each slice that is one of several end to end, with the sizes of them all.

    Args:
        graph: in numbers.
    """
    found: dict[tuple[Ref | ParamRef, int, int], dict[str, _Span]] = defaultdict(dict)
    for op in graph.ops:
        if op.target in _CUTS and isinstance(op.args[0], Ref | ParamRef):
            size, dim, span = _span(graph, op)
            if span is not None and span != (0, size) and span[0] < span[1]:
                found[op.args[0], dim, size][op.name] = span
    for (_, _, size), spans in found.items():
        sizes = _sizes(sorted(set(spans.values())), size)
        if sizes:
            yield from ((name, sizes) for name in spans)


def _span(graph: Graph, op: Op) -> tuple[int, int, _Span | None]:
    """Return (size, dimension, what is taken) of a slice; None for what is known at run time."""
    source = op.args[0]
    named = dict(zip(_CUTS[op.target], op.args[1:], strict=False)) | dict(op.kwargs)
    dim, start, step = named.get("dim", 0), named.get("start") or 0, named.get("step", 1)
    made = op.outputs[0].shape
    assert isinstance(dim, int)
    dim %= len(made)
    size = int(_shape(graph, source)[dim])
    if not isinstance(start, int) or step != 1:
        return size, dim, None
    start = max(0, start + size if start < 0 else start)
    return size, dim, (start, start + int(made[dim]))


def _shape(graph: Graph, source: Arg) -> tuple[Dim, ...]:
    if isinstance(source, ParamRef):
        return graph.param[source.param].spec.shape
    assert isinstance(source, Ref)
    made = graph.input[source.value].spec if source.value in graph.input else None
    return (made or graph.op[source.value].outputs[0]).shape


def _sizes(spans: list[_Span], size: int) -> tuple[int, ...]:
    """Return the sizes of spans; none unless each begins where the one before ends."""
    ends = [0, *(stop for _, stop in spans)]
    if ends[-1] != size or [start for start, _ in spans] != ends[:-1]:
        return ()
    return tuple(stop - start for start, stop in spans)
