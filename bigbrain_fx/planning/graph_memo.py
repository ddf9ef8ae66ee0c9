"""What was worked out of a graph, kept as long as the graph is alive: plans ask for it again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

from bigbrain_fx.core import Graph

T = TypeVar("T")


MOST = 16
"""Values of one graph that are kept; then the oldest goes."""


class GraphMemo(Generic[T]):
    """Values by graph and key; graphs go by identity, as comparing them would take longer."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Graph], dict[Hashable, T]]] = {}

    def get(self, graph: Graph, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made for a graph and key; make it where it was not."""
        found = self._known.get(id(graph))
        if found is None or found[0]() is not graph:
            found = weakref.ref(graph, partial(self._forget, id(graph))), {}
            self._known[id(graph)] = found
        values = found[1]
        if key not in values:
            made = make()
            if len(values) >= MOST:
                del values[next(iter(values))]
            values[key] = made
        return values[key]

    def _forget(self, key: int, _graph: weakref.ref[Graph]) -> None:
        self._known.pop(key, None)
