"""Graph x Plan -> Placement: a graph of the same model placed as the plan placed its own.

So one plan serves training and inference: what trained on a device infers there, with its weights.
This room knows two graphs of one model; it knows no costs and no schedules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from bigbrain_fx.core import Graph, Op, Placement
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Plan

_Sign = tuple[str, int, str, int]  # module, call of it, target, how many alike came before


@dataclass(frozen=True)
class _PlanOfNames:
    """Where a plan runs things, by stage."""

    of_op: Mapping[_Sign, int]
    of_param: Mapping[str, int]


def place_like(graph: Graph, plan: Plan) -> Placement:
    """Place every op where the plan, of replicas the first, runs the same one.

    An op is the same when it is the n-th of its kind in the same call of the same module. What has
    no twin goes where its parameters are, else with the latest of what it reads: that keeps stages
    contiguous. Ops that read nothing placed go with the first op that reads them.

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
