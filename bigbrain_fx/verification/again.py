"""The model captured again, as it was when it was split. This file knows graphs; it runs none."""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import (
    Captured,
    ModelFile,
    answers_in,
    capture,
    laid_out,
    leaf_paths,
    lines_apart,
)
from bigbrain_fx.plan import Plan, places_again, rewritten_graph, with_frozen


def capture_again(file: ModelFile, plan: Plan) -> Captured:
    """Capture as `split` did.

    Raises:
        InputError: it gives another graph than the plan's.
    """
    captured = capture(
        file.model,
        file.example_batch,
        file.loss,
        training=plan.graph.training,
        name=plan.graph.name,
        micro_batch=plan.graph.static_batch,
        assume=answers_in(plan.graph),
        leaves=leaf_paths(plan.graph),
        autocast=file.autocast,
        batch_dims=file.batch_dims,
        lengths=file.free,
        parts=plan.micro_batches if plan.source.has_micro else None,
        apart=lines_apart(plan.graph),
        loss_apart=any(entry.varies for entry in plan.graph.inputs),
    )
    found = _rewritten(captured.graph, plan)
    if _unplaced(found) == _unplaced(plan.graph):
        return captured
    if frozen := _frozen_since(found, plan.graph):
        raise InputError(
            f"{file.path.name} trains {frozen[0]}, which this bundle has frozen (resplit --freeze)",
            code="BX3804",
            at=str(file.path),
            help="give --model a copy of the file whose model() freezes it, too, with "
            f"requires_grad_(False), and all of {len(frozen)} parameters that the bundle trains no "
            "more",
        )
    raise InputError(
        f"{file.path.name} gives another graph than the one that was split",
        code="BX3805",
        at=str(file.path),
        help="split it again, or give the file it was split from with --model",
    )


def _rewritten(graph: Graph, plan: Plan) -> Graph:
    """Return a graph with the places of a plan rewritten, as far as it has them."""
    places = places_again(graph, plan.source.rewritten)
    if not places:
        return graph
    fresh = [op.name for place in places for op in place.made]
    return laid_out(rewritten_graph(graph, places), fresh)


def _frozen_since(found: Graph, planned: Graph) -> list[str]:
    """Return the parameters that are trained by the file and not by the plan, if that is all."""
    trained = {p.name: p.spec.requires_grad for p in found.params}
    frozen = [p.name for p in planned.params if trained.get(p.name) and not p.spec.requires_grad]
    if not frozen or [*trained] != [p.name for p in planned.params]:
        return []
    return frozen if _unplaced(with_frozen(found, frozen)) == _unplaced(planned) else []


def _unplaced(graph: Graph) -> Graph:
    """Leave out where code stands (a file may be moved, and given comments) and what is kept."""
    ops = tuple(_unplaced_op(op) for op in graph.ops)
    return replace(graph, ops=ops, statements=())


def _unplaced_op(op: Op) -> Op:
    calls = (replace(call, type=call.type.rpartition(".")[2]) for call in op.modules)
    body = _unplaced(op.body) if op.body else None
    return replace(op, modules=tuple(calls), source="", lines=(), body=body, saves=None)
