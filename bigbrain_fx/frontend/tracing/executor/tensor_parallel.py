"""Run the graphs of a tensor group's ranks in one process, op by op, forward and backward.

An exchange of TP ranks is one autograd function over all ranks, which adds in rank order. The
numbers are the same as of processes that send each other messages. The module does not know how a
graph was split; `run_graph` is the same for one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from bigbrain_fx.core import Graph, Inner, Op, Shard
from bigbrain_fx.frontend.tracing.executor.graph_executor import (
    Interpreter,
    Key,
    Leaf,
    autocast,
    last_uses,
)
from bigbrain_fx.runtime import added, joined, largest, part_of_whole

Env = dict[str, object]


def taken(tensor: Tensor, shard: Shard) -> Tensor:
    """Return the part of a parameter that a shard names."""
    lengths = shard.start, shard.stop - shard.start, shard.size - shard.stop
    return part_of_whole(tensor, shard.dim, shard.inner, lengths, 1)


def run_members(
    graphs: Sequence[Graph],
    tensors: Sequence[Mapping[str, Tensor]],
    inputs: Sequence[Mapping[str, Tensor]],
    *,
    key: Key | None = None,
    values: Iterable[str] | None = None,
    functions: Mapping[str, object] | None = None,
    order: Sequence[str] | None = None,
    leaves: Sequence[Leaf] | None = None,
) -> list[dict[str, object]]:
    """Run the graphs of all TP ranks, in step.

    Args:
        graphs: the same ops, other numbers: `Sharded.members`.
        tensors: for each rank its parameters, buffers and constants.
        inputs: for each rank the batch's tensors by name, the same for all.
        key: a context entered around each random op.
        values: names of the values to return; the loss and the outputs when left out.
        functions: as in `run_graph`.
        order: as in `run_graph`.
        leaves: for each rank the argument `leaf` of `run_graph`.

    Returns:
        For each rank value by name. Gradients flow across ranks: take them for all at once.
    """
    first = graphs[0]
    wanted = list(values if values is not None else [*filter(None, [first.loss]), *first.outputs])
    device = torch.device("cpu")
    given: Sequence[Leaf | None] = leaves or [None] * len(graphs)
    machines = [
        Interpreter(own, leaf, functions or {}, device, None)
        for own, leaf in zip(tensors, given, strict=True)
    ]
    envs: list[Env] = [dict(own) for own in inputs]
    each = [_in_order(graph, order) for graph in graphs]
    freed = last_uses(each[0], wanted)
    with autocast(first.autocast, device, casts_once=False):
        for position, ops in enumerate(zip(*each, strict=True)):
            _step(ops, machines, envs, key)
            for name in freed.get(position, ()):
                for env in envs:
                    env.pop(name, None)
    return [{name: env[name] for name in wanted} for env in envs]


def _in_order(graph: Graph, order: Sequence[str] | None) -> list[Op]:
    return list(graph.ops) if order is None else [graph.op[name] for name in order]


def _step(
    ops: tuple[Op, ...], machines: Sequence[Interpreter], envs: Sequence[Env], key: Key | None
) -> None:
    if ops[0].target.startswith("shard."):
        _exchange(ops, machines, envs)
        return
    for op, machine, env in zip(ops, machines, envs, strict=True):
        if key is None or not op.random:
            env[op.name] = machine.call(op, env, op.name)
            continue
        with key(op):
            env[op.name] = machine.call(op, env, op.name)


Move = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class _How:
    """Operation of TP ranks on a value forward, and on its gradient backward."""

    forward: Move
    backward: Move


class _Noted(FunctionCtx):
    how: _How


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Noted, how: _How, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how = how
        return tuple(how.forward(given))

    @staticmethod
    def backward(ctx: _Noted, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """All ranks run the same code: either each rank has a gradient, or none has."""
        found = [gradient for gradient in gradients if gradient is not None]
        return (None, *(ctx.how.backward(found) if found else gradients))


def _exchange(ops: tuple[Op, ...], machines: Sequence[Interpreter], envs: Sequence[Env]) -> None:
    given = [
        cast("Tensor", machine.value(op.args[0], env, op.name))
        for op, machine, env in zip(ops, machines, envs, strict=True)
    ]
    how = _how(ops[0])
    made = cast("Sequence[Tensor]", _Exchange.apply(how, *given))  # type: ignore[no-untyped-call]
    for op, env, value in zip(ops, envs, made, strict=True):
        env[op.name] = value


def _how(op: Op) -> _How:
    kind, args = op.target.removeprefix("shard."), op.args[1:]
    if kind == "copy_to_group":
        return _How(_same, _added)
    if kind == "all_reduce":
        return _How(_added if args[0] == "sum" else _largest, _same)
    dim, inner, lengths = cast("tuple[int, Inner, tuple[int, ...]]", args)
    own, whole = partial(_own, dim, inner, lengths), partial(_whole, dim, inner, lengths)
    own_sum = partial(_own_sum, dim, inner, lengths)
    return {
        "all_gather": _How(whole, own),
        "split": _How(own, whole),
        "reduce_scatter": _How(own_sum, whole),
        "gather_to_group": _How(whole, own_sum),
    }[kind]


def _same(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [value.view_as(value) for value in given]


def _added(given: Sequence[Tensor]) -> Sequence[Tensor]:
    """Add in rank order; each rank has a sum of its own."""
    total = added(given)
    return [total.clone() for _ in given]


def _largest(given: Sequence[Tensor]) -> Sequence[Tensor]:
    most = largest(given)
    return [most.clone() for _ in given]


def _own(
    dim: int, inner: Inner, lengths: Sequence[int], given: Sequence[Tensor]
) -> Sequence[Tensor]:
    return [part_of_whole(value, dim, inner, lengths, m) for m, value in enumerate(given)]


def _own_sum(
    dim: int, inner: Inner, lengths: Sequence[int], given: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Add in rank order; each rank has its part of the sum."""
    return _own(dim, inner, lengths, [added(given)] * len(given))


def _whole(
    dim: int, inner: Inner, lengths: Sequence[int], given: Sequence[Tensor]
) -> Sequence[Tensor]:
    whole = joined(given, dim, inner, lengths)
    return [whole.clone() for _ in given]
