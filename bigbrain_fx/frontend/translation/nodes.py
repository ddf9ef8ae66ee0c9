"""Read single fx nodes: their arguments, tensors, storages and places in the user's code.

This file knows fx; it knows nothing of the graph around a node.
"""

from __future__ import annotations

import math
import re
from typing import TypedDict

import torch
from torch import Tensor, fx

from bigbrain_fx.core import Arg, Const, ModuleCall, ParamRef, Ref, TensorSpec
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation import rules
from bigbrain_fx.frontend.translation.params import dtype_name
from bigbrain_fx.frontend.translation.sizes import UnknownSizeError, dim
from bigbrain_fx.frontend.translation.sources import Lines, line_of, lines_of, module_calls


class Place(TypedDict):
    """Origin of an op, as fields of `Op`."""

    modules: tuple[ModuleCall, ...]
    source: str
    code: str
    lines: Lines


VALUE = "bigbrain_fx.value"
"""In the meta of a traced node: the value of the graph that it stands for."""


def is_free(value: object) -> bool:
    """Whether a number is a size that the trace leaves free."""
    return isinstance(value, torch.SymInt) and not isinstance(dim(value), int)


def literal(value: object) -> Arg:
    """Translate a constant argument.

    Raises:
        CaptureError: it is of a kind that a graph cannot hold.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else Const(str(value))
    if isinstance(value, complex):
        return Const(str(value))
    if isinstance(value, torch.device):
        return Const("device")
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return Const(str(value))
    if isinstance(value, list | tuple):
        return tuple(literal(item) for item in value)
    if isinstance(value, torch.SymInt) and isinstance(number := dim(value), int):
        return number
    raise CaptureError(
        f"an op takes a {type(value).__name__} as argument, which a graph cannot hold",
        code="BX2176",
        help="pass numbers, strings and tensors only (a torch.Generator: leave it out; of a dict "
        "or an object what is read of it, each as an argument: apply(x, config['rate']))",
    )


def spec_of(tensor: Tensor, requires_grad: bool | None = None) -> TensorSpec:
    """Describe a real or fake tensor; only floating ones can want a gradient."""
    wants = tensor.requires_grad if requires_grad is None else requires_grad
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return TensorSpec(
        tuple(dim(size) for size in tensor.shape),
        dtype_name(tensor),
        tuple(dim(size) for size in tensor.stride()),
        wants and floating,
    )


def storage(node: fx.Node) -> int | None:
    """Return a number for the storage of a node's (first) tensor."""
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def same_tensor(node: fx.Node, source: fx.Node) -> bool:
    """Whether two nodes are one tensor, in shape and storage."""
    new, old = node.meta.get("val"), source.meta.get("val")
    if (
        not isinstance(new, Tensor)
        or not isinstance(old, Tensor)
        or storage(node) != storage(source)
    ):
        return False
    return spec_of(new, False) == spec_of(old, False)


def specs_of(node: fx.Node, needs: bool) -> tuple[TensorSpec | None, ...]:
    """Describe a call's result: a spec for each entry, None for one that is no tensor.

    Raises:
        CaptureError: a shape depends on data.
    """
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    try:
        return tuple(
            spec_of(item, needs) if isinstance(item, Tensor) else None
            for item in values
            if isinstance(value, list | tuple) or isinstance(item, Tensor)
        )
    except UnknownSizeError as error:
        at, code = line_of(node.meta.get("stack_trace"))
        what = code or rules.target_name(node.target)
        raise inside(
            node,
            CaptureError(
                f"the shape of a result depends on data: {what}",
                code="BX0130b",
                at=at or None,
                notes=(str(error),),
                help="use a mask and torch.where instead of selecting rows: shapes must be fixed; "
                "or make the module that selects and uses them opaque: --opaque with its class",
            ),
        ) from None


def inside(node: fx.Node, error: CaptureError) -> CaptureError:
    """Note in an error which module its node belongs to."""
    calls = module_calls(node)
    error.inside = calls[-1].path if calls else ""
    return error


def kept_kwargs(node: fx.Node) -> list[tuple[str, object]]:
    """Return the keyword arguments worth keeping."""
    return [(k, v) for k, v in node.kwargs.items() if not (k == "pin_memory" and not v)]


def place_of(node: fx.Node) -> Place:
    """Return the modules and the user's line that a node belongs to."""
    trace = node.meta.get("stack_trace")
    source, code = line_of(trace)
    return {"modules": module_calls(node), "source": source, "code": code, "lines": lines_of(trace)}


def name_of(arg: Arg) -> str | None:
    """Return the name of the value or param that an argument refers to."""
    if isinstance(arg, Ref):
        return arg.value
    return arg.param if isinstance(arg, ParamRef) else None


def tidy(name: str) -> str:
    """Name the plain form of a call: "relu__1" -> "relu_1"."""
    return re.sub(r"_(_\d+)?$", lambda found: found[1] or "", name)
