"""Items -> expressions: `self.norm(x)`, `F.relu(x)`, `self.blocks[i](x, mask)`.

This module knows how each kind of item looks; what values are called is given to it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from bigbrain_fx.core import Arg, Const, Graph, Op, ParamRef, Ref
from bigbrain_fx.emit.modules.again import made_again, widened_again
from bigbrain_fx.emit.modules.blocks import Where
from bigbrain_fx.emit.modules.expressions import attribute, constant, member
from bigbrain_fx.emit.modules.kept import Users, kept_call
from bigbrain_fx.emit.modules.rolling import Loop, changed
from bigbrain_fx.emit.ops.calls import call_expression
from bigbrain_fx.emit.ops.items import BlockCall, Body, Call, Item, LayerCall, is_below, params_of
from bigbrain_fx.planning import is_size

TRAIN = {  # op -> position and name of the argument that says whether the model trains
    "aten.dropout.default": (2, "train"),
    "aten.alpha_dropout.default": (2, "train"),
    "aten.feature_dropout.default": (2, "train"),
    "aten.feature_alpha_dropout.default": (2, "train"),
    "aten.native_dropout.default": (2, "train"),
    "aten.batch_norm.default": (5, "training"),
}
ATTENTION = "aten.scaled_dot_product_attention.default"


@dataclass
class Writing:
    """Write the items of one function.

    Attributes:
        body: the function. arguments: value -> name, as in the signature.
        users: see `user_aliases`.
        outer: outer parameter -> argument name.
        varying: item, by identity -> place of a number in it -> attribute that holds it.
        nth: call of a class that draws -> which call of its module it is; left out where there is
            only one.
        value: gives the expression of a value; set by the function that is being written.
        inner: input of a region -> what it is called with.
        again: ops whose results the backward makes again. wide: of them, those that make a float
            weight of an int8 one.
        turn: the loop being written, the path of the module that its variable is, and the variable.
    """

    graph: Graph
    body: Body
    arguments: Mapping[str, str]
    users: Users
    outer: Mapping[str, str] = field(default_factory=dict)
    varying: Mapping[int, Mapping[Where, str]] = field(default_factory=dict)
    nth: Mapping[int, ast.expr] = field(default_factory=dict)
    value: Callable[[Ref | ParamRef], ast.expr | None] = lambda _: None
    inner: dict[str, Arg] = field(default_factory=dict)
    turn: tuple[Loop, str, ast.expr] | None = None
    again: frozenset[str] = frozenset()
    wide: frozenset[str] = frozenset()
    special: dict[str, ast.expr] = field(default_factory=dict)

    def op(self, op: Op) -> ast.expr:
        """Return the expression of one op; the user's own Python is called by its name."""
        whole = self._with_numbers(self._in_training(op), id(op))
        own = kept_call(whole, self.argument, self.users)
        found = own or call_expression(whole, self._ref, self._device())
        if op.name not in self.again:
            return found
        return widened_again(found) if op.name in self.wide else made_again(found)

    def call(self, item: Call) -> ast.expr:
        """Return the call of a layer or class."""
        module = self.module(item.module.path)
        if isinstance(item, LayerCall):
            found = ast.Call(module, [self.argument(arg) for arg in item.inputs], [])
            return made_again(found) if item.op.name in self.again else found
        if id(item) in self.nth:
            module = ast.Call(attribute(module, "nth"), [self.nth[id(item)]], [])
        values: list[ast.expr] = [self._ref(Ref(name)) for name in item.takes]
        if isinstance(item, BlockCall):
            values += [self._ref(ParamRef(name)) for name in item.body.outer_params]
        return ast.Call(module, values, [])

    def manager(self, op: Op) -> ast.expr:
        """Return the context manager of a region op."""
        torch = ast.Name("torch")
        if op.target != "region.autocast":
            return ast.Call(attribute(torch, op.target.removeprefix("region.")), [], [])
        where = attribute(self._device(), "type")
        keywords = [ast.keyword(name, constant(value)) for name, value in op.kwargs]
        return ast.Call(attribute(torch, "autocast"), [where], keywords)

    def varies(self, item: Item, loop: Loop) -> bool:
        """Whether an item of a loop's turn names another module in each turn."""
        index = loop.turns[0].index(item)
        after = loop.turns[1][index]
        return _paths(item) != _paths(after)

    def argument(self, arg: Arg) -> ast.expr:
        """Return the expression of any argument."""
        if isinstance(arg, Ref | ParamRef):
            return self._ref(arg)
        if isinstance(arg, tuple):
            return ast.Tuple([self.argument(item) for item in arg])
        return self._device() if arg == Const("device") else constant(arg)

    def module(self, path: str) -> ast.expr:
        """Return `self.blocks[0].norm` for a path, or what it is in the loop being written."""
        relative = self.body.relative(path)
        if self.turn is None:
            return member(relative)
        loop, whole, variable = self.turn
        if path == whole or (whole and is_below(path, whole)):
            return member(path[len(whole) + 1 :], variable)
        number = _number_in_turn(loop, path)
        if number is None:
            return member(relative)
        skipped = len(self.body.path.split(".")) if self.body.path else 0
        offset = int(path.split(".")[number]) - loop.start
        index = variable if not offset else ast.BinOp(variable, ast.Add(), ast.Constant(offset))
        return member(relative, numbers={number - skipped: index})

    # ------------------------------------------------------------------ references

    def _ref(self, ref: Ref | ParamRef) -> ast.expr:
        if isinstance(ref, ParamRef):
            if ref.param in self.outer:
                return ast.Name(self.outer[ref.param])
            return self.module(ref.param)
        if ref.value in self.special:
            return self.special[ref.value]
        given = self.inner.get(ref.value, ref)
        if given != ref:
            return self.argument(given)
        found = self.value(ref)
        assert found is not None, f"{ref.value} has no name"
        return found

    def _device(self) -> ast.expr:
        """Return where this function's tensors live: on the device of its first argument."""
        tensors = [name for value, name in self.arguments.items() if not self._is_size(value)]
        own = [name for name in self.body.params if "." not in self.body.relative(name)]
        if not tensors and own and self.body.path:
            return attribute(self.module(own[0]), "device")
        return attribute(ast.Name(tensors[0] if tensors else "self"), "device")

    def _is_size(self, value: str) -> bool:
        return value in self.graph.op and is_size(self.graph.op[value])

    # ------------------------------------------------------------------ what is not fixed

    def _in_training(self, op: Op) -> Op:
        """Let what differs between training and inference ask `self.training`."""
        if not self.graph.training:
            return op
        training = attribute(ast.Name("self"), "training")
        if op.target in TRAIN:
            position, name = TRAIN[op.target]
            self.special["self.training"] = training
            return _asking(op, position, name, Ref("self.training"))
        rate = _dropout_of(op)
        if rate is None:
            return op
        stand_in = f"self.dropout {rate!r}"
        self.special[stand_in] = ast.IfExp(training, ast.Constant(rate), ast.Constant(0.0))
        return _asking(op, 4, "dropout_p", Ref(stand_in))

    def _with_numbers(self, op: Op, item: int) -> Op:
        """Replace numbers that vary between uses of a class by the attributes that hold them."""
        mine = self.varying.get(item, {})
        if not mine:
            return op
        for name in mine.values():
            self.special[f"self.{name}"] = attribute(ast.Name("self"), name)
        args = tuple(_replaced(arg, mine, (0, i)) for i, arg in enumerate(op.args))
        values = [_replaced(value, mine, (1, i)) for i, (_, value) in enumerate(op.kwargs)]
        names = [name for name, _ in op.kwargs]
        return replace(op, args=args, kwargs=tuple(zip(names, values, strict=True)))


def _number_in_turn(loop: Loop, path: str) -> int | None:
    """Return which component of a path grows from turn to turn; None for one that stays."""
    for first, second in zip(loop.turns[0], loop.turns[1], strict=True):
        for a, b in zip(_paths(first), _paths(second), strict=True):
            if a == path:
                moved = changed(a, b)
                return moved[0][0] if moved else None
    return None


def _paths(item: Item) -> list[str]:
    return list(params_of(item)) if isinstance(item, Op) else [item.module.path]


def _asking(op: Op, position: int, name: str, asked: Ref) -> Op:
    """Put a reference in place of an argument that is on."""
    if len(op.args) > position:
        if not op.args[position]:
            return op
        return replace(op, args=(*op.args[:position], asked, *op.args[position + 1 :]))
    given = dict(op.kwargs)
    if name in given and not given[name]:
        return op
    if name not in given and op.target == ATTENTION:
        return op
    return replace(op, kwargs=tuple({**given, name: asked}.items()))


def _dropout_of(op: Op) -> float | None:
    if op.target != ATTENTION:
        return None
    rate = op.args[4] if len(op.args) > 4 else dict(op.kwargs).get("dropout_p")
    return rate if isinstance(rate, float) and rate > 0 else None


def _replaced(arg: Arg, mine: Mapping[Where, str], path: Where) -> Arg:
    """Put a reference where a number varies; the shape of nested arguments is kept."""
    if path in mine:
        return Ref(f"self.{mine[path]}")
    if isinstance(arg, tuple):
        return tuple(_replaced(item, mine, (*path, i)) for i, item in enumerate(arg))
    return arg
