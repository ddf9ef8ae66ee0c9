"""Write one argument of an op as a Python expression.

This module knows literals, constants and references; it does not know what op they belong to.
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from bigbrain_fx import core
from bigbrain_fx.errors import InputError

DTYPES = frozenset(core.DTYPE_BYTES) | {"complex32", "float8_e4m3fnuz", "float8_e5m2fnuz"}
LAYOUTS = frozenset({"strided", "sparse_coo", "sparse_csr"})
MEMORY_FORMATS = frozenset(
    {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
)

TORCH_CONSTANTS = frozenset(f"torch.{name}" for name in DTYPES | LAYOUTS | MEMORY_FORMATS)
"""The constants of the torch namespace that may stand in emitted code."""

FLOATS = frozenset({"inf", "-inf", "nan"})


@dataclass(frozen=True, slots=True)
class Writer:
    """Write arguments for one device.

    Attributes:
        value: gives the expression of a reference: a local name, `self.weight`, ...
        device: the expression of the stage's device; None when it has none (tensors are then made
            on the CPU, torch's own default).
    """

    value: Callable[[core.Ref | core.ParamRef], ast.expr]
    device: ast.expr | None

    def write(self, arg: core.Arg) -> ast.expr:
        """Return the expression of one argument; a tuple stays a tuple."""
        if isinstance(arg, core.Ref | core.ParamRef):
            return self.value(arg)
        if isinstance(arg, core.Const):
            return self._constant(arg.const)
        if isinstance(arg, tuple):
            return ast.Tuple([self.write(item) for item in arg], ast.Load())
        return literal(arg)

    def write_list(self, args: tuple[core.Arg, ...]) -> ast.expr:
        """Return the arguments as one list expression."""
        return ast.List([self.write(item) for item in args], ast.Load())

    def omits(self, arg: core.Arg) -> bool:
        """Whether the argument is the device, and there is none to name."""
        return self.device is None and arg == core.Const("device")

    def _constant(self, const: str) -> ast.expr:
        if const == "device":
            cpu = ast.Call(dotted("torch.device"), [ast.Constant("cpu")], [])
            return cpu if self.device is None else self.device
        if const in FLOATS:
            return literal(float(const))
        if const in TORCH_CONSTANTS:
            return dotted(const)
        if const.endswith(("j", "j)")):
            with contextlib.suppress(ValueError):
                return ast.Constant(complex(const))
        raise InputError(
            f"expected a constant such as torch.float32, device or inf; found {const!r}",
            code="BX3615",
            help="write the plan again with `bigbrain-fx split`",
        )


def literal(value: bool | int | float | str | None) -> ast.expr:
    """Return the expression of a Python literal.

    Negative numbers are written as a minus sign and a number, as Python's own parser reads them.
    Infinities and nan are written as `float("inf")`.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return ast.Call(ast.Name("float", ast.Load()), [ast.Constant(str(value))], [])
    if isinstance(value, int | float) and math.copysign(1.0, value) < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)


def dotted(path: str) -> ast.expr:
    """Return the expression of a dotted name, such as `torch.float32`."""
    first, *rest = path.split(".")
    expression: ast.expr = ast.Name(first, ast.Load())
    for attribute in rest:
        expression = ast.Attribute(expression, attribute, ast.Load())
    return expression
