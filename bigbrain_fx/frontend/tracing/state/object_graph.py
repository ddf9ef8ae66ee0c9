"""Places that forward's code can reach beside weights and buffers: where numbers may be kept.

    model ─▶ attributes, slots, classes, hooks ─▶ functions ─▶ closures, defaults, names of the file

A place is a path from a root, so that an object which a call binds anew is followed. This file
knows Python's objects; it runs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import numbers
import types
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.state.attributes import OF_TORCH, file_of
from bigbrain_fx.frontend.translation.sources import is_own

_DEEP = 12  # levels that are looked into
_FOREIGN = 4  # levels of those that a library's object takes
_MANY = 50_000  # places
_LONG = 512  # entries: of a longer container the length alone counts
_FEW = 16  # elements: a larger tensor is no counter
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_CALLS = ("__func__", "__self__", "func", "args", "keywords", "__wrapped__", "fget")
_CALLS = (types.MethodType, functools.partial, functools._lru_cache_wrapper)
_WRAPPED = (property, staticmethod, classmethod)
_OF_CLASSES = ("__dict__", "__weakref__", "__doc__", "__slots__")
Part = tuple[str, Any, str]  # how an object holds a value, by which key, and how that is shown


@dataclass(frozen=True)
class Place:
    """Something that holds a value, by the path from a root.

    Attributes:
        name: how it is shown.
        holder: the place of the object that holds the value; None: `key` is the value itself.
        kind: "attribute", "item", "module", "cell" or "global".
    """

    name: str
    holder: Place | None
    kind: str
    key: Any

    def get(self) -> Any:  # noqa: ANN401  # any value
        """Return the value that is there now."""
        if self.holder is None:
            return self.key
        held = self.holder.get()
        match self.kind:
            case "item" if isinstance(held, list | tuple):
                return held[self.key] if self.key < len(held) else None
            case "cell":
                return held.__closure__[self.key].cell_contents
        entries = self._entries(held)
        return getattr(held, self.key, None) if entries is None else entries.get(self.key)

    def put(self, value: object) -> None:
        """Set the value; a tuple that holds it is bound anew."""
        if self.holder is None:
            return
        held = self.holder.get()
        entries = self._entries(held)
        if isinstance(held, tuple):
            items = [*held[: self.key], value, *held[self.key + 1 :]]
            self.holder.put(getattr(type(held), "_make", tuple)(items))
        elif self.kind == "cell":
            held.__closure__[self.key].cell_contents = value
        elif isinstance(held, list):
            held[self.key] = value
        elif entries is None or isinstance(held, type):
            setattr(held, self.key, value)
        else:
            entries[self.key] = value

    def _entries(self, held: Any) -> Any:  # noqa: ANN401  # a mapping of any kind, or None
        """Return the mapping in which the value is; None: a slot or a property has it."""
        match self.kind:
            case "item":
                return held
            case "module":
                return held._modules
            case "global":
                return held.__globals__
        own = getattr(held, "__dict__", {})
        return own if self.key in own else None


def places(roots: Iterable[object], leaving: Iterable[object] = ()) -> Iterator[Place]:
    """Yield the places of numbers, small tensors and lists that objects reach.

    What is in `leaving` is not looked into.
    """
    walk = _Walk({id(value) for value in leaving})
    for root in roots:
        yield from (place for place in walk.from_root(root) if is_leaf(place.get()))


def tensors(roots: Iterable[object]) -> list[Tensor]:
    """Return all tensors that objects reach, those of modules that no other module holds, too."""
    walk = _Walk()
    for root in roots:
        deque(walk.from_root(root), maxlen=0)
    held = [part for part in walk.kept if isinstance(part, nn.Module)]
    own = (t for part in held for t in (*part._parameters.values(), *part._buffers.values()))
    return list({id(t): t for t in (*walk.tensors, *own) if t is not None}.values())


@dataclass
class _Walk:
    """A way through objects that meets each once."""

    seen: set[int] = field(default_factory=set)
    kept: list[object] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def from_root(self, root: object) -> Iterator[Place]:
        """Yield all places that an object reaches."""
        is_module = isinstance(root, nn.Module)
        name = "" if is_module else str(getattr(root, "__qualname__", type(root).__qualname__))
        return self._into(Place(name, None, "", root), root, 0)

    def _into(self, home: Place, value: object, depth: int) -> Iterator[Place]:
        if depth > _DEEP or id(value) in self.seen or len(self.seen) > _MANY:
            return
        self.seen.add(id(value))
        self.kept.append(value)  # or its number in memory might be another's
        for place, held in _read_all(home, value):
            yield place
            if isinstance(held, Tensor):
                self.tensors.append(held)
            elif not isinstance(held, numbers.Number | str | bytes | None):
                step = 1 if _is_near(held) else _FOREIGN
                yield from self._into(place, held, depth + step)


def _read_all(home: Place, value: object) -> list[tuple[Place, Any]]:
    found: list[tuple[Place, Any]] = []
    with contextlib.suppress(Exception):  # the user's own properties, or a library's
        for kind, key, shown in _parts(value):
            name = f"{home.name}{shown}".removeprefix(".") if shown[:1] in ".[" else shown
            place = Place(name, home if kind else None, kind, key)
            found.append((place, place.get()))
    return found


def is_leaf(value: object) -> bool:
    """Whether a value may count: a number, a list that grows, a small tensor."""
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and value.device.type == "cpu"
        return plain and value.numel() <= _FEW and not (value.requires_grad or value.is_complex())
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and hasattr(value, "size"):
        return value.size <= _FEW and value.dtype.kind in "iuf"
    if isinstance(value, array):
        return len(value) <= _FEW and value.typecode != "u"
    return isinstance(value, (numbers.Real, list, deque)) and not isinstance(value, bool)


def _is_near(value: object) -> bool:
    """Whether a value is Python's or the user's, and no library's object."""
    kind = type(value)
    return kind.__module__ == "builtins" or isinstance(value, nn.Module) or is_own(file_of(kind))


def _parts(value: Any) -> Iterator[Part]:  # noqa: ANN401  # any object
    """Yield what an object holds, by its kind."""
    if isinstance(value, nn.Module):
        yield from _attributes(key for key in vars(value) if key not in OF_TORCH)
        yield from _attributes(hooks for hooks in _HOOKS if getattr(value, hooks))
        yield from (("module", key, f".{key}") for key in value._modules)
        yield from _classes(type(value).__mro__)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, (*_CALLS, *_WRAPPED)):
        yield from _attributes(key for key in _OF_CALLS if hasattr(value, key))
    elif isinstance(value, type):
        own = vars(value) if is_own(file_of(value)) else {}
        yield from _attributes(key for key in own if key not in _OF_CLASSES)
        yield from _classes([type(value)] if own and type(value) is not type else [])
    elif isinstance(value, types.ModuleType):
        is_file = is_own(str(getattr(value, "__file__", None) or ""))
        yield from _attributes(vars(value) if is_file else ())
    else:
        yield from _of_object(value)


def _attributes(keys: Iterable[str]) -> Iterator[Part]:
    return (("attribute", key, f".{key}") for key in list(keys))


def _classes(kinds: Iterable[type]) -> Iterator[Part]:
    return (("", kind, kind.__qualname__) for kind in kinds if is_own(file_of(kind)))


def _of_function(function: types.FunctionType) -> Iterator[Part]:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    for number, (name, cell) in enumerate(zip(names, cells, strict=True)):
        if cell != types.CellType():  # an empty one
            yield "cell", number, f"{name} in {function.__qualname__}"
    yield from _attributes(("__defaults__", "__kwdefaults__", *vars(function)))
    if is_own(function.__code__.co_filename):
        named = set(itertools.chain.from_iterable(c.co_names for c in _codes(function.__code__)))
        yield from (("global", name, name) for name in sorted(named & function.__globals__.keys()))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _of_object(value: Any) -> Iterator[Part]:  # noqa: ANN401  # any object
    if isinstance(value, MutableMapping) and len(value) <= _LONG:
        yield from (("item", key, f"[{key!r}]") for key in list(value))
    elif isinstance(value, list | tuple) and len(value) <= _LONG:
        yield from (("item", number, f"[{number}]") for number in range(len(value)))
    elif isinstance(value, deque | set | frozenset) and len(value) <= _LONG:
        yield from (("", held, f"[{number}]") for number, held in enumerate(value))
    kind = type(value)
    if kind.__module__.partition(".")[0] != "torch":
        inner = getattr(value, "__dict__", None)
        yield from _attributes(inner if isinstance(inner, dict) else ())
    if is_own(file_of(kind)):
        yield from _classes([kind])
        slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
        named = itertools.chain.from_iterable([s] if isinstance(s, str) else s for s in slots)
        yield from _attributes(key for key in named if hasattr(value, key))
