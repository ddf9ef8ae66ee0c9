"""A short text for a value of Python, the same in another process where the value is the same.

Numbers, tensors and containers count by value. Of functions their code and closures count, of
classes all but methods, of other objects the attributes. This file knows Python's objects; it knows
no files.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, range)
_DEEP, _MANY = 12, 2_000_000  # levels, and values, that are looked at
_SKIPPED = frozenset(
    {"__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__annotations__"}
)


def digest(value: object, is_own: Callable[[object], bool] = lambda module: False) -> str:
    """Return a text that is different for different values.

    Args:
        value: any.
        is_own: whether a module's values count beside its name.
    """
    walk = _Hashing(is_own)
    walk.add(value, 0)
    return str(walk.hash.hexdigest())


@dataclass
class _Hashing:
    """A value and its parts, on the way into a hash; an object met before counts by its number."""

    is_own: Callable[[object], bool]
    hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    met: dict[int, int] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)

    def add(self, value: object, depth: int) -> None:
        """Add a value and its parts."""
        if isinstance(value, _PLAIN):
            self.say(type(value).__name__, repr(value))
        elif id(value) in self.met:
            self.say("again", self.met[id(value)])
        elif depth > _DEEP or len(self.met) > _MANY:
            self.say("deep", type(value).__qualname__)
        else:
            self.met[id(value)] = len(self.met)
            self.kept.append(value)  # or its number in memory might be another's
            self.look(value, depth + 1)

    def look(self, value: Any, depth: int) -> None:  # noqa: ANN401  # any object
        """Add an object's parts, by its kind."""
        self.say("of", type(value).__qualname__)
        if isinstance(value, Tensor):
            self.numbers(value)
        elif isinstance(value, torch.Generator):
            self.hash.update(value.get_state().numpy().tobytes())
        elif isinstance(value, random.Random):
            self.say("dice", value.getstate())
        elif isinstance(value, itertools.count):
            self.say("at", repr(value))
        elif isinstance(value, ContextVar):
            self.add(value.get(None), depth)
        elif hasattr(value, "tobytes") and hasattr(value, "dtype") and not value.dtype.hasobject:
            self.say(str(value.dtype), value.shape)
            self.hash.update(value.tobytes())
        else:
            self.parts(value, depth)

    def parts(self, value: Any, depth: int) -> None:  # noqa: ANN401  # any object
        """Add the parts of a value that is no number."""
        if isinstance(value, Mapping):
            self.pairs(value, depth)
        elif isinstance(value, set | frozenset):
            self.say("set", sorted(digest(item, self.is_own) for item in value))
        elif isinstance(value, list | tuple) or type(value).__name__ == "deque":
            self.say("items", len(value))
            for item in value:
                self.add(item, depth)
        elif isinstance(value, types.FunctionType):
            self.function(value, depth)
        elif isinstance(value, type):
            self.kind(value, depth)
        elif isinstance(value, types.ModuleType):
            self.module(value, depth)
        else:
            self.attributes(value, depth)

    def attributes(self, value: object, depth: int) -> None:
        """Add an object's attributes; of a library's, which may lead anywhere, the nearest."""
        foreign = not self.is_own(_module_of(type(value)))
        if not type(value).__module__.startswith("logging"):
            held = {**_slots(value), **getattr(value, "__dict__", {})}
            self.pairs(held, max(depth, _DEEP - 3) if foreign else depth)

    def pairs(self, held: Mapping[Any, object], depth: int) -> None:
        """Add the entries of a mapping, in their order."""
        self.say("entries", len(held))
        for key, item in list(held.items()):
            self.add(key, depth)
            self.add(item, depth)

    def function(self, value: types.FunctionType, depth: int) -> None:
        """Add a function's closure and defaults; its source is in the text."""
        self.say("function", value.__qualname__)
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        for held in (value.__defaults__, value.__kwdefaults__, vars(value), cells):
            self.add(held, depth)

    def kind(self, value: type, depth: int) -> None:
        """Add a user class's attributes beside its methods."""
        self.say("class", value.__qualname__)
        if self.is_own(_module_of(value)):
            held = {k: v for k, v in vars(value).items() if k not in _SKIPPED}
            self.pairs({k: v for k, v in held.items() if not _is_method(v)}, depth)

    def module(self, value: types.ModuleType, depth: int) -> None:
        """Add the values of a module of the user's."""
        self.say("module", value.__name__)
        if self.is_own(value):
            self.pairs({k: v for k, v in vars(value).items() if not k.startswith("__")}, depth)

    def numbers(self, value: Tensor) -> None:
        """Add a tensor's numbers, where it has any."""
        self.say(str(value.dtype), tuple(value.shape))
        if value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
            return
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        self.hash.update(plain.view(torch.uint8).numpy().data)

    def say(self, *parts: object) -> None:
        """Add words."""
        self.hash.update("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"))
        self.hash.update(b"\1")


def _slots(value: object) -> dict[str, object]:
    """Return the values in an object's slots."""
    kinds = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = (name for slots in kinds for name in ([slots] if isinstance(slots, str) else slots))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _module_of(kind: type) -> object:
    return sys.modules.get(kind.__module__)


def _is_method(value: object) -> bool:
    methods = types.FunctionType, classmethod, staticmethod, property, types.GetSetDescriptorType
    return isinstance(value, (*methods, types.MemberDescriptorType))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
