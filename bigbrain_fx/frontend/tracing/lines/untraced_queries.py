"""Queries of tensors' numbers that plain runs make and a trace does not: a trace has one outcome.

    try: big = float(loss) > 20        raises in a trace, and the user's own `except` catches that
    except Exception: big = False
    if not is_compiling() and h.isnan().any():    is_compiling() is true in a trace

Only lines of the user's own that query torch directly count: a library that queries less in a trace
takes the general path. This file compares lines; it runs nothing.
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
from types import CodeType, FrameType

import numpy
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.opaque.tensor_access import VALUES
from bigbrain_fx.frontend.translation.sources import is_own

_ARRAYS = ("/torch/_tensor.py", __file__)
_SYMBOLS = ("/torch/fx/", "/torch/__init__.py", "/torch/_export/", *_ARRAYS)  # before the error
_MAKES_ERROR = "_make_data_dependent_error"
Line = tuple[str, int]


@dataclass
class Asked(TorchFunctionMode):
    """The lines that read a tensor's numbers, and the lines that fail to.

    Attributes:
        whole: opaque code, which runs as it is in a bundle: its queries are not in the trace.
        answered: lines, each with the innermost module that has it; None in the loss.
        said: lines that only print or log: a trace gives them ones.
    """

    whole: frozenset[CodeType] = frozenset()
    answered: dict[Line, object] = field(default_factory=dict)
    failed: set[Line] = field(default_factory=set)
    said: set[Line] = field(default_factory=set)
    _traces: bool = False

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
        frame = _outside(sys._getframe(1), between)
        line = self._line(frame) if func in VALUES else None
        if line is None:
            return func(*args, **(kwargs or {}))
        if only_says(*line) is not None:
            return self._answer(line, func, args, kwargs or {})
        self.failed.add(line)
        found = func(*args, **(kwargs or {}))
        self.failed.discard(line)
        self.answered[line] = next(filter(None, map(_module, _outwards(frame))), None)
        return found

    def _answer(
        self,
        line: Line,
        func: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """Answer a line that only prints: a trace has no number for it, and it needs none."""
        first = args[0]
        if not self._traces or not isinstance(first, Tensor):
            return func(*args, **kwargs)
        self.said.add((line[0], only_says(*line) or line[1]))
        return number_for(func, first, args[1:])

    def _line(self, frame: FrameType | None) -> Line | None:
        """Return the line of the user's own that queries; None for a library's or an opaque one."""
        if frame is None or not is_own(frame.f_code.co_filename):
            return None
        if any(outer.f_code in self.whole for outer in _outwards(frame)):
            return None
        return frame.f_code.co_filename, frame.f_lineno

    @contextlib.contextmanager
    def formatting(self) -> Iterator[None]:
        """Answer lines that only format a number as text; no torch mode sees a format."""
        own = Tensor.__format__

        def formatted(tensor: Tensor, spec: str) -> str:
            line = self._line(_outside(sys._getframe(1), _ARRAYS))
            if line is None or only_says(*line) is None:
                return str(own(tensor, spec))  # type: ignore[no-untyped-call]  # torch has it so
            return str(self._answer(line, own, (tensor, spec), {}))

        Tensor.__format__ = formatted  # type: ignore[method-assign]  # put back
        try:
            yield
        finally:
            Tensor.__format__ = own  # type: ignore[method-assign]

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Record, too, the numbers of a trace that lines request in vain."""
        self._traces = True
        own = getattr(ShapeEnv, _MAKES_ERROR, None)
        if own is None:  # of another torch: what is asked for is heard all the same
            yield
            return

        def made(env: ShapeEnv, *args: object, **kwargs: object) -> Exception:
            line = self._line(_outside(sys._getframe(1), _SYMBOLS))
            self.failed |= {line} if line else set()
            error: Exception = own(env, *args, **kwargs)
            return error

        setattr(ShapeEnv, _MAKES_ERROR, made)
        try:
            yield
        finally:
            setattr(ShapeEnv, _MAKES_ERROR, own)


def _outside(frame: FrameType | None, files: tuple[str, ...]) -> FrameType | None:
    outer = (f for f in _outwards(frame) if not any(part in f.f_code.co_filename for part in files))
    return next(outer, None)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> object:
    """Return the module that a frame of the user's own is a method of."""
    own = is_own(frame.f_code.co_filename)
    found = frame.f_locals.get("self") if own else None
    return found if isinstance(found, nn.Module) else None


@contextlib.contextmanager
def both(one: contextlib.AbstractContextManager[object], asked: Asked) -> Iterator[None]:
    """Enter both modes: the one entered last sees a call first."""
    with one, asked:
        yield


def code_of(function: object) -> CodeType | None:
    """Return the code of a function, a method, or a module's or autograd.Function's forward."""
    inner = getattr(function, "forward", function)
    inner = getattr(inner, "__func__", inner)
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    return getattr(inner, "__code__", None)


def require_seen(plain: Mapping[Line, object], trace: Asked) -> None:
    """Refuse a model with lines that read data in plain runs, and not in a trace.

    Raises:
        CaptureError: names the line.
    """
    unseen = sorted(plain.keys() - (trace.answered.keys() - trace.failed))
    if not unseen:
        return
    file, number = unseen[0]
    code = linecache.getline(file, number).strip()
    error = CaptureError(
        f"training asks a tensor for its number here, and a trace gets past: {code}",
        code="BX0130a",
        at=f"{file.rpartition('/')[2]}:{number}",
        notes=("a try whose except hears the trace's own error, or a question about tracing",),
        help="let a tensor decide: h = torch.where(h.abs().max() > 6, h / 2, h); or ask outside of "
        "the try, and ask nothing of tracing or of types before it; or put the lines into a module "
        "of its own and make that opaque: --opaque with its class",
    )
    error.inside = [plain[unseen[0]]]  # `enclosing` reads it
    raise error


# --------------------------------------------------------------------------- lines that only print

_SAYING = frozenset(("debug", "info", "warning", "error", "critical", "exception", "warn", "write"))
_OF_TEXT = frozenset(("format", "join", "ljust", "rjust"))
_BUILTIN = frozenset(("float", "int", "round", "str", "repr", "format", "len", "abs", "tuple"))


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
    """Whether a part of a printed expression binds no name and calls nothing but torch's own."""
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
    """Return the substitute for a line that only prints: ones, of the call's type."""
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
