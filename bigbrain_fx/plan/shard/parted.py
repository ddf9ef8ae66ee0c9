"""One rank's graph -> the same, in which what crosses between groups goes in parts.

    group A   v ──split──▶ v_own          each rank sends its own part to its own place
                             │
    group B                v_own ──all_gather──▶ v_again ──▶ readers

Both groups have all of `v` on every rank, so a rank need not send what others send as well. The
two exchanges undo each other, forward and backward: results are bitwise what they were. This file
knows one graph; which values cross is the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from bigbrain_fx.core import Arg, Crossed, Graph, Op, Ref, TensorSpec, dense_strides
from bigbrain_fx.plan.shard.saved import exchange_saves, with_args


def own_name(value: str) -> str:
    """Return what a rank's part of a value is called."""
    return f"{value}_own"


def again_name(value: str, number: int) -> str:
    """Return what the value is called where a group has put it together again."""
    return f"{value}_again{number or ''}"


def part_dim(spec: TensorSpec, members: int) -> int | None:
    """Return the dimension along which a value is divided; None: it has none, or gaps."""
    if spec.strides != dense_strides(spec.shape):
        return None
    sizes = [(dim, size) for dim, size in enumerate(spec.shape) if isinstance(size, int)]
    return next((dim for dim, size in sizes if dim and size >= members), None)


def with_parts(
    graph: Graph, crossed: Sequence[Crossed], member: int, lengths: Mapping[str, tuple[int, ...]]
) -> Graph:
    """Return a rank's graph in which some values cross in parts.

    Args:
        graph: of the rank.
        crossed: values, with their readers in each other group.
        member: its place.
        lengths: by value, what each rank has of it.
    """
    reads = {
        (reader, each.value): again_name(each.value, number)
        for each in crossed
        for number, readers in enumerate(each.readers)
        for reader in readers
    }
    by_value = {each.value: each for each in crossed}
    joined: set[str] = set()
    ops: list[Op] = []
    for op in graph.ops:
        for value in dict.fromkeys(op.refs):
            again = reads.get((op.name, value))
            if again is not None and again not in joined:
                joined.add(again)
                ops.append(_again(graph.op[value], again, op, lengths[value]))
        ops.append(_reading(op, reads))
        if op.name in by_value:
            ops.append(_own(op, member, lengths[op.name]))
    return replace(graph, ops=tuple(ops))


def _reading(op: Op, reads: Mapping[tuple[str, str], str]) -> Op:
    """Return an op that reads what its group has put together."""
    if not any((op.name, value) in reads for value in op.refs):
        return op

    def changed(arg: Arg) -> Arg:
        return Ref(reads.get((op.name, arg.value), arg.value)) if isinstance(arg, Ref) else arg

    return with_args(op, changed)


def _own(op: Op, member: int, lengths: tuple[int, ...]) -> Op:
    spec = op.outputs[0]
    dim = part_dim(spec, len(lengths))
    assert dim is not None
    shape = (*spec.shape[:dim], lengths[member], *spec.shape[dim + 1 :])
    part = replace(spec, shape=shape, strides=dense_strides(shape))
    return _exchange("split", own_name(op.name), Ref(op.name), part, op, (op, op), lengths)


def _again(op: Op, name: str, reader: Op, lengths: tuple[int, ...]) -> Op:
    read = Ref(own_name(op.name))
    return _exchange("all_gather", name, read, op.outputs[0], op, (op, reader), lengths)


def _exchange(
    kind: str,
    name: str,
    value: Ref,
    spec: TensorSpec,
    whole: Op,
    beside: tuple[Op, Op],
    lengths: tuple[int, ...],
) -> Op:
    """Return an exchange, in the innermost module call that both ops beside it share."""
    first, second = beside
    pairs = zip(first.modules, second.modules, strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    dim = part_dim(whole.outputs[0], len(lengths))
    return Op(
        name=name,
        target=f"shard.{kind}",
        args=(value, dim, 1, lengths),
        outputs=(spec,),
        modules=second.modules[:count],
        source=second.source,
        code=second.code,
        lines=second.lines[: count + 1],
        saves=exchange_saves(kind, whole.outputs[0], len(lengths)),
    )


def divisible(graph: Graph, whole: Graph, value: str, members: int) -> bool:
    """Whether every rank has all of a value that may be divided."""
    if value not in whole.op or len(graph.op[value].outputs) != 1:
        return False
    op, given = graph.op[value], whole.op[value]
    is_float = op.outputs[0].dtype in ("float32", "float64", "float16", "bfloat16")
    alike = op.outputs == given.outputs and not op.is_tuple and not op.target.startswith("shard.")
    return is_float and alike and part_dim(op.outputs[0], members) is not None
