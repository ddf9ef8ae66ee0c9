"""Stages -> the same with what of their activations lies in stores: which, how much, how long.

A stage's activations leave it where moving them takes no longer than computing the stage: forward
and backward; of one that runs again that is what it received. Stages that keep something else for
their backward (what waits for weights' gradients, ops that are made again) keep all here, and so do
those that run code of the user's own, which may write into what it has saved without telling
autograd. `rrelu` does: autograd saves its noise, and then it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from bigbrain_fx.core import Costs, Edge, Graph, Op, SavedInStore, Stage, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.offloading import STORED_FROM_BYTES
from bigbrain_fx.plan.schedule.stage_part import Part

_MAY_WRITE = ("leaf.", "opaque.", "aten.rrelu")
"""Ops that may write into what autograd has saved: what lies in a store is of before."""


def with_saved_in_stores(
    graph: Graph, stages: Stages, costs: Costs, trained: Iterable[int]
) -> Stages:
    """Say of each stage what its forward would put into the store, if activations are offloaded.

    Args:
        graph: concrete, for one micro-batch.
        stages: that are marked with what waits and what is made again.
        costs: of its ops.
        trained: stages with a backward.

    Raises:
        InputError: all stages keep theirs for another reason.
    """
    if "activations" not in stages.offload:
        return stages
    able = [stages.stages[n] for n in sorted(trained) if _is_able(graph, stages.stages[n])]
    if not able:
        raise InputError(
            "no stage's activations can lie in a store: all stages split their backward, make "
            "ops again for it, or run code of your own, or rrelu, which may write into what is "
            "saved",
            code="BX1316",
            at="--offload",
            help="leave activations out of --offload, or --delay-weight-gradients (zb-h1, zb-v, "
            "--activation-checkpointing ops) "
            "out",
        )
    saves = (_saved(Part(graph, stages, stage, costs)) for stage in able)
    return replace(stages, saves=tuple(each for each in saves if each.nbytes))


def _is_able(graph: Graph, stage: Stage) -> bool:
    if stage.runs_again:
        return not stage.deferred
    writes = any(_may_write(graph.op[name]) for name in stage.ops)
    return not (writes or stage.deferred or stage.again)


def _may_write(op: Op) -> bool:
    inner = op.body.ops if op.body else ()
    return op.target.startswith(_MAY_WRITE) or any(map(_may_write, inner))


def _saved(part: Part) -> SavedInStore:
    device, each = part.stage.device, [*_asked(part)]
    if part.stage.runs_again:
        each = [{edge.value: part.rounded(edge.nbytes) for edge in _received(part)}]
    rate = part.costs.cluster.store[device].bytes_per_s
    written = {name: nbytes for found in each for name, nbytes in found.items()}
    read_bytes = sum(sum(found.values()) for found in each)
    ops = [part.costs.op_cost(name, device) for name in part.stage.ops]
    return SavedInStore(
        part.stage.index,
        sum(written.values()),
        sum(written.values()) / rate,
        read_bytes / rate,
        sum(cost.forward_s * (1 + part.stage.runs_again) + cost.backward_s for cost in ops),
    )


def _received(part: Part) -> Iterator[Edge]:
    """Yield what comes to the stage and is worth moving."""
    edges = part.stages.into(part.stage.index, "activation")
    return (edge for edge in edges if edge.nbytes >= STORED_FROM_BYTES)


def _asked(part: Part) -> Iterator[Mapping[str, int]]:
    """Yield what each op's backward asks of the store."""
    return (part.stored(op) for op in part.ops() if part.is_graded(op))
