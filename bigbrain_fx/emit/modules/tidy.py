"""Take out of a graph what a person would not write: joining with nothing, for a start.

Values, strides and gradients stay bitwise what they are. This room knows ops; it knows nothing of
stages or text.
"""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Arg, Graph, Op, ParamRef, Ref, TensorSpec


def tidied(graph: Graph) -> Graph:
    """Return the graph with the same values from plainer ops."""
    return replace(graph, ops=tuple(_tidy(graph, op) for op in graph.ops))


def _tidy(graph: Graph, op: Op) -> Op:
    if op.target == "aten.cat.default" and isinstance(op.args[0], tuple):
        return _without_nothing(graph, op, op.args[0])
    return op


def _without_nothing(graph: Graph, op: Op, joined: tuple[Arg, ...]) -> Op:
    """Leave empty tensors out of `torch.cat`: an empty cache, to which the first keys are joined.

    What is left is a copy; where it is contiguous, `contiguous` gives the same numbers and strides.
    """
    kept = tuple(arg for arg in joined if not _is_nothing(graph, arg))
    if not kept or len(kept) == len(joined):
        return op
    if len(kept) == 1 and _has_dtype(graph, kept[0], op) and _is_contiguous(op.outputs[0]):
        return replace(op, target="aten.contiguous.default", args=kept, kwargs=())
    return replace(op, args=(kept, *op.args[1:]))


def _has_dtype(graph: Graph, arg: Arg, op: Op) -> bool:
    found = graph.op.get(arg.value) if isinstance(arg, Ref) else None
    return found is not None and [s.dtype for s in found.outputs] == [op.outputs[0].dtype]


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
