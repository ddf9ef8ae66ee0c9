"""Answers to the search: costs of trials, and their steps by simulation.

The module judges pipelines of devices as those of tensor groups: a `Maker` turns placements into
plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from bigbrain_fx.core import Cluster, Costs, Graph, OpCost, Placement, micro_text
from bigbrain_fx.errors import BigBrainError, InputError, NoPlanError
from bigbrain_fx.plan.fastest import (
    fastest,
    fastest_number,
    least_gap,
    open_halves,
    stop,
    tell,
    times_counted,
)
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.nouns import AUTO, Case, Options, Plan
from bigbrain_fx.plan.offloading import as_planners_see
from bigbrain_fx.plan.one import counts, estimated, more_counts, placed, placement_of, planned_as
from bigbrain_fx.plan.schedule import traits
from bigbrain_fx.plan.search import (
    MANY_DEVICES,
    MOST_OTHERS,
    Ask,
    Score,
    Search,
    Trial,
    most_micro_batches,
    numbers,
    search,
)
from bigbrain_fx.planning import crowded, label

MOST_KEPT = 1_000_000
"""Instructions of trials that are kept, some 100 bytes each; the winner's are made again."""


class Maker(Protocol):
    """Turns placements of one graph on one cluster into plans.

    Attributes:
        scope: what all of its plans have in common, for what bounds say.
    """

    @property
    def graph(self) -> Graph: ...  # noqa: D102
    @property
    def cluster(self) -> Cluster: ...  # noqa: D102
    @property
    def options(self) -> Options: ...  # noqa: D102
    @property
    def scope(self) -> str: ...  # noqa: D102

    def estimated(self, rows: int) -> Costs:
        """Estimate the graph at so many rows."""

    def placed(
        self,
        options: Options,
        micro_batches: int,
        placement: Placement,
        costs: Costs,
        is_trial: bool = False,
    ) -> Plan:
        """Cut, schedule and simulate a placement; check its programs, unless it is a trial."""


@dataclass(frozen=True)
class PipelineMaker(Case):
    """Makes plans whose stages are of one device each."""

    scope: str = "that divides no op, of one replica"

    @staticmethod
    def of(case: Case) -> PipelineMaker:
        """Return what makes plans of a case."""
        return PipelineMaker(case.graph, case.cluster, case.source, case.options)

    def estimated(self, rows: int) -> Costs:
        """Estimate the graph at so many rows."""
        return estimated(self.graph.at(rows), self.cluster, self.source, self.options.estimator)

    def placed(
        self,
        options: Options,
        micro_batches: int,
        placement: Placement,
        costs: Costs,
        is_trial: bool = False,
    ) -> Plan:
        """Cut, schedule and simulate a placement."""
        case = replace(self, options=options)
        return placed(case, micro_batches, placement, costs, is_trial=is_trial)


def by_partitioner(maker: Maker, known: Sequence[Plan] = ()) -> Plan:
    """Plan by the partitioner that was asked for; where micro-batches are open, with the best.

    Args:
        maker: of plans.
        known: plans of the same graph; "auto" is no worse than what they would take.

    Raises:
        NoPlanError: nothing fits in memory; the arithmetic per device.
        InputError: the batch cannot be split as asked.
    """
    options = maker.options
    if options.partitioner == AUTO:
        return Judge(maker).plan(known)
    usual = counts(maker.graph, maker.cluster, options)
    more = more_counts(maker.graph, options, max(usual))
    # where the number is open, those that do not suit a schedule of virtual stages are left out
    open_count = traits(options.schedule).fold and options.micro_batches is None
    but: tuple[type[BigBrainError], ...] = (NoPlanError, *([InputError] if open_count else []))
    return fastest_number(usual, more, partial(_made, maker), but=but)


def _made(maker: Maker, micro_batches: int) -> Plan:
    tell(f"{label(maker.options.partitioner)}, {micro_text(micro_batches)}")
    costs, options = maker.estimated(maker.graph.batch // micro_batches), maker.options
    seen = [costs, held_up(costs) if isinstance(options.partitioner, str) else None]
    tries = [partial(_seen_so, maker, micro_batches, costs, each) for each in seen if each]
    return fastest(tries, but=(NoPlanError,))


def _seen_so(maker: Maker, micro_batches: int, costs: Costs, seen: Costs) -> Plan:
    """Plan by what a partitioner makes of what it is shown of the costs."""
    options = maker.options
    about = maker.graph, maker.cluster, options, micro_batches, seen
    return planned_as(
        lambda: placement_of(*about),
        lambda placement: maker.placed(options, micro_batches, placement, costs),
    )


class Judge:
    """The search's judge: costs, placements of other partitioners, and simulated trials.

    The judge keeps the plan of every trial: the winner's is the answer.
    """

    def __init__(self, maker: Maker) -> None:
        self.maker, self.options = maker, maker.options
        self.graph, self.cluster = maker.graph, maker.cluster
        self._costs: dict[int, Costs] = {}
        self._plans: dict[int, tuple[Trial, Plan]] = {}
        self._fastest_s = float("inf")
        self._instructions = 0

    def plan(self, known: Sequence[Plan]) -> Plan:
        """Search, and return the best plan with what was tried."""
        usual = tuple(counts(self.graph, self.cluster, self.options, _most_each(self.cluster)))
        runnable = tuple(_trial_of(plan) for plan in known if self.can_run(plan))
        trial, found = self._search(usual, runnable)
        if found.stopped:
            stop()
        plan = self._whole(trial)
        return replace(plan, partitioner=AUTO, search=found)

    def _search(self, usual: tuple[int, ...], known: tuple[Trial, ...]) -> tuple[Trial, Search]:
        """Search numbers of micro-batches: further ones where none fits, or the largest is best."""
        ask = self._ask(usual, known)
        last = max(numbers(ask))
        further = more_counts(self.graph, self.options, last)
        try:
            trial, found = search(ask)
        except NoPlanError as error:
            return self._with_fewer_rows(further, known, error)
        for count in further if ask.objective != "latency" else ():
            if found.stopped or trial.micro_batches != last or count > most_micro_batches(ask):
                break
            last, before = count, found
            trial, found = search(self._ask((count,), (trial,)))
            found = _together(before, found)
            if not _gains(before, found, ask.apart):
                break
        return trial, found

    def _with_fewer_rows(
        self, further: Iterator[int], known: tuple[Trial, ...], error: NoPlanError
    ) -> tuple[Trial, Search]:
        """Search with the first further number of micro-batches that fits.

        Raises:
            NoPlanError: none does; the one that was met first.
        """
        for count in further:
            with suppress(NoPlanError):
                return self._search((count,), known)
        raise error

    def _ask(self, counts: tuple[int, ...], known: tuple[Trial, ...]) -> Ask:
        options = self.options
        return Ask(
            self.graph,
            crowded(self.cluster),
            self._seen,
            counts,
            self.place,
            self.score,
            schedule=options.schedule,
            in_flight=options.in_flight,
            objective=options.objective,
            effort=options.effort,
            known=known,
            recompute=self.graph.training and options.recompute in (None, "auto"),
            apart=least_gap(self.cluster),
            scope=self.maker.scope + ", that cuts no layer" * (options.cut_at == "blocks"),
            cut_at=options.cut_at,
            halves=open_halves(self.graph, self.cluster, options),
            split=times_counted(is_split=True),
        )

    def can_run(self, plan: Plan) -> bool:
        """Whether a plan's devices are all here, and its micro-batches divide the batch."""
        used = set(plan.placement.device_of.values())
        return used <= set(self.cluster.device) and self.graph.batch % plan.micro_batches == 0

    def costs(self, rows: int) -> Costs:
        """Estimate the graph at so many rows, once."""
        if rows not in self._costs:
            self._costs[rows] = self.maker.estimated(rows)
        return self._costs[rows]

    def _seen(self, rows: int) -> Costs:
        """Estimate the graph as a search sees it: what lies in stores takes no memory."""
        return as_planners_see(self.costs(rows), self.options.offload)

    def place(self, name: str, micro_batches: int) -> Placement:
        """Ask another partitioner."""
        options = replace(self.options, partitioner=name, partitioner_options=())
        costs = self.costs(self.graph.batch // micro_batches)
        return placement_of(self.graph, self.cluster, options, micro_batches, costs)

    def _whole(self, trial: Trial) -> Plan:
        """Return a trial's plan with its programs, made again where they were not kept."""
        _, plan = self._plans[id(trial)]
        if plan.programs:
            return plan
        tell("the best plan, with the programs of all devices")
        try:
            return self._made(trial, is_trial=False)
        except KeyboardInterrupt:  # all is decided: who presses it again means it
            stop()
            return self._made(trial, is_trial=False)

    def _kept(self, plan: Plan) -> Plan:
        """Return a plan as it is kept: the programs of many large ones would fill the memory."""
        self._instructions += sum(len(each.instructions) for each in plan.programs)
        return plan if self._instructions <= MOST_KEPT else replace(plan, programs=())

    def _made(self, trial: Trial, *, is_trial: bool) -> Plan:
        """Make a trial's plan; "auto" makes single ops again where whole stages would have to."""
        asked = self.options.recompute
        options = replace(
            self.options,
            schedule=trial.schedule,
            in_flight=trial.in_flight,
            recompute="auto" if asked == "auto" else trial.recompute or asked,
        )
        micro = trial.micro_batches
        costs = self.costs(self.graph.batch // micro)
        return self.maker.placed(options, micro, trial.placement, costs, is_trial=is_trial)

    def score(self, trial: Trial) -> Score:
        """Simulate a trial."""
        plan = self._made(trial, is_trial=True)
        self._plans[id(trial)] = trial, self._kept(plan)
        self._fastest_s = min(self._fastest_s, plan.forecast.step_s)
        tell(f"{len(self._plans):,} plans simulated, the fastest {self._fastest_s:.3g} s a step")
        return _score(plan)


def _together(before: Search, after: Search) -> Search:
    """Return what two searches tried, the second of which knew the first one's winner."""
    is_new = after.winner.micro_batches != before.winner.micro_batches
    return replace(
        after,
        others=tuple(dict.fromkeys((*after.others, *before.others)))[:MOST_OTHERS],
        refused=tuple(dict.fromkeys((*after.refused, *before.refused)))[:MOST_OTHERS],
        bounds=after.bounds if is_new else before.bounds,
        looked_at=before.looked_at + after.looked_at,
        simulated=before.simulated + after.simulated,
    )


def _gains(before: Search, after: Search, least: float) -> bool:
    """Whether the second search's winner is faster by more than forecasts can tell apart."""
    return (after.winner.step_s or 0.0) < (before.winner.step_s or 0.0) * (1 - least)


def _most_each(cluster: Cluster) -> int:
    """Return for how many micro-batches a device, at most, a search looks."""
    return 8 if len(cluster.devices) <= MANY_DEVICES else 64


def _score(plan: Plan) -> Score:
    shares = []
    for entry in plan.forecast.devices:
        device = plan.cluster.device[entry.device]
        shares.append(needed_bytes(entry, device) / max(1, device.memory_bytes))
    return Score(
        plan.forecast.step_s,
        plan.stages.devices,
        tuple(plan.forecast.of(device).peak_bytes for device in plan.stages.devices),
        max(shares, default=0.0),
        plan.stages.is_chain,
    )


def _trial_of(plan: Plan) -> Trial:
    return Trial(
        "known plan",
        plan.placement,
        plan.schedule,
        plan.micro_batches,
        plan.in_flight,
        plan.stages.recompute,
    )


# -------------------------------------------------------------- devices that wait for their process


_Table = Mapping[str, OpCost]


def held_up(costs: Costs) -> Costs | None:
    """Return costs in which GPUs that wait for their processes take those's time; None: none does.

    Args:
        costs: of a graph's ops on every device.
    """
    alone = None if costs.alone is None else held_up(costs.alone)
    known: dict[int, _Table] = {}  # devices of one kind have one table: keep it so
    for table in costs.ops.values():
        if id(table) not in known:
            known[id(table)] = _by_process(table) if _waits(table) else table
    if alone is None and not any(map(_waits, costs.ops.values())):
        return None
    ops = {device: known[id(table)] for device, table in costs.ops.items()}
    return replace(costs, ops=ops, alone=alone or costs.alone)


def _waits(table: _Table) -> bool:
    """Whether starting all ops takes longer than computing them."""
    started_s = sum(cost.host_forward_s + cost.host_backward_s for cost in table.values())
    return started_s > sum(cost.forward_s + cost.backward_s for cost in table.values())


def _by_process(table: _Table) -> _Table:
    return {name: _started(cost) for name, cost in table.items()}


def _started(cost: OpCost) -> OpCost:
    """Return an op that takes what starting it takes; its gradients of inputs in proportion."""
    share = cost.backward_input_s / cost.backward_s if cost.backward_s else 0.0
    return replace(
        cost,
        forward_s=cost.host_forward_s,
        backward_s=cost.host_backward_s,
        backward_input_s=share * cost.host_backward_s,
    )
