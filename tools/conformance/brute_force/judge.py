"""A way to run an instance -> the seconds of its step, as plans are forecast; the planner's own.

It tells the product each op's device and each replica's micro-batches, and leaves nothing to
choose. Tensor groups are left out: `auto` plans these in equal parts only. The search for the best
way is here: it judges those whose floor is below the best known, the lowest first, so that what it
leaves out is surely no faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from bigbrain_fx.core import Costs, Placement, Replica
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Plan, make_plan
from bigbrain_fx.plan.judge import PipelineMaker
from tools.conformance.brute_force.instances import PROCESS, PROCESS_BYTES, SOURCE, Instance
from tools.conformance.brute_force.ways import Floor, Line, Way, spans, ways

_HELD = 4
"""Times the bytes of a weight: itself, its gradient, and two of AdamW's."""
ORDERS = ("1f1b", "gpipe", "list")
_SAME = 1e-9


@dataclass(frozen=True)
class Found:
    """Results of the planner and of the search by force for an instance.

    Attributes:
        auto_s: None where it finds nothing that fits.
        best_s: of all ways, likewise.
        ways: how many there are.
        judged: how many of them were simulated; the rest have a floor that is no lower.
    """

    instance: str
    auto_s: float | None
    best_s: float | None
    ways: int
    judged: int
    auto: str
    best: str

    @property
    def gap(self) -> float:
        """By how much the planner's is slower, as a share; infinite where it finds nothing."""
        if self.best_s is None:
            return 0.0
        if self.auto_s is None:
            return float("inf")
        gap = self.auto_s / self.best_s - 1
        return gap if gap > _SAME else 0.0


def planned(instance: Instance, effort: str) -> Plan | None:
    """Return the plan of `auto` with all left open but the number of micro-batches."""
    options = Options(
        "auto",
        defer=(),  # split backwards are not enumerated
        micro_batches=instance.micro_batches,
        tensor=1,
        replicas=0,
        effort=effort,  # type: ignore[arg-type]  # click offers the three that there are
    )
    try:
        return make_plan(instance.graph, instance.cluster, SOURCE, options)
    except NoPlanError:
        return None


def compared(instance: Instance, effort: str) -> Found:
    """Plan an instance, and look for anything that is faster."""
    plan = planned(instance, effort)
    auto_s = plan.forecast.step_s if plan is not None else None
    force = Force(instance)
    found_s, best = force.best(float("inf") if auto_s is None else auto_s)
    best_s = auto_s if best is None else found_s
    said = "nothing fits" if plan is None else _said(plan)
    return Found(str(instance), auto_s, best_s, force.ways, force.judged, said, best or "")


def _said(plan: Plan) -> str:
    stages = plan.stages
    devices = ", ".join(f"{stage.device}: {len(stage.ops)} ops" for stage in stages.stages)
    return (
        f"{stages.replicas} replicas, ZeRO {stages.zero_stage}, {plan.schedule}: {devices}; "
        f"{stages.micros}"
    )


class Force:
    """A search by force of one instance: mutable, used once.

    Attributes:
        ways: how many it knows of.
        judged: how many were simulated.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.ways = self.judged = 0

    @cached_property
    def _maker(self) -> PipelineMaker:
        instance = self.instance
        return PipelineMaker(instance.graph, instance.cluster, SOURCE, Options("naive"))

    @cached_property
    def _costs(self) -> Costs:
        """The ops' at the rows of a micro-batch."""
        return self._maker.estimated(self.instance.graph.batch // self.instance.micro_batches)

    def best(self, known_s: float) -> tuple[float, str | None]:
        """Return the least step below what is known, and its way; None: there is none."""
        best: str | None = None
        for floor_s, way in self._in_order(known_s):
            if floor_s >= known_s * (1 - _SAME):
                break
            for order in ORDERS if max(map(len, way.lines)) > 1 else ORDERS[:1]:
                step_s = self.step_s(way, order)
                if step_s < floor_s * (1 - _SAME):
                    raise AssertionError(f"{way} takes {step_s} s, below its floor of {floor_s}")
                if step_s < known_s * (1 - _SAME):
                    known_s, best = step_s, f"{order}: {way}"
        return known_s, best

    def _in_order(self, known_s: float) -> list[tuple[float, Way]]:
        found, seen = [], set()
        for way in self._ways():
            self.ways += 1
            floor_s = self._cheap.of(way)
            if floor_s < known_s and self._cheap.fits(way):
                key = self._likeness(way)
                if key not in seen:
                    seen.add(key)
                    found.append((floor_s, way))
        return sorted(found, key=lambda each: each[0])

    def _ways(self) -> Iterator[Way]:
        names, ops = list(self.instance.cluster.device), len(self.instance.graph.ops)
        return ways(names, ops, self.instance.micro_batches)

    def _likeness(self, way: Way) -> object:
        """Return the way with the kinds of devices for their names, where links are equal."""
        if self.instance.cluster.links:
            return way
        kind = {d.name: d.flops_per_s for d in self.instance.cluster.devices}
        lines = tuple(tuple((kind[name], end) for name, end in line) for line in way.lines)
        return lines, way.micros

    @cached_property
    def _cheap(self) -> Floor:
        costs = self._costs
        seconds = {
            name: [_both_s(costs, op.name, name) for op in self.instance.graph.ops]
            for name in self.instance.cluster.device
        }
        graph, where = self.instance.graph, self.instance.cluster
        held = [_HELD * sum(graph.param[p].spec.nbytes for p in op.params) for op in graph.ops]
        room = {d.name: (d.memory_bytes - PROCESS_BYTES) / PROCESS for d in where.devices}
        return Floor(seconds, held, room)

    def step_s(self, way: Way, order: str) -> float:
        """Return the forecast of a way; infinity where it does not fit in memory."""
        self.judged += 1
        homes = [self._homes(line) for line in way.lines]
        options = Options("naive", schedule=order, micro_batches=self.instance.micro_batches)
        about = options, self.instance.micro_batches, _placement(homes, way.micros), self._costs
        try:
            return self._maker.placed(*about, is_trial=True).forecast.step_s
        except NoPlanError:
            return float("inf")

    def _homes(self, line: Line) -> dict[str, str]:
        ops = self.instance.graph.ops
        return {op.name: name for name, a, b in spans(line) for op in ops[a:b]}


def _both_s(costs: Costs, op: str, device: str) -> float:
    cost = costs.op_cost(op, device)
    return cost.forward_s + cost.backward_s


def _placement(homes: Sequence[Mapping[str, str]], micros: Sequence[int]) -> Placement:
    if len(homes) == 1:
        return Placement(homes[0])
    ends = list(accumulate(micros))
    replicas = tuple(
        Replica(each, tuple(range(end - own, end)))
        for each, end, own in zip(homes, ends, micros, strict=True)
    )
    return Placement(homes[0], "", replicas)
