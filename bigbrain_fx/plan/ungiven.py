"""What may get no gradient at all, by the data: only code of the user's own gives back None.

    h ──▶ Function whose backward returns None ──▶ loss      h.grad is None, and so are its weights'
    h ──▶ Function ──▶ (+) ──▶ loss                          h has one in any case, but a use of it
    └───────────────────┘                                    may give none

An optimizer leaves a weight alone that has no gradient, and may decay one whose gradient is zero.
This file knows the graph; it knows no stages.
"""

from __future__ import annotations

from bigbrain_fx.core import Graph, Op

_TRACED = ("aten.", "operator.", "region.", "math.", "assume.", "shard.")
"""What a target begins with that is not code of the user's own."""
_LOSS = "user.loss"


def may_be_ungiven(graph: Graph) -> frozenset[str]:
    """Return the values and parameters (canonical) of which a use may have no gradient.

    Where a use is in written values, it is taken for one of these: that costs a few bytes.
    """
    found, sure = set[str](), {graph.loss}
    for op in reversed(graph.ops):
        if op.name in graph.graded:
            gives = op.name in sure and _gives(graph, op)
            read = {graph.param[name].canonical for name in op.params if name in graph.param}
            (sure if gives else found).update(graph.graded.intersection(op.refs), read)
    return frozenset(found)


def _gives(graph: Graph, op: Op) -> bool:
    """Whether all that an op reads gets a gradient; a loss of one value has none else."""
    if op.target == _LOSS:
        return not op.params and sum(name in graph.graded for name in op.refs) == 1
    return not _is_users(op)


def _is_users(op: Op) -> bool:
    inside = op.body.ops if op.body else ()
    return not op.target.startswith(_TRACED) or any(map(_is_users, inside))
