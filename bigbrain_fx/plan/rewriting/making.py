"""Ops that stand for others: made like one of them, and sizes added up as numbers or as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bigbrain_fx.core import DTYPE_BYTES, Arg, Dim, Graph, ModuleCall, Op, TensorSpec


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
    nbytes = 0 if moves is None else _times(DTYPE_BYTES[moves.dtype], moves.shape)
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
        flops=0 if moves is None else _times(1, moves.shape),
        reads_bytes=nbytes,
        writes_bytes=nbytes,
        view_of=view_of,
        saves=None,
    )


def _times(number: int, shape: Sequence[Dim]) -> Dim:
    fixed = number * math.prod(dim for dim in shape if isinstance(dim, int))
    free = [f"({dim})" for dim in shape if not isinstance(dim, int)]
    return "*".join((str(fixed), *free)) if free else fixed


def fresh(graph: Graph, name: str) -> str:
    """Return a name that nothing in the graph has."""
    taken = {*graph.op, *graph.input, *graph.param}
    while name in taken:
        name += "_"
    return name


def total(sizes: Iterable[Dim]) -> Dim:
    """Return a sum of sizes."""
    found = [size for size in sizes if size != 0]
    numbers = [size for size in found if isinstance(size, int)]
    return sum(numbers) if len(numbers) == len(found) else " + ".join(map(str, found))


def is_plain(graph: Graph, name: str, written: frozenset[str]) -> bool:
    """Whether a value is nobody's but its readers': not written into, and no output."""
    return name not in written and name not in graph.outputs and name != graph.loss
