"""Write one op as the Python that a person would write for it: `F.linear(x, self.weight)`, `a + b`.

The forms stand in the tables beside this file. An aten op without a row is called by its own
name, `torch.ops.aten.<op>.<overload>(...)`, so that every model can be written. Call targets come
from the tables only, never from a plan. This module imports no torch, and knows nothing of files or
classes.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bigbrain_fx import core
from bigbrain_fx.emit.ops import call_special, call_table_make, call_table_nn, call_table_tensor
from bigbrain_fx.emit.ops.call_special import Special
from bigbrain_fx.emit.ops.call_template import (
    Bound,
    CallArgs,
    CallTemplate,
    fill,
    parse_signature,
    parse_template,
)
from bigbrain_fx.emit.ops.call_values import Writer, dotted
from bigbrain_fx.errors import InputError

ATEN_CALL = re.compile(r"torch\.ops\.aten\.[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*")
"""The fall-back: an aten op by its own name."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one op is written: the templates in order of preference, or a function."""

    signature: CallArgs
    templates: tuple[CallTemplate, ...] = ()
    special: Special | None = None

    def write(self, bound: Bound, writer: Writer) -> ast.expr | None:
        """Return the op's expression; None if no form is exact for these arguments."""
        if self.special is not None:
            return self.special(bound, writer)
        filled = (fill(template, self.signature, bound, writer) for template in self.templates)
        return next((expression for expression in filled if expression is not None), None)


def call_expression(
    op: core.Op, value: Callable[[core.Ref | core.ParamRef], ast.expr], device: ast.expr | None
) -> ast.expr:
    """Write one op as a Python expression over `torch`, `F` and `math`.

    Args:
        op: an aten op, or arithmetic on numbers (`operator.mul`, `math.floor`, `torch.sym_max`);
            no region and no opaque op.
        value: gives the expression of a reference: a local name, `self.weight`, ...
        device: the expression of the stage's device; None leaves `device=` out, and tensors are
            made on the CPU.

    Returns:
        An expression that computes what the op computes, bit for bit, with the same strides and
        the same gradients.

    Raises:
        InputError: the target is neither in the tables nor an aten op, or an argument is a
            constant that torch does not have.
    """
    writer = Writer(value, device)
    form = FORMS.get(op.target)
    bound = form.signature.bind(op) if form else None
    if form and bound and _is_natural(op, bound):
        written = form.write(bound, writer)
        if written is not None:
            return written
    return _by_its_name(op, writer)


def _is_natural(op: core.Op, bound: Bound) -> bool:
    """Whether a tensor stands where Python wants one.

    `2 / x` is `x.reciprocal() * 2` in torch, one rounding more than aten.div(2, x).
    """
    first = bound.get("self")
    scalar = "Scalar" in op.target
    return "self" not in bound or scalar or isinstance(first, core.Ref | core.ParamRef)


def _by_its_name(op: core.Op, writer: Writer) -> ast.expr:
    name = f"torch.ops.{op.target}"
    words = [*op.target.split("."), *(key for key, _ in op.kwargs)]
    if not ATEN_CALL.fullmatch(name) or not all(map(_is_identifier, words)):
        raise _unknown(op)
    named = [ast.keyword(key, writer.write(arg)) for key, arg in op.kwargs if not writer.omits(arg)]
    return ast.Call(dotted(name), [writer.write(arg) for arg in op.args], named)


def _is_identifier(word: str) -> bool:
    return word.isidentifier() and not keyword.iskeyword(word)


def _unknown(op: core.Op) -> InputError:
    return InputError(
        f"op {op.name!r} has the target {op.target!r}; expected an aten op or arithmetic on sizes",
        code="BX3616",
        at=op.source or None,
        notes=(f"the line is: {op.code}",) if op.code else (),
        help="write this line with functions of torch or torch.nn.functional",
    )


def _forms() -> Iterator[Form]:
    for table in (call_table_tensor.TABLE, call_table_nn.TABLE, call_table_make.TABLE):
        for text, forms in table.items():
            yield _form(f"aten.{text}", forms)
    for text, special in call_special.SPECIAL.items():
        yield Form(parse_signature(f"aten.{text}"), special=special)
    for text, template in call_table_tensor.NUMBERS.items():
        yield _form(text, template)


def _form(signature: str, forms: str | tuple[str, ...]) -> Form:
    texts = (forms,) if isinstance(forms, str) else forms
    return Form(parse_signature(signature), tuple(parse_template(text) for text in texts))


FORMS: Mapping[str, Form] = {form.signature.target: form for form in _forms()}
"""Every op that has a form of its own, by target."""
