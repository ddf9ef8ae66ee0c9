"""Two plans of one run -> a sentence on whether both add the same numbers in the same order."""

from __future__ import annotations

from bigbrain_fx.plan import Plan

_ORDERS = {
    "micro": "one micro-batch after the other",
    "tree": "as a tree over the micro-batches",
}
_SAME = "a run goes on with numbers that equal the old devices' to rounding, not bit for bit"


def order_notes(before: Plan, after: Plan) -> tuple[str, ...]:
    """Return what to say of a run that goes on by another plan; nothing where its bits stay."""
    found = []
    if _sums(before) != _sums(after):
        found.append(
            f"gradients were added {_words(before)}, and are now added {_words(after)}: {_SAME}. "
            "--all-reduce-order micro and tree give the same bits for any replicas"
        )
    shared, now = _shared(before), _shared(after)
    if others := sorted(n for n in shared | now if shared.get(n) != now.get(n)):
        found.append(
            f"other stages share {', '.join(others)} than before, and each adds its own uses "
            f"first: {_SAME}"
        )
    if _divided(before) != _divided(after):
        found.append(f"what tensor groups divide, and so add, is another than before: {_SAME}")
    return tuple(found)


def _sums(plan: Plan) -> tuple[object, ...]:
    """Return in which order micro-batches are added."""
    groups, order = plan.stages.micros, plan.stages.sum_order
    if order in ("micro", "tree") and groups:
        return (order,)
    return (order, groups) if len(groups) > 1 else ("micro",)


def _words(plan: Plan) -> str:
    (order, *groups) = _sums(plan)
    if not groups:
        return _ORDERS[str(order)]
    own = " + ".join(str(len(micros)) for micros in plan.stages.micros)
    return f"replica by replica ({own} micro-batches)"


def _shared(plan: Plan) -> dict[str, frozenset[tuple[str, ...]]]:
    """Return the weights that several stages hold: name -> the ops of each of those stages."""
    stages, found = plan.stages.stages, dict[str, set[tuple[str, ...]]]()
    for edge in plan.stages.edges:
        if edge.kind == "tied":
            own = {tuple(stages[number].ops) for number in (edge.source, edge.target)}
            found.setdefault(edge.value, set()).update(own)
    return {name: frozenset(own) for name, own in found.items()}


def _divided(plan: Plan) -> tuple[object, ...]:
    tensor = plan.placement.tensor
    return () if tensor is None else (tensor.shares, tensor.axes)
