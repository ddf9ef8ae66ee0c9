"""Take out of a graph what a person would not write: joining with nothing, `+ 0`, `* 1.0`.

Values, strides and gradients stay bitwise what they are. This module knows ops; it knows nothing of
stages or text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from bigbrain_fx.core import Arg, Graph, Op, ParamRef, Ref, TensorSpec

_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
_SAME = "aten.to.dtype_layout"
"""What writes a value as it is, where no type is asked for."""


def tidied(graph: Graph, again: Collection[str] = ()) -> Graph:
    """Return the graph with the same values from plainer ops.

    Ops that are made `again` stay what they are: the plan speaks of them.
    """
    return replace(graph, ops=_all_tidy(graph, graph.ops, frozenset(again)))


def _all_tidy(scope: Graph, ops: Sequence[Op], again: frozenset[str]) -> tuple[Op, ...]:
    """Tidy ops; `scope` has all that they read."""
    writes = any(name not in scope.param for op in ops for name in op.mutates)
    return tuple(_tidy(scope, op, not writes and op.name not in again, again) for op in ops)


def _tidy(scope: Graph, op: Op, may_share: bool, again: frozenset[str]) -> Op:
    if op.body is not None:
        inner = replace(scope, ops=(*scope.ops, *op.body.ops))
        return replace(op, body=replace(op.body, ops=_all_tidy(inner, op.body.ops, again)))
    if op.target == "aten.cat.default" and isinstance(op.args[0], tuple):
        return _without_nothing(scope, op, op.args[0])
    if may_share and _is_neutral(scope, op):
        return replace(op, target=_SAME, args=op.args[:1], kwargs=())
    return op


def _is_neutral(graph: Graph, op: Op) -> bool:
    """Whether an op gives its first argument's own numbers, strides and type: `x + 0`.

    A float + 0 makes 0.0 of -0.0; where a gradient comes back, one op less may sum it in another
    order. The argument is a value or an entry of the batch: a buffer may be written later.
    """
    _, name, *_ = (*op.target.split("."), "")
    if name not in _NEUTRAL or len(op.args) != 2 or op.kwargs or op.requires_grad:
        return False
    first, second = op.args
    if not op.outputs:  # a size plus a size has none: pairs that forward joins
        return False
    if _specs(graph, first) != op.outputs or isinstance(second, bool):
        return False
    is_exact = name != "add" or op.outputs[0].dtype.startswith(("int", "uint"))
    return is_exact and isinstance(second, int | float) and second == _NEUTRAL[name]


def _specs(graph: Graph, arg: Arg) -> tuple[TensorSpec, ...]:
    """Return the forms of what an op or the batch gives; none of anything else."""
    if not isinstance(arg, Ref):
        return ()
    entry = graph.input.get(arg.value)
    return graph.op[arg.value].outputs if entry is None else (entry.spec,)


def _without_nothing(graph: Graph, op: Op, joined: tuple[Arg, ...]) -> Op:
    """Leave empty tensors out of `torch.cat`: an empty cache, to which the first keys are joined.

    The remaining tensor is copied; where it is contiguous, `contiguous` gives the same numbers and
    strides.
    """
    kept = tuple(arg for arg in joined if not _is_nothing(graph, arg))
    if not kept or len(kept) == len(joined):
        return op
    if len(kept) == 1 and _has_dtype(graph, kept[0], op) and _is_contiguous(op.outputs[0]):
        return replace(op, target="aten.contiguous.default", args=kept, kwargs=())
    return replace(op, args=(kept, *op.args[1:]))


def _has_dtype(graph: Graph, arg: Arg, op: Op) -> bool:
    return [spec.dtype for spec in _specs(graph, arg)] == [op.outputs[0].dtype]


def _is_nothing(graph: Graph, arg: Arg) -> bool:
    """Whether an argument is a constant without elements, which `cat` skips."""
    if not isinstance(arg, ParamRef):
        return False
    param = graph.param[arg.param]
    return param.kind == "constant" and param.spec.shape == (0,)


def _is_contiguous(spec: TensorSpec) -> bool:
    """Whether strides are those of a dense tensor; only the first size may depend on the batch."""
    expected = 1
    for dim, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if stride != expected or not isinstance(expected, int):
            return False
        expected = expected * dim if isinstance(dim, int) else None  # type: ignore[assignment]
    return True
