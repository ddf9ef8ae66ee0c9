"""Nests of Python as arguments of an op: tuples, lists, dicts and dataclasses of tensors.

    {"logits": t} ─▶ ("dict", (("logits", Ref("t")),))      a container is tagged, a leaf is not

The module knows containers, not ops or modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from bigbrain_fx.core import Arg, Const
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation.nodes import is_free, literal


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Stand among a call's arguments for its tensor number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class SizeSlot:
    """Stand among a call's arguments for its size number `index`, which a trace leaves free."""

    index: int


def encode(
    value: object, leaf: Callable[[Tensor | torch.SymInt], Arg], *, lenient: bool = False
) -> Arg:
    """Turn containers of tensors into an argument.

    Args:
        value: a Python object.
        leaf: returns the substitute of a tensor, or of a free size.
        lenient: put None in the place of objects that no graph can hold (a cache).

    Raises:
        CaptureError: it holds other objects than containers, tensors, numbers and strings.
    """

    def inner(item: object) -> Arg:
        return encode(item, leaf, lenient=lenient)

    if isinstance(value, Tensor) or is_free(value):
        return leaf(cast("Tensor | torch.SymInt", value))
    if isinstance(value, Mapping) and type(value) in (dict,):
        return ("dict", tuple((literal(key), inner(item)) for key, item in value.items()))
    if type(value) in (tuple, list):
        items = tuple(inner(item) for item in cast("tuple[object, ...]", value))
        return (type(value).__name__, items)
    fields = _fields(value)
    if fields is not None and (kind := _importable(type(value))):
        return ("object", kind, tuple((name, inner(item)) for name, item in fields))
    try:
        return literal(value)
    except CaptureError:
        if lenient:
            return None
        raise


def _fields(value: object) -> list[tuple[str, object]] | None:
    """Return the fields of an object, fields with None left out."""
    if hasattr(type(value), "__dataclass_fields__"):
        names = list(vars(type(value))["__dataclass_fields__"])
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        names = list(value._fields)
    else:
        return None
    found = [(name, getattr(value, name, None)) for name in names]
    return [(name, item) for name, item in found if item is not None]


def _importable(kind: type) -> str | None:
    """Return "module.Class" when that is how to import it."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        return name if class_of(name) is kind else None
    except (ImportError, AttributeError):
        return None


def class_of(name: str) -> type:
    """Import a class by "module.Class".

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, last = name.rpartition(".")
    return cast("type", getattr(importlib.import_module(module), last))


def decode(arg: object, leaf: Callable[[Arg], object]) -> object:
    """Rebuild the object of `encode`; `leaf` returns the value for each leaf."""
    match arg:
        case ("dict", items):
            return {key: decode(item, leaf) for key, item in cast("_Pairs", items)}
        case ("tuple", items):
            return tuple(decode(item, leaf) for item in cast("tuple[Arg, ...]", items))
        case ("list", items):
            return [decode(item, leaf) for item in cast("tuple[Arg, ...]", items)]
        case ("object", kind, items):
            fields = {str(key): decode(item, leaf) for key, item in cast("_Pairs", items)}
            return class_of(str(kind))(**fields)
    return leaf(cast("Arg", arg))


def replaced(arg: object, leaf: Callable[[object], object]) -> Arg:
    """Return an argument with other leaves."""
    match arg:
        case ("dict" | "tuple" | "list" as kind, items):
            return (str(kind), _replaced_items(str(kind), items, leaf))
        case ("object", kind, items):
            return ("object", str(kind), _replaced_items("object", items, leaf))
    return cast("Arg", leaf(arg))


def _replaced_items(kind: str, items: object, leaf: Callable[[object], object]) -> Arg:
    if kind in ("dict", "object"):
        return tuple((key, replaced(item, leaf)) for key, item in cast("_Pairs", items))
    return tuple(replaced(item, leaf) for item in cast("tuple[object, ...]", items))


def plain_value(arg: Arg) -> object:
    """Return the literal of a leaf that is no tensor."""
    if isinstance(arg, Const):
        name = arg.const
        if name == "device":
            return torch.device("cpu")
        return getattr(torch, name.removeprefix("torch.")) if "torch." in name else arg.number
    return arg


_Pairs = tuple[tuple[str, Arg], ...]
