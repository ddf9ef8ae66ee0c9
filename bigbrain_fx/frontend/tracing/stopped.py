"""Gradients that a user's autograd.Function stops by returning None, out of a graph's sight.

    h = self.body(x); return self.head(Stop.apply(h))      body.weight.grad is None, and stays None

A stage before such a Function would be sent zeros, and its optimizer would decay weights that plain
PyTorch leaves alone. This file reads graphs; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation.opaque import PREFIX


def require_reaching(graph: Graph, gradients: Mapping[str, Tensor | None]) -> None:
    """Refuse a weight that has no gradient though all ops from it to the loss would pass one on.

    A Function that is given the weight itself is on the weight's own stage, and needs no word.

    Raises:
        CaptureError: names the Function.
    """
    stopping = [op for op in graph.ops if op.target.startswith(PREFIX)]
    without = {name for name, gradient in gradients.items() if gradient is None}
    if not stopping or not without:
        return
    for op in _reached(graph):
        names = without & {str(name) for name in op.params}
        if names and op not in stopping:
            name, last = min(names), stopping[-1]
            raise CaptureError(
                f"BX0112: {last.target.removeprefix(PREFIX)} gives no gradient back, so {name} has "
                "none: a device before it would be sent zeros, and its optimizer may decay it",
                at=last.source or None,
                help="say so where it is read: Stop.apply(h.detach()), or h.detach() alone",
            )


def _reached(graph: Graph) -> list[Op]:
    """Return the ops that the loss's gradient comes to, as far as types tell."""
    pending, found = [graph.loss], {}
    while pending:
        op = graph.op.get(pending.pop() or "")
        if op is None or op.name in found or not any(spec.requires_grad for spec in op.outputs):
            continue
        found[op.name] = op
        pending += op.refs
    return [*found.values()]
