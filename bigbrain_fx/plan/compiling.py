"""Stages under torch.compile: what they do not go with, refused in words.

What is compiled computes the same to rounding. How is `runtime.compiled`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigbrain_fx.core import Graph, Op, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import AUTO, Options, Source
from bigbrain_fx.plan.schedule import SPLIT

_OR_LEAVE = "or leave --compile out"


def require_compilable(graph: Graph, source: Source, options: Options) -> None:
    """Refuse what does not go with --compile, whatever the cut is."""
    if not options.compiled:
        return
    for what, help_ in _not_with(graph, source, options):
        raise InputError(
            f"--compile does not go with {what}", at="--compile", help=f"{help_}, {_OR_LEAVE}"
        )


def _not_with(graph: Graph, source: Source, options: Options) -> Iterator[tuple[str, str]]:
    """Yield what does not go with it, and what to do."""
    taps = "a backward in two halves, which hooks into each layer"
    if options.partitioner == AUTO:
        among = "--partitioner auto, which chooses among schedules that do not go with it"
        yield among, "name another partitioner (--partitioner analytical)"
    if options.schedule in SPLIT:
        yield f"--schedule {options.schedule}: it may have {taps}", "use --schedule 1f1b or gpipe"
    if options.defer:
        yield f"--defer: {taps}", "leave --defer out"
    if options.recompute in ("ops", "auto"):
        single = "it hooks into what autograd keeps"
        yield f"--recompute {options.recompute}: {single}", "use --recompute all, or stages"
    if {"weights", "activations"} & set(options.offload):
        moved = "--offload of weights and activations: they hook into what autograd keeps"
        yield moved, "use --offload state"
    if options.asynchronous:
        yield "--asynchronous: its older weights take the place of others", "leave it out"
    if options.tensor not in (None, 1) or options.tensor_shares:
        yield "--tensor: members speak with each other within a forward", "leave --tensor out"
    if options.zero_stage == 3:
        yield "--zero 3: weights come and go between forward and backward", "use --zero 2"
    if source.drop_last is False:
        few = "smaller last batches (drop_last = False): shapes are fixed"
        yield few, "say drop_last = True in the model file"
    draws = next(_drawing(graph), None)
    if draws is not None:
        where = ", ".join(filter(None, (draws.name, draws.source)))
        yield (
            f"random numbers ({where}): compiled code draws others",
            "set dropout to 0 in the model file",
        )


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
