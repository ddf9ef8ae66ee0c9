"""A way to run an instance -> the seconds of its step, as plans are forecast; the planner's own.

It tells the product each op's device, each replica's micro-batches and each group's members, and
leaves nothing to choose. The search for the best way is here: it judges those whose floor is below
the best known, the lowest first, so that what it leaves out is surely no faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from bigbrain_fx.core import Axis, Costs, Placement, Replica, TensorParallel
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Plan, axes, make_plan, priced_axes
from bigbrain_fx.plan.judge import Maker, PipelineMaker
from bigbrain_fx.plan.tensor import GroupMaker
from tools.conformance.brute_force.instances import PROCESS, PROCESS_BYTES, SOURCE, Instance
from tools.conformance.brute_force.ways import Floor, Line, Way, below, spans, ways

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
        tensor=0,
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
    tensor = plan.placement.tensor
    group_of = {group[0]: "+".join(group) for group in tensor.groups} if tensor else {}
    devices = ", ".join(
        f"{group_of.get(stage.device, stage.device)}: {len(stage.ops)} ops"
        for stage in stages.of_member(0)
    )
    divided = f" {tensor.shares} of {[axis.name for axis in tensor.axes]}" if tensor else ""
    return (
        f"{stages.replicas} replicas, {stages.members} members{divided}, ZeRO {stages.zero_stage}, "
        f"{plan.schedule}: {devices}; {stages.micros}"
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
        self._makers: dict[object, tuple[Maker, Costs]] = {}

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Axes that groups may divide."""
        graph = self.instance.graph
        return priced_axes(graph, (axis for axis in axes(graph) if axis.flops and axis.params))

    def best(self, known_s: float) -> tuple[float, str | None]:
        """Return the least step below what is known, and its way; None: there is none."""
        best: str | None = None
        for floor_s, way in self._in_order(known_s):
            if floor_s >= known_s * (1 - _SAME):
                break
            if len(way.shares) > 1 and self._floor_s(way) >= known_s * (1 - _SAME):
                continue
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
        where = self.instance.cluster
        names, sizes = list(where.device), [axis.size for axis in self.axes]
        every = ways(names, self._ops, self.instance.micro_batches, sizes, len(names))
        chosen = list(self._together())
        return (way for way in every if len(way.shares) == 1 or way.axes in chosen)

    def _together(self) -> Iterator[tuple[int, ...]]:
        """Yield axes that do not meet: no parameter and no value has two of them."""
        for bits in range(1, 1 << len(self.axes)):
            some = tuple(i for i in range(len(self.axes)) if bits >> i & 1)
            every = [p.name for i in some for p in (*self.axes[i].params, *self.axes[i].values)]
            if len(set(every)) == len(every):
                yield some

    def _likeness(self, way: Way) -> object:
        """Return the way with the kinds of devices for their names, where links are equal."""
        if self.instance.cluster.links:
            return way
        kind = {d.name: d.flops_per_s for d in self.instance.cluster.devices}
        lines = tuple(
            tuple((tuple(kind[name] for name in group), end) for group, end in line)
            for line in way.lines
        )
        return lines, way.micros, way.shares, way.axes

    @property
    def _ops(self) -> int:
        return len(self.instance.graph.ops)

    @cached_property
    def _cheap(self) -> Floor:
        costs = self._maker(Way((), ()))[1]
        seconds = {
            name: [_both_s(costs, op.name, name) for op in self.instance.graph.ops]
            for name in self.instance.cluster.device
        }
        graph, where = self.instance.graph, self.instance.cluster
        held = [_HELD * sum(graph.param[p].spec.nbytes for p in op.params) for op in graph.ops]
        room = {d.name: (d.memory_bytes - PROCESS_BYTES) / PROCESS for d in where.devices}
        number = {op.name: i for i, op in enumerate(graph.ops)}
        divided = [frozenset(number[op] for op in (*a.along, *a.summed)) for a in self.axes]
        return Floor(seconds, held, room, divided, [axis.size for axis in self.axes])

    def _floor_s(self, way: Way) -> float:
        """Return the floor of a way of groups by what its ops take in them."""
        maker, costs = self._maker(way)
        assert isinstance(maker, GroupMaker)
        found = []
        for line, micros in zip(way.lines, way.micros, strict=True):
            homes = maker.homes_of(self._homes(line))
            each = [
                sum(_both_s(costs, op, at) for op, at in homes.items() if at == group[0])
                for group, _, _ in spans(line)
            ]
            found.append(below(each, micros))
        return max(found)

    def step_s(self, way: Way, order: str) -> float:
        """Return the forecast of a way; infinity where it does not fit in memory."""
        self.judged += 1
        maker, costs = self._maker(way)
        homes = [self._homes(line) for line in way.lines]
        if isinstance(maker, GroupMaker):
            homes = [maker.homes_of(each) for each in homes]
        options = Options("naive", schedule=order, micro_batches=self.instance.micro_batches)
        about = options, self.instance.micro_batches, _placement(homes, way.micros), costs
        try:
            return maker.placed(*about, is_trial=True).forecast.step_s
        except NoPlanError:
            return float("inf")

    def _homes(self, line: Line) -> dict[str, str]:
        ops = self.instance.graph.ops
        return {op.name: group[0] for group, a, b in spans(line) for op in ops[a:b]}

    def _maker(self, way: Way) -> tuple[Maker, Costs]:
        """Return what makes plans of such groups, and what their ops cost."""
        groups = tuple(group for line in way.lines for group, _ in line)
        key = (groups, way.shares, way.axes) if len(way.shares) > 1 else ()
        if key not in self._makers:
            maker = self._made(groups, way.shares, way.axes)
            rows = self.instance.graph.batch // self.instance.micro_batches
            self._makers[key] = maker, maker.estimated(rows)
        return self._makers[key]

    def _made(
        self, groups: tuple[tuple[str, ...], ...], shares: tuple[int, ...], some: Sequence[int]
    ) -> Maker:
        about = self.instance.graph, self.instance.cluster, SOURCE, Options("naive")
        if len(shares) == 1:
            return PipelineMaker(*about)
        divided = tuple(self.axes[number] for number in some)
        return GroupMaker(*about, TensorParallel(groups, shares, divided, scatters=True))


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
