"""The forward of one module as its file has it, and some of its statements.

    1  x = self.embed(ids)
    2  p = pack(x, length)          Span(forward, 2, 3)   is given length and x, leaves h,
    3  _, h = self.rnn(p)                                 uses rnn
    4  return self.head(h)

This file knows texts and modules; it changes none.
"""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import re
import types
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import cast

from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.opaque.hoisting import hoisted, is_call_of
from bigbrain_fx.frontend.tracing.opaque.syntax import (
    attribute_chains,
    attributes,
    escapes,
    names,
    of_methods,
)

_PATH = re.compile(
    r"(?:(?P<owner>.+)\.)?forward_(?P<first>\d+)_(?P<last>\d+)(?:_without(?P<without>(_\d+)+))?"
)


@dataclass(frozen=True)
class Forward:
    """The forward of one module, as its file has it.

    Attributes:
        path: of the module in the model.
        function: without wrappers, as in the file.
        node: its syntax tree, with the lines of the file and its decorators.
    """

    path: str
    module: nn.Module
    function: types.FunctionType
    node: ast.FunctionDef

    @staticmethod
    def of(model: nn.Module, path: str) -> Forward | None:
        """Return it where a file has its text; a trace's stand-in has none."""
        module = model.get_submodule(path)
        function = inspect.unwrap(type(module).forward)
        if not isinstance(function, types.FunctionType) or "forward" in vars(module):
            return None
        node = None if function.__code__.co_freevars else _text_of(function)
        return Forward(path, module, function, node) if node else None

    @cached_property
    def file(self) -> str:
        """The file that has it."""
        return self.function.__code__.co_filename

    @cached_property
    def body(self) -> list[ast.stmt]:
        """Its statements, without a docstring, calls of modules inside of calls before them."""
        has_text = ast.get_docstring(self.node) is not None
        taken = {node.id for node in ast.walk(self.node) if isinstance(node, ast.Name)}
        own = self.node.body[1:] if has_text else self.node.body
        return [part for each in own for part in hoisted(each, self.own, taken | self.names)]

    @cached_property
    def names(self) -> set[str]:
        """The names of its arguments, without its own."""
        args = self.node.args
        more = [arg for arg in (args.vararg, args.kwarg) if arg]
        return {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, *more)} - {
            self.own
        }

    @cached_property
    def own(self) -> str:
        """Name of its module in it: "self"."""
        return (*self.node.args.posonlyargs, *self.node.args.args)[0].arg

    def statement_at(self, line: int, column: int | None = None) -> int | None:
        """Return the number of the last statement that has a place of the file, from 1."""
        for number, each in reversed([*enumerate(self.body, 1)]):
            end = cast("int", each.end_lineno), cast("int", each.end_col_offset)
            first = (each.lineno, each.col_offset if column is not None else 0)
            if first <= (line, column or 0) and (line, column or 0) <= end:
                return number
        return None

    def held(self, statements: Sequence[ast.stmt]) -> set[str]:
        """Return the paths of the modules and tensors that statements read: "embed.weight"."""
        chains = attribute_chains(statements, self.own)
        waiting, seen = [*chains], set[tuple[str, ...]]()
        while waiting:
            chain = waiting.pop()
            if chain in seen:
                continue
            seen.add(chain)
            method = inspect.unwrap(getattr(type(self.module), chain[0], None))  # type: ignore[arg-type]
            code = getattr(method, "__code__", None)
            if isinstance(code, types.CodeType) and not hasattr(nn.Module, chain[0]):
                waiting += [(name,) for name in of_methods(code)]
        found = {self._held(chain) for chain in seen} - {""}
        return {path for path in found if not any(is_below(path, other) for other in found)}

    def _held(self, chain: Sequence[str]) -> str:
        """Return how far a chain of attributes leads to modules, and to a tensor at its end."""
        value: object = self.module
        for number, name in enumerate(chain):
            value = getattr(value, name, None)
            if isinstance(value, Tensor):
                return ".".join(chain[: number + 1])
            if not isinstance(value, nn.Module):
                return ".".join(chain[:number])
        return ".".join(chain)

    def calls(self) -> list[int]:
        """Return the numbers of the statements that call one module, and do nothing else."""
        return [number for number, each in enumerate(self.body, 1) if self._is_call(each)]

    def _is_call(self, statement: ast.stmt) -> bool:
        call = getattr(statement, "value", None)
        is_plain = isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return) and is_call_of(
            call, self.own
        )
        name = cast("ast.Attribute", cast("ast.Call", call).func).attr if is_plain else ""
        return isinstance(getattr(self.module, name, None) if name else None, nn.Module)

    def stores(self) -> list[int]:
        """Return the numbers of the statements that assign to attributes of the module."""
        return [i for i, each in enumerate(self.body, 1) if attributes([each], self.own, ast.Store)]


@dataclass(frozen=True)
class Span:
    """A range of statements of a forward: from the first to the last, counted from 1.

    Statements in `without` do not depend on the ones before them, and run first.
    """

    forward: Forward
    first: int
    last: int
    without: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        """Path of the module that they become: "encoder.forward_2_4"."""
        but = "".join(f"_{number}" for number in self.without)
        name = f"forward_{self.first}_{self.last}{but and f'_without{but}'}"
        return f"{self.forward.path}.{name}".removeprefix(".")

    @property
    def numbers(self) -> list[int]:
        """Their numbers."""
        return [n for n in range(self.first, self.last + 1) if n not in self.without]

    @property
    def statements(self) -> list[ast.stmt]:
        """Syntax trees of the statements."""
        return [self.forward.body[number - 1] for number in self.numbers]

    @property
    def before(self) -> list[ast.stmt]:
        """The statements that run before them."""
        moved = [self.forward.body[number - 1] for number in self.without]
        return [*self.forward.body[: self.first - 1], *moved]

    @property
    def others(self) -> list[ast.stmt]:
        """The other statements of the forward."""
        return [*self.before, *self.forward.body[self.last :]]

    def needing(self, numbers: Collection[int]) -> Span:
        """Return the span without statements that may run before it and that it does not need."""
        without, own = list[int](), self.forward.own
        for number in (n for n in range(self.first + 1, self.last) if n not in numbers):
            each = self.forward.body[number - 1]
            earlier = range(self.first, number)
            prior = [self.forward.body[n - 1] for n in earlier if n not in without]
            stored, loaded = names([each])
            before_stored, before_loaded = names(prior)
            kept = attributes(prior, own, ast.Store)
            is_free = not (loaded & before_stored or stored & (before_stored | before_loaded))
            moves = isinstance(each, ast.Assign | ast.AnnAssign) and (
                is_call_of(each.value, own) or escapes([each], own)
            )
            if moves and is_free and not kept & attributes([each], own):
                without.append(number)
        return replace(self, without=tuple(without))

    @property
    def is_all(self) -> bool:
        """Whether nothing is left of the forward."""
        return self.first == 1 and self.last == len(self.forward.body)

    def __str__(self) -> str:
        """Return "lines 8 to 10 of Net.forward"."""
        first, last = self.statements[0].lineno, self.statements[-1].end_lineno
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        return f"{lines}, in forward of {type(self.forward.module).__name__}"

    def contains(self, other: Span) -> bool:
        """Whether all statements of another are among these."""
        return self.first <= other.first and other.last <= self.last

    def covers(self, path: str) -> bool:
        """Whether a path stands for some of these statements."""
        other = span_of_forward(self.forward, path)
        return other is not None and self.contains(other)

    def with_statement(self, number: int) -> Span:
        """Return the span with another statement, and the statements between."""
        return replace(self, first=min(self.first, number), last=max(self.last, number))

    def whole(self) -> Span:
        """Return the span with all statements that share attributes which its own assign.

        A module has its attributes for itself. A statement that may return ends the forward.
        """
        nodes = [node for each in self.statements for node in ast.walk(each)]
        ends = any(isinstance(node, ast.Return) for node in nodes)
        span = self.with_statement(len(self.forward.body)) if ends else self
        for _ in self.forward.body:
            wider = span
            for number in span.sharing():
                wider = wider.with_statement(number)
            if wider == span:
                break
            span = wider
        return span

    def sharing(self) -> list[int]:
        """Return the numbers of the statements that share attributes which the span assigns."""
        own = self.forward.own
        kept = attributes(self.statements, own, ast.Store)
        read = attributes(self.statements, own)
        return [
            number
            for number, each in enumerate(self.forward.body, 1)
            if kept & attributes([each], own) or read & attributes([each], own, ast.Store)
        ]

    @property
    def class_name(self) -> str:
        """Name of the module's class: "NetForward2To4"."""
        return f"{type(self.forward.module).__name__}Forward{self.first}To{self.last}"

    @cached_property
    def given(self) -> list[str]:
        """The names that the statements read, or leave as they were."""
        stored, _ = names(self.before)
        known = self.forward.names | stored
        _, loaded = names(self.statements)
        surely = {
            target.id
            for each in self.statements
            if isinstance(each, ast.Assign)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        return sorted(known & (loaded | {*self.left} - surely))

    @cached_property
    def left(self) -> list[str]:
        """The names that are read after the statements."""
        stored, _ = names(self.statements)
        _, loaded = names(self.forward.body[self.last :])
        return sorted(stored & loaded)

    @cached_property
    def uses(self) -> tuple[str, ...]:
        """The modules and tensors of the module that the statements read, in methods, too."""
        found = self.forward.held(self.statements)
        return tuple(sorted(path for path in found if path not in self.keeps))

    @cached_property
    def keeps(self) -> tuple[str, ...]:
        """The attributes that the statements assign."""
        stored = attributes(self.statements, self.forward.own, ast.Store)
        written = {n for n in stored if n in self.forward.module._buffers}
        assigned = set[str]()
        for node in (node for each in self.statements for node in ast.walk(each)):
            targets = getattr(node, "targets", [])
            assigned |= {each.attr for each in targets if isinstance(each, ast.Attribute)}
        return tuple(sorted(stored - (written - assigned)))  # += writes into a buffer

    @property
    def returns(self) -> bool:
        """Whether they end the forward."""
        return isinstance(self.statements[-1], ast.Return)


def _text_of(function: types.FunctionType) -> ast.FunctionDef | None:
    code = function.__code__
    linecache.checkcache(code.co_filename)
    with suppress(SyntaxError):
        for node in ast.walk(_parsed("".join(linecache.getlines(code.co_filename)))):  # or a cell's
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
                if first == code.co_firstlineno:
                    return copy.deepcopy(node)  # it is rewritten
    return None


@lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def span_of(model: nn.Module, path: str) -> Span | None:
    """Return the statements that a path stands for; None of any other module."""
    match = _PATH.fullmatch(path)
    with suppress(AttributeError):  # no such module
        forward = Forward.of(model, match["owner"] or "") if match else None
        return span_of_forward(forward, path) if forward else None
    return None


def span_of_forward(forward: Forward, path: str) -> Span | None:
    """Return the statements of a forward that a path stands for; None of any other path."""
    match = _PATH.fullmatch(path)
    if match is None or (match["owner"] or "") != forward.path:
        return None
    without = tuple(int(each) for each in (match["without"] or "").split("_") if each)
    span = Span(forward, int(match["first"]), int(match["last"]), without)
    return span if 1 <= span.first <= span.last <= len(forward.body) else None


def is_below(path: str, other: str) -> bool:
    """Whether a path is of something inside of another's module."""
    return path.startswith(f"{other}.")


def is_lines(path: str) -> bool:
    """Whether a path stands for statements of a forward."""
    return _PATH.fullmatch(path) is not None
