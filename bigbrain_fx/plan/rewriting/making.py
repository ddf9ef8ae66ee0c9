"""Ops that stand for others: made like one of them, and sizes added up as numbers or as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bigbrain_fx.core import Arg, Dim, Graph, ModuleCall, Op, TensorSpec


def made_like(
    op: Op,
    name: str,
    target: str,
    args: tuple[Arg, ...],
    outputs: Sequence[TensorSpec],
    *,
    modules: tuple[ModuleCall, ...] | None = None,
    flops: Dim = 0,
    reads_bytes: Dim = 0,
    writes_bytes: Dim = 0,
    view_of: str | None = None,
) -> Op:
    """Return an op at the user's line of another; how its tensors lie is found by running it.

    `modules` are those calls of the other's that it belongs to; all when left out.
    """
    held = op.modules if modules is None else modules
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
        flops=flops,
        reads_bytes=reads_bytes,
        writes_bytes=writes_bytes,
        view_of=view_of,
        saves=None,
    )


def fresh(graph: Graph, name: str) -> str:
    """Return a name that nothing in the graph has."""
    taken = {*graph.op, *graph.input, *graph.param}
    while name in taken:
        name += "_"
    return name


def total(sizes: Iterable[Dim]) -> Dim:
    """Return a sum of sizes."""
    found = [size for size in sizes if size != 0]
    if all(isinstance(size, int) for size in found):
        return sum(int(size) for size in found)
    return " + ".join(str(size) for size in found)


def is_plain(graph: Graph, name: str, written: frozenset[str]) -> bool:
    """Whether a value is nobody's but its readers': not written into, and no output."""
    return name not in written and name not in graph.outputs and name != graph.loss
