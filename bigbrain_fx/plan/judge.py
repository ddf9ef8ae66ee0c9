"""What the search asks of plans: what its trials cost, and what they take by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.plan.apart import apart
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.nouns import AUTO, Options, Plan, Source
from bigbrain_fx.plan.one import counts, estimated, placed, placement_of
from bigbrain_fx.plan.search import Ask, Score, Trial, search
from bigbrain_fx.planning import crowded


class Judge:
    """What the search asks: costs, placements of other partitioners, and what a trial takes.

    It keeps the plan of every trial: the winner's is the answer.
    """

    def __init__(self, graph: Graph, cluster: Cluster, source: Source, options: Options) -> None:
        self.graph, self.cluster, self.source, self.options = graph, cluster, source, options
        self._costs: dict[int, Costs] = {}
        self._plans: dict[int, tuple[Trial, Plan]] = {}

    def plan(self, known: Sequence[Plan]) -> Plan:
        """Search, and return the best plan with what was tried."""
        options = self.options
        ask = Ask(
            self.graph,
            crowded(self.cluster),
            self.costs,
            tuple(counts(self.graph, self.cluster, options, 8)),
            self.place,
            self.score,
            schedule=options.schedule,
            in_flight=options.in_flight,
            objective=options.objective,
            effort=options.effort,
            known=tuple(_trial_of(plan) for plan in known if self.can_run(plan)),
            recompute=self.graph.training and options.recompute in (None, "auto"),
            apart=apart(self.cluster),
        )
        trial, found = search(ask)
        _, plan = self._plans[id(trial)]
        if plan.stages.deferring:  # the other bounds are of pipelines of whole backwards
            found = replace(found, bounds=found.bounds[:1])
        return replace(plan, partitioner=AUTO, search=found)

    def can_run(self, plan: Plan) -> bool:
        """Whether a plan's devices are all here, and its micro-batches divide the batch."""
        used = set(plan.placement.device_of.values())
        return used <= set(self.cluster.device) and self.graph.batch % plan.micro_batches == 0

    def costs(self, rows: int) -> Costs:
        """Estimate the graph at so many rows, once."""
        if rows not in self._costs:
            graph = self.graph.at(rows)
            self._costs[rows] = estimated(graph, self.cluster, self.source, self.options.estimator)
        return self._costs[rows]

    def place(self, name: str, micro_batches: int) -> Placement:
        """Ask another partitioner."""
        options = replace(self.options, partitioner=name, partitioner_options=())
        costs = self.costs(self.graph.batch // micro_batches)
        return placement_of(self.graph, self.cluster, options, micro_batches, costs)

    def score(self, trial: Trial) -> Score:
        """Simulate a trial; "auto" makes single ops again where whole stages would have to run."""
        asked = self.options.recompute
        options = replace(
            self.options,
            schedule=trial.schedule,
            in_flight=trial.in_flight,
            recompute="auto" if asked == "auto" else trial.recompute or asked,
        )
        micro = trial.micro_batches
        costs = self.costs(self.graph.batch // micro)
        args = (self.graph, self.cluster, self.source, options, micro, trial.placement, costs)
        plan = placed(*args)
        self._plans[id(trial)] = trial, plan
        return _score(plan)


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
