"""Write the few ops whose Python form depends on the values of their arguments.

Subscripts (`x[:, 1:3]`), `to` and `einsum`. Each function takes the op's arguments by name and
returns None when Python has no exact form; this module knows nothing of the other ops.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from bigbrain_fx import core
from bigbrain_fx.emit.ops.call_template import Bound
from bigbrain_fx.emit.ops.call_values import Writer

END = 9223372036854775807
"""What a slice without an end has as its end."""

DTYPE_METHODS = {"torch.float32": "float", "torch.int64": "long", "torch.bool": "bool"}

Special = Callable[[Bound, Writer], ast.expr | None]


def slice_form(bound: Bound, writer: Writer) -> ast.expr | None:
    """Write `x[:, start:end:step]`."""
    dim, start, end, step = (bound[name] for name in ("dim", "start", "end", "step"))
    if not isinstance(dim, int):
        return None
    index = ast.Slice(
        None if start in (None, 0) else writer.write(start),
        None if end in (None, END) else writer.write(end),
        None if step == 1 else writer.write(step),
    )
    return _subscript(writer.write(bound["self"]), _at(dim, index))


def select_form(bound: Bound, writer: Writer) -> ast.expr | None:
    """Write `x[:, index]`."""
    dim = bound["dim"]
    if not isinstance(dim, int):
        return None
    index = writer.write(bound["index"])
    return _subscript(writer.write(bound["self"]), _at(dim, index))


def index_form(bound: Bound, writer: Writer) -> ast.expr | None:
    """Write `x[mask]` or `x[:, rows, columns]`."""
    indices = bound["indices"]
    if not isinstance(indices, tuple) or all(index is None for index in indices):
        return None
    while indices[-1] is None:
        indices = indices[:-1]
    parts = [ast.Slice() if index is None else writer.write(index) for index in indices]
    return _subscript(writer.write(bound["self"]), parts)


def to_form(bound: Bound, writer: Writer) -> ast.expr | None:
    """Write `x.float()`, `x.to(torch.bfloat16)`, `x.to(device)`; just `x` when nothing is asked."""
    if bound.get("layout") is not None:
        return None
    wanted = [bound.get("device"), bound.get("dtype")]
    positional = [writer.write(arg) for arg in wanted if arg is not None and not writer.omits(arg)]
    named = _to_keywords(bound, writer)
    tensor = writer.write(bound["self"])
    if not positional and not named:
        return tensor
    dtype = bound.get("dtype")
    method = DTYPE_METHODS.get(dtype.const) if isinstance(dtype, core.Const) else None
    if method and len(positional) == 1 and not named:
        return ast.Call(ast.Attribute(tensor, method, ast.Load()), [], [])
    return ast.Call(ast.Attribute(tensor, "to", ast.Load()), positional, named)


def _to_keywords(bound: Bound, writer: Writer) -> list[ast.keyword]:
    named = []
    if bound.get("copy", True):  # aten._to_copy has no such argument: it always copies
        named.append(ast.keyword("copy", ast.Constant(True)))
    if bound["memory_format"] is not None:
        named.append(ast.keyword("memory_format", writer.write(bound["memory_format"])))
    return named


def einsum_form(bound: Bound, writer: Writer) -> ast.expr | None:
    """Write `torch.einsum("ij,jk->ik", a, b)`.

    Three or more tensors are not written this way. Where opt_einsum is installed, torch.einsum then
    looks for a contraction order of its own, and groups the sums differently.
    """
    tensors = bound["tensors"]
    if bound["path"] is not None or not isinstance(tensors, tuple) or len(tensors) > 2:
        return None
    torch_einsum = ast.Attribute(ast.Name("torch", ast.Load()), "einsum", ast.Load())
    operands = [writer.write(tensor) for tensor in tensors]
    return ast.Call(torch_einsum, [writer.write(bound["equation"]), *operands], [])


def _at(dim: int, index: ast.expr) -> list[ast.expr]:
    """Return the parts of a subscript that has `index` at dimension `dim`: `:, :, index`."""
    if dim >= 0:
        return [*(ast.Slice() for _ in range(dim)), index]
    return [ast.Constant(...), index, *(ast.Slice() for _ in range(-dim - 1))]


def _subscript(tensor: ast.expr, parts: list[ast.expr]) -> ast.expr:
    index = parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Load())
    return ast.Subscript(tensor, index, ast.Load())


_TO = "non_blocking=False, copy=False, memory_format=None"
_LAYOUT = "dtype=None, layout=None, device=None, pin_memory=None"

SPECIAL: Mapping[str, Special] = {
    "slice.Tensor(self, dim=0, start=None, end=None, step=1)": slice_form,
    "select.int(self, dim, index)": select_form,
    "index.Tensor(self, indices)": index_form,
    f"to.dtype(self, dtype, {_TO})": to_form,
    f"to.device(self, device, dtype, {_TO})": to_form,
    f"to.dtype_layout(self, {_LAYOUT}, {_TO})": to_form,
    f"_to_copy.default(self, {_LAYOUT}, non_blocking=False, memory_format=None)": to_form,
    "einsum.default(equation, tensors, path=None)": einsum_form,
}
