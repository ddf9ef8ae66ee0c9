"""Values that a run of items needs from outside, values that it leaves, and reads of its sizes.

The module uses names of the graph; the variables of the text are `variables`' business.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from zlib import crc32

from bigbrain_fx.core import Graph, Op, Ref, TensorSpec, size_of
from bigbrain_fx.emit.ops.items import Body, Item, gives_of, is_below, params_of, takes_of
from bigbrain_fx.planning import is_size

ROWS = (7, 11, 13)  # batch sizes at which sizes are compared: prime, so that they tell them apart
ARITHMETIC: Mapping[str, Callable[..., int]] = {
    "operator.add": operator.add,
    "operator.sub": operator.sub,
    "operator.mul": operator.mul,
    "operator.floordiv": operator.floordiv,
}


class NoSizeError(LookupError):
    """A size is wanted that no tensor in reach has."""


def make_body(
    graph: Graph,
    items: Sequence[Item],
    gives: Collection[str],
    *,
    path: str = "",
    call: int = 0,
    depth: int = -1,
    takes: tuple[str, ...] | None = None,
) -> Body:
    """Collect what a run of items needs; `takes` fixes the arguments where their order is given."""
    body = tuple(item for item in items if not (isinstance(item, Op) and is_size(item)))
    own = {value for item in body for value in gives_of(item)}
    refs = dict.fromkeys(ref for item in body for ref in takes_of(item))
    outside = tuple(ref for ref in refs if ref not in own and not _is_number(graph, ref))
    params = dict.fromkeys(name for item in body for name in params_of(item))
    outer = tuple(name for name in params if not is_below(name, path))
    results = tuple(v for item in body for v in gives_of(item) if v in gives)
    return Body(path, call, depth, body, outside if takes is None else takes, outer, results)


def spec_of(graph: Graph, value: str) -> TensorSpec | None:
    """Return the spec of a value that is one tensor, else None."""
    if value in graph.input:
        return graph.input[value].spec
    op = graph.op[value]
    return op.outputs[0] if op.outputs and not op.is_tuple else None


def _is_number(graph: Graph, value: str) -> bool:
    return value in graph.op and is_size(graph.op[value])


def with_sizes(graph: Graph, body: Body) -> list[Item]:
    """Put each size where it is first needed, read from an argument or from a tensor already made.

    Calls of classes read the sizes they need from their own arguments.

    Raises:
        NoSizeError: no tensor in reach has a size that is needed.
    """
    made: list[str] = list(body.takes)
    known: set[str] = set()
    found: list[Item] = []
    for item in body.items:
        if isinstance(item, Op):
            for ref in item.refs:
                found += _size(graph, ref, made, known)
        found.append(item)
        made += gives_of(item)
    return found


def _size(graph: Graph, name: str, made: Sequence[str], known: set[str]) -> Iterator[Op]:
    if name in known or not _is_number(graph, name):
        return
    op = graph.op[name]
    known.add(name)
    local = _read_size(graph, op, made)
    if local is not None:
        yield local
        return
    if op.target == "aten.sym_size.int":
        raise NoSizeError(f"no local tensor has the size that {name} reads")
    for ref in op.refs:
        yield from _size(graph, ref, made, known)
    yield op


def _read_size(graph: Graph, op: Op, made: Iterable[str]) -> Op | None:
    """Return how to read a number off a tensor at hand; None if none has it."""
    wanted = _values(graph, op)
    if wanted is None:
        return None
    for value in made:
        spec = spec_of(graph, value)
        for axis, dim in enumerate(spec.shape if spec is not None else ()):
            if tuple(size_of(dim, rows, _trial) for rows in ROWS) == wanted:
                return replace(op, target="aten.sym_size.int", args=(Ref(value), axis), kwargs=())
    return None


def _values(graph: Graph, op: Op) -> tuple[int, ...] | None:
    """Return what a size is for several batch sizes; None if that is not known."""
    found = [_value(graph, op.name, rows) for rows in ROWS]
    known = tuple(value for value in found if value is not None)
    return known if len(known) == len(found) else None


def _trial(name: str) -> int:
    """Return a number for a free length that no other size has."""
    return 100_003 + crc32(name.encode())


def _value(graph: Graph, name: str, rows: int) -> int | None:
    op = graph.op[name]
    if op.target == "aten.sym_size.int":
        spec, axis = spec_of(graph, op.refs[0]), op.args[1]
        return size_of(spec.shape[axis], rows, _trial) if spec and isinstance(axis, int) else None
    if op.target not in ARITHMETIC or op.kwargs:  # its arguments need not be sizes
        return None
    given = [_value(graph, a.value, rows) if isinstance(a, Ref) else a for a in op.args]
    if not all(type(a) is int for a in given):
        return None
    return ARITHMETIC[op.target](*given)
