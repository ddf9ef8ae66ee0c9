"""Values over all positions: computed once where they depend on no token, else cached.

no token   a table, indexed by the rows' own positions
tokens     keys and values, written at their row's position, read over all positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from bigbrain_fx.frontend.cached.making import POSITION, ROW, Making, aten
from bigbrain_fx.frontend.cached.row import refuse, shape_of


@dataclass(eq=False)
class Tables:
    """Tables along the positions: learned positions, rotary angles, masks."""

    made: Making
    _whole: dict[tuple[fx.Node, str], fx.Node] = field(default_factory=dict)

    def free(self, node: fx.Node) -> fx.Node:
        """Return a value that depends on no token and has no positions."""
        if node in self.made.row.held or node not in self.made.row.sized:
            return cast("fx.Node", self._copied(node, "one", 1))
        if node in self.made.row.of_parameters or self._has_rows(node):
            return cast("fx.Node", self._copied(node, "one", 1))
        return self.made.constant(node, self.made.row.table(node))

    def _has_rows(self, node: fx.Node) -> bool:
        return any(isinstance(size, torch.SymInt) for size in shape_of(node))

    def _copied(self, node: fx.Node, world: str, length: int) -> Any:  # noqa: ANN401  # a node or a number
        """Copy an op that depends on no token, for so many positions."""
        if isinstance(node.meta.get("val"), torch.SymInt):
            one_row = {self.made.row.rows: 1, self.made.row.length: length}
            is_whole = world == "whole"
            size = node.meta["val"]
            return self.made.row.number(size, one_row) if is_whole else self.made.size(node, length)
        if node in self.made.row.held:
            name, tensor = self.made.row.held[node]
            is_made = name not in self.made.row.own  # by the trace: a number that became a tensor
            return self.made.constant(node, tensor) if is_made else self.made.tensor(name, tensor)
        if (node, world) not in self._whole:
            if node.op != "call_function":
                refuse(node, f"a {node.op} of the trace", code="BX2023")
            args, kwargs = fx.map_arg(
                (node.args, dict(node.kwargs)), lambda n: self._copied(n, world, length)
            )
            self._whole[node, world] = self.made.call(node, node.target, args, kwargs)
        return self._whole[node, world]

    def indexed(
        self, node: fx.Node, reader: fx.Node, shape: Sequence[Any], keys: frozenset[int]
    ) -> fx.Node:
        """Return a table at the positions of the rows, broadcastable to `shape`.

        Args:
            node: the table's node, which depends on no token.
            reader: the node that reads the table.
            shape: of the trace's values that it is spread over, aligned to the right.
            keys: dimensions of `shape` that go over all keys.
        """
        offset = len(shape) - len(shape_of(node))
        along = [dim + offset for dim in self.made.row.positions(node)]
        along = [dim for dim in along if dim not in keys]
        if not along:
            return self.over_all(node)
        (dim, *more) = along
        fits = not more and dim > 0 and offset >= 0 and self.made.row.is_length(shape[dim])
        if not fits or not self.made.row.is_rows(shape[0]):
            refuse(
                reader,
                "a table along the positions meets what is laid out otherwise",
                code="BX2024",
            )
        if (
            node.target is aten.embedding.default
            and node.args[1] not in self.made.row.of_parameters
        ):
            weight, *rest = node.args
            where = self.indexed(rest[0], reader, shape[:-1], keys)  # type: ignore[arg-type]  # a node
            return self.made.call(node, node.target, (self.free(weight), where))  # type: ignore[arg-type]
        if node in self.made.row.of_parameters:
            return self._indexed_parameter(node, len(shape), dim)
        table = self.made.row.table(node)
        table = table.reshape((1,) * offset + tuple(table.shape))
        if table.shape[0] != 1:
            refuse(reader, "a table along the positions has rows of its own", code="BX2025")
        kept = self.made.constant(node, table.transpose(0, dim))
        return self.made.at_first(
            aten.index_select.default, kept, 0, self.made.inputs[POSITION], like=node
        )

    def _indexed_parameter(self, node: fx.Node, rank: int, dim: int) -> fx.Node:
        whole = self._copied(node, "whole", self.made.row.longest)
        for _ in range(rank - len(shape_of(node))):
            whole = self.made.call(node, aten.unsqueeze.default, (whole, 0))
        turned = self.made.call(node, aten.transpose.int, (whole, 0, dim))
        return self.made.call(
            node, aten.index_select.default, (turned, 0, self.made.inputs[POSITION])
        )

    def over_all(self, node: fx.Node) -> fx.Node:
        """Return a value that depends on no token, over all positions."""
        if node in self.made.row.of_parameters:
            return cast("fx.Node", self._copied(node, "whole", self.made.row.longest))
        return self.made.constant(node, self.made.row.table(node))


# --------------------------------------------------------------------------- keys and values

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
