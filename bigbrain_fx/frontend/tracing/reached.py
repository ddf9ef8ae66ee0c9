"""Places that forward's code can reach beside weights and buffers: where numbers may be kept.

    model ─▶ attributes, slots, classes, hooks ─▶ functions ─▶ closures, defaults, names of the file

This file knows Python's objects; it runs nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
import inspect
import itertools
import numbers
import os
import re
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.attributes import OF_TORCH, file_of
from bigbrain_fx.frontend.tracing.iterators import is_iterator
from bigbrain_fx.frontend.translation.sources import is_own, is_users

_DEEP = 12  # levels that are looked into
_FOREIGN = 4  # levels of those that a library's object takes
_MANY = 50_000  # places
_LONG = 512  # entries: of a longer container the length alone counts
_FEW = 16  # elements: a larger tensor is no counter
_TEXT = 2**14  # bytes: a larger file is no counter
_WORD = 64  # characters: a longer text is none
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class Place:
    """Something that holds a value: where, and how the value is read and set there."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def places(roots: Iterable[object], leaving: Iterable[object] = ()) -> Iterator[Place]:
    """Yield the places of numbers, small tensors, lists and generators that objects reach.

    What is in `leaving` is not looked into.
    """
    yield from holding(roots, is_leaf, leaving)
    for key in os.environ:
        yield from _in_text(f"os.environ[{key!r}]", partial(_setting, key), partial(_set, key))


def holding(
    roots: Iterable[object], wanted: Callable[[object], bool], leaving: Iterable[object] = ()
) -> Iterator[Place]:
    """Yield the places whose values are wanted, of all that objects reach."""
    walk = _Walk({id(value) for value in leaving}, wanted)
    for root in roots:
        name = "" if isinstance(root, nn.Module) else _called(root)
        yield from walk.into(Place(name, partial(_itself, root), _refuse), 0)


def tensors(roots: Iterable[object]) -> list[Tensor]:
    """Return all tensors that objects reach, those of modules that no other module holds, too."""
    walk = _Walk()
    for root in roots:
        deque(walk.into(Place("", partial(_itself, root), _refuse), 0), maxlen=0)
    held = [part for part in walk.kept if isinstance(part, nn.Module)]
    own = (t for part in held for t in (*part._parameters.values(), *part._buffers.values()))
    return list({id(t): t for t in (*walk.tensors, *own) if t is not None}.values())


def known(function: types.FunctionType) -> Mapping[str, object]:
    """Return what the names of a user's function outside it stand for."""
    if not is_users(function.__code__.co_filename):
        return {}
    named = set(itertools.chain.from_iterable(c.co_names for c in codes(function.__code__)))
    found = {name: function.__globals__[name] for name in named & function.__globals__.keys()}
    return found | {name: cell.cell_contents for name, cell in _cells(function)}


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from codes(inner)


def _cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty one
            yield name, cell


def _setting(key: str) -> str:
    return os.environ.get(key, "")


def _set(key: str, text: str) -> None:
    os.environ[key] = text


@dataclass(frozen=True)
class TextFile:
    """A small file that may hold numbers, for the next call to read."""

    path: str

    def read(self) -> str:
        """Return its text; none of a large or binary one."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if os.path.getsize(self.path) <= _TEXT:
                return Path(self.path).read_text(encoding="utf-8")
        return ""

    def write(self, text: str) -> None:
        """Let its text be another one."""
        Path(self.path).write_text(text, encoding="utf-8")


def _in_text(name: str, read: Callable[[], str], write: Callable[[str], None]) -> Iterator[Place]:
    """Yield the places of the numbers in a text."""
    found = _NUMBER.findall(read())[:_FEW]
    for index in range(len(found)):
        said = f"number {index + 1} of {name}" if len(found) > 1 else name
        yield Place(said, partial(_number_in, read, index), partial(_put_in, read, write, index))


def _number_in(read: Callable[[], str], index: int) -> int | float | None:
    found = _NUMBER.findall(read())[index : index + 1]
    return float(found[0]) if found and "." in found[0] else int(found[0]) if found else None


def _put_in(
    read: Callable[[], str], write: Callable[[str], None], index: int, value: float
) -> None:
    text = read()
    found = list(_NUMBER.finditer(text))[index]
    write(f"{text[: found.start()]}{value}{text[found.end() :]}")


@dataclass
class _Walk:
    """A way through objects that meets each once."""

    seen: set[int] = field(default_factory=set)
    wanted: Callable[[object], bool] = lambda _value: False
    kept: list[object] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def into(self, home: Place, depth: int) -> Iterator[Place]:
        """Yield the places in what a place holds, and in what is in that."""
        value = home.get()
        if depth > _DEEP or id(value) in self.seen or len(self.seen) > _MANY:
            return
        self.seen.add(id(value))
        self.kept.append(value)  # or its number in memory might be another's
        for place, held in _read_all(home, value):
            if self.wanted(held):
                yield place
            if isinstance(held, Tensor):
                self.tensors.append(held)
            elif isinstance(held, str):
                yield from filter(lambda each: self.wanted(each.get()), _in_word(place))
            elif not isinstance(held, numbers.Number | str | bytes | None):
                step = 1 if _is_near(held) else _FOREIGN
                yield from self.into(place, depth + step)


def _read_all(home: Place, value: object) -> list[tuple[Place, Any]]:
    found: list[tuple[Place, Any]] = []
    with contextlib.suppress(Exception):  # the user's own properties, or a library's
        found.extend((place, place.get()) for place in _inside(home, value))
    return found


def _in_word(place: Place) -> Iterator[Place]:
    """Yield the places of numbers in a short text that a place holds."""
    if len(place.get()) <= _WORD:
        yield from _in_text(place.name, lambda: str(place.get()), place.put)


def is_leaf(value: object) -> bool:
    """Whether a value may count: a number, an iterator, a list that grows, a small tensor."""
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and value.device.type == "cpu"
        return plain and value.numel() <= _FEW and not (value.requires_grad or value.is_complex())
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and hasattr(value, "size"):
        return value.size <= _FEW and value.dtype.kind in "iuf"
    if isinstance(value, array | bytearray):
        return len(value) <= _FEW and not (isinstance(value, array) and value.typecode in "uw")
    if isinstance(value, ctypes._SimpleCData):
        return isinstance(value.value, int | float)
    kinds = (numbers.Real, Decimal, complex, list, deque)
    return is_iterator(value) or (isinstance(value, kinds) and not isinstance(value, bool))


def _is_near(value: object) -> bool:
    """Whether a value is Python's or the user's, and no library's object."""
    kind = type(value)
    return kind.__module__ == "builtins" or isinstance(value, nn.Module) or is_own(file_of(kind))


# --------------------------------------------------------------------------- what is in a value


def _inside(home: Place, value: Any) -> Iterator[Place]:  # noqa: ANN401  # any object
    """Yield the places right in a value, by its kind."""
    name = home.name
    if isinstance(value, nn.Module):
        yield from _in_module(name, value)
    elif isinstance(value, types.FunctionType):
        yield from _in_function(name, value)
    elif isinstance(value, types.MethodType | functools.partial | functools._lru_cache_wrapper):
        yield from _read(name, value, ("__func__", "__self__", "func", "args", "keywords"))
        yield from _read(name, value, ("__wrapped__",))
        yield from _cached(name, value)
    elif isinstance(value, property):
        yield from _read(name, value, ("fget",))
    elif isinstance(value, staticmethod | classmethod):
        yield from _read(name, value, ("__func__",))
    elif isinstance(value, type):
        yield from _in_class(name, value)
    elif isinstance(value, types.ModuleType):
        if is_own(str(getattr(value, "__file__", None) or "")):
            yield from _entries(f"{name}.", vars(value))
    elif isinstance(value, contextvars.ContextVar):
        yield Place(f"{name}.get()", partial(_value_of, value), value.set)
    elif isinstance(value, TextFile):
        yield from _in_text(Path(value.path).name, value.read, value.write)
    elif isinstance(value, weakref.ref):
        yield Place(f"{name}()", value, _refuse)
    else:
        yield from _in_object(home, value)


def _in_object(home: Place, value: Any) -> Iterator[Place]:  # noqa: ANN401  # any object
    """Yield places in what a place holds: in whatever it holds then, for it may be bound anew."""
    name = home.name
    if isinstance(value, MutableMapping) and len(value) <= _LONG:
        yield from (_kept_by(home, key, f"[{key!r}]", _itself) for key in list(value))
    elif isinstance(value, list | tuple) and len(value) <= _LONG:
        put = partial(_put_item, home)
        for index in range(len(value)):
            get = partial(_item_of, home, index)
            yield Place(f"{name}[{index}]", get, partial(put, index))
    elif isinstance(value, deque | set | frozenset) and len(value) <= _LONG:
        items = enumerate(value)
        yield from (Place(f"{name}[{i}]", partial(_itself, item), _refuse) for i, item in items)
    if type(value).__module__.partition(".")[0] != "torch":
        inner = getattr(value, "__dict__", None)
        keys = list(inner) if isinstance(inner, dict) else []
        yield from (_kept_by(home, key, f".{key}", vars) for key in keys)
    if is_own(file_of(type(value))):
        yield Place(type(value).__qualname__, partial(type, value), _refuse)
        slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
        named = itertools.chain.from_iterable([s] if isinstance(s, str) else s for s in slots)
        yield from _read(name, value, tuple(named))


def _kept_by(home: Place, key: Any, shown: str, entries: Callable[[Any], Any]) -> Place:  # noqa: ANN401
    """Return the place of an entry of what a place holds."""
    return Place(
        f"{home.name}{shown}",
        lambda: entries(home.get()).get(key),
        lambda value: entries(home.get()).__setitem__(key, value),
    )


def _item_of(home: Place, index: int) -> object:
    held = home.get()
    return held[index] if index < len(held) else None


def _put_item(home: Place, index: int, value: object) -> None:
    """Set an item of a list; a tuple is bound anew."""
    held = home.get()
    if isinstance(held, list):
        held[index] = value
        return
    items = [*held[:index], value, *held[index + 1 :]]
    home.put(getattr(type(held), "_make", tuple)(items))


def _in_module(name: str, part: nn.Module) -> Iterator[Place]:
    before = f"{name}." if name else ""
    yield from _entries(before, {k: v for k, v in vars(part).items() if k not in OF_TORCH}, of=part)
    for hooks in _HOOKS:
        yield from _entries(f"{before}{hooks}[", getattr(part, hooks), "]")
    yield from _entries(before, part._modules)
    for kind in type(part).__mro__:
        if is_own(file_of(kind)):
            yield Place(kind.__qualname__, partial(_itself, kind), _refuse)


def _cached(name: str, value: object) -> Iterator[Place]:
    """Yield what an lru_cache holds: an object that it gives again and again may change."""
    if isinstance(value, functools._lru_cache_wrapper) and value.cache_info().currsize:
        kinds = types.FunctionType, types.MethodType, type
        held = [each for each in gc.get_referents(value) if not isinstance(each, kinds)]
        yield from (Place(f"{name}'s cache", partial(_itself, each), _refuse) for each in held)


def _in_class(name: str, kind: type) -> Iterator[Place]:
    if not is_own(file_of(kind)):
        return
    if type(kind) is not type:
        yield Place(type(kind).__qualname__, partial(type, kind), _refuse)
    for key in vars(kind):
        if key not in ("__dict__", "__weakref__", "__doc__", "__slots__"):
            get = partial(lambda k: vars(kind).get(k), key)
            yield Place(f"{name}.{key}", get, partial(setattr, kind, key))


def _in_function(name: str, function: types.FunctionType) -> Iterator[Place]:
    for key, cell in _cells(function):
        get, put = partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")
        yield Place(f"{key} in {function.__qualname__}", get, put)
    yield Place(f"{name}'s defaults", lambda: function.__defaults__, _refuse)
    yield Place(f"{name}'s defaults", lambda: function.__kwdefaults__, _refuse)
    yield from _entries(f"{name}.", vars(function))
    if is_own(function.__code__.co_filename):
        names = known(function).keys() & function.__globals__.keys()
        scope = function.__globals__
        yield from (_entry("", scope, key) for key in sorted(names))


def _read(name: str, value: object, attributes: tuple[str, ...]) -> Iterator[Place]:
    for key in attributes:
        if inspect.getattr_static(value, key, None) is not None and hasattr(value, key):
            get, put = partial(getattr, value, key, None), partial(setattr, value, key)
            yield Place(f"{name}.{key}", get, put)


def _entries(
    before: str, held: MutableMapping[Any, Any], after: str = "", of: object = None
) -> Iterator[Place]:
    """Yield the places of a mapping's entries; of an object's when it is a copy of `of`'s."""
    owner = vars(of) if of is not None else held
    for key in list(held):
        yield _entry(before, owner, key, after)


def _entry(before: str, held: MutableMapping[Any, Any], key: object, after: str = "") -> Place:
    shown = repr(key) if after else str(key)
    return Place(f"{before}{shown}{after}", partial(held.get, key), partial(held.__setitem__, key))


def _value_of(held: contextvars.ContextVar[Any]) -> object:
    try:
        return held.get()
    except LookupError:
        return None


def _called(root: object) -> str:
    return str(getattr(root, "__qualname__", type(root).__qualname__))


def _itself(value: object) -> object:
    return value


def _refuse(_value: object) -> None:
    """Leave what cannot be set as it is."""
