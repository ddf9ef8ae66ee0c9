"""Keys and values: written at their row's position, read over all positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from bigbrain_fx.frontend.cached.making import POSITION, ROW, Making, aten
from bigbrain_fx.frontend.cached.row import refuse, shape_of
from bigbrain_fx.frontend.cached.tables import Tables

_PLAIN_VIEWS = frozenset(
    (
        *(aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.expand.default),
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
        *(aten.repeat_interleave.self_int, aten.clone.default, aten.contiguous.default),
        *(aten.slice.Tensor, aten.to.dtype, aten.flatten.using_ints, aten.unflatten.int),
    )
)
_GROWING = frozenset((aten.expand.default, aten.repeat_interleave.self_int, aten.unsqueeze.default))


@dataclass(eq=False)
class Caches:
    """Values over all positions, of which each call makes one."""

    made: Making
    table: Tables
    _whole: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def full(self, node: fx.Node, name: str) -> fx.Node:
        """Return a value over all positions: from a cache, written where the value is small."""
        row = self.made.row
        if node not in row.dependent:
            return self.table.over_all(node) if row.positions(node) else self.table.free(node)
        if node not in self._whole:
            turned = not row.is_rows(shape_of(node)[0]) and node.target in _PLAIN_VIEWS
            make = self._viewed if turned or self._grown(node) else self._cached
            self._whole[node] = make(node, name)
        return self._whole[node]

    def _grown(self, node: fx.Node) -> bool:
        """Whether a value is some smaller one, repeated and viewed."""
        while node.target in _PLAIN_VIEWS and node is not self.made.row.tokens:
            if node.target in _GROWING:
                return True
            node = node.args[0]  # type: ignore[assignment]  # a view's source is a node
        return False

    def _viewed(self, node: fx.Node, name: str) -> fx.Node:
        source = self.full(node.args[0], name)  # type: ignore[arg-type]  # a view's source is a node

        def argument(given: fx.Node) -> Any:  # noqa: ANN401  # node or number
            return source if given is node.args[0] else self.made.size(given, self.made.row.longest)

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), argument)
        return self.made.call(node, node.target, args, kwargs)

    def _cached(self, node: fx.Node, name: str) -> fx.Node:
        """Write a value into its cache at the rows' positions, and read all of the rows."""
        positions, shape = self.made.row.positions(node), shape_of(node)
        if len(positions) != 1 or positions[0] == 0 or not self.made.row.is_rows(shape[0]):
            refuse(
                node,
                "keys and values are not laid out as (rows, ..., positions, ...)",
                code="BX2004",
            )
        (dim,) = positions
        now = self.made.one[node]
        if dim != 1:
            now = self.made.call(node, aten.transpose.int, (now, 1, dim))
        now = self.made.call(node, aten.select.int, (now, 1, 0))
        value = now.meta["val"]
        held = torch.zeros(
            (self.made.places, self.made.row.longest, *value.shape[1:]), dtype=value.dtype
        )
        cache = self._cache(node, name, held)
        indices = [self.made.inputs[ROW], self.made.inputs[POSITION]]
        written = self.made.call(node, aten.index_put_.default, (cache, indices, now))
        rows = self.made.call(node, aten.index_select.default, (written, 0, self.made.inputs[ROW]))
        later = self.made.seen_as(value.dim() + 1, 1, "later")
        clean = self.made.call(node, aten.masked_fill.Scalar, (rows, later, 0))
        return self.made.call(node, aten.transpose.int, (clean, 1, dim)) if dim != 1 else clean

    def _cache(self, node: fx.Node, name: str, held: Tensor) -> fx.Node:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = str(stack[-1][0]).removeprefix("model").removeprefix(".") if stack else ""
        full, count = f"{path}.{name}".lstrip("."), 1
        while full in self.made.caches or full in self.made.row.own:
            count += 1
            full = f"{path}.{name}_{count}".lstrip(".")
        self.made.caches[full] = held
        return self.made.tensor(full, held)
