"""Modules whose calls go by what they have left in plain attributes: may they be opaque?

    whose attributes does a call of the model move? ─▶ let each call of these begin as the first
    one did, while all others see them move on ─▶ the same numbers, now and a million calls later?

Then all that is kept from call to call is in attributes of these modules, only they read and write
it, and a device that runs each whole, and records its attributes, computes as the user's loop does.
It knows calls and attributes; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.state.python_rng import random_state_kept
from bigbrain_fx.runtime import put_into, taken_of

_PREFIX = "state:"
_NEARLY_ALL = 0.95  # of the parameters: nothing would be split
_RUNS = 3


@dataclass(frozen=True)
class Snapshot:
    """What a module has in plain attributes: those that are data."""

    text: str
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(module: nn.Module) -> Snapshot:
        """Return it as of now."""
        facts, tensors = taken_of(module, _PREFIX)
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return Snapshot(json.dumps(facts, sort_keys=True), copies)

    def put_into(self, module: nn.Module) -> None:
        """Let a module have it, as a process that replaces a dead one lets it."""
        put_into(module, _PREFIX, json.loads(self.text), dict(self.tensors))

    def is_as(self, other: Snapshot) -> bool:
        """Whether both are the same, bit by bit."""
        if self.text != other.text or self.tensors.keys() != other.tensors.keys():
            return False
        return all(torch.equal(t, other.tensors[n]) for n, t in self.tensors.items())

    def moved(self, now: Snapshot) -> list[str]:
        """Return the attributes that are others now, by path."""
        before, after = self._values(), now._values()
        return [n for n in {**before, **after} if not _same(before.get(n), after.get(n))]

    def _values(self) -> dict[str, tuple[str, list[Tensor]]]:
        parts: dict[str, dict[str, Any]] = json.loads(self.text)["parts"]
        return {
            f"{path}.{name}".removeprefix("."): (_shape_of(entry), self._in(entry))
            for path, held in parts.items()
            for name, entry in held.items()
        }

    def _in(self, entry: object) -> list[Tensor]:
        return [self.tensors[name] for name in _tensor_names(entry)]


def _same(one: tuple[str, list[Tensor]] | None, other: tuple[str, list[Tensor]] | None) -> bool:
    if one is None or other is None or one[0] != other[0]:
        return False
    return all(map(torch.equal, one[1], other[1]))


def _tensor_names(entry: object) -> Iterator[str]:
    """Yield the names of tensors in the JSON of a value."""
    if isinstance(entry, list):
        for item in entry:
            yield from _tensor_names(item)
    elif isinstance(entry, dict):
        if entry["is"] == "tensor":
            yield entry["of"]
        else:
            yield from _tensor_names(entry["of"])


def _shape_of(entry: object) -> str:
    """Return the JSON of a value, whatever its tensors are called there."""
    text = json.dumps(entry)
    for number, name in enumerate(_tensor_names(entry)):
        text = text.replace(json.dumps(name), f'"{number}"', 1)
    return text


class NotOpaqueError(Exception):
    """Report a module that cannot be opaque: others read or write its state, or call it twice."""


@dataclass
class _Tried:
    """One module, each of whose calls begins as the first one did; others see its state move."""

    module: nn.Module
    first: Snapshot
    left: Snapshot
    calls: int = 0

    def begin(self) -> None:
        """Hear that a run of the model begins: whatever moved the state meanwhile was no call."""
        self.left, self.calls = Snapshot.of(self.module), 0

    def end(self) -> None:
        """Require one call in the run, and that nobody has written since."""
        if self.calls != 1 or not Snapshot.of(self.module).is_as(self.left):
            raise NotOpaqueError

    def call(
        self, original: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, Any]
    ) -> object:
        """Run a call from where the state is, for what it leaves, and from where it was first."""
        if not Snapshot.of(self.module).is_as(self.left):
            raise NotOpaqueError
        self.calls += 1
        with random_state_kept(), torch.random.fork_rng(devices=[]), _tensors_kept(self.module):
            original(*args, **kwargs)
        self.left = Snapshot.of(self.module)
        self.first.put_into(self.module)
        try:
            return original(*args, **kwargs)
        finally:
            self.left.put_into(self.module)


@contextmanager
def _tensors_kept(module: nn.Module) -> Iterator[None]:
    """Put the numbers of buffers and frozen weights back."""
    held = [*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)]
    kept = [(tensor, tensor.detach().clone()) for tensor in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, numbers in kept:
                tensor.copy_(numbers)


def moving_modules(model: nn.Module, run: Callable[[], object]) -> tuple[str, ...]:
    """Return the outermost modules whose attributes move as the model runs, by path.

    None where nearly all of the model is in them, or where one has tensors in attributes from the
    start: a device that builds the model without numbers would lack theirs.
    """
    before = {path: _own(part) for path, part in model.named_modules() if path}
    run()
    run()
    moved = [path for path, was in before.items() if was.moved(_own(model.get_submodule(path)))]
    outer = [p for p in moved if not any(p.startswith(f"{other}.") for other in moved)]
    held = {id(p): p.numel() for path in outer for p in model.get_submodule(path).parameters()}
    share = sum(held.values()) / max(1, sum(p.numel() for p in model.parameters()))
    has_tensors = any(was.tensors for p, was in before.items() if _is_in(p, outer))
    return () if share > _NEARLY_ALL or has_tensors else tuple(outer)


def _is_in(path: str, outer: Sequence[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in outer)


def _own(part: nn.Module) -> Snapshot:
    """Return the attributes of a module itself; of those within each has its own."""
    found = Snapshot.of(part)
    facts = json.loads(found.text)
    own = facts["parts"][""]
    names = {*_tensor_names([*own.values()])}
    text = json.dumps({"parts": {"": own}})
    return Snapshot(text, {n: t for n, t in found.tensors.items() if n in names})


@contextmanager
def begun_anew(
    model: nn.Module, paths: Sequence[str]
) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Let each call of some modules begin as the first one does; yield what runs the model so.

    What it yields raises `NotOpaqueError` where others than the calls read or write that state, or
    where a run calls a module twice, or not at all.
    """
    parts = map(model.get_submodule, paths)
    tried = [_Tried(part, first, first) for part, first in ((p, Snapshot.of(p)) for p in parts)]

    def run(work: Callable[[], Any]) -> Any:  # noqa: ANN401  # of any kind
        for each in tried:
            each.begin()
        found = work()
        for each in tried:
            each.end()
        return found

    with ExitStack() as stack:
        for each in tried:
            stack.enter_context(_called_as(each))
        yield run


@contextmanager
def _called_as(tried: _Tried) -> Iterator[None]:
    """Let a module's calls be those of a trial: its class is exchanged, hooks are part of them."""
    module, kind = tried.module, type(tried.module)

    def called(self: nn.Module, *args: object, **kwargs: object) -> object:
        return tried.call(functools.partial(kind.__call__, self), args, kwargs)

    names = {"__call__": called, "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), {**names, "__qualname__": kind.__qualname__})
    try:
        yield
    finally:
        module.__class__ = kind


def goes_on(
    model: nn.Module, paths: Sequence[str], run: Callable[[], Sequence[Tensor | None]]
) -> bool:
    """Whether runs are alike where states of modules are written and read again between them."""
    firsts = {path: Snapshot.of(model.get_submodule(path)) for path in paths}
    with contextlib.suppress(Exception):  # the user's own code
        plain = [run() for _ in range(_RUNS)]
        for path, first in firsts.items():
            first.put_into(model.get_submodule(path))
        for expected in plain:
            for part in map(model.get_submodule, paths):
                Snapshot.of(part).put_into(part)
            if not _alike(run(), expected):
                return False
        return True
    return False


def _alike(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return len(one) == len(other) and all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )
