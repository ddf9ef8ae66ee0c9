"""The trace of a row -> a graph of one position, which reads keys and values from caches.

position by position   the same op, on a slice of length one
attention              the new query against all keys and values, cached where they are made
tables along T         (positions, rotary angles, masks) made once, and indexed by position
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from bigbrain_fx.frontend.cached.making import Making, aten
from bigbrain_fx.frontend.cached.row import Row, is_tensor, refuse, shape_of
from bigbrain_fx.frontend.cached.tables import Caches, Tables

_SIZED = frozenset(
    (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default)
)


@dataclass(frozen=True)
class PositionForm:
    """A graph of one position, and its tensors beside the model's own.

    Attributes:
        graph: placeholders are `TOKENS`, `ROW` and `POSITION`; tensors by the user's names.
        caches: name -> shape of one row, element type; [T, ...].
        tables: name -> a tensor that is indexed by position, [T, ...].
    """

    graph: fx.Graph
    caches: Mapping[str, Tensor]
    tables: Mapping[str, Tensor]


def one_position(row: Row, places: int) -> PositionForm:
    """Rewrite a trace.

    Args:
        row: the trace.
        places: rows that the caches hold.

    Raises:
        CaptureError: an op is not covered; names its place.
    """
    made = Making(row, places)
    rules = _Rules(made)
    for node in row.nodes:
        if node in row.dependent and is_tensor(node):
            rules.add(node)
    made.graph.output((made.one[row.scores],))
    made.graph.eliminate_dead_code()
    return PositionForm(made.graph, made.caches, made.tables)


@dataclass(eq=False)
class _Rules:
    made: Making

    def __post_init__(self) -> None:
        self.table = Tables(self.made)
        self.cache = Caches(self.made, self.table)

    def add(self, node: fx.Node) -> None:
        """Add the ops that compute a value at one position."""
        if node in self.made.one:
            return
        special: dict[object, Callable[[fx.Node], fx.Node]] = {
            aten.scaled_dot_product_attention.default: self._attention,
            aten.matmul.default: self._product,
            aten.bmm.default: self._product,
            aten.baddbmm.default: self._product,
            aten.einsum.default: self._einsum,
        }
        if _draws(node):
            refuse(node, "random numbers are drawn at inference", code="BX2008")
        self.made.one[node] = special.get(node.target, self._general)(node)

    def _general(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function":
            refuse(node, f"a {node.op} of the trace", code="BX2009")
        return self._op(node, self._arguments(node))

    def _arguments(self, node: fx.Node) -> tuple[Any, ...]:
        args = list(node.args)
        sizes = self._kept_sizes(node)
        if sizes is not None:
            args[1] = sizes
        return tuple(fx.map_arg(arg, lambda n: self._argument(n, node)) for arg in args)

    def _argument(self, given: fx.Node, reader: fx.Node) -> Any:  # noqa: ANN401  # node or number
        if given in self.made.one:
            return self.made.one[given]
        if isinstance(given.meta.get("val"), torch.SymInt):
            return self.made.size(given, 1)
        if not self.made.row.positions(given):
            return self.table.free(given)
        return self.table.indexed(given, reader, shape_of(reader), self._keys(reader))

    def _op(self, like: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        kwargs = {
            key: fx.map_arg(value, lambda n: self._argument(n, like))
            for key, value in like.kwargs.items()
        }
        return self.made.call(like, like.target, args, kwargs)

    def _kept_sizes(self, node: fx.Node) -> list[Any] | None:
        """Give a view of scores over all keys its sizes: its T is that of the viewed tensor."""
        source = node.args[0] if node.args else None
        if (
            node.target not in _SIZED
            or not isinstance(source, fx.Node)
            or source not in self.made.one
        ):
            return None
        now = shape_of(self.made.one[source])
        lengths = [now[dim] for dim in self.made.row.positions(source)]
        if self.made.row.longest not in lengths:
            return None
        found, left = [], list(lengths)
        for size in node.args[1]:  # type: ignore[union-attr]  # a list of sizes
            is_length = isinstance(size, fx.Node) and self.made.row.is_length(size.meta["val"])
            found.append(left.pop(0) if is_length and left else size)
        return found

    def _keys(self, reader: fx.Node) -> frozenset[int]:
        """Return the dimensions of a reader's result that go over all keys."""
        rank, found = len(shape_of(reader)), set()
        for node in reader.all_input_nodes:
            if node in self.made.one:
                now = shape_of(self.made.one[node])
                keys = (d for d in self.made.row.positions(node) if now[d] == self.made.row.longest)
                found |= {d + rank - len(now) for d in keys}
        return frozenset(found)

    def _attention(self, node: fx.Node) -> fx.Node:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        query, key, value = (given.pop(name) for name in names[:3])
        mask, is_causal = given.pop("attn_mask", None), given.pop("is_causal", False)
        if given.pop("dropout_p", 0.0):
            refuse(node, "random numbers are drawn at inference", code="BX2010")
        along = self.made.row.positions(query)
        if query not in self.made.one or along != [len(shape_of(query)) - 2]:
            refuse(node, "the query has no positions", code="BX2011")
        if mask is None and not is_causal:
            refuse(
                node,
                "every position looks at those after it: the model is not causal",
                code="BX2012",
            )
        scores = (*shape_of(query)[:-1], shape_of(key)[-2])
        last = frozenset({len(scores) - 1})
        if mask is None:
            seen = self.made.seen_as(len(scores), len(scores) - 1, "seen")
        elif mask in self.made.row.dependent:
            refuse(node, "the mask depends on the tokens", code="BX2013")
        elif self.made.row.positions(mask):
            seen = self.table.indexed(mask, node, scores, last)
        else:
            seen = self.table.free(mask)
        args = (
            self.made.one[query],
            self.cache.full(key, "keys"),
            self.cache.full(value, "values"),
            seen,
            0.0,
            False,
        )
        return self.made.call(node, node.target, args, given)

    def _product(self, node: fx.Node) -> fx.Node:
        """Multiply matrices; a sum over T, or scores over T, go over all keys."""
        *before, left, right = (arg for arg in node.args if isinstance(arg, fx.Node))
        rank_left, rank_right = len(shape_of(left)), len(shape_of(right))
        if right not in self.made.row.sized or rank_left < 2 or rank_right < 2:
            return self._general(node)
        if self.made.row.is_length(shape_of(left)[-1]):
            now = shape_of(self.made.one[left]) if left in self.made.one else ()
            if not now or now[-1] != self.made.row.longest:
                refuse(node, "positions are mixed", code="BX2014")
            right_now = self.cache.full(right, "values")
        elif self.made.row.is_length(shape_of(right)[-1]):
            right_now = self.cache.full(right, "keys")
        else:
            return self._general(node)
        keys = frozenset({len(shape_of(node)) - 1})
        first = [
            self.table.indexed(n, node, shape_of(node), keys)
            if n not in self.made.one and self.made.row.positions(n)
            else self._argument(n, node)
            for n in before
        ]
        return self._op(node, (*first, self._argument(left, node), right_now))

    def _einsum(self, node: fx.Node) -> fx.Node:
        """Multiply by letters: the second T that the result has, and one summed over, are keys."""
        equation, operands, *rest = cast("tuple[Any, ...]", node.args)
        terms, _, result = str(equation).replace(" ", "").partition("->")
        parts = terms.split(",")
        if len(parts) != 2 or not result or "." in str(equation):
            return self._general(node)
        letters = [self._letters(n, term) for n, term in zip(operands, parts, strict=True)]
        lengths = [letter for letter in result if letter in letters[0] | letters[1]]
        summed = (letters[0] | letters[1]) - set(result)
        keys = set(lengths[1:]) | summed
        if len(lengths) > 2 or len(summed) > 1:
            refuse(node, "positions are mixed", code="BX2015")
        now = [
            self._letter_operand(n, own & keys, node)
            for n, own in zip(operands, letters, strict=True)
        ]
        return self._op(node, (equation, now, *rest))

    def _letters(self, node: fx.Node, term: str) -> set[str]:
        return {term[dim] for dim in self.made.row.positions(node)}

    def _letter_operand(self, node: fx.Node, keys: set[str], reader: fx.Node) -> fx.Node:
        if not keys:
            return cast("fx.Node", self._argument(node, reader))
        now = shape_of(self.made.one[node]) if node in self.made.one else ()
        if now and any(now[dim] == self.made.row.longest for dim in self.made.row.positions(node)):
            return self.made.one[node]
        return self.cache.full(node, "kept")


def _draws(node: fx.Node) -> bool:
    """Whether an op draws random numbers, a dropout that is off left out."""
    if node.target is aten.dropout.default:
        return bool(node.args[2]) and bool(node.args[1])
    if node.target is aten.scaled_dot_product_attention.default:
        return False
    return bool(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()))
