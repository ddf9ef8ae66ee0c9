"""Trial whether modules with calls that depend on their own plain attributes may be opaque.

    modules with attributes that a call of the model moves ─▶ let each of their calls begin as the
    first one did, while other code sees them move on ─▶ equal numbers, now and a million calls on?

If so, all state between calls is in attributes of these modules, and only they read and write it. A
device that runs each module as one op, and records its attributes, computes as the user's loop
does. The module knows calls and attributes, not graphs.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.state.attributes import OF_TORCH
from bigbrain_fx.frontend.tracing.state.python_rng import random_state_kept
from bigbrain_fx.runtime import UnkeptError, Values, put_into, taken_of

_PREFIX = "state:"
_NEARLY_ALL = 0.95  # of the parameters: nothing would be split
_RUNS = 3
Marks = dict[tuple[str, str], tuple[str, list[Tensor]]]
"""Path of a module and name of its attribute -> the value as JSON, and its tensors' numbers."""


def marks(module: nn.Module) -> Marks:
    """Return the plain attributes of a module and its modules, as far as they are data."""
    found: Marks = {}
    parameters = dict(module.named_parameters())
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            values = Values(parameters, "")
            with contextlib.suppress(UnkeptError):
                text = json.dumps(values.encode(value)) if name not in OF_TORCH else ""
                tensors = [tensor.clone() for tensor in values.tensors.values()]
                if text and not any(tensor.is_meta for tensor in tensors):
                    found[path, name] = text, tensors
    return found


def moved(before: Marks, now: Marks) -> list[tuple[str, str]]:
    """Return the attributes that are others now."""
    return [key for key in {**before, **now} if not _same(before.get(key), now.get(key))]


def _same(one: tuple[str, list[Tensor]] | None, other: tuple[str, list[Tensor]] | None) -> bool:
    if one is None or other is None or one[0] != other[0]:
        return False
    return all(map(torch.equal, one[1], other[1]))


@dataclass(frozen=True)
class Snapshot:
    """Part of a module that a checkpoint would have."""

    text: str
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(module: nn.Module) -> Snapshot:
        """Return it as of now."""
        facts, tensors = taken_of(module, _PREFIX)
        return Snapshot(json.dumps(facts), {name: t.clone() for name, t in tensors.items()})

    def put_into(self, module: nn.Module) -> None:
        """Let a module have it, as a process that replaces a dead one lets it."""
        put_into(module, _PREFIX, json.loads(self.text), dict(self.tensors))


class NotOpaqueError(Exception):
    """Report a module that cannot be opaque: others read or write its state, or call it twice."""


@dataclass
class _Tried:
    """One module: each call begins as the first one did, while other code sees its state move."""

    module: nn.Module
    first: Snapshot
    left: Marks
    calls: int = 0

    def begin(self) -> None:
        """Begin a run of the model: a change of state since the last one was no call's."""
        self.left, self.calls = marks(self.module), 0

    def end(self) -> None:
        """Require one call in the run, and no write since."""
        if self.calls != 1 or moved(self.left, marks(self.module)):
            raise NotOpaqueError

    def call(
        self, original: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, Any]
    ) -> object:
        """Run a call twice: from the present state, for its effects, and from the first one."""
        if moved(self.left, marks(self.module)):
            raise NotOpaqueError
        self.calls += 1
        with aside(self.module):
            original(*args, **kwargs)
        self.left, after = marks(self.module), Snapshot.of(self.module)
        self.first.put_into(self.module)
        try:
            return original(*args, **kwargs)
        finally:
            after.put_into(self.module)


@contextmanager
def aside(module: nn.Module) -> Iterator[None]:
    """Put the numbers of buffers and frozen weights back, and all random states."""
    held = [*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)]
    kept = [(tensor, tensor.detach().clone()) for tensor in held]
    with random_state_kept(), torch.random.fork_rng(devices=[]):
        yield
    with torch.no_grad():
        for tensor, numbers in kept:
            tensor.copy_(numbers)


def moving_modules(model: nn.Module, run: Callable[[], object]) -> tuple[str, ...]:
    """Return the outermost modules with attributes that move as the model runs, by path.

    None where nearly all of the model is in them, or where one has tensors in attributes from the
    start. A device that builds the model without numbers would lack such tensors.
    """
    before = marks(model)
    run()
    run()
    paths = dict.fromkeys(path for path, _ in moved(before, marks(model)) if path)
    outer = [p for p in paths if not any(p.startswith(f"{other}.") for other in paths)]
    held = {id(p): p.numel() for path in outer for p in model.get_submodule(path).parameters()}
    share = sum(held.values()) / max(1, sum(p.numel() for p in model.parameters()))
    has_tensors = any(held and is_within(path, outer) for (path, _), (_, held) in before.items())
    return () if share > _NEARLY_ALL or has_tensors else tuple(outer)


def is_within(path: str, outer: Collection[str]) -> bool:
    """Whether a module is one of some, or inside one."""
    return any(f"{path}.".startswith(f"{other}.") for other in outer)


@contextmanager
def begun_anew(
    model: nn.Module, paths: Sequence[str]
) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Let each call of some modules begin as the first one does; yield a runner of the model.

    The runner raises `NotOpaqueError` where other code than the calls reads or writes that state.
    It also does where a run calls a module twice, or not at all.
    """
    parts = map(model.get_submodule, paths)
    tried = [_Tried(part, Snapshot.of(part), {}) for part in parts]

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
    """Let a module's calls be a trial's: its class is exchanged, hooks included."""
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
    """Whether runs are equal after states of modules are saved and restored between them."""
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
