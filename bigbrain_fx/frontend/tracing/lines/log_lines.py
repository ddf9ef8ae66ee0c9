"""Lines of the user's own that only say a number: what they print changes nothing that is computed.

    print(f"max {h.max():.3f}")         log.info("norm %g", h.norm().item())

A trace has no numbers, and such a line would end it. It is told ones, and says so; a bundle has no
such line. What is asked for anything else is asked in earnest. This file reads lines.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bigbrain_fx.frontend.tracing.opaque.tensor_access import VALUES
from bigbrain_fx.frontend.translation.sources import is_own

_SAYING = frozenset(("debug", "info", "warning", "error", "critical", "exception", "warn", "write"))
_OF_TEXT = frozenset(("format", "join", "ljust", "rjust"))
_BUILTIN = frozenset(("float", "int", "round", "str", "repr", "format", "len", "abs", "tuple"))


_ARRAYS = ("/torch/_tensor.py", __file__)


@dataclass
class LogLines(TorchFunctionMode):
    """Answer lines that only print or log a tensor's number, while a model is traced.

    Attributes:
        said: those lines.
    """

    said: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        between = _ARRAYS if func is Tensor.__array__ else (__file__,)
        if func in VALUES and self._says(_outside(sys._getframe(1), between)):
            first = args[0]
            if isinstance(first, Tensor):
                return number_for(func, first, args[1:])
        return func(*args, **(kwargs or {}))

    def _says(self, frame: FrameType | None) -> bool:
        """Note the line of the user's own that asks, where it only says."""
        if frame is None or not is_own(frame.f_code.co_filename):
            return False
        begin = only_says(frame.f_code.co_filename, frame.f_lineno)
        if begin is not None:
            self.said.add((frame.f_code.co_filename, begin))
        return begin is not None

    @contextlib.contextmanager
    def formatting(self) -> Iterator[None]:
        """Answer a number in text; torch tells no mode of a format."""
        own = Tensor.__format__

        def formatted(tensor: Tensor, spec: str) -> str:
            if self._says(_outside(sys._getframe(1), _ARRAYS)):
                return str(number_for(own, tensor, (spec,)))
            return str(own(tensor, spec))  # type: ignore[no-untyped-call]  # torch has it so

        Tensor.__format__ = formatted  # type: ignore[method-assign]  # put back
        try:
            yield
        finally:
            Tensor.__format__ = own  # type: ignore[method-assign]


@contextlib.contextmanager
def both(one: contextlib.AbstractContextManager[object], log: LogLines) -> Iterator[None]:
    """Listen to questions after `one` does: who listens last hears first."""
    with one, log:
        yield


def _outside(frame: FrameType | None, files: tuple[str, ...]) -> FrameType | None:
    while frame is not None and any(part in frame.f_code.co_filename for part in files):
        frame = frame.f_back
    return frame


def only_says(file: str, line: int) -> int | None:
    """Return where a statement begins that prints or logs and does nothing else; of another, None.

    `line` is any line of it.
    """
    return _lines(file).get(line)


@functools.cache
def _lines(file: str) -> Mapping[int, int]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    said = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and _says(node.value)]
    inside = {id(part) for node in said for part in ast.walk(node)}
    parts = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    others = {number for node in parts if id(node) not in inside for number in _of(node)}
    return {n: node.lineno for node in said for n in _of(node) if n not in others}


def _of(node: ast.expr | ast.Expr) -> range:
    return range(node.lineno, 1 + (node.end_lineno or node.lineno))


def _says(call: ast.expr) -> bool:
    if not isinstance(call, ast.Call):
        return False
    match call.func:
        case ast.Name("print"):
            pass
        case ast.Attribute(owner, name) if name in _SAYING and ast.unparse(owner) != "self":
            pass
        case _:
            return False
    given = [*call.args, *(word.value for word in call.keywords)]
    return all(_is_harmless(node) for arg in given for node in ast.walk(arg))


def _is_harmless(node: ast.AST) -> bool:
    """Whether a part of what is printed binds no name and calls nothing but torch's own."""
    if not isinstance(node, ast.Call):
        return not isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)
    match node.func:
        case ast.Name(name):
            return name in _BUILTIN and hasattr(builtins, name)
        case ast.Attribute(_, name):
            own = name in _OF_TEXT or hasattr(Tensor, name) or hasattr(torch, name)
            return own and not name.endswith("_")
    return False


def number_for(func: Callable[..., object], tensor: Tensor, rest: tuple[object, ...]) -> object:
    """Return what a line that only says is told: ones, in the form in which it asks."""
    kind = tensor.dtype
    one = 1.0 if kind.is_floating_point else 1j if kind.is_complex else 1
    if func.__name__ == "__format__":
        return format(one, *map(str, rest))
    if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
        ones = numpy.full(tuple(_sizes(tensor)), one)  # torch would make one of the trace's
        return ones.tolist() if func is Tensor.tolist else ones
    if func in (Tensor.__bool__, Tensor.__int__, Tensor.__index__):
        return func is Tensor.__bool__ or 1
    return one


def _sizes(tensor: Tensor) -> Iterator[int]:
    """Yield its sizes; of a free one that of the example, which asking would make fixed."""
    for size in tensor.shape:
        node = getattr(size, "node", None)
        yield size if node is None else node.hint
