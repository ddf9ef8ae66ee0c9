"""Places that forward's code can reach beside weights and buffers: where numbers may be kept.

    model ─▶ attributes, slots, classes, hooks ─▶ functions ─▶ closures, defaults, names of the file

This file knows Python's objects; it runs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import numbers
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.state.attributes import OF_TORCH, file_of
from bigbrain_fx.frontend.translation.sources import is_own, is_users

_DEEP = 12  # levels that are looked into
_FOREIGN = 4  # levels of those that a library's object takes
_MANY = 50_000  # places
_LONG = 512  # entries: of a longer container the length alone counts
_FEW = 16  # elements: a larger tensor is no counter
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class Place:
    """Something that holds a value: where, and how the value is read and set there."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def places(roots: Iterable[object], leaving: Iterable[object] = ()) -> Iterator[Place]:
    """Yield the places of numbers, small tensors and lists that objects reach.

    What is in `leaving` is not looked into.
    """
    yield from holding(roots, is_leaf, leaving)


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
            elif not isinstance(held, numbers.Number | str | bytes | None):
                step = 1 if _is_near(held) else _FOREIGN
                yield from self.into(place, depth + step)


def _read_all(home: Place, value: object) -> list[tuple[Place, Any]]:
    found: list[tuple[Place, Any]] = []
    with contextlib.suppress(Exception):  # the user's own properties, or a library's
        found.extend((place, place.get()) for place in _inside(home, value))
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
    elif isinstance(value, property):
        yield from _read(name, value, ("fget",))
    elif isinstance(value, staticmethod | classmethod):
        yield from _read(name, value, ("__func__",))
    elif isinstance(value, type):
        yield from _in_class(name, value)
    elif isinstance(value, types.ModuleType):
        if is_own(str(getattr(value, "__file__", None) or "")):
            yield from _entries(f"{name}.", vars(value))
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


def _called(root: object) -> str:
    return str(getattr(root, "__qualname__", type(root).__qualname__))


def _itself(value: object) -> object:
    return value


def _refuse(_value: object) -> None:
    """Leave what cannot be set as it is."""
