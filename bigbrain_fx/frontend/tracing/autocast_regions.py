"""A forward with its own autocast: the graph runs under that autocast, so it can be cut anywhere.

    forward ─▶ embed ─▶ [ autocast: block ─▶ block ─▶ head ] ─▶ loss      one op, on one device
    under autocast:      embed ─▶ block ─▶ block ─▶ head ─▶ loss          any op on any device

Both are the same where autocast changes nothing outside of the region. An op of torch that autocast
changes has another type of result, so the types of all results are compared. Opaque code may cast
inside, so none may be outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend.tracing.captured import Captured
from bigbrain_fx.frontend.translation.kept import FUNCTION, LEAF, LOSS
from bigbrain_fx.frontend.translation.regions import AUTOCAST, type_of
from bigbrain_fx.frontend.translation.translate import Labels

_PART = "operator.getitem"  # a result of a region, or of an op with several
_UNTRACED = (FUNCTION, LEAF, LOSS, "library.")


class Capture(Protocol):
    """Captures a step under the autocast of its labels, which forward may have set itself."""

    def __call__(self, labels: Labels, *, casts_itself: bool = False) -> Captured:
        """Return the capture."""
        ...


def without_autocast_regions(capture: Capture, labels: Labels) -> Captured:
    """Capture a step; where forward has an autocast, put that around the graph.

    Raises:
        BigBrainError: any error of `capture` for the unchanged step.
    """
    found = capture(labels)
    casts = own_autocast(found.graph)
    if casts is None or labels.autocast is not None:
        return found
    try:
        whole = capture(replace(labels, autocast=casts), casts_itself=True)
    except BigBrainError:  # it computes something else
        return found
    same = [*_results(whole.graph)] == [*_results(found.graph)]
    return whole if same and whole.graph.static_batch == found.graph.static_batch else found


def own_autocast(graph: Graph) -> str | None:
    """Return the type that all regions of autocast cast to.

    None without one, for several types, and where untraced code is outside of the regions.
    """
    found = {type_of(dict(op.kwargs)) for op in graph.ops if op.target == AUTOCAST}
    return found.pop() if len(found) == 1 and not any(_untraced(graph)) else None


def _untraced(graph: Graph) -> Iterator[bool]:
    """Yield whether each op outside of regions of autocast is untraced code."""
    for op in (op for op in graph.ops if op.target != AUTOCAST):
        yield op.target.startswith(_UNTRACED)
        if op.body is not None:
            yield from _untraced(op.body)


def _results(graph: Graph) -> Iterator[tuple[object, ...]]:
    """Yield each op with the types of its results; a region's include its body's."""
    for op in graph.ops:
        if op.body is not None:
            yield from _results(op.body)
        if op.target not in (AUTOCAST, _PART):
            yield op.target, *(spec.dtype for spec in op.outputs)
