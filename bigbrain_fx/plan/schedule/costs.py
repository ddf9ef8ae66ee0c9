"""Add up what one micro-batch of each stage costs, and what its device holds for the whole step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, TypeVar

from bigbrain_fx.core import (
    DTYPE_BYTES,
    Cluster,
    Costs,
    Edge,
    Graph,
    OpCost,
    Param,
    Stage,
    Stages,
    TensorSpec,
)
from bigbrain_fx.plan.recompute import waiting_ops
from bigbrain_fx.plan.schedule.stage_part import Part, divided, library_bytes, rounded, wholes
from bigbrain_fx.plan.schedule.update_costs import (
    bytes_of,
    kept_params,
    older_bytes,
    optimizer_s,
    optimizer_workspace,
    resident_bytes,
    stored_bytes,
    stored_s,
    stored_weights_bytes,
    trainable,
    visiting_bytes,
)
from bigbrain_fx.plan.schedule.walk import Working, walked
from bigbrain_fx.planning import concrete


@dataclass(frozen=True)
class StageTimes:
    """Times of stages and optimizer steps on a cluster; fields as in `StageCosts`."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: Mapping[str, float]
    cluster: Cluster
    weight_s: tuple[float, ...] = ()
    host_forward_s: tuple[float, ...] = ()
    host_backward_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _fill(self)


@dataclass(frozen=True)
class StageCosts:
    """Costs of each stage on its own device, for one micro-batch, and memory of each device.

    Tuples have one entry per stage. `backward_s` includes the forward of a stage that recomputes.
    `weight_s` is the time of its BackwardWeight, which `backward_s` leaves out: 0 without one.
    `saved_bytes` stay from forward to backward; `workspace_bytes` are there only while the stage
    runs. `gradient_bytes` are the stage's own parameter gradients, one leaf per (parameter, stage);
    `deferred_bytes` are those of them that wait. `working` has the memory op by op; it stands for
    the two where there is nothing finer. Mappings are by device. `weights_bytes` counts parameters,
    buffers and constants once per device. `optimizer_s` and `optimizer_bytes` are for trainable
    parameters, `optimizer_workspace_bytes` are there only while the optimizer runs. `gappy_bytes`:
    by edge, of a received tensor whose strides leave gaps; the gaps are not sent. `whole_bytes`: by
    edge, of a gradient that stays on its device as a part of a larger tensor. `alone`: see
    `Costs.alone`. `library_bytes` are there all the time. `early_s`: by edge, how long before the
    end of its stage's backward a bucket is complete and leaves. `host_forward_s` and
    `host_backward_s` are the time of a GPU's process to start it all; 0.0 on a CPU. `stored_bytes`
    lie in stores all the time, activations not counted; `stored_s` is the time of a step for moving
    them. `visiting_bytes` are weights that are here from when their stage runs until another one
    does. Bytes are as the device's allocator takes them, except `gappy_bytes`, whose edges have two
    ends.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    saved_bytes: tuple[int, ...]
    cluster: Cluster
    workspace_bytes: tuple[int, ...] = ()
    gradient_bytes: tuple[int, ...] = ()
    weights_bytes: Mapping[str, int] = field(default_factory=dict)
    optimizer_bytes: Mapping[str, int] = field(default_factory=dict)
    optimizer_s: Mapping[str, float] = field(default_factory=dict)
    optimizer_workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    working: tuple[Working, ...] = ()
    gappy_bytes: Mapping[Edge, int] = field(default_factory=dict)
    whole_bytes: Mapping[Edge, int] = field(default_factory=dict)
    alone: StageTimes | None = None
    early_s: Mapping[Edge, float] = field(default_factory=dict)
    library_bytes: Mapping[str, int] = field(default_factory=dict)
    weight_s: tuple[float, ...] = ()
    deferred_bytes: tuple[int, ...] = ()
    host_forward_s: tuple[float, ...] = ()
    host_backward_s: tuple[float, ...] = ()
    stored_bytes: Mapping[str, int] = field(default_factory=dict)
    stored_s: Mapping[str, float] = field(default_factory=dict)
    visiting_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _fill(self)

    def part(self, stages: range) -> StageCosts:
        """Return the costs of some stages, numbered from 0."""
        cut = slice(stages.start, stages.stop)
        return replace(_of(self, cut), alone=self.alone and _of(self.alone, cut))

    @property
    def whole(self) -> StageCosts:
        """The same costs, with the seconds of every BackwardWeight in its Backward."""
        both = zip(self.backward_s, self.weight_s, strict=True)
        return replace(self, backward_s=tuple(map(sum, both)), weight_s=())

    def working_of(self, stage: int) -> Working:
        """Return what a stage holds while it runs; the most it can, where only sums are known.

        A later backward makes all parameter gradients again before it adds them up.
        """
        if self.working:
            return self.working[stage]
        saved, work = self.saved_bytes[stage], self.workspace_bytes[stage]
        again = work + self.gradient_bytes[stage]
        return Working(saved, saved + work, (work, again))

    def wire_s(self, stages: Stages, edge: Edge) -> tuple[float, float]:
        """Return the seconds one message occupies its link, and the latency that comes on top."""
        link = self.cluster.link(
            stages.stages[edge.source].device, stages.stages[edge.target].device
        )
        return link.wire_s(edge.nbytes), link.latency_s


_NOTHING: Mapping[str, float] = {
    "weight_s": 0.0,
    "visiting_bytes": 0,
    "deferred_bytes": 0,
    "workspace_bytes": 0,
    "gradient_bytes": 0,
    "host_forward_s": 0.0,
    "host_backward_s": 0.0,
}
_Costs = TypeVar("_Costs", StageCosts, StageTimes)


def _fill(costs: StageCosts | StageTimes) -> None:
    """Count as nothing, of each stage, what was left out."""
    for name in _NOTHING:
        if getattr(costs, name, None) == ():
            object.__setattr__(costs, name, (_NOTHING[name],) * len(costs.forward_s))


def _of(costs: _Costs, cut: slice) -> _Costs:
    """Return the costs of some stages: all tuples have an entry per stage."""
    each = ((entry.name, getattr(costs, entry.name)) for entry in fields(costs))
    cut_of: dict[str, Any] = {name: own[cut] for name, own in each if isinstance(own, tuple)}
    return replace(costs, **cut_of)


def stage_costs(graph: Graph, stages: Stages, costs: Costs) -> StageCosts:
    """Add up the costs of every stage on its device.

    Args:
        graph: concrete (`graph.at(rows)`), for the micro-batch that `costs` and `stages` are for.
        stages: the cut; copies that a stage recomputes are paid for in that stage.
        costs: one entry per op and device that `stages` uses.
    """
    measured = graph.loss is not None and any(op.saves for op in graph.ops)
    measured = measured or bool(
        stages.recompute or stages.deferring or stages.again or stages.saving
    )  # sums do not say that
    parts = [Part(graph, stages, stage, costs) for stage in stages.stages] if measured else []
    times = _times(graph, stages, costs)
    kinds = {name: costs.cluster.device[name].kind for name in stages.devices}
    return StageCosts(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        host_forward_s=times.host_forward_s,
        host_backward_s=times.host_backward_s,
        saved_bytes=tuple(_saved_bytes(stage, costs) for stage in stages.stages),
        cluster=costs.cluster,
        workspace_bytes=tuple(_workspace_bytes(graph, stage, costs) for stage in stages.stages),
        gradient_bytes=tuple(
            bytes_of(trainable(graph, (stage,)), kinds[stage.device]) for stage in stages.stages
        ),
        weights_bytes={
            d: bytes_of(kept_params(graph, stages, d), kinds[d]) + older_bytes(graph, stages, d, k)
            for d, k in kinds.items()
        },
        # Adam's `step` is no part of it: a CPU tensor, unless `capturable` or `fused` (torch/optim/
        # adam.py, "special device hosting for step").
        optimizer_bytes={d: resident_bytes(graph, stages, costs, d) for d in stages.devices},
        stored_bytes={
            d: sum(stored_bytes(graph, stages, costs, d))
            + sum(stored_weights_bytes(graph, stages, d))
            for d in stages.devices
        },
        stored_s={d: stored_s(graph, stages, costs, d) for d in stages.devices},
        visiting_bytes=tuple(visiting_bytes(graph, stages, stage) for stage in stages.stages),
        working=tuple(map(walked, parts)),
        gappy_bytes=dict(_gappy(graph, stages)),
        whole_bytes=dict(wholes(graph, stages, stages.edges)),
        optimizer_workspace_bytes=optimizer_workspace(graph, stages, costs),
        optimizer_s=times.optimizer_s,
        alone=None if costs.alone is None else _times(graph, stages, costs.alone),
        library_bytes={d: _library_bytes(graph, stages, costs, d) for d in stages.devices},
        early_s=dict(_early_s(graph, stages, costs)),
        weight_s=times.weight_s,
        deferred_bytes=tuple(
            bytes_of(_deferred(graph, stage), kinds[stage.device]) for stage in stages.stages
        ),
    )


def _deferred(graph: Graph, stage: Stage) -> tuple[Param, ...]:
    return tuple(p for p in trainable(graph, (stage,)) if p.canonical in stage.deferred)


def _times(graph: Graph, stages: Stages, costs: Costs) -> StageTimes:
    each = [[costs.op_cost(op, stage.device) for op in stage.ops] for stage in stages.stages]
    forward_s = tuple(sum(cost.forward_s for cost in ops) for ops in each)
    stored = [stages.saving.get(stage.index) for stage in stages.stages]
    weight_s = tuple(_weight_s(graph, stage, costs) for stage in stages.stages)
    whole_s = (sum(cost.backward_s for cost in ops) for ops in each)
    backward_s = (whole - later for whole, later in zip(whole_s, weight_s, strict=True))
    again_s = (_again_s(costs, stage, forward_s[stage.index]) for stage in stages.stages)
    host_s = tuple(sum(cost.host_forward_s for cost in ops) for ops in each)
    return StageTimes(
        tuple(
            s + (found.write_s if found else 0.0)
            for s, found in zip(forward_s, stored, strict=True)
        ),
        tuple(
            back + again + (found.read_s if found else 0.0)
            for back, again, found in zip(backward_s, again_s, stored, strict=True)
        ),
        {d: optimizer_s(graph, stages, costs, d) for d in stages.devices},
        costs.cluster,
        weight_s,
        host_s,
        tuple(
            sum(cost.host_backward_s for cost in ops)
            + (host_s[s.index] if s.runs_again else 0.0)
            + sum(costs.op_cost(op, s.device).host_forward_s for op in s.again)
            for s, ops in zip(stages.stages, each, strict=True)
        ),
    )


def _weight_s(graph: Graph, stage: Stage, costs: Costs) -> float:
    """Return what a stage's BackwardWeight takes: of ops that wait, all but gradients of inputs."""
    waiting = waiting_ops(graph, stage) if stage.deferred else ()
    found = (costs.op_cost(name, stage.device) for name in stage.ops if name in waiting)
    return sum((cost.backward_s - cost.backward_input_s for cost in found), 0.0)


def _saved_bytes(stage: Stage, costs: Costs) -> int:
    kind = costs.cluster.device[stage.device].kind
    return sum(rounded(costs.op_cost(op, stage.device).saved_bytes, kind) for op in stage.ops)


def _library_bytes(graph: Graph, stages: Stages, costs: Costs, device: str) -> int:
    ops = (graph.op[name] for stage in stages.of(device) for name in stage.ops)
    return library_bytes(costs.cluster.device[device], ops, graph.loss is not None)


def _again_s(costs: Costs, stage: Stage, forward_s: float) -> float:
    """Return what a second forward adds to a backward: its ops, and what starting it costs."""
    if not stage.runs_again:
        return sum((costs.op_cost(op, stage.device).forward_s for op in stage.again), 0.0)
    return forward_s + costs.cluster.device[stage.device].overheads.instruction_s


def _workspace_bytes(graph: Graph, stage: Stage, costs: Costs) -> int:
    """Return the most that one running op holds besides what is saved: result and workspace.

    Without a loss nothing is saved: all values that a later op of the stage reads count instead.
    """
    kind = costs.cluster.device[stage.device].kind
    if graph.loss is None:
        return max(_live_bytes(graph, stage, costs, kind), default=0)
    return max(
        (
            rounded(concrete(graph.op[name].writes_bytes), kind)
            + rounded(costs.op_cost(name, stage.device).workspace_bytes, kind)
            for name in stage.ops
        ),
        default=0,
    )


def _live_bytes(graph: Graph, stage: Stage, costs: Costs, kind: str) -> Iterator[int]:
    """Yield the bytes held while each op runs: values made here, until their last reader is done.

    A value that the stage sends counts as a message from the end of the stage; until then it counts
    here.
    """
    own = set(stage.ops)
    storage = {name: name for name in stage.ops}
    for name in stage.ops:  # a view keeps its base
        storage[name] = storage.get(graph.op[name].view_of or name, name)
    last = {storage[ref]: i for i, op in enumerate(stage.ops) for ref in _read(graph, op, own)}
    kept = {storage[name] for name in (*stage.sends, *graph.outputs) if name in own}
    held: dict[str, int] = {}
    for i, name in enumerate(stage.ops):
        op = graph.op[name]
        if storage[name] == name:
            held[name] = rounded(concrete(op.writes_bytes), kind)
        workspace = rounded(costs.op_cost(name, stage.device).workspace_bytes, kind)
        yield sum(held.values()) + workspace
        held = {n: size for n, size in held.items() if last.get(n, -1) > i or n in kept}


def _gappy(graph: Graph, stages: Stages) -> Iterator[tuple[Edge, int]]:
    """Yield the edges whose tensors have strides that leave gaps: parts of larger tensors."""
    for edge in stages.edges:
        spec = None
        if edge.kind == "activation":
            spec = graph.op[edge.value].outputs[0]
        elif edge.kind == "gradient":
            spec = _spec_of_part(graph, stages, edge)
        if spec is not None and (extent := _extent(spec)) > _stored(spec):
            yield edge, extent * DTYPE_BYTES[spec.dtype]


def _spec_of_part(graph: Graph, stages: Stages, edge: Edge) -> TensorSpec | None:
    """Return a gradient that is a part of its only reader's, with the strides that it has there."""
    whole = divided(graph, stages, edge)
    if whole is None:
        return None
    return replace(graph.op[edge.value].outputs[0], strides=whole.outputs[0].strides)


def _extent(spec: TensorSpec) -> int:
    """Return the elements from a tensor's first to its last, gaps included."""
    steps = zip(spec.shape, spec.strides, strict=True)
    return 1 + sum((int(size) - 1) * int(step) for size, step in steps)


def _stored(spec: TensorSpec) -> int:
    """Return the elements that are stored; those repeated by a stride of 0 once."""
    steps = zip(spec.shape, spec.strides, strict=True)
    return prod(int(size) for size, step in steps if step != 0)


def _read(graph: Graph, name: str, own: set[str]) -> Iterator[str]:
    return (ref for ref in graph.op[name].refs if ref in own)


def _early_s(graph: Graph, stages: Stages, costs: Costs) -> Iterator[tuple[Edge, float]]:
    """Yield the time left of a stage's backward when a bucket is complete: all before its first op.

    Where the bucket waits, the time is that of its BackwardWeight. A GPU's backward is queued
    before it is done, and a bucket there leaves at its end.
    """
    if stages.sum_order == "tree" and not stages.sums_each:
        return  # its nodes leave when all is computed
    for bucket in stages.buckets:
        names = set(bucket.params)
        for number in bucket.stages:
            stage = stages.stages[number]
            if costs.cluster.device[stage.device].kind == "cuda":
                continue
            ops = [graph.op[name] for name in stage.ops]
            uses = [{graph.param[param].canonical for param in op.params} & names for op in ops]
            first = next((place for place, used in enumerate(uses) if used), 0)
            split = waiting_ops(graph, stage) if stage.deferred else frozenset()
            waits = stages.waits_for(bucket.name, number)
            left = ((costs.op_cost(op.name, stage.device), op.name in split) for op in ops[:first])
            left_s = sum(_share_s(cost, is_split, waits) for cost, is_split in left)
            for edge in stages.out_of(number, "reduce"):
                if edge.value == bucket.name:
                    yield edge, left_s


def _share_s(cost: OpCost, is_split: bool, later: bool) -> float:
    """Return what of an op's backward comes with the BackwardWeight, or with the Backward."""
    weight_s = cost.backward_s - cost.backward_input_s if is_split else 0.0
    return weight_s if later else cost.backward_s - weight_s
