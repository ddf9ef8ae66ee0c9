"""What emitted code may call: read off the forms, so that a new one is on the list."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bigbrain_fx.emit.ops.call_special import DTYPE_METHODS
from bigbrain_fx.emit.ops.call_template import CallArgs
from bigbrain_fx.emit.ops.calls import ATEN_CALL, FORMS, Form

ROOTS = frozenset({"torch", "F", "math"})
"""Modules that the forms name; `F` is torch.nn.functional."""


def is_allowed_call(function: ast.expr) -> bool:
    """Whether `call_expression` may write a call of this function or method.

    Args:
        function: the `func` of an `ast.Call` in emitted code.
    """
    name = dotted_name(function)
    if name is not None and ("." not in name or name.partition(".")[0] in ROOTS):
        return name in ALLOWED_CALLS or ATEN_CALL.fullmatch(name) is not None
    return isinstance(function, ast.Attribute) and f".{function.attr}" in ALLOWED_CALLS


def _called(form: Form) -> Iterator[str]:
    for template in form.templates:
        for node in ast.walk(template.expression):
            if isinstance(node, ast.Call):
                yield _call_name(node.func, form.signature)


def _call_name(function: ast.expr, signature: CallArgs) -> str:
    name = dotted_name(function)
    if name is not None and name.partition(".")[0] not in signature.names:
        return name
    assert isinstance(function, ast.Attribute), ast.unparse(function)
    return f".{function.attr}"


def dotted_name(expression: ast.expr) -> str | None:
    """Return the dotted name that an expression is, such as "torch.cat"; None if it is not one."""
    match expression:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            prefix = dotted_name(value)
            return None if prefix is None else f"{prefix}.{attribute}"
    return None


ALLOWED_CALLS: frozenset[str] = (
    frozenset(name for form in FORMS.values() for name in _called(form))
    | {"torch.einsum", ".to", *(f".{name}" for name in DTYPE_METHODS.values())}
    | {"float", "torch.device"}
)
"""What emitted calls may call: "F.linear", "torch.cat", "float"; methods with a dot: ".view".

The fall-back, `torch.ops.aten.<op>.<overload>`, is not listed: `ATEN_CALL` is its pattern.
"""

RESERVED_NAMES = ROOTS | {name for name in ALLOWED_CALLS if "." not in name}
"""Names that the forms use; no local of an emitted file may have one of them."""
