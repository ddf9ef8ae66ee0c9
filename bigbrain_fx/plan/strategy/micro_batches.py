"""Numbers of micro-batches -> the plan of the best: from the most promising, up and then down.

    about_s   12.9  11.9 [11.7] 12.6     planned: the third, the fourth, which is slower, the second

A step takes longer the further a number is from the best one: of fewer a pipeline fills late, of
more each op is started more often. So neighbours are planned only while they are faster, and would
be as the best one is cut. What lacks memory by its bound is planned only where nothing else is
there. How a step would be with another number, cut as it is (`as_cut_s`): a replica's first
micro-batch, stage by stage, and each further one on its busiest device or link, by the difference
to the plan's own number, since sums of gradients and updates take the same in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bigbrain_fx.core import Costs, OpCost, Stage
from bigbrain_fx.errors import BigBrainError, InputError, NoPlanError
from bigbrain_fx.plan.fastest import counted_s
from bigbrain_fx.plan.judge import held_up
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.progress import is_stopped
from bigbrain_fx.plan.strategy.bound import Priced


def fastest_number(
    priced: Sequence[Priced],
    make: Callable[[int | None], Plan],
    may_be_faster: Callable[[float], bool],
    as_cut_s: Callable[[Plan, int], float],
) -> Plan:
    """Return the fastest plan of the numbers of micro-batches of one strategy.

    Args:
        priced: the strategy with each number, ascending; one at least.
        make: plans a number; None: as the search of a pipeline finds it.
        may_be_faster: whether a step of at least so many seconds is worth a plan.
        as_cut_s: about the step of a plan with another number, cut as it is.

    Raises:
        BigBrainError: no number makes a plan; the first one's.
    """
    fitting = [each for each in priced if not each.lacks] or priced[-1:]
    start = min(range(len(fitting)), key=lambda i: fitting[i].about_s)
    climb = _Climb(make, may_be_faster, as_cut_s)
    climb.along(fitting[start:])
    climb.along(fitting[:start][::-1])
    if climb.best is None:
        assert climb.failure is not None
        raise climb.failure
    return climb.best


@dataclass
class _Climb:
    """What was planned so far: mutable, used once."""

    make: Callable[[int | None], Plan]
    may_be_faster: Callable[[float], bool]
    as_cut_s: Callable[[Plan, int], float]
    best: Plan | None = None
    failure: BigBrainError | None = field(default=None)

    def along(self, numbers: Sequence[Priced]) -> None:
        """Plan numbers as long as each is faster than the best so far, or there is none."""
        for each in numbers:
            if self.best is not None and (is_stopped() or not self._is_promising(each)):
                return
            if not self._is_faster(each.strategy.micro_batches):
                return

    def _is_promising(self, each: Priced) -> bool:
        assert self.best is not None
        best_s, number = counted_s(self.best), each.strategy.micro_batches
        if each.least_s >= best_s or not self.may_be_faster(each.least_s):
            return False
        return number is None or self.as_cut_s(self.best, number) < best_s

    def _is_faster(self, number: int | None) -> bool:
        """Plan one; whether those beyond it are worth a plan."""
        try:
            plan = self.make(number)
        except (NoPlanError, InputError) as error:
            self.failure = self.failure or error
            return self.best is None
        if self.best is not None and counted_s(plan) >= counted_s(self.best):
            return False
        self.best = plan
        return True


def as_cut_s(plan: Plan, micro_batches: int, costs_at: Callable[[int], Costs]) -> float:
    """Return about the step of a plan's stages, as comparisons count it.

    Args:
        plan: of replicas, whose devices compute alone.
        micro_batches: of a step, of all replicas together.
        costs_at: of the model's ops, at so many rows.
    """
    own_s = _pipelines_s(plan, plan.micro_batches, costs_at)
    return counted_s(plan) + _pipelines_s(plan, micro_batches, costs_at) - own_s


def _pipelines_s(plan: Plan, micro_batches: int, costs_at: Callable[[int], Costs]) -> float:
    """Return about the seconds of the slowest replica's forwards and backwards."""
    stages, times = plan.stages, micro_batches / plan.micro_batches
    first_s: dict[int, float] = defaultdict(float)
    busy_s: dict[int, dict[object, float]] = defaultdict(lambda: defaultdict(float))
    for replica, taken, seconds in _taken(plan, micro_batches, costs_at):
        first_s[replica] += seconds
        busy_s[replica][taken] += seconds
    return max(
        first_s[replica] + (len(micros) * times - 1) * max(busy_s[replica].values())
        for replica, micros in enumerate(stages.micros)
    )


def _taken(
    plan: Plan, micro_batches: int, costs_at: Callable[[int], Costs]
) -> list[tuple[int, object, float]]:
    """Return a micro-batch's seconds: of which replica, on which device or link, how long."""
    rows, stages = plan.graph.batch // micro_batches, plan.stages
    costs = costs_at(rows)
    ops = (held_up(costs) or costs).ops
    found: list[tuple[int, object, float]] = [
        (stage.replica, stage.device, _stage_s(stage, ops)) for stage in stages.stages
    ]
    for edge in stages.edges:
        if edge.kind in ("activation", "gradient") and not stages.is_local(edge):
            source, target = stages.stages[edge.source], stages.stages[edge.target]
            link = plan.cluster.wire(source.device, target.device)
            wire_s = link.wire_s(edge.nbytes * rows // plan.rows)
            found.append((source.replica, (source.device, target.device), wire_s))
    return found


def _stage_s(stage: Stage, ops: Mapping[str, Mapping[str, OpCost]]) -> float:
    own = ops[stage.device]
    return sum(own[op].forward_s + own[op].backward_s for op in stage.ops)
