"""Plan -> Explanation: what each device runs, and why each cut is where it is.

For every cut of a chain the plan is recomputed with one block more on either side, and the
forecasts are compared. This module decides nothing and knows no terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bigbrain_fx.core import (
    Backward,
    BackwardWeight,
    Costs,
    Edge,
    Forward,
    Graph,
    Instruction,
    Placement,
    Shown,
    Stage,
)
from bigbrain_fx.errors import InputError, NoPlanError, ScheduleError
from bigbrain_fx.plan.fastest import least_gap
from bigbrain_fx.plan.lightening import Step, room_of
from bigbrain_fx.plan.making import costs_of, measured_share
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.recovery import Recovery, choose
from bigbrain_fx.plan.replanning import with_placement
from bigbrain_fx.plan.schedule import Synthesised, goes_in_row, stage_costs, traits, virtual_stages
from bigbrain_fx.plan.search import Compared
from bigbrain_fx.plan.tensor import AxisChoice, axis_choices, cheaper_whole, tensor_text
from bigbrain_fx.planning import JobOf, Kind, OrderClock, Synthesis, VirtualStages, bound_s


@dataclass(frozen=True)
class DevicePart:
    """One device's part: its modules (first to last), and the forecast."""

    device: str
    stages: tuple[int, ...]
    modules: str
    ops: int
    busy_s: float
    idle_s: float
    peak_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Alternative:
    """The same plan with one block moved over a cut: its forecast, or why it is none.

    `code` is that of the error which says why; `is_cut`, that the cut lies within the block.
    """

    block: str
    to_device: str
    step_s: float | None
    reason: str = ""
    code: str | None = None
    is_cut: bool = False

    def __str__(self) -> str:
        return f"{'all of ' * self.is_cut}{self.block} on {self.to_device}"


@dataclass(frozen=True)
class Cut:
    """One place where tensors cross: between which stages, what, and why here.

    `nbytes` and `transfer_s` are of one micro-batch's activations, `back_nbytes` and
    `back_transfer_s` of the gradients that come back.
    """

    source: int
    target: int
    after: str
    values: tuple[str, ...]
    nbytes: int
    transfer_s: float
    back_nbytes: int
    back_transfer_s: float
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """A plan as sentences and numbers.

    `reason` is the partitioner's own; `moved` lists ops that run elsewhere, to stay with others.
    `recompute` names the stages that recompute, `split` those that delay gradients of weights,
    `replicas` what copies of the model share. `order` explains the order of each device.
    `tensor` says what tensor groups divide, `axes` the cost of each axis, `cheaper` the axes that
    had better stay whole. `compared` lists the replicas and groups that were tried. `offload` names
    what lies in stores, `asynchronous` the age of weights in overlapping steps. `compiled` says
    that stages are compiled, `quantised` which frozen weights are int8. `measured` is the measured
    share of the ops' time; None: the estimator does not measure. `scaled` names the machine of
    times from elsewhere. `recovery` is the cost of a failure; None: one device, or no training.
    """

    step_s: float
    reason: str
    devices: tuple[DevicePart, ...]
    cuts: tuple[Cut, ...]
    moved: tuple[str, ...] = ()
    measured: float | None = None
    recovery: Recovery | None = None
    recompute: str = ""
    replicas: str = ""
    split: str = ""
    order: str = ""
    tensor: str = ""
    axes: tuple[AxisChoice, ...] = ()
    cheaper: str = ""
    compared: tuple[Compared, ...] = ()
    offload: str = ""
    asynchronous: str = ""
    compiled: str = ""
    quantised: str = ""
    scaled: str = ""

    @property
    def forecast_text(self) -> str:
        """Say what a step takes, and what that rests on."""
        return f"forecast {self.step_s:.4f} s a step{_share_text(self.measured)}{self.scaled}"

    def __str__(self) -> str:
        lines = [
            self.forecast_text,
            *([self.reason] if self.reason else []),
        ]
        lines += [
            f"  {part.device}: {part.modules} ({part.ops} ops); busy {part.busy_s:.4f} s, "
            f"idle {part.idle_s:.4f} s; "
            f"memory {size_text(part.peak_bytes)} of {size_text(part.memory_bytes)}"
            for part in self.devices
        ]
        for cut in self.cuts:
            lines.append(f"  {self.cut_text(cut)}")
            lines += [f"    {line}" for line in map(self.compare, cut.alternatives)]
        said = self.tensor, self.replicas, self.recompute, self.split, self.offload, self.order
        lines += [
            text for text in (*said, self.asynchronous, self.compiled, self.quantised) if text
        ]
        lines += [f"  {line}" for line in self.axis_lines]
        lines += [f"  compared: {line}" for line in map(compared_text, self.compared)]
        lines += [f"when a device dies: {self.recovery}"] if self.recovery else []
        return "\n".join(lines)

    def cut_text(self, cut: Cut) -> str:
        """Say where a cut is and what crosses it."""
        there = f"{size_text(cut.nbytes)} a micro-batch in {cut.transfer_s * 1e3:.2f} ms"
        back = f"{size_text(cut.back_nbytes)} in {cut.back_transfer_s * 1e3:.2f} ms"
        gradients = f", gradients back {back}" if cut.back_nbytes else ""
        return f"cut {cut.source} -> {cut.target} {cut.after}: {there}{gradients}"

    @property
    def axis_lines(self) -> tuple[str, ...]:
        """Say of each axis what it sends and saves, and which had better stay whole."""
        return (*map(self.axis_text, self.axes), *([self.cheaper] if self.cheaper else []))

    def axis_text(self, axis: AxisChoice) -> str:
        """Say what dividing an axis sends, and what leaving it whole would change."""
        times = f" x{len(axis.axes)}" if len(axis.axes) > 1 else ""
        sent = f"{axis.name}{times}: {size_text(axis.sent_bytes)} a step to each other TP rank"
        if axis.whole_s is None:
            return f"{sent}; not whole: {axis.reason}"
        change = 100 * (axis.whole_s / self.step_s - 1)
        return f"{sent}; whole: {axis.whole_s:.4f} s ({change:+.1f} %)"

    def compare(self, other: Alternative) -> str:
        """Say what moving a block would change."""
        if other.step_s is None:
            return f"not {other}: {other.reason}"
        change = 100 * (other.step_s / self.step_s - 1)
        return f"with {other}: {other.step_s:.4f} s ({change:+.1f} %)"


def explain(plan: Plan) -> Explanation:
    """Explain a plan: the parts, and for each cut of a chain the neighbours it was chosen over."""
    parts = tuple(_part(plan, device) for device in plan.stages.devices)
    pairs = {(e.source, e.target) for e in _crossing(plan)}
    costs = costs_of(plan)
    cuts = tuple(_cut(plan, costs, a, b) for a, b in sorted(pairs))
    said = plan.placement.reason
    by_hand = said.startswith("placed by hand")  # no partitioner was asked
    reason = said if by_hand or not said else f"{plan.partitioner}: {said}"
    axes = axis_choices(plan)
    recovery = choose(plan) if plan.mode == "train" and len(plan.stages.devices) > 1 else None
    return Explanation(
        plan.forecast.step_s,
        reason,
        parts,
        cuts,
        plan.stages.moved,
        measured_share(plan, costs),
        recovery,
        order=order_text(plan, costs),
        tensor=tensor_text(plan),
        axes=axes,
        cheaper=cheaper_whole(axes, plan.forecast.step_s, least_gap(plan.cluster)),
        compared=plan.compared,
        scaled=scaled_text(plan, costs),
        **plan.said,
    )


def compared_text(other: Compared) -> str:
    """Say what was compared with the plan."""
    took = "" if other.step_s is None else f"{other.step_s:.4f} s, "
    return f"{other.what}: {took}{other.why}"


def measured_text(plan: Plan) -> str:
    """Say how much of a forecast was measured, and where; nothing, where nothing ever is."""
    costs = costs_of(plan)
    return f"{_share_text(measured_share(plan, costs))}{scaled_text(plan, costs)}"


def _share_text(share: float | None) -> str:
    return "" if share is None else f", {100 * share:.0f} % of the ops' time measured"


def scaled_text(plan: Plan, costs: Costs) -> str:
    """Say which devices have times of another machine, scaled by rates, and how to measure them."""
    of: dict[tuple[str, int], list[str]] = {}
    for device in plan.cluster.devices:
        if device.name in plan.stages.devices and device.name in costs.scaled:
            of.setdefault((costs.scaled[device.name], device.threads), []).append(device.name)
    said = [
        f"{', '.join(names)} by rates from {key}: `bigbrain-fx profile --threads {threads}` there "
        "measures them"
        for (key, threads), names in of.items()
    ]
    return f"; scaled for {'; for '.join(said)}" if said else ""


def size_text(count: int) -> str:
    """Write bytes in the largest unit that leaves a number above 1: "1.5 MiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def _part(plan: Plan, device: str) -> DevicePart:
    stages = plan.stages.of(device)
    names = list(dict.fromkeys(block for stage in stages for block in _blocks(plan, stage)))
    entry = plan.forecast.of(device)
    return DevicePart(
        device,
        tuple(stage.index for stage in stages),
        f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names),
        sum(len(stage.ops) for stage in stages),
        entry.busy_s,
        entry.idle_s,
        entry.peak_bytes,
        plan.cluster.device[device].memory_bytes,
    )


def _crossing(plan: Plan) -> list[Edge]:
    edges = plan.stages.edges
    return [e for e in edges if e.kind == "activation" and not plan.stages.is_local(e)]


def _cut(plan: Plan, costs: Costs, source: int, target: int) -> Cut:
    there = [e for e in _crossing(plan) if (e.source, e.target) == (source, target)]
    back = [
        e
        for e in plan.stages.edges
        if e.kind == "gradient" and (e.source, e.target) == (target, source)
    ]
    a, b = plan.stages.stages[source], plan.stages.stages[target]
    link = plan.cluster.wire(a.device, b.device)
    neighbours = plan.stages.is_chain and target == source + 1 and a.replica == b.replica
    neighbours = neighbours and plan.placement.tensor is None
    moves = _alternatives(plan, costs, a, b) if neighbours else ()
    return Cut(
        source,
        target,
        _place(plan, a, b),
        tuple(edge.value for edge in there),
        sum(edge.nbytes for edge in there),
        sum(link.transfer_s(edge.nbytes) for edge in there),
        sum(edge.nbytes for edge in back),
        sum(link.transfer_s(edge.nbytes) for edge in back),
        moves,
    )


def _place(plan: Plan, a: Stage, b: Stage) -> str:
    """Say where a cut is: after a block, or within one."""
    last = _blocks(plan, a)[-1:]
    if last and last == _blocks(plan, b)[:1]:
        return f"within {last[0]}"
    return f"after {last[0]}" if last else "after the inputs"


def _alternatives(plan: Plan, costs: Costs, a: Stage, b: Stage) -> tuple[Alternative, ...]:
    before, after = _blocks(plan, a), _blocks(plan, b)
    found = []
    if len(before) > 1:
        start = min(i for i, op in enumerate(a.ops) if _is_of(plan, a, op, before[-1]))
        whole = before[-1] in after
        found.append(_moved(plan, costs, before[-1], a.ops[start:], b, whole))
    if len(after) > 1:
        end = max(i for i, op in enumerate(b.ops) if _is_of(plan, b, op, after[0]))
        whole = after[0] in before
        found.append(_moved(plan, costs, after[0], b.ops[: end + 1], a, whole))
    return tuple(found)


def _moved(
    plan: Plan, costs: Costs, block: str, ops: Sequence[str], to: Stage, whole: bool
) -> Alternative:
    """Forecast the plan with some ops moved: all that lie between the block's end and the cut."""
    placement = _with_ops_on(plan.placement, ops, to)
    try:
        moved = with_placement(plan, placement, costs)
        return Alternative(block, to.device, moved.forecast.step_s, is_cut=whole)
    except ScheduleError:  # replicas cut unlike may meet in unlike orders
        reason = "replicas would wait for each other in a circle"
        return Alternative(block, to.device, None, reason, is_cut=whole)
    except (NoPlanError, InputError) as error:
        return Alternative(block, to.device, None, error.what, error.code, is_cut=whole)


def _with_ops_on(placement: Placement, ops: Sequence[str], to: Stage) -> Placement:
    """Return a placement with some ops on a stage's device, of its replica."""
    moved = dict.fromkeys(ops, to.device)
    if not placement.replicas:
        return Placement({**placement.device_of, **moved})
    replicas = [
        replace(each, device_of={**each.device_of, **moved}) if number == to.replica else each
        for number, each in enumerate(placement.replicas)
    ]
    return replace(placement, device_of=replicas[0].device_of, replicas=tuple(replicas))


def _is_of(plan: Plan, stage: Stage, op: str, block: str) -> bool:
    return op not in stage.recomputed and _block_of(plan.graph_of(stage), op) == block


def _blocks(plan: Plan, stage: Stage) -> list[str]:
    """Return the blocks of a stage in order of their first op."""
    own = [name for name in stage.ops if name not in stage.recomputed]
    graph = plan.graph_of(stage)
    return [block for block in dict.fromkeys(_block_of(graph, name) for name in own) if block]


def _block_of(graph: Graph, op: str) -> str:
    """Return the block an op belongs to: a numbered layer, else the outermost other module."""
    if graph.op[op].layer:
        return graph.op[op].layer
    parts = graph.op[op].module_path.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((p for p in prefixes if p not in _holders(graph)), ".".join(parts))


@lru_cache(maxsize=4)
def _holders_of(paths: tuple[str, ...]) -> frozenset[str]:
    """Return what holds numbered layers somewhere below: ("m.layers.3.up",) -> m, m.layers."""
    found = set()
    for path in paths:
        parts = path.split(".")
        numbered = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
        found |= {".".join(parts[:count]) for count in range(1, numbered + 1)}
    return frozenset(found)


def _holders(graph: Graph) -> frozenset[str]:
    return _holders_of(tuple(dict.fromkeys(op.module_path for op in graph.ops)))


# ------------------------------------------------------------------------------------------------
# Why devices compute in this order: what was found, and how near the bound it is.


def order_text(plan: Plan, costs: Costs) -> str:
    """Say it of a schedule of virtual stages, or one that was searched; nothing of others."""
    own = traits(plan.schedule)
    if not (own.searches or own.fold) or plan.mode != "train" or plan.stages.micros:
        return ""
    if plan.placement.tensor is not None:  # `costs` are of all ranks, and they run one order
        return ""
    concrete, trained = plan.graph.at(plan.rows), frozenset(plan.trained)
    per_stage = stage_costs(concrete, plan.stages, costs)
    step = Step(concrete, plan.stages, plan.micro_batches, per_stage, trained, plan.cluster)
    given = virtual_stages(plan.stages, plan.micro_batches, per_stage, trained)
    found = None
    if own.searches:
        search = Synthesised(room_bytes=room_of(step, plan.schedule))
        found = search.found(plan.stages, plan.micro_batches, per_stage, trained)
    return _said(plan, given, found)


def _said(plan: Plan, given: VirtualStages, found: Synthesis | None) -> str:
    in_row = goes_in_row(plan.stages)
    row_s, alone_s = OrderClock(given).row_s(_jobs(plan))
    least_s = bound_s(given, in_row=in_row)
    why = "in a row, since nothing is clipped" if in_row else "alone, since gradients are clipped"
    gap = (row_s if in_row else alone_s) / least_s - 1 if least_s else 0.0
    lines = [
        f"order: {plan.schedule}{_start(found)}; a step alone takes {alone_s:.4g} s, one more in a "
        f"row {row_s:.4g} s",
        f"  what counts is a step {why}: no order of these stages takes less than {least_s:.4g} s, "
        f"this one {gap:.1%} more",
    ]
    return "\n".join(lines)


def _start(found: Synthesis | None) -> str:
    if found is None:
        return ""
    kept = "a list schedule" if found.start == "list" else found.start
    return f", {kept}, the best that was found under the devices' memory"


def _jobs(plan: Plan) -> dict[int, tuple[JobOf, ...]]:
    """Return the plan's own orders as the planning kernel has them."""
    return {
        place: tuple(job for i in program.instructions for job in _job(i))
        for place, program in enumerate(plan.programs)
    }


def _job(instruction: Instruction) -> list[JobOf]:
    match instruction:
        case Forward(stage, micro):
            return [(Kind.FORWARD, stage, micro)]
        case Backward(stage, micro):
            return [(Kind.BACKWARD, stage, micro)]
        case BackwardWeight(stage, micro):
            return [(Kind.BACKWARD_WEIGHT, stage, micro)]
    return []
