"""A captured graph with one of its blocks repeated: a deep model without capturing one.

It knows graphs alone: numbered modules ("blocks.1"), the one value that a block hands on, and the
one that it takes from the block before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bigbrain_fx.core import Arg, Graph, Op, ParamRef, Ref
from bigbrain_fx.errors import InputError


def stacked(graph: Graph, ops: int, name: str = "blocks") -> Graph:
    """Return the graph with block 1 repeated until there are about so many ops.

    Args:
        graph: captured, with modules `name`.0, `name`.1, ... that feed each other.
        ops: wanted; never fewer than there are.
        name: of the list of blocks.

    Raises:
        InputError: block 1 does not take one value from block 0, or hands on more than one.
    """
    block = [op for op in graph.ops if _is_in(op, f"{name}.1")]
    taken, made = _taken(graph, block, name), _made(graph, block)
    copies = max(0, (ops - len(graph.ops)) // max(1, len(block)))
    last = max(i for i, op in enumerate(graph.ops) if op in block)
    whole, params, end = list(graph.ops[: last + 1]), list(graph.params), made
    mine = [p for p in graph.params if any(p.name in op.params for op in block)]
    own = [p for p in mine if f"{name}.1." in f"{p.name}."]
    for copy in range(copies):
        number = 1_000 + copy
        values = {op.name: f"{op.name}_{number}" for op in block} | {taken: end}
        path = f"{name}.1", f"{name}.{number}"
        names = {p.name: p.name.replace(*path) for p in own}
        whole += [_renamed(op, values, names, path) for op in block]
        params += [replace(p, name=names[p.name], canonical=names[p.name]) for p in own]
        end = values[made]
    rest = [_renamed(op, {made: end}, {}, ("", "")) for op in graph.ops[last + 1 :]]
    return replace(graph, name=f"{graph.name}x{copies}", ops=(*whole, *rest), params=tuple(params))


def _is_in(op: Op, path: str) -> bool:
    return any(m.path == path or m.path.startswith(f"{path}.") for m in op.modules)


def _taken(graph: Graph, block: Sequence[Op], name: str) -> str:
    """Return the value of block 0 that block 1 reads."""
    before = {op.name for op in graph.ops if _is_in(op, f"{name}.0")}
    found = {ref for op in block for ref in op.refs if ref in before}
    if len(found) != 1:
        raise InputError(f"{name}.1 takes {len(found)} values from {name}.0; it takes one")
    return found.pop()


def _made(graph: Graph, block: Sequence[Op]) -> str:
    """Return the value of block 1 that others read."""
    inside = {op.name for op in block}
    others = {ref for op in graph.ops if op.name not in inside for ref in op.refs}
    found = inside & others
    if len(found) != 1:
        raise InputError(f"the block hands on {len(found)} values; it hands on one")
    return found.pop()


def _renamed(
    op: Op, values: Mapping[str, str], params: Mapping[str, str], path: tuple[str, str]
) -> Op:
    """Return the op with other names for itself, what it reads, and the modules it is in."""

    def changed(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(changed(each) for each in arg)
        if isinstance(arg, Ref):
            return replace(arg, value=values.get(arg.value, arg.value))
        if isinstance(arg, ParamRef):
            return replace(arg, param=params.get(arg.param, arg.param))
        return arg

    return replace(
        op,
        name=values.get(op.name, op.name),
        args=tuple(changed(arg) for arg in op.args),
        kwargs=tuple((key, changed(arg)) for key, arg in op.kwargs),
        view_of=values.get(op.view_of, params.get(op.view_of, op.view_of)) if op.view_of else None,
        mutates=tuple(values.get(n, params.get(n, n)) for n in op.mutates),
        modules=tuple(replace(m, path=m.path.replace(*path)) for m in op.modules),
    )
