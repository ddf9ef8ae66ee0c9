"""Ops as capture makes them, and the text of the calls that they are emitted as."""

from __future__ import annotations

import ast
from typing import Any

import torch

from bigbrain_fx import core
from bigbrain_fx.emit.ops.calls import call_expression
from tests.support.allowed_calls import is_allowed_call

LEAVES = (bool, int, float, str, core.Ref, core.ParamRef, core.Const)


def as_arg(value: Any) -> core.Arg:
    """Say a Python value as capture does."""
    if isinstance(value, list | tuple):
        return tuple(as_arg(item) for item in value)
    if isinstance(value, torch.device):
        return core.Const("device")
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return core.Const(str(value))
    if isinstance(value, float) and str(value) in ("inf", "-inf", "nan"):
        return core.Const(str(value))
    assert value is None or isinstance(value, LEAVES), value
    return value


def op_of(target: str, *args: Any, **kwargs: Any) -> core.Op:
    named = tuple((name, as_arg(value)) for name, value in kwargs.items())
    return core.Op("y", target, tuple(as_arg(arg) for arg in args), named)


def name_of(ref: core.Ref | core.ParamRef) -> ast.expr:
    name = ref.value if isinstance(ref, core.Ref) else f"self.{ref.param}"
    return ast.parse(name, mode="eval").body


def text_of(op: core.Op, device: str | None = "device") -> str:
    """Write a call, checking that its text is what its tree says and calls only what it may."""
    place = None if device is None else ast.Name(device, ast.Load())
    expression = call_expression(op, name_of, place)
    text = ast.unparse(expression)
    assert ast.dump(ast.parse(text, mode="eval").body) == ast.dump(expression)
    calls = (node for node in ast.walk(expression) if isinstance(node, ast.Call))
    assert all(is_allowed_call(call.func) for call in calls), text
    return text
