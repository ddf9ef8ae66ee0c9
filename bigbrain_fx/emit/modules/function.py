"""A body -> the statements of one function: calls as people write them, free names used again.

This module knows one function at a time; it knows nothing of classes, files or schedules.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bigbrain_fx.core import Graph, Op, ParamRef, Ref
from bigbrain_fx.emit.modules.expressions import member, tuple_of
from bigbrain_fx.emit.modules.folding import Folding, Piece, is_short
from bigbrain_fx.emit.modules.hints import Hints, alias
from bigbrain_fx.emit.modules.layout import statement
from bigbrain_fx.emit.modules.names import identifier
from bigbrain_fx.emit.modules.rolling import Loop, Step
from bigbrain_fx.emit.modules.variables import Variables, last_uses, places, readers
from bigbrain_fx.emit.modules.writing import Writing
from bigbrain_fx.emit.ops.items import Body, Item, LayerCall, Results, gives_of, takes_of, values_in
from bigbrain_fx.planning import is_size


@dataclass(frozen=True)
class Statement:
    """One statement, or the head of a block with the lines inside it."""

    node: ast.stmt | ast.expr | str
    comment: str = ""
    key: ast.expr | None = None
    inside: tuple[Statement, ...] = ()

    def text(self, indent: int) -> list[str]:
        """Return the lines of text."""
        if self.key is not None:
            head = ast.unparse(ast.fix_missing_locations(self.key))
            return [f"{' ' * indent}with {head}:", *replace(self, key=None).text(indent + 4)]
        if not isinstance(self.node, str):
            return statement(self.node, indent, self.comment)
        tail = f"  # {self.comment}" if self.comment else ""
        head = f"{' ' * indent}{self.node}:{tail}"
        return [head, *(text for line in self.inside for text in line.text(indent + 4))]


@dataclass
class FunctionText:
    """Write one forward function.

    Args:
        body: what it does; `steps` are its items, with loops and sizes.
        hints: a name for every value.
        arguments: value -> name, as in the signature.
        writing: how items are written as expressions.
        keys: random op -> the expression of its key.
        barred: names that no local may have.
        whole: whether a loop runs over all children of the module at a path.
    """

    graph: Graph
    body: Body
    steps: Sequence[Step]
    hints: Hints
    arguments: Mapping[str, str]
    writing: Writing
    keys: Mapping[str, ast.expr]
    barred: Collection[str] = ()
    whole: Callable[[str, int], bool] = lambda _path, _turns: False
    skipped: set[str] = field(default_factory=set)
    forced: dict[str, str] = field(default_factory=dict)

    def lines(self, indent: int) -> list[str]:
        """Return the body of the function, the return statement included."""
        self.at = places(self.steps)
        last = last_uses(self.steps, self.body.gives)
        self.variables = Variables(self.arguments, self.barred, last)
        self.readers = readers(self.steps)
        self.numbered = dict(_numbered(self.body.items))
        self.folding = Folding()
        self.source = ""
        self.writing.value = self._value
        written = [line for step in self.steps for line in self._step(step)]
        written += self._flush()
        return [text for line in self._with_return(written) for text in line.text(indent)]

    def _with_return(self, written: list[Statement]) -> list[Statement]:
        """Return the last value: `x = f(y)` at the end becomes `return f(y)`."""
        names = [self.variables.local[name] for name in self.body.gives]
        values = tuple_of([ast.Name(name) for name in names])
        last = written[-1] if written else Statement("")
        match last.node:
            case ast.Assign(targets=[target], value=value):
                if ast.dump(target) == ast.dump(values):
                    return [*written[:-1], Statement(ast.Return(value), last.comment, last.key)]
        return [*written, Statement(ast.Return(values))]

    # ------------------------------------------------------------------ steps

    def _step(self, step: Step) -> list[Statement]:
        if isinstance(step, Loop):
            return self._loop(step)
        return self._item(step)

    def _item(self, item: Item) -> list[Statement]:
        if isinstance(item, Op) and item.name in self.skipped:
            return []
        self.variables.position = self.at[id(item)]
        if isinstance(item, Op) and item.body is not None:
            return [*self._flush(before=True), self._region(item)]
        written: list[Statement] = []
        piece = self.folding.fold(self._piece(item))
        if piece is None:
            written = self._flush(before=True)
            piece = self._piece(item)
        if self._may_wait(item, piece):
            self.folding.push(gives_of(item)[0], piece)
            return written
        if not (isinstance(item, Op) and is_size(item)):
            self.folding.hold(piece.expression)
            written += self._flush(before=True)  # a size draws no line before what comes after
            self.folding.hold(None)
        written += [line for value in gives_of(item) for line in self._room_for(value)]
        return [*written, self._statement(item, piece)]

    def _room_for(self, value: str) -> list[Statement]:
        """Write `residual = x` where a variable is given anew while its value is still needed."""
        hint = self._hint(value)
        held = self.variables.holder.get(hint)
        free = self.variables.free(hint, self.folding.names()) == hint
        if held is None or free or hint in self.folding.names():
            return []
        found = self.readers[held]
        last = found[-1] if found else None
        name = alias(self.graph, last, held) if isinstance(last, Op) else None
        self.variables.position -= 1  # it is written before the item at hand reads what it reads
        is_free = name is not None and self.variables.free(name, self.folding.names()) == name
        self.variables.position += 1
        if name is None or not is_free or name == hint:
            return []
        self.variables.hold(held, name)
        return [Statement(ast.Assign([ast.Name(name)], ast.Name(hint), lineno=0))]

    def _piece(self, item: Item) -> Piece:
        if isinstance(item, Op):
            key = self.keys.get(item.name)
            return Piece(self.writing.op(item), item.source, key)
        made = item.op.name if isinstance(item, LayerCall) else item.gives[0]
        key = self.keys.get(made)
        inside = key is None and any(op.random for op in item.ops)
        return Piece(self.writing.call(item), self._source_of(item), key, inside)

    def _source_of(self, item: Item) -> str:
        """Return the line of this function that an item stands in."""
        op = item if isinstance(item, Op) else item.ops[-1]
        if isinstance(item, Op) or len(op.lines) <= len(op.modules):
            return op.source
        own = op.lines[: op.modules.index(item.module) + 1]
        return next((frames[-1] for frames in reversed(own) if frames), op.source)

    def _flush(self, before: bool = False) -> list[Statement]:
        """Write the values that wait as statements of their own."""
        lines: list[Statement] = []
        self.variables.position -= before  # the item at hand still needs them
        while (waiting := self.folding.take_first()) is not None:  # the others keep their variables
            piece, hint = waiting.piece, self._hint(waiting.value)
            name = self.variables.give(waiting.value, hint, self.folding.names())
            assign = ast.Assign([ast.Name(name)], piece.expression, lineno=0)
            lines.append(Statement(assign, self._comment(piece.source), piece.key))
        self.variables.position += before
        return lines

    def _may_wait(self, item: Item, piece: Piece) -> bool:
        """Whether a value has no name in the source, and one reader that may hold it."""
        gives = gives_of(item)
        if len(gives) != 1 or gives[0] in self.body.gives or gives[0] in self.hints.assigned:
            return False
        if isinstance(item, Op) and (item.is_tuple or item.mutates or item.checks):
            return False
        if isinstance(item, LayerCall) and item.results:
            return False
        found = self.readers[gives[0]]
        if len(found) != 1 or isinstance(found[0], Loop):
            return False
        reader = found[0]
        if isinstance(reader, Op) and reader.body is not None:
            return False
        return is_short(piece.expression)

    def _statement(self, item: Item, piece: Piece) -> Statement:
        is_number = isinstance(item, Op) and is_size(item)
        comment = "" if is_number else self._comment(piece.source)
        if isinstance(item, Op) and not self._has_value(item):
            return Statement(ast.Expr(piece.expression), comment, piece.key)
        if isinstance(item, LayerCall) and item.results:
            given = {value: self._give(value) for value in item.gives}
            unpacked = _pattern(item.results, given)
            return Statement(ast.Assign([unpacked], piece.expression, lineno=0), comment, piece.key)
        parts = self._unpacked(item) if isinstance(item, Op) and item.is_tuple else None
        names = parts or [self._give(value) for value in gives_of(item)]
        target = tuple_of([ast.Name(name) for name in names])
        if parts and len(parts) == 1:
            target = ast.Tuple([target])
        assign = ast.Assign([target], piece.expression, lineno=0)
        return Statement(assign, comment, piece.key)

    def _has_value(self, op: Op) -> bool:
        if op.checks and not op.outputs:
            return False
        if not op.outputs and not op.is_tuple and not is_size(op):
            return False
        return self.variables.is_used(op.name) or not op.mutates

    def _unpacked(self, op: Op) -> list[str] | None:
        """Return names for `a, b = ...` when each part is taken once; None otherwise."""
        found = self.readers[op.name]
        takers = [r for r in found if isinstance(r, Op) and r.target == "operator.getitem"]
        parts = {taker.args[1]: taker.name for taker in takers}
        if op.name in self.body.gives or not found or len(parts) != len(found) or _has_gaps(op):
            return None
        self.skipped |= set(parts.values())
        return [
            self._give(parts[i]) if i in parts and self.variables.is_used(parts[i]) else "_"
            for i in range(len(op.outputs))
        ]

    # ------------------------------------------------------------------ blocks of statements

    def _region(self, op: Op) -> Statement:
        """Write `with torch.no_grad():` and the like around the region's own ops."""
        body = op.body
        assert body is not None
        outside = dict(self.writing.inner)
        for entry, given in zip(body.inputs, op.args, strict=True):
            self.writing.inner[entry.name] = given
        head = ast.unparse(ast.fix_missing_locations(self.writing.manager(op)))
        comment = self._comment(op.source)
        inside = [line for inner in body.ops for line in self._item(inner)]
        inside += self._flush()
        self.writing.inner = outside
        for part in self.readers[op.name]:  # the region's results are variables already
            if isinstance(part, Op):
                name = self.variables.local[body.outputs[int(str(part.args[1]))]]
                self.variables.hold(part.name, name)
                self.skipped.add(part.name)
        return Statement(f"with {head}", comment, self.keys.get(op.name), tuple(inside))

    def _loop(self, loop: Loop) -> list[Statement]:
        """Write `for block in self.blocks: x = block(x, ...)`."""
        self.variables.position = self.at[id(loop.turns[0][0])]
        lines = self._flush(before=True)
        head = self._head(loop)
        before = {first: self.variables.local[first] for first, _ in loop.carried}
        names: list[str] = []
        for first, made in loop.carried:
            names.append(self._carrier(first, made, names))
        lines += _assigned(names, list(before.values()))
        for name, (first, made) in zip(names, loop.carried, strict=True):
            read = [self.at[id(item)] for item in loop.turns[0] if first in takes_of(item)]
            self.variables.lend(first, name, max(read))
            self.forced[made[0]] = name
        comment = self._comment(self._source_of(loop.turns[0][0]))
        inside = [line for item in loop.turns[0] for line in self._item(item)]
        inside += self._flush()
        inside += _assigned(names, [self.variables.local[made[0]] for _, made in loop.carried])
        self.writing.turn = None
        self.source = ""
        self.variables.local.update(before)
        for name, (_, made) in zip(names, loop.carried, strict=True):
            self.variables.hold(made[-1], name)
        for early, late in zip(loop.turns[0], loop.turns[-1], strict=True):
            for a, b in zip(gives_of(early), gives_of(late), strict=True):
                if b not in self.variables.local and a in self.variables.local:
                    self.variables.hold(b, self.variables.local[a])
        return [*lines, Statement(head, comment, None, tuple(inside))]

    def _carrier(self, first: str, made: Sequence[str], others: Sequence[str]) -> str:
        """Return the variable that hands a value from turn to turn."""
        before, hint = self.variables.local[first], self._hint(made[-1])
        end = self.variables.last_use.get(made[0], -1)
        is_free = self.variables.last_use.get(first, -1) < end  # `end` is after the loop
        plain = before == hint or made[-1] not in self.hints.assigned
        if is_free and plain and before not in others:
            return before
        return self.variables.free(hint, others)

    def _head(self, loop: Loop) -> str:
        """Return `for block in self.blocks` or `for i in range(2, 8)`; set how turns look."""
        varying = [item for item in loop.turns[0] if self.writing.varies(item, loop)]
        item = varying[0]
        path = "" if isinstance(item, Op) else item.module.path
        parent, _, last = path.rpartition(".")
        single = len(varying) == 1 and last.isdigit() and loop.stride == 1
        if single and self.whole(parent, len(loop.turns)):
            words = [word for word in parent.split(".") if not word.isdigit()]
            base = words[-1][:-1] if words and words[-1].endswith("s") else "block"
            name = self.variables.free(identifier(base or "block"))
            self.variables.barred |= {name}
            self.writing.turn = (loop, path, ast.Name(name))
            over = member(self.body.relative(parent))
            return f"for {name} in {ast.unparse(ast.fix_missing_locations(over))}"
        name = self.variables.free("i")
        self.variables.barred |= {name}
        self.writing.turn = (loop, "", ast.Name(name))
        stop = loop.start + len(loop.turns) * loop.stride
        bounds = [stop] if not loop.start and loop.stride == 1 else [loop.start, stop]
        bounds += [loop.stride] if loop.stride != 1 else []
        return f"for {name} in range({', '.join(map(str, bounds))})"

    # ------------------------------------------------------------------ names and comments

    def _value(self, ref: Ref | ParamRef) -> ast.expr | None:
        assert isinstance(ref, Ref)
        waiting = self.folding.stand_in(ref.value)
        if waiting is not None:
            return waiting
        name = self.variables.local.get(ref.value)
        return ast.Name(name) if name is not None else None

    def _give(self, value: str) -> str:
        """Name a value; where its name is in use, after the numbered module that made it."""
        hint, busy = self._hint(value), self.folding.names()
        other = self.numbered.get(value)
        if other and self.variables.free(hint, busy) != hint:
            hint = other
        return self.variables.give(value, hint, busy)

    def _hint(self, value: str) -> str:
        return self.forced.get(value) or self.hints.names.get(value) or "size"

    def _comment(self, source: str) -> str:
        """Return the source line where it differs from the statement before."""
        if not source or source == self.source:
            return ""
        self.source = source
        return " ".join(source.split())


def _assigned(names: Sequence[str], values: Sequence[str]) -> list[Statement]:
    """Return the assignments of variables to others; all at once where one would hide another."""
    pairs = [(name, value) for name, value in zip(names, values, strict=True) if name != value]
    hides = {name for name, _ in pairs} & {value for _, value in pairs}
    groups = [pairs] if hides else [[pair] for pair in pairs]
    return [
        Statement(
            ast.Assign(
                [tuple_of([ast.Name(name) for name, _ in group])],
                tuple_of([ast.Name(value) for _, value in group]),
                lineno=0,
            )
        )
        for group in groups
    ]


def _pattern(results: Results, names: Mapping[str, str]) -> ast.expr:
    """Return the target `out, (hidden, _)` for what a layer returns; unread parts stay unnamed."""
    parts: list[ast.expr] = []
    for part in results:
        if isinstance(part, tuple):
            is_read = any(values_in(part))
            parts.append(_pattern(part, names) if is_read else ast.Name("_"))
        else:
            parts.append(ast.Name("_" if part is None else names[part]))
    return ast.Tuple(parts)


def _has_gaps(op: Op) -> bool:
    """Whether some results are None, as a mask in a backward's arguments says."""
    tuples = (arg for arg in op.args if isinstance(arg, tuple))
    return any(item is False for arg in tuples for item in arg)


def _numbered(items: Iterable[Item]) -> Iterator[tuple[str, str]]:
    """Yield the results of numbered modules: `down_0` for what `self.down[0](...)` gives."""
    for item in items:
        gives = gives_of(item)
        parts = [] if isinstance(item, Op) else item.module.path.split(".")
        if len(gives) == 1 and len(parts) > 1 and parts[-1].isdigit():
            yield gives[0], identifier(f"{parts[-2]}_{parts[-1]}")
