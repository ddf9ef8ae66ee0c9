"""What depends on no token: made once for all positions, and indexed by the rows' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from bigbrain_fx.frontend.cached.making import POSITION, Making, aten
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
        """Return a table at the positions of the rows, as it lines up with `shape`.

        Args:
            node: depends on no token.
            reader: what reads it.
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
