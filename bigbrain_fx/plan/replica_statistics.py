"""Tensors that a forward writes -> the running statistics and counters that replicas share.

    F.batch_norm(x, mean, var, training=True)    what each micro-batch adds to them is exchanged
    counter.add_(1)                              is counted for the other replicas' micro-batches

A forward that writes anything else is refused. The module knows ops and stages, not messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bigbrain_fx.core import (
    DTYPE_BYTES,
    Edge,
    Graph,
    Op,
    ParamRef,
    Ref,
    Stages,
    Statistics,
    TensorSpec,
)
from bigbrain_fx.errors import InputError

_NORM, _COUNT = "aten.batch_norm.default", "aten.add_.Tensor"
_WHOLE = ("int8", "int16", "int32", "int64", "uint8")
_ONE = "use one replica (no --replicas, no --schedule gems)"
_ALONE = f"{_ONE}; a norm may be in eval() instead, by train() of the model"
_HELP: Mapping[str, str] = {
    "leaf.": "give a BatchNorm a momentum: one of momentum=None averages over all batches; else ",
    "aten.instance_norm.": "leave out track_running_stats; else ",
}


@dataclass(frozen=True)
class _Write:
    """One op that writes, and the op of the graph that it is or is in."""

    op: Op
    outer: Op


def written(graph: Graph) -> tuple[str, ...]:
    """Return the tensors of the model that a forward writes, by canonical name."""
    return tuple(name for write in _nested(graph.ops) for name in _written(graph, write.op))


def statistics(graph: Graph, stages: Stages, rows: int) -> Iterator[Statistics]:
    """Yield what replicas write, by the stages that write it.

    Raises:
        InputError: a forward writes what cannot be exchanged.
    """
    writes = [write for write in _nested(graph.ops) if _written(graph, write.op)]
    if not writes or stages.replicas == 1:
        return
    _require_exchanged(graph, writes, rows)
    _require_unread(graph, writes)
    makers = [_makers(stages, number) for number in range(stages.replicas)]
    groups: dict[tuple[tuple[int, ...], str], list[Op]] = {}
    for write in writes:
        ends = tuple(made[write.outer.name] for made in makers)
        name = _written(graph, write.op)[0]
        groups.setdefault((ends, graph.param[name].spec.dtype), []).append(write.op)
    for number, ((ends, dtype), ops) in enumerate(sorted(groups.items(), key=lambda g: g[0])):
        norms = [op for op in ops if op.target == _NORM]
        buffers = tuple(name for op in norms for name in _written(graph, op))
        yield Statistics(f"statistics{number}", ends, dtype, buffers, _counters(graph, ops))


def statistics_edges(graph: Graph, stages: Stages) -> Iterator[Edge]:
    """Yield the way of each replica's statistics to every other."""
    for each in stages.statistics:
        elements = sum(graph.param[name].spec.numel for name in each.buffers)
        for source in each.stages if elements else ():
            nbytes = DTYPE_BYTES[each.dtype] * elements * len(stages.micros_of(source, 0))
            for target in each.stages:
                if source != target:
                    yield Edge(each.name, source, target, "statistics", nbytes)


def _nested(ops: Iterable[Op], outer: Op | None = None) -> Iterator[_Write]:
    """Yield all ops, those inside regions in place of the regions."""
    for op in ops:
        if op.body is not None:
            yield from _nested(op.body.ops, outer or op)
        else:
            yield _Write(op, outer or op)


def _written(graph: Graph, op: Op) -> tuple[str, ...]:
    """Return the tensors of the model that an op writes, by canonical name."""
    return tuple(graph.param[name].canonical for name in op.mutates if name in graph.param)


def _makers(stages: Stages, replica: int) -> Mapping[str, int]:
    """Return the stage of a replica that runs each op."""
    own = stages.of_replica(replica)
    return {name: s.index for s in own for name in s.ops if name not in s.recomputed}


def _counters(graph: Graph, ops: Iterable[Op]) -> tuple[tuple[str, int], ...]:
    """Return what a micro-batch adds to each counter."""
    found: dict[str, int] = {}
    for op in ops:
        if op.target == _COUNT:
            (name,), added = _written(graph, op), op.args[1]
            assert isinstance(added, int)
            found[name] = found.get(name, 0) + added
    return tuple(found.items())


# --------------------------------------------------------------------------- what is refused


def _require_exchanged(graph: Graph, writes: Iterable[_Write], rows: int) -> None:
    """Refuse writes whose order over replicas nobody can keep."""
    specs = _specs(graph)
    for write in writes:
        op, name = write.op, _written(graph, write.op)[0]
        if _is_count(graph, op) or (_is_norm(op) and _is_dense(specs, op, rows)):
            continue
        where = op.source or write.outer.source or None
        if _is_norm(op):
            raise InputError(
                f"the BatchNorm that writes '{name}' reads a tensor whose strides are not those of "
                "its shape, and torch rounds its statistics otherwise then",
                code="BX1271",
                at=where,
                help=f"call .contiguous() on what it reads, or {_ONE}",
            )
        raise InputError(
            f"the forward writes into '{name}', and each replica would write its own",
            code="BX1272",
            at=where,
            notes=(_exchanged(name),),
            help="".join(text for kind, text in _HELP.items() if op.target.startswith(kind))
            + _ALONE,
        )


def _exchanged(name: str) -> str:
    """Say why a write is not exchanged."""
    if re.search(r"parametrizations\.\w+\.\d+\._[uv]$|_[uv]$", name):
        return (
            "spectral norm's power iteration writes it in every forward, from where the last "
            "forward has left it: replicas run those side by side"
        )
    return "of what a forward writes, replicas exchange BatchNorm's statistics and counters only"


def _is_count(graph: Graph, op: Op) -> bool:
    """Whether an op adds a whole number to a whole number."""
    if op.target != _COUNT or op.kwargs or len(op.args) != 2:
        return False
    added, kind = op.args[1], graph.param[op.mutates[0]].spec.dtype
    return isinstance(added, int) and not isinstance(added, bool) and kind in _WHOLE


def _is_norm(op: Op) -> bool:
    """Whether an op is a BatchNorm that trains, with running statistics to which it adds a part."""
    if op.target != _NORM or op.kwargs or len(op.args) < 7 or op.args[5] is not True:
        return False
    ends = [a.param for a in op.args[3:5] if isinstance(a, ParamRef)]
    return tuple(ends) == op.mutates and isinstance(op.args[6], float | int)


def _specs(graph: Graph) -> Mapping[str, TensorSpec]:
    found = {each.name: each.spec for each in graph.inputs}
    for write in _nested(graph.ops):
        for op in (write.outer, write.op):
            found.update({op.name: op.outputs[0]} if len(op.outputs) == 1 else {})
    return found


def _is_dense(specs: Mapping[str, TensorSpec], op: Op, rows: int) -> bool:
    """Whether torch's CPU kernel takes what a BatchNorm reads for contiguous, channels last too."""
    read = op.args[0]
    if not isinstance(read, Ref) or read.value not in specs:
        return False
    spec = specs[read.value].at(rows)
    dims = range(len(spec.shape))
    orders = [list(dims), [0, *dims[2:], 1]] if len(spec.shape) in (4, 5) else [list(dims)]
    return any(_lies_in(spec, order) for order in orders)


def _lies_in(spec: TensorSpec, order: list[int]) -> bool:
    """Whether a tensor's elements lie one after the other, the last dimension of an order first."""
    step = 1
    for dim in reversed(order):
        if spec.shape[dim] != 1 and spec.strides[dim] != step:
            return False
        step *= int(spec.shape[dim])
    return True


def _require_unread(graph: Graph, writes: Iterable[_Write]) -> None:
    """Refuse a forward that also reads what it writes: it would read another order's numbers."""
    written = {name for write in writes for name in _written(graph, write.op)}
    writers = {id(write.op) for write in writes}
    for each in _nested(graph.ops):
        for name in each.op.params if id(each.op) not in writers else ():
            if graph.param[name].canonical in written:
                raise InputError(
                    f"the forward writes '{name}' and reads it elsewhere, and what it reads would "
                    "depend on the replica",
                    code="BX1273",
                    at=each.op.source or each.outer.source or None,
                    help=f"read it between steps, not in the forward; else {_ALONE}",
                )
