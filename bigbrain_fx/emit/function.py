"""A scope -> the statements of one function: calls as people write them, free names used again.

This room knows one function at a time; it knows nothing of classes, files or schedules.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from bigbrain_fx.core import Arg, Graph, Op, ParamRef, Ref, leaves
from bigbrain_fx.emit.blocks import Signature, Where
from bigbrain_fx.emit.calls import call_expression
from bigbrain_fx.emit.expressions import (
    attribute,
    constant,
    dotted,
    function_place,
    member,
    tuple_of,
)
from bigbrain_fx.emit.folding import Folding, Waiting, is_short
from bigbrain_fx.emit.layout import statement
from bigbrain_fx.emit.names import RESERVED, identifier
from bigbrain_fx.units import is_size


@dataclass(frozen=True)
class BlockCall:
    """A call of a block's class: which child module, which call of it, arguments and results."""

    path: str
    call: int
    takes: tuple[str, ...]
    outer_params: tuple[str, ...]
    gives: tuple[str, ...]
    template: Signature
    has_draws: bool
    source: str = ""


@dataclass(frozen=True)
class BlockLoop:
    """Calls of consecutive blocks, each fed with the result of the one before.

    Attributes:
        carried: position of the argument that is the result of the block before.
        parent: the module whose children the blocks are.
        whole: whether they are all of its children.
    """

    calls: tuple[BlockCall, ...]
    carried: int
    parent: str
    whole: bool

    @property
    def takes(self) -> tuple[str, ...]:
        """Values that the loop reads from outside."""
        return self.calls[0].takes

    @property
    def gives(self) -> tuple[str, ...]:
        """Values that the loop leaves: the last block's."""
        return self.calls[-1].gives

    @property
    def source(self) -> str:
        """The user's line of the first call."""
        return self.calls[0].source


Item: TypeAlias = Op | BlockCall | BlockLoop


@dataclass
class FunctionText:
    """Write one forward function.

    Args:
        hints: a name for every value.
        path: what parameter names are relative to.
        arguments: value -> name, as in the signature.
        results: values that are returned.
        outer: outer parameter -> argument name.
        draws: random op -> arguments of `self.key`.
        varying: place of a number -> attribute that holds it.
        variables: values that the source assigns to a variable: they keep a line of their own.
        inner: input of a region -> what it is called with; filled while writing.
        numbers: stand-in of a varying number -> attribute that holds it; filled while writing.
    """

    graph: Graph
    hints: Mapping[str, str]
    path: str
    arguments: Mapping[str, str]
    results: Sequence[str]
    outer: Mapping[str, str] = field(default_factory=dict)
    draws: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    varying: Mapping[Where, str] = field(default_factory=dict)
    variables: Collection[str] = ()
    inner: dict[str, Arg] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)

    def lines(self, items: Sequence[Item], indent: int) -> list[str]:
        """Return the body of the function, the return statement included."""
        self.local = dict(self.arguments)
        self.holder = {name: value for value, name in self.local.items()}
        self.last_use = _last_uses(items, self.results)
        self.source = ""
        self.skipped: set[str] = set()
        self.folding = Folding()
        self.readers = _readers(items)
        written: list[str] = []
        for position, item in enumerate(items):
            if isinstance(item, Op) and item.name in self.skipped:
                continue
            written += self._item(item, position, items, indent)
        return self._with_return(written, indent)

    def _with_return(self, written: list[str], indent: int) -> list[str]:
        """Return the last value: `x = f(y)` at the end becomes `return f(y)`."""
        names = [self.local[name] for name in self.results]
        last = written[-1] if written else ""
        start = f"{' ' * indent}{', '.join(names)} = "
        if len(names) == 1 and last.startswith(start) and not last.endswith(("(", ",")):
            return [*written[:-1], f"{' ' * indent}return {last.removeprefix(start)}"]
        values = tuple_of([ast.Name(name) for name in names])
        return [*written, *statement(ast.Return(values), indent)]

    # ------------------------------------------------------------------ items

    def _item(self, item: Item, position: int, items: Sequence[Item], indent: int) -> list[str]:
        self.position = position
        if isinstance(item, Op) and item.body is None and item.name not in self.draws:
            return self._op(self._with_numbers(item, position), items, indent)
        before = self._flush(indent)
        match item:
            case BlockCall():
                return before + self._block_call(item, position, indent)
            case BlockLoop():
                return before + self._loop(item, position, indent)
        numbered = self._with_numbers(item, position)
        write = self._op if item.body is None else self._region
        return before + self._keyed(item, write(numbered, items, indent), indent)

    def _flush(self, indent: int) -> list[str]:
        """Write the values that wait as statements of their own."""
        lines: list[str] = []
        self.position -= 1  # the item at hand still needs them
        for waiting in self.folding.clear():
            name = self._name(waiting.value, self.hints[waiting.value])
            assign = ast.Assign([ast.Name(name)], waiting.expression, lineno=0)
            lines += statement(assign, indent, self._comment(waiting.source))
        self.position += 1
        return lines

    def _keyed(self, op: Op, lines: list[str], indent: int) -> list[str]:
        """Put an op that draws random numbers under its key."""
        if op.name not in self.draws:
            return lines
        arguments: list[ast.expr] = [ast.Constant(a) for a in self.draws[op.name]]
        key = ast.Call(attribute(ast.Name("self"), "key"), arguments, [])
        head = ast.unparse(ast.fix_missing_locations(key))
        return [" " * indent + f"with {head}:", *("    " + line for line in lines)]

    def _op(self, op: Op, items: Sequence[Item], indent: int) -> list[str]:
        lines: list[str] = []
        expression = self.folding.fold(self._call(op), op.source)
        if expression is None:
            lines = self._flush(indent)
            expression = self._call(op)
        if self._may_wait(op, expression):
            self.folding.push(Waiting(op.name, expression, op.source))
            return lines
        if not is_size(op):  # a size draws no line between what was before and what comes after
            lines += self._flush(indent)
        return lines + self._statement(op, expression, items, indent)

    def _may_wait(self, op: Op, expression: ast.expr) -> bool:
        """Whether a value has no name in its source line, and one reader there: a plain op."""
        if op.is_tuple or not op.outputs or op.mutates or op.name in self.draws:
            return False
        if op.name in self.results or op.name in self.variables or len(self.readers[op.name]) != 1:
            return False
        reader = self.readers[op.name][0]
        if not isinstance(reader, Op) or reader.body is not None or reader.name in self.draws:
            return False
        return reader.source == op.source and is_short(expression)

    def _statement(
        self, op: Op, expression: ast.expr, items: Sequence[Item], indent: int
    ) -> list[str]:
        comment = "" if is_size(op) else self._comment(op.source)
        if not op.outputs and not op.is_tuple and not is_size(op):
            return statement(ast.Expr(expression), indent, comment)
        if op.mutates and not self._is_used(op.name):
            return statement(ast.Expr(expression), indent, comment)
        parts = self._unpacked(op, items) if op.is_tuple else None
        if parts is None:
            target: ast.expr = ast.Name(self._name(op.name, self.hints[op.name]))
        else:
            target = ast.Tuple([ast.Name(name) for name in parts])
        return statement(ast.Assign([target], expression, lineno=0), indent, comment)

    def _unpacked(self, op: Op, items: Sequence[Item]) -> list[str] | None:
        """Return names for `a, b = ...` when each part is taken once; None otherwise."""
        readers = [item for item in items if op.name in _uses(item)]
        takers = [r for r in readers if isinstance(r, Op) and r.target == "operator.getitem"]
        parts = {taker.args[1]: taker.name for taker in takers}
        if op.name in self.results or not readers or len(parts) != len(readers):
            return None
        self.skipped |= set(parts.values())
        return [
            self._name(parts[i], self.hints[parts[i]]) if i in parts else "_"
            for i in range(len(op.outputs))
        ]

    def _region(self, op: Op, items: Sequence[Item], indent: int) -> list[str]:
        """Write `with torch.no_grad():` and the like around the region's own ops."""
        body = op.body
        assert body is not None
        for entry, given in zip(body.inputs, op.args, strict=True):
            self.inner[entry.name] = given
        head = ast.unparse(ast.fix_missing_locations(self._manager(op)))
        lines = [" " * indent + f"with {head}:" + self._tail_comment(op.source)]
        for inner in body.ops:
            expression = self._call(inner)
            name = self._name(inner.name, self.hints.get(inner.name) or _plain(inner))
            self.last_use[inner.name] = self.position + 1  # until the results have their names
            lines += statement(ast.Assign([ast.Name(name)], expression, lineno=0), indent + 4)
        parts = [item for item in items if isinstance(item, Op) and op.name in item.refs]
        for part in parts:  # the region's results are variables already
            self.local[part.name] = self.local[body.outputs[int(str(part.args[1]))]]
            self.holder[self.local[part.name]] = part.name
            self.skipped.add(part.name)
        return lines

    def _manager(self, op: Op) -> ast.expr:
        """Return the context manager of a region op."""
        torch = ast.Name("torch")
        if op.target != "region.autocast":
            return ast.Call(attribute(torch, op.target.removeprefix("region.")), [], [])
        where = attribute(self._device(), "type")
        keywords = [ast.keyword(name, constant(value)) for name, value in op.kwargs]
        return ast.Call(attribute(torch, "autocast"), [where], keywords)

    def _call(self, op: Op) -> ast.expr:
        """Return the expression of one op; a user's own autograd.Function is called by its name."""
        if not op.target.startswith("opaque."):
            return call_expression(op, self._value, self._device())
        function = dotted(function_place(op.target)[1])
        return ast.Call(attribute(function, "apply"), [self._argument(arg) for arg in op.args], [])

    def _argument(self, arg: Arg) -> ast.expr:
        if isinstance(arg, Ref | ParamRef):
            return self._value(arg)
        if isinstance(arg, tuple):
            return ast.Tuple([self._argument(item) for item in arg])
        return constant(arg)

    def _block_call(self, item: BlockCall, position: int, indent: int) -> list[str]:
        self.position = position
        block: ast.expr = self._module(item.path)
        if item.has_draws and item.call:
            block = ast.Call(attribute(block, "nth"), [ast.Constant(item.call)], [])
        call = ast.Call(block, self._arguments(item), [])
        names = [self._name(value, self.hints[value]) for value in item.gives]
        target = tuple_of([ast.Name(name) for name in names])
        return statement(ast.Assign([target], call, lineno=0), indent, self._comment(item.source))

    def _loop(self, item: BlockLoop, position: int, indent: int) -> list[str]:
        """Write `for block in self.blocks.children(): x = block(x, ...)`."""
        self.position = position
        before, after = item.takes[item.carried], item.gives[0]
        arguments = self._arguments(item.calls[0])
        lines = []
        is_free = self.last_use.get(before, -1) <= position
        name = self._name(after, self.local[before] if is_free else self.hints[after])
        if name != self.local[before]:
            first_value = ast.Name(self.local[before])
            lines += statement(ast.Assign([ast.Name(name)], first_value, lineno=0), indent)
        arguments[item.carried] = ast.Name(name)
        parent = self._module(item.parent)
        variable = "i" if not item.whole else _free("block", {*self.holder})
        if item.whole:
            over: ast.expr = ast.Call(attribute(parent, "children"), [], [])
            block: ast.expr = ast.Name(variable)
        else:
            first, last = (int(c.path.rpartition(".")[2]) for c in (item.calls[0], item.calls[-1]))
            over = ast.Call(ast.Name("range"), [ast.Constant(first), ast.Constant(last + 1)], [])
            block = ast.Subscript(parent, ast.Name(variable))
        head = ast.unparse(ast.fix_missing_locations(over))
        lines.append(" " * indent + f"for {variable} in {head}:" + self._tail_comment(item.source))
        call = ast.Call(block, arguments, [])
        return lines + statement(ast.Assign([ast.Name(name)], call, lineno=0), indent + 4)

    # ------------------------------------------------------------------ expressions

    def _arguments(self, item: BlockCall) -> list[ast.expr]:
        values: list[ast.expr] = [self._value(Ref(name)) for name in item.takes]
        return values + [self._value(ParamRef(name)) for name in item.outer_params]

    def _value(self, ref: Ref | ParamRef) -> ast.expr:
        if isinstance(ref, ParamRef):
            if ref.param in self.outer:
                return ast.Name(self.outer[ref.param])
            return self._module(ref.param)
        if ref.value in self.numbers:
            return attribute(ast.Name("self"), self.numbers[ref.value])
        if ref.value in self.inner and ref.value not in self.local:
            return self._argument(self.inner[ref.value])
        return self.folding.stand_in(ref.value) or ast.Name(self.local[ref.value])

    def _module(self, path: str) -> ast.expr:
        relative = path[len(self.path) + 1 :] if self.path else path
        return member(relative)

    def _device(self) -> ast.expr:
        """Return where this function's tensors live: on the device of its first argument."""
        tensors = (name for value, name in self.arguments.items() if not self._is_size(value))
        return attribute(ast.Name(next(tensors, "self")), "device")

    def _is_size(self, value: str) -> bool:
        return value in self.graph.op and is_size(self.graph.op[value])

    def _with_numbers(self, op: Op, position: int) -> Op:
        """Replace numbers that vary between uses of a class by the attributes that hold them."""
        mine = {where[1:]: name for where, name in self.varying.items() if where[0] == position}
        if not mine:
            return op
        self.numbers.update({f"self.{name}": name for name in mine.values()})
        args = tuple(_replaced(arg, mine, (0, i)) for i, arg in enumerate(op.args))
        values = [_replaced(value, mine, (1, i)) for i, (_, value) in enumerate(op.kwargs)]
        names = [name for name, _ in op.kwargs]
        return replace(op, args=args, kwargs=tuple(zip(names, values, strict=True)))

    # ------------------------------------------------------------------ names and comments

    def _name(self, value: str, hint: str) -> str:
        """Give a value its variable: its hint when nobody needs what that holds now."""
        name = self._free_name(hint)
        self.local[value] = name
        self.holder[name] = value
        return name

    def _free_name(self, hint: str) -> str:
        busy = {
            name
            for name, value in self.holder.items()
            if self.last_use.get(value, -1) > self.position
        }
        return _free(hint, busy | set(self.outer.values()) | self.folding.names())

    def _is_used(self, value: str) -> bool:
        return self.last_use.get(value, -1) > self.position

    def _comment(self, source: str) -> str:
        """Return the source line where it differs from the statement before."""
        if not source or source == self.source:
            return ""
        self.source = source
        return " ".join(source.split())

    def _tail_comment(self, source: str) -> str:
        comment = self._comment(source)
        return f"  # {comment}" if comment else ""


def _uses(item: Item) -> tuple[str, ...]:
    return item.refs if isinstance(item, Op) else item.takes


def _readers(items: Sequence[Item]) -> Mapping[str, list[Item]]:
    """Return who reads each value; an item that reads it twice is listed twice."""
    readers: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        for value in item.takes if not isinstance(item, Op) else _references(item):
            readers[value].append(item)
    return readers


def _references(op: Op) -> list[str]:
    arguments = (*op.args, *(value for _, value in op.kwargs))
    return [leaf.value for leaf in leaves(arguments) if isinstance(leaf, Ref)]


def _last_uses(items: Sequence[Item], results: Sequence[str]) -> dict[str, int]:
    """Return the position of the last item that reads each value; results are read at the end."""
    last = {value: position for position, item in enumerate(items) for value in _uses(item)}
    for position, item in enumerate(items):  # a tuple lives on in its parts
        if isinstance(item, Op) and item.target == "operator.getitem":
            for value in item.refs:
                last[value] = max(last.get(value, 0), position)
    return {**last, **dict.fromkeys(results, len(items))}


def _free(hint: str, busy: set[str]) -> str:
    name, number = hint, 1
    while name in busy or name in RESERVED:
        number += 1
        name = f"{hint}_{number}"
    return name


def _plain(op: Op) -> str:
    return identifier(op.target.split(".")[1] if "." in op.target else op.target)


def _replaced(arg: Arg, mine: Mapping[Where, str], path: Where) -> Arg:
    """Put a reference where a number varies; the shape of nested arguments is kept."""
    if path in mine:
        return Ref(f"self.{mine[path]}")
    if isinstance(arg, tuple):
        return tuple(_replaced(item, mine, (*path, i)) for i, item in enumerate(arg))
    return arg
