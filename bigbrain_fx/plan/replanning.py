"""A plan's choices, applied anew: for another cluster, or with another placement.

Choices that still apply stay: schedule, recompute, defer, offload, replicas, tensor groups. Choices
that do not apply are dropped; a change of the schedule is reported with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bigbrain_fx.core import Cluster, Costs, Graph, Op, Placement
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.features import asked_again, options_again
from bigbrain_fx.plan.making import costs_of, make_plan
from bigbrain_fx.plan.nouns import Case, Options, Plan
from bigbrain_fx.plan.one import placed
from bigbrain_fx.plan.schedule import traits

BY_DEFAULT = ("1f1b", "forward")
"""Schedules of a chain of stages, where none is asked for."""


def replan(
    plan: Plan,
    cluster: Cluster,
    members: int | None = None,
    whole: tuple[tuple[str, str], ...] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Make the same plan's choices again for another cluster: what would it give there?

    Where the cluster has too few devices for the plan's replicas, there are as many as fit. Where
    devices cannot compute in such groups, none do. A schedule stays where it can run the stages
    that come out.

    Args:
        plan: to follow.
        cluster: the other one.
        members: of each tensor group; None: as many as the plan has, where they go.
        whole: as `Options.tensor_whole`, for groups of another number than the plan's.
        say: called with a line where the schedule is another one, with the reason.

    Raises:
        InputError: as `make_plan`.
        NoPlanError: it does not fit in memory.
    """
    tensor = plan.placement.tensor
    if tensor is not None and members in (None, tensor.members):
        same = Options(tensor=tensor.members, tensor_shares=tensor.shares, tensor_tried=tensor.axes)
        try:
            return _rescheduled(plan, cluster, same, say)
        except (InputError, NoPlanError):
            if members is not None:
                raise
    return _rescheduled(plan, cluster, Options(tensor=members or 1, tensor_whole=whole), say)


def _rescheduled(plan: Plan, cluster: Cluster, groups: Options, say: Callable[[str], None]) -> Plan:
    """Plan for the plan's own schedule; where that cannot be, for another one, and say why."""
    why = ""
    for schedule, pieces in _own_schedule(plan):
        try:
            return _with_replicas(plan, cluster, groups, schedule, pieces)
        except (InputError, NoPlanError) as error:
            why = error.what
    found = _with_replicas(plan, cluster, groups)
    if found.schedule != plan.schedule:
        say(f"the schedule is {found.schedule} now, not {plan.schedule}: {why or _why(found)}")
    return found


def _why(found: Plan) -> str:
    """Return why a schedule is another one that nobody had asked for."""
    if found.search is not None:
        return "the search has chosen anew"
    return f"the stages are {'' if found.stages.is_chain else 'not '}one a device there"


def _own_schedule(plan: Plan) -> Iterator[tuple[str, int | None]]:
    """Yield the plan's schedule with its pieces of a device, and fewer of them, to be tried.

    Nothing, where it is what such stages have by default, or what a search chose among orders of
    whole backwards: these are chosen again.
    """
    name, stages = plan.schedule, plan.stages
    is_asked = plan.search is None and stages.is_chain and name not in BY_DEFAULT
    if name == "interleaved":
        pieces = max(len(stages.of(device)) for device in stages.devices)
        yield from ((name, count) for count in range(pieces, 1, -1))
    elif traits(name).splits or traits(name).joins or is_asked:
        yield name, None


def _with_replicas(
    plan: Plan,
    cluster: Cluster,
    groups: Options,
    schedule: str | None = None,
    pieces: int | None = None,
) -> Plan:
    make = partial(_replan, plan, cluster, groups, schedule, pieces)
    if traits(schedule).joins:  # two replicas are on the same devices
        return make(plan.stages.replicas // 2)
    if plan.stages.replicas == 1:
        return make(1)
    try:
        return make(plan.stages.replicas)
    except (InputError, NoPlanError):
        return make(0)


def _shard_group_of(plan: Plan, replicas: int) -> int | None:
    """Return a plan's shard group where it divides so many replicas; else all are one."""
    size = plan.stages.shard_group
    return size if size and replicas > size and replicas % size == 0 else None


def _replan(
    plan: Plan,
    cluster: Cluster,
    groups: Options,
    schedule: str | None,
    pieces: int | None,
    replicas: int,
) -> Plan:
    kept = asked_again(plan, cluster)
    options = Options(
        plan.partitioner,
        plan.estimator,
        schedule,
        plan.micro_batches,
        plan.seed,
        pieces=pieces,
        replicas=replicas,
        zero_stage=0 if len(cluster.replicas) == 1 else plan.stages.zero_stage,
        shard_group=_shard_group_of(plan, replicas),
        sum_order=plan.stages.sum_order,
        tensor=groups.tensor,
        tensor_shares=groups.tensor_shares,
        tensor_whole=groups.tensor_whole,
        tensor_tried=groups.tensor_tried,
        **{**kept, **_of_any_cut(plan, kept, is_own=bool(schedule))},
    )
    if plan.search is None:
        return make_plan(plan.graph, cluster, plan.source, options)
    again = replace(
        options, recompute=None, objective=plan.search.objective, effort=plan.search.effort
    )
    return make_plan(plan.graph, cluster, plan.source, again, known=(plan,))


def _of_any_cut(plan: Plan, kept: Mapping[str, Any], *, is_own: bool) -> dict[str, Any]:
    """Return what recomputes and defers, for another cut: numbers of stages mean others there.

    Of replicas all recompute where some do. Some stages defer for a schedule that is made for it.
    """
    found = {name: kept[name] for name in ("recompute", "defer")}
    if plan.stages.micros and plan.stages.recompute:
        found["recompute"] = "all"
    if found["defer"] not in ("all", ()) or not (is_own or not traits(plan.schedule).splits):
        found["defer"] = None
    return found


def with_placement(plan: Plan, placement: Placement, costs: Costs | None = None) -> Plan:
    """Return the plan with another placement, all its other choices kept where they still apply.

    Raises:
        NoPlanError: it does not fit in memory.
    """
    case = Case(plan.graph, plan.cluster, plan.source, options_again(plan))
    costs = costs or costs_of(plan)
    return placed(case, plan.micro_batches, placement, costs, keep_schedule=False)


# ------------------------------------------------------------------------------------------------
# Graph x Plan -> Placement: a graph of the same model placed as the plan placed its own.
#
# So one plan serves training and inference: what trained on a device infers there, with its
# weights.


_Sign = tuple[str, int, str, int]  # module, call of it, target, how many alike came before


@dataclass(frozen=True)
class _PlanOfNames:
    """Stages of a plan's ops and parameters."""

    of_op: Mapping[_Sign, int]
    of_param: Mapping[str, int]


def place_like(graph: Graph, plan: Plan) -> Placement:
    """Place every op where the plan, of replicas the first, runs the same one.

    An op is the same when it is the n-th of its kind in the same call of the same module. An op
    without a twin goes where its parameters are, else with the latest of the ops that it reads:
    that keeps stages contiguous. Ops that read nothing placed go with the first op that reads them.

    Raises:
        InputError: the graph is of another model.
    """
    _require_same_model(graph, plan)
    known = _known(plan)
    stage_of: dict[str, int] = {}
    for op, sign in zip(graph.ops, _signs(graph), strict=True):
        found = known.of_op.get(sign, _by_params(op, known))
        before = [stage_of[ref] for ref in op.refs if ref in stage_of]
        if found is not None or before:
            stage_of[op.name] = max(before) if found is None else found
    for op in reversed(graph.ops):
        readers = [stage_of[name] for name in graph.consumers[op.name] if name in stage_of]
        stage_of.setdefault(op.name, min(readers, default=0))
    stages = plan.stages.stages
    homes = {op.name: stages[stage_of[op.name]].device for op in graph.ops}
    return Placement(homes, f"as plan {plan.key} placed {plan.graph.name}")


def _known(plan: Plan) -> _PlanOfNames:
    sign_of = dict(zip((op.name for op in plan.graph.ops), _signs(plan.graph), strict=True))
    of_op: dict[_Sign, int] = {}
    of_param: dict[str, int] = {}
    for stage in plan.stages.of_replica(0):
        copies = set(stage.recomputed)
        of_op.update({sign_of[name]: stage.index for name in stage.ops if name not in copies})
        for name in stage.params:
            of_param.setdefault(name, stage.index)
    return _PlanOfNames(of_op, of_param)


def _signs(graph: Graph) -> list[_Sign]:
    seen: Counter[tuple[str, int, str]] = Counter()
    found = []
    for op in graph.ops:
        call = op.modules[-1].call if op.modules else 0
        kind = op.module_path, call, op.target
        found.append((*kind, seen[kind]))
        seen[kind] += 1
    return found


def _by_params(op: Op, known: _PlanOfNames) -> int | None:
    return next((known.of_param[name] for name in op.params if name in known.of_param), None)


def _require_same_model(graph: Graph, plan: Plan) -> None:
    """Two captures of one model have the same parameters, of the same sizes."""
    ours = {p.name: p.spec.shape for p in graph.params if p.kind == "parameter"}
    theirs = {p.name: p.spec.shape for p in plan.graph.params if p.kind == "parameter"}
    if ours == theirs:
        return
    differing = sorted(n for n in {*ours, *theirs} if ours.get(n) != theirs.get(n))
    raise InputError(
        f"the plan to follow is of another model: {len(differing)} parameters differ",
        code="BX1299",
        notes=(f"first: {', '.join(differing[:3])}",),
        help="give the bundle that was split from this model file",
    )
