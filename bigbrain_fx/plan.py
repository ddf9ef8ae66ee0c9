"""Plan: everything that is decided before a process starts; and the search for a good one.

This room knows graph, cluster, plug-ins, cut, schedules and the simulator. It knows nothing of
torch, of emitted text, or of how a plan is run. `plan.json` is this noun, field by field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from bigbrain_fx.core import (
    Cluster,
    Costs,
    Forecast,
    Graph,
    Partitioner,
    Placement,
    Program,
    Stages,
)
from bigbrain_fx.cut import cut, trained
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.fitting import (
    beside_tensors,
    for_tensors,
    needed_bytes,
    require_fits,
    with_data,
)
from bigbrain_fx.plugins import estimator, options_of, partitioner
from bigbrain_fx.recompute import Wanted, recompute_text, recomputing, wanted_by
from bigbrain_fx.schedule import build, require_sound, stage_costs
from bigbrain_fx.search import Ask, Effort, Objective, Score, Search, Trial, search
from bigbrain_fx.simulate import simulate

FORMAT = 1
AUTO = "auto"
"""The partitioner that tries the others, with every choice that was left open."""


@dataclass(frozen=True)
class Options:
    """What a user may choose; None means: let the planner choose.

    `rows` of a micro-batch are for a model whose trace cannot leave the batch size free. `mode`
    "eval" captures the model as `model.eval()` computes, for inference: there is no backward;
    None is "train", and "eval" for an ONNX file.
    `assume` says for places ("model.py:31") whether the condition there holds, where a tensor's
    value decides. `leaves` are modules that are kept whole, by path or class name. `recompute` are
    the stages (by number, or "all") that keep no activations and run forward again before backward.
    `objective` and `effort` are for the partitioner "auto": what is best, and how long to look.
    """

    partitioner: str = "chain-dp"
    estimator: str = "analytical"
    schedule: str | None = None
    micro_batches: int | None = None
    seed: int = 0
    in_flight: tuple[int, ...] | None = None
    rows: int | None = None
    partitioner_options: tuple[tuple[str, int], ...] = ()
    mode: Literal["train", "eval"] | None = None
    assume: tuple[tuple[str, bool], ...] = ()
    leaves: tuple[str, ...] = ()
    recompute: Wanted = None
    objective: Objective = "throughput"
    effort: Effort = "normal"


@dataclass(frozen=True)
class Source:
    """Where the model came from, so that `verify` can ask it again.

    A module in memory has no `path`; `module` is the model file's name as a module. The optimizer
    keeps `optimizer_state` bytes per byte of parameters, and for a moment `optimizer_temporaries`
    tensors of the size of the largest; AdamW's are 2 and 2.
    """

    path: str
    has_batches: bool = False
    has_optimizer: bool = False
    has_loss: bool = False
    has_lr_scale: bool = False
    clip_norm: float | None = None
    module: str = ""
    optimizer_state: float = 2.0
    optimizer_temporaries: float = 2.0


@dataclass(frozen=True)
class Plan:
    """A model, a cluster, and who does what when.

    Attributes:
        rows: of a micro-batch.
        trained: stages that have a backward pass.
        forecast: of one step, without its timeline (`timeline(plan)` simulates it again).
        in_flight: as in `schedule.build`; None is the schedule's own choice.
        search: what the partitioner "auto" tried; None for the others.
    """

    graph: Graph
    cluster: Cluster
    source: Source
    partitioner: str
    estimator: str
    schedule: str
    micro_batches: int
    rows: int
    seed: int
    placement: Placement
    stages: Stages
    trained: tuple[int, ...]
    programs: tuple[Program, ...]
    forecast: Forecast
    format: int = FORMAT
    in_flight: tuple[int, ...] | None = None
    search: Search | None = None

    @property
    def mode(self) -> Literal["train", "eval"]:
        """What the plan is for: training, or inference as `model.eval()` computes."""
        return "train" if self.graph.training else "eval"

    @cached_property
    def key(self) -> str:
        """A short hash of the plan; a process that runs another plan is refused."""
        return hashlib.sha256(to_json(self)).hexdigest()[:16]

    def __str__(self) -> str:
        """Show the plan as plain text, a line per device."""
        stages, devices = len(self.stages.stages), len(self.stages.devices)
        lines = [
            f"{self.graph.name}: {stages} stages on {devices} devices, "
            f"{self.schedule}, {self.micro_batches} micro-batches of {self.rows} rows, "
            f"forecast {self.forecast.step_s:.3f} s a step"
        ]
        if self.stages.recompute:
            lines.append(f"  {recompute_text(self.stages)}")
        for entry in self.forecast.devices:
            numbers = ", ".join(str(stage.index) for stage in self.stages.of(entry.device))
            peak = f"peak {entry.peak_bytes / 2**20:.0f} MiB"
            lines.append(f"  {entry.device}: stages {numbers}; busy {entry.busy_s:.3f} s; {peak}")
        return "\n".join(lines)


def make_plan(
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    known: Sequence[Plan] = (),
) -> Plan:
    """Place, cut, schedule and simulate.

    With no number of micro-batches given, try those that divide the batch and keep the fastest.

    Args:
        graph: as captured.
        cluster: where it runs.
        source: what the model file says besides.
        options: what was chosen; the partitioner "auto" chooses all that was left open.
        known: plans of the same graph, of a poorer cluster, say: "auto" is no worse than what they
            would take here.

    Raises:
        NoPlanError: nothing fits in memory; the arithmetic per device.
        InputError: the batch cannot be split as asked.
    """
    if options.partitioner == AUTO:
        return _Judge(graph, cluster, source, options).plan(known)
    counts = _counts(graph, cluster, options)
    found: list[Plan] = []
    failure: NoPlanError | None = None
    for count in counts:
        try:
            found.append(_plan(graph, cluster, source, options, count))
        except NoPlanError as error:
            failure = failure or error
    if not found:
        assert failure is not None
        raise failure
    return min(found, key=lambda plan: plan.forecast.step_s)


def plan_placed(
    graph: Graph, cluster: Cluster, source: Source, options: Options, placement: Placement
) -> Plan:
    """Cut, schedule and simulate a graph whose placement is given.

    Raises:
        NoPlanError: it does not fit in memory.
        InputError: the batch cannot be split as asked, or the cluster lacks a device.
    """
    lacking = sorted(set(placement.device_of.values()) - set(cluster.device))
    if lacking:
        raise InputError(
            f"the cluster has no device {', '.join(lacking)}, where the placement puts ops",
            help="leave --devices out: the plan to follow has its cluster",
        )
    plans = []
    for count in _counts(graph, cluster, options):
        concrete = graph.at(graph.batch // count)
        costs = _costs(concrete, cluster, source, options.estimator)
        plans.append(_placed(graph, cluster, source, options, count, placement, costs))
    return min(plans, key=lambda plan: plan.forecast.step_s)


def replan(plan: Plan, cluster: Cluster) -> Plan:
    """Make the same plan's choices again for another cluster: what would it give there?"""
    options = Options(
        plan.partitioner,
        plan.estimator,
        None,
        plan.micro_batches,
        plan.seed,
        recompute=wanted_by(plan.stages, plan.trained),
    )
    if plan.search is None:
        return make_plan(plan.graph, cluster, plan.source, options)
    again = replace(
        options, recompute=None, objective=plan.search.objective, effort=plan.search.effort
    )
    return make_plan(plan.graph, cluster, plan.source, again, known=(plan,))


def with_placement(plan: Plan, placement: Placement, costs: Costs | None = None) -> Plan:
    """Return the plan with another placement, all its other choices kept where they still apply.

    Args:
        plan: to change.
        placement: where its ops go.
        costs: `costs_of(plan)` where it is known already.

    Raises:
        NoPlanError: it does not fit in memory.
    """
    options = Options(
        plan.partitioner,
        plan.estimator,
        plan.schedule,
        plan.micro_batches,
        plan.seed,
        plan.in_flight,
        recompute=wanted_by(plan.stages, plan.trained),
    )
    return _placed(
        plan.graph,
        plan.cluster,
        plan.source,
        options,
        plan.micro_batches,
        placement,
        costs or costs_of(plan),
        keep_schedule=False,
    )


def costs_of(plan: Plan) -> Costs:
    """Estimate the plan's ops again, for a closer look than plan.json holds."""
    return _costs(plan.graph.at(plan.rows), plan.cluster, plan.source, plan.estimator)


def measured_share(plan: Plan) -> float | None:
    """Return the share of the ops' forecast time that was measured; None if nothing ever is."""
    costs = costs_of(plan)
    if not costs.measured:
        return None
    known = {device: set(ops) for device, ops in costs.measured.items()}
    measured_s = total_s = 0.0
    for stage in plan.stages.stages:
        for op in stage.ops:
            cost = costs.op_cost(op, stage.device)
            taken_s = cost.forward_s + cost.backward_s
            total_s += taken_s
            measured_s += taken_s if op in known[stage.device] else 0.0
    return measured_s / total_s if total_s else 1.0


def timeline(plan: Plan) -> Forecast:
    """Simulate the plan again, with its timeline."""
    concrete = plan.graph.at(plan.rows)
    costs = stage_costs(concrete, plan.stages, costs_of(plan))
    found = simulate(plan.programs, plan.stages, costs)
    return with_data(found, concrete, plan.stages, plan.micro_batches)


def _plan(
    graph: Graph, cluster: Cluster, source: Source, options: Options, micro_batches: int
) -> Plan:
    costs = _costs(graph.at(graph.batch // micro_batches), cluster, source, options.estimator)
    placement = _placement(graph, cluster, options, micro_batches, costs)
    return _placed(graph, cluster, source, options, micro_batches, placement, costs)


def _placement(
    graph: Graph, cluster: Cluster, options: Options, micro_batches: int, costs: Costs
) -> Placement:
    """Ask the partitioner; NoPlanError says what is left of each device's memory."""
    concrete = graph.at(graph.batch // micro_batches)
    method = partitioner(options.partitioner, **_choices(options, micro_batches))
    smaller = for_tensors(cluster, concrete, micro_batches)
    told = replace(costs, cluster=smaller, recompute=options.recompute == "all")
    try:
        return _partitioned(method, concrete, told, options)
    except NoPlanError as error:
        notes = (*error.notes, *beside_tensors(cluster, concrete, micro_batches))
        raise NoPlanError(error.what, at=error.at, notes=notes, help=error.help) from None


def _partitioned(method: Partitioner, concrete: Graph, costs: Costs, options: Options) -> Placement:
    """Place a graph; where that fits only because some stages recompute, as if all of them did.

    Which ops the stages of some numbers will have is known once they are placed, and not before.
    """
    try:
        return method.partition(concrete, costs.cluster, costs)
    except NoPlanError:
        if not options.recompute or costs.recompute:
            raise
        return method.partition(concrete, costs.cluster, replace(costs, recompute=True))


def _costs(graph: Graph, cluster: Cluster, source: Source, name: str) -> Costs:
    """Estimate a concrete graph, for the user's own optimizer."""
    return replace(
        estimator(name).estimate(graph, cluster),
        optimizer_state_per_byte=source.optimizer_state,
        optimizer_temporaries=source.optimizer_temporaries,
    )


def _choices(options: Options, micro_batches: int) -> Mapping[str, object]:
    """Return what a partitioner can be told, of the fields that it has."""
    in_flight = micro_batches if options.schedule == "gpipe" else options.in_flight
    given = {"micro_batches": micro_batches, "in_flight": in_flight, "seed": options.seed}
    known = options_of("partitioner", options.partitioner)
    fields = {name: value for name, value in given.items() if name in known}
    return {**fields, **dict(options.partitioner_options)}


def _placed(
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    micro_batches: int,
    placement: Placement,
    costs: Costs,
    keep_schedule: bool = True,
) -> Plan:
    rows = graph.batch // micro_batches
    concrete = graph.at(rows)
    stages = cut(graph, placement, rows, clip=source.clip_norm is not None)
    with_backward = trained(graph, stages.stages)
    stages = recomputing(graph, stages, with_backward, options.recompute, lenient=not keep_schedule)
    chain = "1f1b" if graph.training else "forward"
    schedule = options.schedule or (chain if stages.is_chain else "list")
    if not (keep_schedule or stages.is_chain):
        schedule = "list"
    in_flight = options.in_flight
    if not keep_schedule and in_flight and len(in_flight) != len(stages.devices):
        in_flight = None
    per_stage = stage_costs(concrete, stages, costs)
    programs = build(schedule, stages, micro_batches, per_stage, with_backward, in_flight)
    require_sound(programs, stages)
    forecast = simulate(programs, stages, per_stage, timeline=False)
    forecast = with_data(forecast, concrete, stages, micro_batches)
    require_fits(forecast, cluster)
    return Plan(
        graph,
        cluster,
        source,
        options.partitioner,
        options.estimator,
        schedule,
        micro_batches,
        rows,
        options.seed,
        placement,
        stages,
        tuple(sorted(with_backward)),
        programs,
        forecast,
        in_flight=in_flight,
    )


class _Judge:
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
            self.cluster,
            self.costs,
            tuple(_counts(self.graph, self.cluster, options, 8)),
            self.place,
            self.score,
            schedule=options.schedule,
            in_flight=options.in_flight,
            objective=options.objective,
            effort=options.effort,
            known=tuple(_trial_of(plan) for plan in known if self.can_run(plan)),
            recompute=self.graph.training and options.recompute is None,
        )
        trial, found = search(ask)
        _, plan = self._plans[id(trial)]
        return replace(plan, partitioner=AUTO, search=found)

    def can_run(self, plan: Plan) -> bool:
        """Whether a plan's devices are all here, and its micro-batches divide the batch."""
        used = set(plan.placement.device_of.values())
        return used <= set(self.cluster.device) and self.graph.batch % plan.micro_batches == 0

    def costs(self, rows: int) -> Costs:
        """Estimate the graph at so many rows, once."""
        if rows not in self._costs:
            graph = self.graph.at(rows)
            self._costs[rows] = _costs(graph, self.cluster, self.source, self.options.estimator)
        return self._costs[rows]

    def place(self, name: str, micro_batches: int) -> Placement:
        """Ask another partitioner."""
        options = replace(self.options, partitioner=name, partitioner_options=())
        costs = self.costs(self.graph.batch // micro_batches)
        return _placement(self.graph, self.cluster, options, micro_batches, costs)

    def score(self, trial: Trial) -> Score:
        """Simulate a trial."""
        options = replace(
            self.options,
            schedule=trial.schedule,
            in_flight=trial.in_flight,
            recompute=trial.recompute or self.options.recompute,
        )
        micro = trial.micro_batches
        costs = self.costs(self.graph.batch // micro)
        args = (self.graph, self.cluster, self.source, options, micro, trial.placement, costs)
        plan = _placed(*args)
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


def _counts(graph: Graph, cluster: Cluster, options: Options, per_device: int = 4) -> list[int]:
    """Return how many micro-batches to try: as asked for, or every divisor up to 4 per device."""
    batch = graph.batch
    if graph.static_batch is not None:
        fixed = batch // graph.static_batch
        if options.micro_batches not in (None, fixed):
            raise InputError(
                f"the trace of {graph.name} holds for {graph.static_batch} rows only, "
                f"so a batch of {batch} has {fixed} micro-batches, not {options.micro_batches}",
                help=f"use --micro-batches {fixed}, or another batch size in example_batch()",
            )
        return [fixed]
    if options.micro_batches is None:
        most = max(1, per_device * len(cluster.devices))
        return [count for count in range(1, min(batch, most) + 1) if batch % count == 0]
    if options.micro_batches < 1 or batch % options.micro_batches:
        divisors = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
        raise InputError(
            f"a batch of {batch} rows cannot be split into {options.micro_batches} equal "
            "micro-batches",
            help=f"use --micro-batches with one of {divisors}",
        )
    return [options.micro_batches]


# --------------------------------------------------------------------------- plan.json


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def to_json(plan: Plan) -> bytes:
    """Return the plan as JSON: the same bytes for the same plan."""
    return _adapter().dump_json(plan, indent=None) + b"\n"


def from_json(text: bytes, where: str) -> Plan:
    """Read a plan.

    Raises:
        InputError: not a plan, or of a newer format; names the field.
    """
    _require_format(text, where)
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"not a plan: {first['msg']}",
            at=f"{where}: {at}",
            help="make it again with `bigbrain-fx split`",
        ) from error


def _require_format(text: bytes, where: str) -> None:
    """Look at the format first: a newer one may have other fields."""
    try:
        found = json.loads(text)
    except ValueError:
        return  # the reader says where it is broken
    number = found.get("format", FORMAT) if isinstance(found, dict) else FORMAT
    if number != FORMAT:
        raise InputError(
            f"plan format {number!r} is not {FORMAT}",
            at=where,
            help="use the bigbrain-fx that wrote it, or make it again with `bigbrain-fx split`",
        )


def read_plan(path: str | Path) -> Plan:
    """Read plan.json, or the plan of a bundle folder.

    Raises:
        InputError: there is none, it is broken, or of another format.
    """
    path = Path(path)
    file = path / "plan.json" if path.is_dir() else path
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {file}: {error.strerror}", help="give a bundle folder or a plan.json"
        ) from error
    return from_json(text, str(file))
