"""Plain attributes of a model: read before and after forward, and restored.

    cell.state   Cell.count (of a class)   model.STEP (of a file)

Parameters and buffers are a bundle's own; any other attribute that one forward sets for the next
would be a constant of the trace. This file knows Python's objects; it knows no graphs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import random
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from bigbrain_fx.frontend.translation.sources import is_own, is_users

Marks = dict[str, Hashable]
OF_TORCH = frozenset(vars(nn.Module())) | {
    *("_initialize_hook", "_load_hook", "_forward_module"),
    *("_flat_weights", "_flat_weight_refs"),  # of recurrent layers: their parameters once more
}
FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_RECORDS = (types.SimpleNamespace, argparse.Namespace)  # options of a script: `self.args.scale`
_LISTS = (list, tuple, set, frozenset, collections.deque)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)
_Cached = functools._lru_cache_wrapper  # it would give a run what a trace has made
_DEEP = 5  # levels of containers and objects that are looked into
_LONG = 512  # entries: of a longer container the length alone counts
_SAMPLED = 64  # numbers of a tensor, evenly apart
_LARGE = 2**24  # bytes: a larger plain tensor is not copied


@dataclass(frozen=True)
class _Held:
    """An object, compared by identity and not by equality; `version` counts writes."""

    value: object
    version: int = 0

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _Held) and self.value is other.value
        return same and self.version == getattr(other, "version", 0)

    def __hash__(self) -> int:
        return id(self.value)


@dataclass
class Attributes:
    """All attributes at one moment.

    Attributes:
        numbers: whether plain tensors are put back, too.
        marks: attribute's name -> a mark of its value.
        parts: names of parameters and modules. paths: of all modules.
    """

    numbers: bool = True
    marks: dict[str, Marks] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _owners: list[tuple[Any, dict[str, object]]] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)

    @staticmethod
    def of(model: nn.Module, loss: object = None, *, numbers: bool = True) -> Attributes:
        """Record the attributes of modules, of their classes, and of the user's own files.

        Args:
            model: the user's.
            loss: the user's; its file counts, too.
            numbers: copy the numbers of plain tensors, to put them back; a trace writes none.
        """
        found = Attributes(numbers=numbers)
        for name, owner in owners(model, loss):
            kept = {key: value for key, value in items(owner) if _counts(owner, key, value)}
            found._owners.append((owner, kept))
            for key, cached in items(owner):
                if isinstance(cached, _Cached):
                    found._look_at_cache(f"{name}.{key}" if name else key, cached)
            for key, value in kept.items():
                found._look(f"{name}.{key}" if name else key, value)
        for path, part in model.named_modules():
            before = f"{path}." if path else ""
            found._look_at_module(before, part)
            found.paths.add(path)
        return found

    def look_at(self, name: str, value: object, write: Callable[[object], None]) -> None:
        """Record one more value, which `write` puts back; another name may have it, too."""
        self._seen = set()
        self._look(name, value)
        if isinstance(value, Tensor):
            self.marks[name]["numbers"] = _sample(value)
        self._undo.append(lambda: write(value))

    def keep(self, value: object, write: Callable[[object], None]) -> None:
        """Put back one more value, and what it holds; it counts as no attribute."""
        self._walk("", value, {}, 0)
        self._undo.append(lambda: write(value))

    def _look(self, name: str, value: object) -> None:
        marks: Marks = {}
        self._walk("", value, marks, 0)
        self.marks[name] = marks

    def _look_at_cache(self, name: str, cached: _Cached[Any]) -> None:
        """Note how often a function with a cache has computed: a call finds the cache empty."""
        self.marks[name] = {"": ("cache", cached.cache_info().misses)}
        self._undo.append(cached.cache_clear)

    def _look_at_module(self, before: str, part: nn.Module) -> None:
        """Record a module's own tensors and modules, which forward may change."""
        for key, parameter in part._parameters.items():
            needs = parameter is not None and parameter.requires_grad
            self.marks[f"{before}{key}"] = {"": _Held(parameter)}
            self.parts.add(f"{before}{key}")
            self.marks[f"{before}{key}.requires_grad"] = {"": ("bool", str(needs))}
            self._undo.append(lambda p=parameter, n=needs: _set_needs(p, n))  # type: ignore[misc]
        for key, child in part._modules.items():
            self.marks[f"{before}{key}"] = {"": _Held(child)}
            self.parts.add(f"{before}{key}")
        for key, buffer in part._buffers.items():
            kind = "None" if buffer is None else "a buffer"
            self.marks[f"{before}{key}"] = {"": ("buffer", kind)}
        for key in FORWARD_HOOKS:  # what forward has set once, and notes in a flag, goes with it
            self._look(f"{before}{key}", vars(part)[key])
        modules, buffers = dict(part._modules), dict(part._buffers)
        parameters = dict(part._parameters)
        self._undo.append(lambda: _put(part._parameters, parameters))
        self._undo.append(lambda: _put(part._modules, modules))
        self._undo.append(lambda: _put_unset(part._buffers, buffers))

    def _walk(self, path: str, value: Any, marks: Marks, depth: int) -> None:  # noqa: ANN401
        if type(value) in _PLAIN:
            marks[path] = (type(value).__name__, repr(value))
        elif isinstance(value, Tensor):
            marks[path] = _Held(value, 0 if value.is_inference() else value._version)
            if self.numbers:
                self._keep_numbers(value)
        elif isinstance(value, _OPAQUE) or depth > _DEEP or id(value) in self._seen:
            marks[path] = _Held(value)
        else:
            self._seen.add(id(value))
            self._walk_into(path, value, marks, depth)

    def _walk_into(self, path: str, value: Any, marks: Marks, depth: int) -> None:  # noqa: ANN401
        inner = getattr(value, "__dict__", None)
        if isinstance(value, Mapping) and hasattr(value, "items"):
            self._keep(value)
            parts = [(f"[{key!r}]", item) for key, item in _some(value.items(), len(value))]
        elif isinstance(value, _LISTS):
            self._keep(value)
            parts = [(f"[{i}]", item) for i, item in enumerate(_some(value, len(value)))]
        elif inner is not None and (type(value) in _RECORDS or is_users(file_of(type(value)))):
            self._keep(inner)
            parts = [(f".{key}", item) for key, item in inner.items()]
        else:
            marks[path] = _state(value)
            self._keep_dice(value)
            return
        marks[path] = (type(value).__name__, len(parts))
        for name, item in parts:
            self._walk(path + name, item, marks, depth + 1)

    def _keep(self, value: Any) -> None:  # noqa: ANN401  # any container
        if isinstance(value, dict):
            kept = dict(value)
            self._undo.append(lambda: _put(value, kept))
        elif isinstance(value, list | collections.deque):
            items = list(value)
            self._undo.append(lambda: _putitems(value, items))
        elif isinstance(value, set):
            members = set(value)
            self._undo.append(lambda: _put_members(value, members))

    def _keep_dice(self, value: Any) -> None:  # noqa: ANN401  # any object
        if isinstance(value, random.Random):
            drawn = value.getstate()
            self._undo.append(lambda: value.setstate(drawn))
        elif isinstance(value, torch.Generator):
            with _untraced():
                place = value.get_state()
            self._undo.append(lambda: (value.set_state(place), None)[1])
        elif hasattr(value, "bit_generator"):
            inner = value.bit_generator
            self._undo.append(lambda state=inner.state: setattr(inner, "state", state))  # type: ignore[misc]

    def _keep_numbers(self, value: Tensor) -> None:
        if type(value) is not Tensor or value.is_inference() or held_bytes(value) > _LARGE:
            return
        numbers, version = value.detach().clone(), value._version
        self._undo.append(lambda: _put_numbers(value, numbers, version))

    def put_back(self) -> None:
        """Restore every attribute to its recorded value."""
        for undo in self._undo:
            undo()
        for owner, kept in self._owners:
            now = {key: value for key, value in items(owner) if _counts(owner, key, value)}
            for key in now.keys() | kept.keys():
                if key not in kept:
                    _delete(owner, key)
                elif now.get(key) is not kept[key] or key not in now:
                    _set(owner, key, kept[key])

    def is_part(self, name: str) -> bool:
        """Whether it is a parameter or a module."""
        return name in self.parts

    def said(self, name: str) -> str:
        """Describe the recorded value of an attribute."""
        marks = self.marks.get(name)
        if marks is None:
            return "not there"
        top = marks.get("")
        value = top.value if isinstance(top, _Held) else None
        if isinstance(value, Tensor):
            return f"a tensor {tuple(value.shape)}"
        if isinstance(top, tuple) and len(top) == 2 and isinstance(top[0], str):
            return f"{top[0]} of {top[1]}" if type(top[1]) is int else str(top[1])[:60]
        return "an object" if value is None else f"a {type(value).__name__}"

    def moved(self, now: Attributes) -> list[str]:
        """Name the attributes that have changed, in order."""
        names = dict.fromkeys((*self.marks, *now.marks))
        return [name for name in names if self.marks.get(name) != now.marks.get(name)]


# --------------------------------------------------------------------------- whose attributes


def owners(model: nn.Module, loss: object) -> Iterator[tuple[str, object]]:
    """Yield modules, their classes, and the files that define them, each with its name."""
    kinds: dict[type, None] = {}
    for path, part in model.named_modules():
        yield path, part
        kinds.update(dict.fromkeys(type(part).__mro__))
    if not isinstance(loss, nn.Module) and is_users(file_of(type(loss))):
        yield type(loss).__name__, loss
    own = [kind for kind in kinds if is_own(file_of(kind))]
    yield from ((kind.__qualname__, kind) for kind in own)
    files = dict.fromkeys([kind.__module__ for kind in own])
    if is_own(str(getattr(getattr(loss, "__code__", None), "co_filename", ""))):
        files[str(getattr(loss, "__module__", ""))] = None
    yield from ((name, sys.modules[name]) for name in files if name in sys.modules)


def file_of(kind: type) -> str:
    """Return the file that defines a class."""
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def items(owner: object) -> list[tuple[str, object]]:
    """Return the attributes of an object."""
    return list(vars(owner).items())


def _counts(owner: object, key: str, value: object) -> bool:
    """Whether an attribute may be state: no method, no import, nothing of torch's."""
    if isinstance(owner, nn.Module):
        return key not in OF_TORCH and not isinstance(value, nn.Module)
    if key.startswith("__") or isinstance(value, _OPAQUE):
        return False
    return isinstance(value, (*_PLAIN, *_LISTS, dict, Tensor, random.Random, torch.Generator))


def _set(owner: object, key: str, value: object) -> None:
    if isinstance(owner, type):
        setattr(owner, key, value)
    else:
        vars(owner)[key] = value


def _delete(owner: object, key: str) -> None:
    if isinstance(owner, type):
        delattr(owner, key)
    else:
        vars(owner).pop(key, None)


# --------------------------------------------------------------------------- what is in them


def _some(values: Any, count: int) -> list[Any]:  # noqa: ANN401  # any iterable
    return list(values) if count <= _LONG else []


def held_bytes(tensor: Tensor) -> int:
    """Return how many bytes a tensor of any layout holds: a sparse one has no `nbytes`."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    parts = _SPARSE_PARTS.get(tensor.layout, ())
    return sum(getattr(tensor, part)().nbytes for part in parts)


_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: (*_ROWS, "values"),
    torch.sparse_bsr: (*_ROWS, "values"),
    torch.sparse_csc: (*_COLUMNS, "values"),
    torch.sparse_bsc: (*_COLUMNS, "values"),
}


def _state(value: Any) -> Hashable:  # noqa: ANN401  # any object
    """Return a mark of an object's state: of generators the position, of arrays the numbers."""
    if isinstance(value, torch.Generator):
        with _untraced():
            return bytes(value.get_state().numpy())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, itertools.count):
        return repr(value)
    if hasattr(value, "bit_generator"):
        return repr(value.bit_generator.state)
    if hasattr(value, "tobytes") and getattr(value, "nbytes", _LARGE) < _LARGE:
        return value.tobytes()  # type: ignore[no-any-return]
    return _Held(value)


def _sample(tensor: Tensor) -> Hashable:
    """Return a mark of some numbers: a write through `.data` counts in no version."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    flat = tensor.detach().flatten()
    step = max(1, flat.numel() // _SAMPLED)
    return tensor.data_ptr(), repr(flat[::step].tolist())


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Let new tensors have numbers, in a trace too."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _put(owner: dict[Any, Any], kept: Mapping[Any, object]) -> None:
    if owner.keys() == kept.keys() and all(owner[key] is kept[key] for key in kept):
        return
    owner.clear()
    owner.update(kept)


def _put_unset(owner: dict[str, Any], kept: Mapping[str, object]) -> None:
    """Remove buffers that were not set before; other buffers stay as forward set them."""
    for key in [key for key in owner if kept.get(key) is None]:
        owner.pop(key)
    owner.update({key: None for key, value in kept.items() if value is None})


def _putitems(owner: Any, kept: list[object]) -> None:  # noqa: ANN401  # a list or a deque
    if len(owner) == len(kept) and all(a is b for a, b in zip(owner, kept, strict=True)):
        return
    owner.clear()
    owner.extend(kept)


def _put_members(owner: set[Any], kept: set[Any]) -> None:
    owner.clear()
    owner.update(kept)


def _put_numbers(tensor: Tensor, numbers: Tensor, version: int) -> None:
    if tensor._version != version or _has_moved(tensor, numbers):
        with torch.no_grad():
            tensor.copy_(numbers)


_WITH_NUMBERS = {Tensor, nn.Parameter}  # those of a trace have none


def _has_moved(tensor: Tensor, numbers: Tensor) -> bool:
    """Whether a tensor has other numbers; a batch norm's statistics count in no version."""
    if tensor.layout is not torch.strided or not {type(tensor), type(numbers)} <= _WITH_NUMBERS:
        return False
    with _disable_current_modes():
        return not tensor.is_meta and not torch.equal(tensor, numbers)


def _set_needs(parameter: Tensor | None, needs: bool) -> None:
    if parameter is not None and parameter.requires_grad != needs:
        parameter.requires_grad_(needs)
