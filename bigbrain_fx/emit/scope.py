"""A scope: the ops of one emitted function, what it takes and what it returns.

This room speaks in names of the graph; it knows nothing of the variables that text will use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from bigbrain_fx.core import Graph, Op, Ref, TensorSpec
from bigbrain_fx.units import is_size


class Gives(Protocol):
    """A call of a block: it makes these values."""

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of the values."""
        ...


Step = TypeVar("Step", bound=Op | Gives)


@dataclass(frozen=True)
class Scope:
    """One function to emit.

    Attributes:
        path: the module its parameters are named relative to; "" for a stage.
        call: which call of that module.
        ops: in order; sizes are read from tensors that the function has.
        takes: values from outside, in order of first use.
        outer_params: parameters outside `path`.
        gives: its values that are used outside.
    """

    path: str
    call: int
    ops: tuple[Op, ...]
    takes: tuple[str, ...]
    outer_params: tuple[str, ...]
    gives: tuple[str, ...]

    @property
    def params(self) -> tuple[str, ...]:
        """Names of its own parameters, in order of first use."""
        outer = set(self.outer_params)
        return tuple(dict.fromkeys(p for op in self.ops for p in op.params if p not in outer))

    def relative(self, param: str) -> str:
        """Return a parameter's name below `path`."""
        return param[len(self.path) + 1 :] if self.path else param


def make_scope(
    graph: Graph,
    ops: Sequence[Op],
    gives: Collection[str],
    *,
    path: str = "",
    call: int = 0,
    takes: tuple[str, ...] | None = None,
) -> Scope:
    """Collect what a run of ops needs; `takes` fixes the arguments where their order is given."""
    body = [op for op in ops if not is_size(op)]
    own = {op.name for op in body}
    refs = dict.fromkeys(ref for op in body for ref in op.refs)
    outside = tuple(ref for ref in refs if ref not in own and not _is_number(graph, ref))
    arguments = outside if takes is None else takes
    params = dict.fromkeys(param for op in body for param in op.params)
    outer = tuple(p for p in params if path and not p.startswith(f"{path}."))
    results = tuple(op.name for op in body if op.name in gives)
    return Scope(path, call, tuple(with_sizes(graph, body, arguments)), arguments, outer, results)


def spec_of(graph: Graph, value: str) -> TensorSpec | None:
    """Return the spec of a value that is one tensor, else None."""
    if value in graph.input:
        return graph.input[value].spec
    op = graph.op[value]
    return op.outputs[0] if op.outputs and not op.is_tuple else None


def _is_number(graph: Graph, value: str) -> bool:
    return value in graph.op and is_size(graph.op[value])


def with_sizes(graph: Graph, body: Sequence[Step], arguments: Sequence[str]) -> Iterable[Step | Op]:
    """Put each size where it is first needed, read from an argument or from a tensor already made.

    Items that are no ops (calls of blocks) need no sizes here, and make what they `give`.
    """
    made: list[str] = list(arguments)
    known: set[str] = set()
    for item in body:
        if isinstance(item, Op):
            for ref in item.refs:
                yield from _size(graph, ref, made, known)
        yield item
        made += [item.name] if isinstance(item, Op) else item.gives


def _size(graph: Graph, name: str, made: Sequence[str], known: set[str]) -> Iterable[Op]:
    if name in known or not _is_number(graph, name):
        return
    op = graph.op[name]
    known.add(name)
    if op.target == "aten.sym_size.int":
        yield _read_size(graph, op, made)
        return
    for ref in op.refs:
        yield from _size(graph, ref, made, known)
    yield op


def _read_size(graph: Graph, op: Op, made: Sequence[str]) -> Op:
    spec = spec_of(graph, op.refs[0])
    axis = op.args[1]
    assert spec is not None
    assert isinstance(axis, int)
    wanted = spec.shape[axis]
    for value in made:
        local = spec_of(graph, value)
        if local is not None and wanted in local.shape:
            return replace(op, args=(Ref(value), local.shape.index(wanted)))
    raise AssertionError(f"no local tensor has the size {wanted} that {op.name} reads")
