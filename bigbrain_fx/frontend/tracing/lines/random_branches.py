"""Assumptions that random numbers alone decide: drawn a thousand times before they are accepted.

`if torch.rand([]) < layerdrop:` may well go one way in a few runs; its ops cost microseconds, so
they are run alone. This file knows graphs; it knows nothing of how they came to be.

Three steps may all fall one way. Public code that has it: layer dropout of transformers' wav2vec2,
`dropout_probability < self.config.layerdrop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.frontend.tracing.executor.graph_executor import run_graph
from bigbrain_fx.frontend.translation.oracle import PREFIX, WrongAnswerError

ROLLS = 1000


def wrong_bet(graph: Graph, tensors: Mapping[str, Tensor]) -> Op | None:
    """Return an assumption that random numbers alone decide, and that does not always hold.

    Args:
        graph: symbolic or not; its sizes must not affect the tried ops.
        tensors: the model's, by name.
    """
    for op in graph.ops:
        if op.target.startswith(PREFIX):
            cone = _cone(graph, op)
            if cone is not None and not _holds(cone, tensors):
                return op
    return None


def without_settled(graph: Graph) -> Graph:
    """Drop assumptions on constants alone, which held in the trace, and the ops only for them."""
    while any(op.checks for op in graph.ops):
        read = {ref for op in graph.ops for ref in op.refs} | {*graph.outputs, graph.loss}
        kept = tuple(op for op in graph.ops if not _is_settled(graph, op, read))
        if len(kept) == len(graph.ops):
            return graph
        graph = replace(graph, ops=kept)
    return graph


def _is_settled(graph: Graph, op: Op, read: set[str | None]) -> bool:
    """Whether an op is an assumption on constants, or was read by such alone."""
    if op.target.startswith(PREFIX):
        return _is_constant(graph, op)
    lone = op.name not in read and not (op.mutates or op.random or op.checks or op.params)
    return lone and _is_constant(graph, op)


def _is_constant(graph: Graph, op: Op) -> bool:
    pending, known = [op], {op.name}
    while pending:
        here = pending.pop()
        names = [ref for ref in here.refs if ref not in known]
        if here.params or here.random or here.mutates or any(ref in graph.input for ref in names):
            return False
        known.update(names)
        pending += [graph.op[name] for name in names]
    return True


def _cone(graph: Graph, op: Op) -> Graph | None:
    """Return the ops behind an assumption, when these depend on random numbers alone."""
    wanted, pending = {op.name}, list(op.refs)
    while pending:
        name = pending.pop()
        if name in graph.input:
            return None
        if name not in wanted:
            wanted.add(name)
            pending += graph.op[name].refs
    ops = tuple(o for o in graph.ops if o.name in wanted)
    names = {name for o in ops for name in o.params}
    constant = all(graph.param[name].kind == "constant" for name in names)
    if not constant or not any(o.random for o in ops) or any(o.mutates for o in ops):
        return None
    return Graph(graph.name, ops, (), graph.params, (), None)


def _holds(cone: Graph, tensors: Mapping[str, Tensor]) -> bool:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        try:
            for _ in range(ROLLS):
                run_graph(cone, tensors, {}, values=())
        except WrongAnswerError:
            return False
    return True
