"""Fill in a call template: an op's arguments go where the template names them.

A row of the table is a signature and one or more templates, all of them Python:

    "add.Tensor(self, other, alpha=1)": ("self + other", "torch.add(self, other, alpha=alpha)")

The signature names the op's arguments in the order of its aten schema; `argument=value` gives the
value that need not be written. A template may leave such an argument out; the first template that
has a place for every argument that must be written is taken. This module knows no torch function:
the rows do.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from bigbrain_fx import core
from bigbrain_fx.emit.ops.call_values import Writer

Bound = Mapping[str, core.Arg]
"""An op's arguments by the names of its signature."""

# Arguments that change no number: where memory is pinned, which backend computes.
IGNORED = frozenset({"pin_memory", "non_blocking", "cudnn_enable", "cudnn_enabled"})

# (3, 3) may be written 3 where torch repeats a single number over the dimensions.
REPEATED = frozenset(
    {"kernel_size", "stride", "padding", "dilation", "output_padding"}
    | {"output_size", "scale_factors"}
)

# (1,) may be written 1 where torch takes a number for a list of one.
SINGLE = frozenset({"dim", "shifts", "dims"})

# Written as lists, as people do; everything else is a tuple.
LISTS = frozenset({"tensors", "hx", "params", "split_sizes"})

REDUCTIONS = ("none", "mean", "sum")
"""What the losses of aten number 0, 1 and 2."""

# F takes these in another form than aten (a word for 2, None for -1): their values must be known.
TRANSLATED = frozenset({"reduction", "padding_idx"})


@dataclass(frozen=True, slots=True)
class CallArgs:
    """The arguments of one op: their names, in order, and the values that need not be written."""

    target: str
    names: tuple[str, ...]
    defaults: Bound

    def bind(self, op: core.Op) -> Bound | None:
        """Return the op's arguments by name; None if they do not fit the signature."""
        if len(op.args) > len(self.names):
            return None
        given = dict(zip(self.names, op.args, strict=False))
        named = {(f"{name}_" if keyword.iskeyword(name) else name): arg for name, arg in op.kwargs}
        if any(name in given or name not in self.names for name in named):
            return None
        bound = {**self.defaults, **given, **named}
        return (
            {name: short(name, bound[name]) for name in bound}
            if len(bound) == len(self.names)
            else None
        )

    def needless(self, name: str, arg: core.Arg) -> bool:
        """Whether an argument need not be written."""
        # repr tells 0 from False and 0.0 from -0.0, which == does not
        return name in self.defaults and repr(arg) == repr(self.defaults[name])


@dataclass(frozen=True)
class CallTemplate:
    """A Python expression with an op's arguments as its free names."""

    expression: ast.expr

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name in the expression."""
        found = (node.id for node in ast.walk(self.expression) if isinstance(node, ast.Name))
        return frozenset(found)


def parse_signature(text: str) -> CallArgs:
    """Parse "add.Tensor(self, other, alpha=1)"; a default that is a name is a constant of torch."""
    target, _, arguments = text.partition("(")
    call = ast.parse(f"f({arguments}", mode="eval").body
    assert isinstance(call, ast.Call), text
    defaults = {str(entry.arg): _default(entry.value) for entry in call.keywords}
    return CallArgs(target, (*(ast.unparse(name) for name in call.args), *defaults), defaults)


def parse_template(text: str) -> CallTemplate:
    """Parse the text of one template."""
    return CallTemplate(ast.parse(text, mode="eval").body)


def short(name: str, arg: core.Arg) -> core.Arg:
    """Return an argument in its shortest form: 3 for a kernel of (3, 3), "sum" for reduction 2."""
    if name == "reduction" and type(arg) is int and 0 <= arg < len(REDUCTIONS):
        return REDUCTIONS[arg]
    if name == "layout" and arg == core.Const("torch.strided"):
        return None
    if not isinstance(arg, tuple) or not arg:
        return arg
    if (name in REPEATED and _all_alike(arg)) or (name in SINGLE and len(arg) == 1):
        return arg[0]
    return arg


def fill(
    template: CallTemplate, signature: CallArgs, bound: Bound, writer: Writer
) -> ast.expr | None:
    """Return the template with the arguments in place; None if an argument has no place in it."""
    filler = _Filler(signature, bound, writer)
    missing = (name for name in bound if name not in template.names and name not in IGNORED)
    if not all(filler.needless(name) for name in missing):
        return None
    if any(isinstance(bound.get(name), core.Ref) for name in TRANSLATED) or _has_gaps(bound):
        return None
    return filler.build(template.expression)


@dataclass(frozen=True, slots=True)
class _Filler:
    signature: CallArgs
    bound: Bound
    writer: Writer

    def needless(self, name: str) -> bool:
        arg = self.bound[name]
        return self.writer.omits(arg) or self.signature.needless(name, arg)

    def build(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.Name(id=name) if name in self.bound:
                return self._argument(name)
            case ast.Call():
                return self._call(node)
            case ast.BinOp(left=left, op=op, right=right):
                return ast.BinOp(self.build(left), op, self.build(right))
            case ast.UnaryOp(op=sign, operand=operand):
                return ast.UnaryOp(sign, self.build(operand))
            case ast.Compare(left=left, ops=ops, comparators=right_sides):
                return ast.Compare(
                    self.build(left), ops, [self.build(side) for side in right_sides]
                )
            case ast.Attribute(value=value, attr=attribute):
                return ast.Attribute(self.build(value), attribute, ast.Load())
            case ast.Subscript(value=value, slice=index):
                return ast.Subscript(self.build(value), self.build(index), ast.Load())
        return node  # a literal, or a name that is no argument: torch, F, float

    def _argument(self, name: str) -> ast.expr:
        arg = self.bound[name]
        if name in LISTS and isinstance(arg, tuple):
            return self.writer.write_list(arg)
        return self.writer.write(arg)

    def _call(self, call: ast.Call) -> ast.expr:
        kept = list(call.args)
        while kept and self._needless_node(kept[-1]):
            kept.pop()
        positional = [expression for node in kept for expression in self._spread(node)]
        named = [
            ast.keyword(entry.arg, self.build(entry.value))
            for entry in call.keywords
            if not self._needless_node(entry.value)
        ]
        return ast.Call(self.build(call.func), positional, named)

    def _needless_node(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.bound and self.needless(node.id)

    def _spread(self, node: ast.expr) -> list[ast.expr]:
        if not isinstance(node, ast.Starred):
            return [self.build(node)]
        assert isinstance(node.value, ast.Name), ast.unparse(node)
        arg = self.bound[node.value.id]
        if not isinstance(arg, tuple) or not arg:  # `x.view()` is an error, `x.view(())` is not
            return [self.writer.write(arg)]
        return [self.writer.write(item) for item in arg]


def _default(node: ast.expr) -> core.Arg:
    if isinstance(node, ast.Name):
        return core.Const("inf" if node.id == "inf" else f"torch.{node.id}")
    value: core.Arg = ast.literal_eval(node)
    return value


def _has_gaps(bound: Bound) -> bool:
    """Whether a list of tensors lacks some: index_put takes None in it, but Python's does not."""
    indices = bound.get("indices")
    return isinstance(indices, tuple) and None in indices


def _all_alike(args: tuple[core.Arg, ...]) -> bool:
    numbers = all(type(arg) in (int, float) for arg in args)
    return numbers and all(repr(arg) == repr(args[0]) for arg in args)
