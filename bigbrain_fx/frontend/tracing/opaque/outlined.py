"""Statements of a forward as a module of their own, which is opaque as any module may be.

    def forward(self, ids, length):              def forward(self, ids, length):
        x = self.embed(ids)                          x = self.embed(ids)
        p = pack(x, length)                ─▶        h = self.forward_2_3(x, length)
        _, h = self.rnn(p)                           return self.head(h)
        return self.head(h)

The statements take the names that they read, and return the names that are read after them. This
file knows Python's syntax and modules; it knows no traces.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.opaque.forward_text import (
    Forward,
    Span,
    is_below,
    is_lines,
    span_of,
)
from bigbrain_fx.frontend.tracing.opaque.syntax import attribute_chains, escapes, names
from bigbrain_fx.runtime import ForwardLines

_BARRED = ast.Global | ast.Nonlocal | ast.Yield | ast.YieldFrom | ast.Await | ast.Delete

_COMPILERS = ("torch.compiler.", "torch._dynamo.")
"""Decorators that mean nothing where nothing is compiled, and that no trace goes through."""
NOT_APART = "BX0141b"
"""Code of the refusal of statements that cannot be a module: more of them do not help."""


class NotApartError(Exception):
    """Report statements that cannot be a module of their own; `shared` with others is a module."""

    def __init__(self, what: str, shared: str = "") -> None:
        super().__init__(what)
        self.shared = shared


@contextmanager
def outlined(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Let statements of forwards be modules of the model meanwhile.

    Args:
        model: the user's; it is as it was afterwards.
        paths: of such modules, "forward_2_4", among others.

    Raises:
        CaptureError: statements cannot be apart.
    """
    by_owner: dict[str, list[Span]] = {}
    for span in filter(None, (span_of(model, path) for path in dict.fromkeys(paths))):
        by_owner.setdefault(span.forward.path, []).append(span)
    whole = frozenset(path for path in paths if not is_lines(path))
    with ExitStack() as stack:
        for spans in by_owner.values():
            ordered = sorted(spans, key=lambda span: span.first)
            stack.enter_context(_changed(model, ordered, whole))
        yield


@contextmanager
def _changed(model: nn.Module, spans: Sequence[Span], whole: Collection[str]) -> Iterator[None]:
    forward, module = spans[0].forward, spans[0].forward.module
    kind = type(module)
    try:
        run = vars(_compiled(_rewritten(forward, spans), forward, kind.__name__))["forward"]
        parts = {span.path.rpartition(".")[2]: _made(model, span, whole) for span in spans}
    except NotApartError as error:
        refusal = CaptureError(
            f"lines of {kind.__name__}.forward cannot be opaque by themselves: {error}",
            code="BX0141b",
            help="put them into a module of their own and make it opaque: --opaque with its class",
        )
        refusal.inside = error.shared or None
        raise refusal from error
    own = {"forward": run, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), own)
    for name, part in parts.items():
        module.add_module(name, part.train(module.training))
    try:
        yield
    finally:
        module.__class__ = kind
        for name in parts:
            del module._modules[name]


def _rewritten(forward: Forward, spans: Sequence[Span]) -> ast.ClassDef:
    """Return a class that has the forward with calls in the place of statements."""
    has_text = ast.get_docstring(forward.node) is not None
    body, at = forward.node.body[:1] if has_text else [], 0  # decorators may read its text
    for span in spans:
        body += [*forward.body[at : span.first - 1], *span.before[span.first - 1 :]]
        body += [ast.copy_location(_call(span), span.statements[0])]
        at = span.last
    body += forward.body[at:]
    node = forward.node
    kept = [each for each in node.decorator_list if not ast.unparse(each).startswith(_COMPILERS)]
    made = ast.FunctionDef("forward", node.args, body, kept, None)
    name = type(forward.module).__name__  # decorators may read __qualname__
    return ast.copy_location(ast.ClassDef(name, [], [], [ast.copy_location(made, node)], []), node)


def _made(model: nn.Module, span: Span, whole: Collection[str]) -> ForwardLines:
    _require_apart(span, whole)
    node = ast.copy_location(_class_node(span), span.statements[0])
    kind = cast("type[ForwardLines]", _compiled(node, span.forward, span.class_name))
    run = cast("ast.FunctionDef", node.body[-1])
    run.body[:0] = _imports(span)  # for another file, which has the text
    kind.text = ast.unparse(node)  # type: ignore[attr-defined]
    return kind(span.forward.module, "", model)


def _compiled(node: ast.stmt, forward: Forward, name: str) -> Any:  # noqa: ANN401
    """Compile text of the user's file, in the names of that file."""
    tree = ast.fix_missing_locations(ast.Module([node], []))
    space: dict[str, Any] = {"ForwardLines": ForwardLines}
    known = forward.function.__globals__
    exec(compile(tree, forward.file, "exec"), known, space)  # the user's own file
    return space[name]


def _class_node(span: Span) -> ast.ClassDef:
    """Return the syntax tree of the module's class."""
    forward, own = span.forward, span.forward.own
    arg = [ast.arg(name) for name in (own, *span.given)]
    body = [
        *span.statements,
        *([] if span.returns else [ast.Return(_named(span, ast.Load()))]),
    ]
    run = ast.FunctionDef("forward", ast.arguments([], arg, None, [], [], None, []), body, [])
    uses, keeps = _texts(span.uses), _texts(span.keeps)
    title = f"L{str(span)[1:]}, in {Path(forward.file).name}."
    text: list[ast.stmt] = [
        ast.Expr(ast.Constant(title)),
        ast.Assign([ast.Name("owner", ast.Store())], ast.Constant(forward.path)),
        ast.Assign([ast.Name("uses", ast.Store())], uses),
        ast.Assign([ast.Name("keeps", ast.Store())], keeps),
        run,
    ]
    return ast.ClassDef(span.class_name, [ast.Name("ForwardLines", ast.Load())], [], text, [])


def _imports(span: Span) -> list[ast.stmt]:
    """Return an import of the names of the user's file that the statements read."""
    stored, loaded = names(span.statements)
    known = span.forward.function.__globals__
    found = sorted(name for name in loaded - stored - {*span.given} if name in known)
    module = span.forward.function.__module__
    return [ast.ImportFrom(module, [ast.alias(name) for name in found], 0)] if found else []


def _require_apart(span: Span, whole: Collection[str]) -> None:
    """Refuse statements that cannot be apart from the others.

    `whole` are the paths of opaque modules, which both may call.
    """
    nodes = [node for each in span.statements for node in ast.walk(each)]
    ends = span.last == len(span.forward.body)
    if any(isinstance(node, _BARRED) for node in nodes):
        raise NotApartError("their text says so")
    if any(isinstance(node, ast.Return) for node in nodes) and not (ends and span.returns):
        raise NotApartError("they may return")
    if any(isinstance(n, ast.Name) and n.id in ("super", "locals") for n in nodes):
        raise NotApartError("they use the frame")
    if escapes(span.statements, span.forward.own):
        raise NotApartError("they hand on the module itself")
    module = span.forward.module
    if any(
        isinstance(getattr(module, name, None), nn.Module | nn.Parameter) or name in module._buffers
        for name in span.keeps
    ):
        raise NotApartError("they put another module or buffer in the place of one")
    others = span.forward.held(span.others)
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for path in span.uses:
        part = operator.attrgetter(path)(module)
        if isinstance(part, Tensor) and id(part) not in known:
            raise NotApartError(f"they read {path}, which is neither a parameter nor a buffer")
        is_own = isinstance(part, nn.Module) and not _is_of_torch(part)
        place = f"{span.forward.path}.{path}".removeprefix(".")
        is_shared = any(path == o or is_below(path, o) or is_below(o, path) for o in others)
        if is_shared and isinstance(part, nn.Module) and not _is_only_called(path, part, span):
            raise NotApartError(
                "they share modules with the other lines, and do not only call them"
            )
        if is_own and is_shared and place not in whole:
            raise NotApartError("they share modules with the other lines", place)


def _is_only_called(path: str, part: nn.Module, span: Span) -> bool:
    """Whether a forward only calls a module and reads its tensors, here and in other lines.

    `self.head.requires_grad_(False)` in some lines would not reach the others on another device.
    """
    parts = tuple(path.split("."))
    chains = attribute_chains([*span.statements, *span.others], span.forward.own)
    more = {chain[len(parts)] for chain in chains if chain[: len(parts)] == parts != chain}
    return all(isinstance(getattr(part, name, None), Tensor | nn.Module) for name in more)


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a stage has a module as it is: a layer of torch's, without modules inside."""
    return type(module).__module__.startswith("torch.nn.") and not [*module.children()]


def _named(span: Span, context: ast.expr_context) -> ast.expr:
    found: list[ast.expr] = [ast.Name(name, context) for name in span.left]
    return found[0] if len(found) == 1 else ast.Tuple(found, context)


def _call(span: Span) -> ast.stmt:
    """Return the statement that takes the place of these."""
    name = span.path.rpartition(".")[2]
    function = ast.Attribute(ast.Name(span.forward.own, ast.Load()), name, ast.Load())
    call = ast.Call(function, [ast.Name(each, ast.Load()) for each in span.given], [])
    if span.returns:
        return ast.Return(call)
    if not span.left:
        raise NotApartError("nothing of theirs is read after them")
    return ast.Assign([_named(span, ast.Store())], call)


def _texts(found: Sequence[str]) -> ast.expr:
    return ast.Tuple([ast.Constant(each) for each in found], ast.Load())
