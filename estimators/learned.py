"""`learned`: op times by a regression that `bigbrain-fx fit` made of profiles.

The error of `analytical` is predicted for forward, input gradients and weight gradients apart, from
each op's shapes (`costs.model.features`). Without a file the model that comes with bigbrain-fx
predicts it, which was fitted on a CPU. The optimizer's step is as the profiles say; memory is
`analytical`'s. A sum of gradients that several readers send back is in the profile of a reader,
where it happens.

How it does beside the roofline of `analytical`: tools/studies/compare_estimators.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from bigbrain_fx.core import Cluster, Costs, Device, Graph, Op, OpCost
from bigbrain_fx.costs import (
    PHASES,
    SHIPPED,
    CostModel,
    OpWork,
    Phase,
    device_of,
    mode_of,
    read_model,
    region_mode,
    signature,
)

from .analytical import Analytical
from .calls import number

VARIABLE = "BIGBRAIN_LEARNED_COSTS"

Seconds: TypeAlias = dict[str, dict[Phase, float]]


@dataclass(frozen=True)
class Learned:
    """Estimate every op by a fitted model.

    Attributes:
        costs: the file that `bigbrain-fx fit` wrote; when left out, what the environment's
            BIGBRAIN_LEARNED_COSTS names; else the shipped one, of CPUs.

    Raises:
        InputError: the file holds no fitted model.
    """

    costs: str = ""

    name = "learned"

    def __post_init__(self) -> None:
        """Refuse now, and not when a model has been captured."""
        self.model()

    def model(self) -> CostModel:
        """Return the fitted model; files are read once, and again when they change."""
        path = Path(self.costs or os.environ.get(VARIABLE, "") or SHIPPED)
        return _read(path, _state(path))

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """Estimate every op of a concrete graph (`graph.at(rows)`) on every device.

        Devices with equal rates share their figures. Regions cost the sum of their ops.

        Raises:
            InputError: the model knows no device of a kind that the cluster has.
        """
        model, known = self.model(), Analytical().estimate(graph, cluster)
        calls = tuple(_calls(graph, (), mode_of(graph), ""))
        places = {device.name: device_of(device) for device in cluster.devices}
        priced = {place: _priced(model, calls, place) for place in dict.fromkeys(places.values())}
        ops = {name: _timed(known.ops[name], priced[place]) for name, place in places.items()}
        return _with_optimizer(replace(known, ops=ops), model)


def _with_optimizer(costs: Costs, model: CostModel) -> Costs:
    """Put the optimizer's step in as it was profiled; as `analytical` has it if it was not."""
    if not model.optimizer_touches and not model.optimizer_launches:
        return costs
    devices = costs.cluster.devices
    return replace(
        costs,
        optimizer_s_per_byte={
            d.name: model.optimizer_touches / d.memory_bytes_per_s for d in devices
        },
        optimizer_s_per_tensor={d.name: model.optimizer_launches * d.launch_s for d in devices},
    )


@dataclass(frozen=True)
class _RunningOp:
    """One op that runs; `name` is of the op of the whole graph that it is, or is part of."""

    name: str
    work: OpWork
    phases: tuple[Phase, ...]


def _calls(graph: Graph, outer: tuple[Graph, ...], mode: str, inside: str) -> Iterator[_RunningOp]:
    for op in graph.ops:
        name = inside or op.name
        if op.body is not None:
            yield from _calls(op.body, (graph, *outer), region_mode(op, mode), name)
        elif op.outputs or op.mutates:  # else it is a size
            yield _call(graph, op, outer, mode, name)


def _call(graph: Graph, op: Op, outer: tuple[Graph, ...], mode: str, name: str) -> _RunningOp:
    signed = signature(graph, op, outer, mode)
    graded = [tensor for tensor in signed.tensors if tensor.wants_grad]
    phases: list[Phase] = ["forward"]
    if op.requires_grad and any(not tensor.is_parameter for tensor in graded):
        phases.append("backward_input")
    if op.requires_grad and any(tensor.is_parameter for tensor in graded):
        phases.append("backward_weight")
    work = OpWork(signed, number(op.flops), number(op.reads_bytes), number(op.writes_bytes))
    return _RunningOp(name, work, tuple(phases))


def _priced(model: CostModel, calls: Sequence[_RunningOp], device: Device) -> Seconds:
    """Return the seconds of each op of the whole graph, by phase; of phases that were learned."""
    known = [phase for phase in PHASES if phase in model.phases]
    found: Seconds = {call.name: dict.fromkeys(known, 0.0) for call in calls}
    for phase in known:
        asked = [call for call in calls if phase in call.phases]
        if not asked:
            continue
        seconds = model.seconds(phase, [call.work for call in asked], device)
        for call, taken_s in zip(asked, seconds, strict=True):
            found[call.name][phase] += float(taken_s)
    return found


def _timed(known: Mapping[str, OpCost], seconds: Seconds) -> dict[str, OpCost]:
    """Put predicted times beside analytical memory; a size takes no time.

    A phase of which too little was profiled stays as `analytical` has it.
    """
    return {
        name: _with_times(cost, seconds[name]) if name in seconds else cost
        for name, cost in known.items()
    }


def _with_times(cost: OpCost, seconds: Mapping[Phase, float]) -> OpCost:
    input_s = seconds.get("backward_input", cost.backward_input_s)
    weight_s = seconds.get("backward_weight", cost.backward_s - cost.backward_input_s)
    return replace(
        cost,
        forward_s=seconds["forward"],
        backward_s=input_s + weight_s,
        backward_input_s=input_s,
        host_forward_s=0.0,  # what was learned from has what starting an op took
        host_backward_s=0.0,
    )


def _state(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written again."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0  # reading it says what is wrong
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4)
def _read(path: Path, state: tuple[int, int]) -> CostModel:
    del state  # part of the cache's key
    return read_model(path)
