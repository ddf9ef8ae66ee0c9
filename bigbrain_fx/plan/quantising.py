"""A frozen base in int8: what it does not go with, what backwards make again of it, and its words.

A layer computes with `weight * weight_scale`, of which autograd would keep a float copy for each
layer and micro-batch: it is made again for the backward instead. What is rounded, and how, is the
frontend's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigbrain_fx.core import Graph, Param, Stages, quantised_weights
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Plan


def requantising(graph: Graph, stages: Stages, trained: frozenset[int]) -> Stages:
    """Return stages whose backward makes float weights of int8 ones again."""
    wide = frozenset(widening(graph)) if graph.training else frozenset()
    if not wide:
        return stages
    marked = (
        replace(stage, again=tuple(name for name in stage.ops if name in wide))
        if stage.index in trained and not (stage.runs_again or stage.deferred)
        else stage
        for stage in stages.stages
    )
    return replace(stages, stages=tuple(marked))


def widening(graph: Graph) -> Iterator[str]:
    """Yield the ops that make a float weight of an int8 one and its scale."""
    rounded = {weight: f"{weight}_scale" for weight in quantised_weights(graph)}
    for op in graph.ops:
        if any(op.params == (weight, rounded.get(weight)) for weight in op.params[:1]):
            yield op.name


def quantised_text(plan: Plan) -> str:
    """Say what is int8, what that spares, and how far a weight is off; nothing, where none is."""
    names = quantised_weights(plan.graph)
    if not plan.source.quantize:
        return ""
    param = plan.graph.param
    wide = sum(param[n].spec.numel * _itemsize(plan.graph, f"{n}_scale") for n in names)
    held = sum(param[m].spec.nbytes for n in names for m in (n, f"{n}_scale"))
    error = plan.source.quantize_error
    off = "" if error is None else f"; a weight is at most {error:.2g} off"
    return (
        f"quantised: {len(names)} frozen weights are int8 with a scale for each output, "
        f"{held / 2**20:.1f} MiB instead of {wide / 2**20:.1f} MiB{off}"
    )


def _itemsize(graph: Graph, scale: str) -> int:
    spec = graph.param[scale].spec
    return spec.nbytes // spec.numel


def plain_params(graph: Graph) -> list[Param]:
    """Return the parameters and buffers that the user's model has, too, with these numbers."""
    names = {name for n in quantised_weights(graph) for name in (n, f"{n}_scale")}
    return [param for param in graph.params if param.name not in names]


def require_float(plan: Plan, what: str) -> None:
    """Refuse to put float weights into a bundle whose frozen ones are int8."""
    if plan.source.quantize:
        raise InputError(
            f"{what}: frozen weights of this bundle are {plan.source.quantize}, and those would "
            "have to be rounded, too",
            code="BX1259",
            help="load them in the model file's model(), and split it again with --quantize",
        )
