"""Stages under torch.compile: what they do not go with, refused in words.

What is compiled computes the same to rounding. How is `runtime.compiled`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigbrain_fx.core import Graph, Op, Stages
from bigbrain_fx.plan.conflicts import (
    Conflict,
    require_none,
    with_members,
    with_split_backwards,
)
from bigbrain_fx.plan.nouns import Options, Source


def require_compilable_options(options: Options) -> None:
    """Refuse what does not go with --compile, whatever the model is."""
    if options.compiled:
        require_none("--compile", _not_with_options(options), code="BX1227")


def require_compilable(graph: Graph, source: Source, options: Options) -> None:
    """Refuse a model that does not go with --compile, whatever the cut is."""
    if options.compiled:
        require_none("--compile", _not_with(graph, source), code="BX1228")


def _not_with_options(options: Options) -> Iterator[Conflict]:
    yield from with_split_backwards(options, "it hooks into what autograd keeps of a layer")
    if {"weights", "activations"} & set(options.offload):
        moved = "--offload of weights and activations: they hook into what autograd keeps"
        yield moved, "use --offload state"
    if options.asynchronous:
        older = "--asynchronous: its older weights take the place of others"
        yield older, "leave --asynchronous out"
    yield from with_members(options, "members speak with each other within a forward")
    if options.zero_stage == 3:
        yield "--zero 3: weights come and go between forward and backward", "use --zero 2"


def _not_with(graph: Graph, source: Source) -> Iterator[Conflict]:
    if source.drop_last is False:
        few = "smaller last batches (drop_last = False): shapes are fixed"
        yield few, "say drop_last = True in the model file"
    draws = next(_drawing(graph), None)
    if draws is not None:
        where = ", ".join(filter(None, (draws.name, draws.source)))
        drawn = f"random numbers ({where}): compiled code draws others"
        yield drawn, "set dropout to 0 in the model file"


def _drawing(graph: Graph) -> Iterator[Op]:
    """Yield the ops that draw random numbers, those in regions, too."""
    for op in graph.ops:
        if op.random:
            yield op
        if op.body is not None:
            yield from _drawing(op.body)


def compiling(stages: Stages, options: Options) -> Stages:
    """Return stages that are compiled, where that was asked for."""
    return replace(stages, compiled=True) if options.compiled else stages
