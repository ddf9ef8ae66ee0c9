"""A graph of one position in the making: its calls, its tensors, its sizes; without rules."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import sympy  # type: ignore[import-untyped]  # it ships no types
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend.cached.row import Row, refuse

aten = torch.ops.aten
TOKENS, ROW, POSITION = "tokens", "row", "position"  # inputs of the form
_META = ("stack_trace", "nn_module_stack")
_ROWS = 3  # while the form is made, any number


@dataclass(eq=False)
class Making:
    """A graph under construction.

    Attributes:
        row: the trace that the graph is derived from.
        places: rows of the caches.
        caches, tables: by name, its tensors beside the model's own: [places, T, ...] and [T, ...].
        one: node of the trace -> its node in this graph.
        inputs: `TOKENS`, `ROW` and `POSITION`.
    """

    row: Row
    places: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    caches: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)
    one: dict[fx.Node, fx.Node] = field(default_factory=dict)
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))

    def __post_init__(self) -> None:
        self._named: dict[str, fx.Node] = {}
        self._first: dict[object, fx.Node] = {}
        with self.mode:
            numbers = torch.empty((_ROWS,), dtype=torch.int64)
        self.inputs = {
            name: self._placeholder(name, numbers.unsqueeze(1) if name == TOKENS else numbers)
            for name in (TOKENS, ROW, POSITION)
        }
        self.one[self.row.tokens] = self.inputs[TOKENS]
        self._head = self.inputs[POSITION]

    def _placeholder(self, name: str, value: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(
        self,
        like: fx.Node | None,
        target: Any,  # noqa: ANN401  # what fx calls
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Add a call; its result's shape is known at once, or the call is refused at its place."""
        named = dict(kwargs or {})
        node = self.graph.call_function(target, args, named)
        if like is not None:
            node.meta.update({key: like.meta[key] for key in _META if key in like.meta})
        values = fx.map_arg((args, named), lambda n: n.meta["val"])
        try:
            with self.mode, torch.no_grad():
                node.meta["val"] = target(*values[0], **values[1])
        except BigBrainError:
            raise
        except Exception as error:  # whatever an op raises of shapes that do not fit
            first = (str(error).splitlines() or [""])[0]
            refuse(like or node, f"on one position this fails ({first[:120]})", code="BX2005")
        return node

    def size(self, node: fx.Node, length: int) -> Any:  # noqa: ANN401  # node or number
        """Return a size where there are so many positions; rows stay free."""
        return self._written(node, node.meta["val"].node.expr.subs({self.row.length: length}))

    def _written(self, node: fx.Node, size: sympy.Basic) -> Any:  # noqa: ANN401  # as above
        if size.is_number:
            return int(size)
        if size == self.row.rows:
            return self.call(None, aten.sym_size.int, (self.inputs[TOKENS], 0))
        how = {sympy.Mul: operator.mul, sympy.Add: operator.add}.get(size.func)
        if how is None:
            refuse(node, f"a size is {size}", code="BX2006")
        parts = [self._written(node, part) for part in size.args]
        return reduce(lambda a, b: self.call(None, how, (a, b)), parts)

    def tensor(self, name: str, tensor: Tensor) -> fx.Node:
        """Return a tensor of the module, by its name there."""
        if name not in self._named:
            with self.graph.inserting_after(self.inputs[POSITION]):
                node = self.graph.get_attr(name)
            self._head = node if self._head is self.inputs[POSITION] else self._head
            node.meta["val"] = self.mode.from_tensor(tensor)
            self._named[name] = node
        return self._named[name]

    def constant(self, like: fx.Node, value: Tensor) -> fx.Node:
        """Keep a table, once for all that are equal."""
        value = value.detach().clone().contiguous()
        for name, other in self.tables.items():
            if other.dtype == value.dtype and torch.equal(other, value):
                return self._named[name]
        name = f"table_{like.name.lstrip('_')}"
        while name in self._named or name in self.row.own:
            name += "_"
        self.tables[name] = value
        return self.tensor(name, value)

    def seen_as(self, rank: int, dim: int, what: str) -> fx.Node:
        """Return which positions the query sees, or those later, along a dimension of `rank`."""
        device = {"device": torch.device("cpu")}
        places = self.at_first(aten.arange.default, self.row.longest, kwargs=device)
        own = self.at_first(aten.unsqueeze.default, self.inputs[POSITION], 1)
        compare = aten.le.Tensor if what == "seen" else aten.gt.Tensor
        found = self.at_first(compare, places, own)
        for _ in range(1, dim):
            found = self.at_first(aten.unsqueeze.default, found, 1)
        for _ in range(rank - dim - 1):
            found = self.at_first(aten.unsqueeze.default, found, -1)
        return found

    def at_first(
        self,
        target: Any,  # noqa: ANN401  # what fx calls
        *args: Any,  # noqa: ANN401  # of the call
        kwargs: Mapping[str, Any] | None = None,
        like: fx.Node | None = None,
    ) -> fx.Node:
        """Return a call before all others, shared by all readers: so layers stay identical."""
        key = target, args
        if key not in self._first:
            with self.graph.inserting_after(self._head):
                self._first[key] = self.call(like, target, args, kwargs)
            self._head = self._first[key]
        return self._first[key]
