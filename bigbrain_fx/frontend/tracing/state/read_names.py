"""Values that the user's functions read beside their arguments, each with its place.

    def loss(output, batch):
        return mse(output, batch["y"]) + beta * output.pow(2).mean()     beta: a global, a closure

A trace has the value of its moment; a loop that sets another value later reaches no device.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from bigbrain_fx.frontend.tracing.state.attributes import OF_TORCH, Attributes, file_of
from bigbrain_fx.frontend.translation.sources import is_own

_CALLED = ("forward", "backward", "setup_context", "__call__")  # of modules and Functions
_FEW = 64  # entries of a collection that are looked at one by one
_NO_VALUE = (type, ModuleType, FunctionType, MethodType)
_NO_OBJECTS = ("builtins", "logging", "numpy", "threading", "torch", "weakref", "_thread")


@dataclass(frozen=True)
class Place:
    """One place of a value that a function reads.

    Attributes:
        holder: a mapping, a list, a cell of a closure, or an object or class with an attribute.
            The place of one stands for what the loop sets there later, too.
        key: of the mapping, or the attribute.
        is_container: it has places of its own, and only its form counts.
    """

    holder: Any
    key: Any
    is_container: bool = False

    def read(self) -> Any:  # noqa: ANN401  # any object
        """Return the value of now; None where there is none."""
        holder = self._held()
        try:
            is_item = isinstance(holder, dict | list)
            return holder[self.key] if is_item else getattr(holder, self.key, None)
        except (LookupError, ValueError):  # of a closure: not bound yet
            return None

    def write(self, value: object) -> None:
        """Set the value; of a container, whose own places are set, nothing."""
        holder = self._held()
        if self.is_container or holder is None:
            return
        if isinstance(holder, dict | list):
            holder[self.key] = value
        else:
            setattr(holder, self.key, value)

    def form(self) -> object:
        """Return a mark of a container: its class, and how much is in it."""
        value = self.read()
        return type(value).__qualname__, len(value) if isinstance(value, dict | list) else 0

    def _held(self) -> Any:  # noqa: ANN401  # any object
        return self.holder.read() if isinstance(self.holder, Place) else self.holder


def read_names(model: nn.Module, loss: object) -> dict[str, Place]:
    """Return what a model's classes and a loss read, by a name to show: "`beta`".

    Numbers of the model's own modules have the names that `Attributes` has: "head.scale".

    Args:
        model: functions of its classes are followed, where those are the user's own.
        loss: a function, a method, a partial, a module or an object that is called; None without.
    """
    return _read(model, loss).places


def read_functions(model: nn.Module, loss: object) -> dict[str, Place]:
    """Return the functions that they read and call, likewise: a criterion of two phases."""
    return _read(model, loss).functions


def _read(model: nn.Module, loss: object) -> _Reading:
    found = _Reading(model)
    if loss is not None:
        found.add(getattr(loss, "__name__", type(loss).__name__), loss, loss, is_given=True)
    found.follow()
    return found


def places_of(model: nn.Module, loss: object) -> list[Place]:
    """Return the places of what they read, but for names of a closure that are not bound yet."""
    places = read_names(model, loss).values()
    return [p for p in places if p.read() is not None or not isinstance(p.holder, CellType)]


@contextmanager
def reads_kept(model: nn.Module, loss: object) -> Iterator[None]:
    """Put back at the end what they read elsewhere: a criterion's centre, a list of losses."""
    kept = Attributes()
    for place in places_of(model, loss):
        kept.keep(place.read(), place.write)
    try:
        yield
    finally:
        kept.put_back()


class _Reading:
    """A walk over functions: what one reads may be another one, or an object with functions.

    Each object is known by where it is: the object itself, or the place where it was found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: dict[str, Place] = {}
        self.functions: dict[str, Place] = {}
        self._names = {*_CALLED}  # that followed functions look up
        self._codes: set[CodeType] = set()
        self._seen = {id(part) for part in model.modules()}
        named = model.named_modules()
        self._parts = [(path, part) for path, part in named if is_own(file_of(type(part)))]
        self._kinds: dict[type, None] = {}
        self._add_kinds(*(type(part) for part in model.modules()))
        self._objects: dict[int, tuple[str, object, Any]] = {}

    def follow(self) -> None:
        """Look up all names in all objects, until nothing is new."""
        before = None
        while before != (before := (len(self._names), len(self._objects), len(self._kinds))):
            for kind in list(self._kinds):
                self._look_up_functions(kind)
            for path, part in self._parts:
                for key in self._names & vars(part).keys():
                    if type(vars(part)[key]) in (int, float):
                        name = f"{path}.{key}" if path else key
                        self.places.setdefault(name, Place(vars(part), key))
            for name, value, where in list(self._objects.values()):
                for key in self._names & _attributes(value):
                    self._add_place(f"{name}.{key}", Place(where, key))

    def _look_up_functions(self, kind: type) -> None:
        for key in self._names & vars(kind).keys():
            held = vars(kind)[key]
            function = getattr(held, "__func__", getattr(held, "fget", held))
            if isinstance(function, FunctionType):
                self._add_function(function)

    def add(self, name: str, value: Any, where: Any, *, is_given: bool = False) -> None:  # noqa: ANN401
        """Follow a value that a function reads, or the loss that is given."""
        if isinstance(value, FunctionType):
            self._add_function(value, is_given=is_given)
        elif isinstance(value, MethodType):
            self.add(name, value.__func__, value.__func__, is_given=is_given)
            self.add("self", value.__self__, value.__self__)
        elif isinstance(value, functools.partial):
            for held in (value.func, *value.args, *value.keywords.values()):
                self.add(name, held, held, is_given=is_given)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._add_inner(name, value, where)

    def _add_inner(self, name: str, value: Any, where: Any) -> None:  # noqa: ANN401  # any object
        if isinstance(value, nn.Module):
            self._add_module(name, value, where)
        elif isinstance(value, dict | list):
            keys = list(value if isinstance(value, dict) else range(len(value)))
            for key in keys:
                self._add_place(f"{name}[{key!r}]", Place(where, key))
        elif _has_places(value) or (isinstance(value, type) and is_own(file_of(value))):
            self._add_kinds(value if isinstance(value, type) else type(value))
            self._objects[id(value)] = name, value, where

    def _add_module(self, name: str, part: nn.Module, where: Any) -> None:  # noqa: ANN401
        self._add_kinds(type(part))
        for kind in ("_parameters", "_buffers", "_modules"):
            for key in vars(part)[kind]:
                self._add_place(f"{name}.{key}", Place(Place(where, kind), key))
        for key in vars(part).keys() - OF_TORCH:
            self._add_place(f"{name}.{key}", Place(where, key))

    def _add_kinds(self, *kinds: type) -> None:
        own = (kind for each in kinds for kind in each.__mro__ if is_own(file_of(kind)))
        self._kinds.update(dict.fromkeys(own))

    def _add_place(self, name: str, place: Place) -> None:
        value = place.read()
        has_places = _has_places(value)
        self.add(name, value, place if has_places else value)
        if not isinstance(value, _NO_VALUE):
            self.places.setdefault(f"`{name}`", replace(place, is_container=has_places))
        elif isinstance(value, FunctionType | MethodType | BuiltinFunctionType):
            self.functions.setdefault(f"`{name}`", place)

    def _add_function(self, function: FunctionType, *, is_given: bool = False) -> None:
        code = function.__code__
        if code in self._codes or not (is_given or is_own(code.co_filename)):
            return
        self._codes.add(code)
        self._names |= _names(code, _OF_OBJECTS)
        for name, place in _places(function):
            self._add_place(name, place)


def _places(function: FunctionType) -> Iterator[tuple[str, Place]]:
    """Yield the globals and the closure of a function, and what it reads of the user's modules."""
    held, attributes = function.__globals__, _names(function.__code__, _OF_OBJECTS)
    for name in _names(function.__code__, _GLOBALS) & held.keys():
        file = getattr(held[name], "__file__", None)
        if isinstance(held[name], ModuleType) and is_own(file or ""):
            of_module = vars(held[name])
            for key in attributes & of_module.keys():
                yield f"{name}.{key}", Place(of_module, key)
        else:
            yield name, Place(held, name)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, Place(cell, "cell_contents")) for name, cell in cells)


def _has_places(value: object) -> bool:
    """Whether parts of a value are looked at one by one."""
    if isinstance(value, dict | list):
        return 0 < len(value) <= _FEW
    if isinstance(value, nn.Module):
        return True
    is_known = type(value).__module__.partition(".")[0] not in _NO_OBJECTS
    return is_known and hasattr(value, "__dict__") and not isinstance(value, _NO_VALUE)


def _attributes(holder: object) -> set[str]:
    """Return the names of an object's or a class's plain attributes; of its own classes, too."""
    kinds = (holder if isinstance(holder, type) else type(holder)).__mro__
    of_kinds = [vars(kind) for kind in kinds if is_own(file_of(kind))]
    found = {k: v for held in of_kinds for k, v in held.items() if not _is_function(v)}
    return {*found, *getattr(holder, "__dict__", {})}


def _is_function(value: object) -> bool:
    return hasattr(value, "__get__")  # a property is one, too


_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_OF_OBJECTS = ("LOAD_ATTR", "LOAD_METHOD")


def _names(code: CodeType, kinds: Sequence[str]) -> set[str]:
    """Return the names that instructions of some kinds look up, in functions within, too."""
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in kinds}
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return found.union(*(_names(each, kinds) for each in inner))
