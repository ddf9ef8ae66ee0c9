"""Ops that stand for others: made like one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigbrain_fx.core import Arg, Graph, ModuleCall, Op, TensorSpec, elements, nbytes


def made_like(
    op: Op,
    name: str,
    target: str,
    args: tuple[Arg, ...],
    outputs: Sequence[TensorSpec],
    *,
    modules: tuple[ModuleCall, ...] | None = None,
    moves: TensorSpec | None = None,
    view_of: str | None = None,
) -> Op:
    """Return an op at the user's line of another; how its tensors lie is found by running it.

    Args:
        op: the other.
        name: of the new one.
        target: of the new one.
        args: of the new one.
        outputs: its tensors; several are a tuple.
        modules: those calls of the other's that it belongs to; all when left out.
        moves: what it reads and writes once, a number computed for each; None: nothing.
        view_of: whose memory its result shares.
    """
    held = op.modules if modules is None else modules
    moved_bytes = 0 if moves is None else nbytes(moves)
    return replace(
        op,
        name=name,
        target=target,
        args=args,
        kwargs=(),
        outputs=tuple(outputs),
        is_tuple=len(outputs) > 1,
        modules=held,
        lines=op.lines[: len(held) + 1],
        flops=0 if moves is None else elements(moves),
        reads_bytes=moved_bytes,
        writes_bytes=moved_bytes,
        view_of=view_of,
        saves=None,
    )


def fresh(graph: Graph, name: str) -> str:
    """Return a name that nothing in the graph has."""
    taken = {*graph.op, *graph.input, *graph.param}
    while name in taken:
        name += "_"
    return name


def is_plain(graph: Graph, name: str, written: frozenset[str]) -> bool:
    """Whether a value is nobody's but its readers': not written into, and no output."""
    return name not in written and name not in graph.outputs and name != graph.loss
