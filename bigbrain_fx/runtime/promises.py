"""Results that a backward recomputes instead of finding them saved.

    forward     x ──▶ F.gelu ──▶ y ──▶ down        of all that autograd saves, y is left out
    backward    x ──▶ F.gelu ──▶ y ──▶ gradient of down's weight

`y = again(F.gelu, x)` runs the function. An op that saves y for its backward, or what the function
itself saves, gets a promise in its place: the function and its arguments. The first backward that
asks runs it once more, with the same arguments, under the same autocast and with gradients on. The
same kernels give the same bits. Its results go after their last use. An argument
that is itself recomputed is a promise, too, so chains of any length hold only what they began with.

torch.utils.checkpoint frees what is inside a region; here the result goes as well, and only it is
recomputed, not the products that read it. Outside of a device (`Stage0` in somebody's own loop)
`again(f, x)` is f(x).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .coded import MisuseError
from .device import Device


class Held(Protocol):
    """Placeholder of a tensor that autograd holds."""

    def tensor(self) -> Tensor:
        """Return the tensor."""


_Noted: TypeAlias = "dict[int, tuple[StorageWeakRef, _Made]]"


class _Now(threading.local):
    """Values that the current forward can recompute: storage -> operation; None: nothing.

    Devices of one process have a thread each: while members of a group exchange, others go on.
    """

    noted: _Noted | None = None


_now = _Now()


def again(function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401  # as the function's
    """Run a function; its result, and what it saves, are recomputed when a backward needs them.

    The function may draw nothing, write nothing in place, and give the same for the same arguments.
    """
    if _now.noted is None or not torch.is_grad_enabled():
        return function(*args)
    made = _Made(function, tuple(map(_argument, args)), _autocast(args))
    noted, _now.noted = _now.noted, None  # what is called inside is made again as a part of it
    try:
        with saved_tensors_hooks(made.inside, _unpack):
            result = function(*args)
    finally:
        _now.noted = noted
    made.note(result, args, noted)
    return result


@contextlib.contextmanager
def making_again() -> Iterator[None]:
    """Let autograd hold promises for what `again` makes in the block."""
    _now.noted = {}
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _now.noted = None  # a storage is known while its forward runs, and never by another's


def _pack(tensor: Tensor) -> Held:
    """Return what autograd holds: a promise where one can be given, else the tensor."""
    storage = _storage(tensor) if _now.noted else None
    if _now.noted and storage is not None and storage._cdata in _now.noted:
        _, made = _now.noted[storage._cdata]
        if made.can_give(tensor):
            return made.promise(tensor)
    return _Kept(tensor, tensor._version)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None for one of several (sparse, nested)."""
    return None if tensor.layout is not torch.strided else tensor.untyped_storage()


def _unpack(held: Held) -> Tensor:
    return held.tensor()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor as it is; with hooks autograd leaves it to them to see that nobody wrote into it."""

    value: Tensor
    version: int

    def tensor(self) -> Tensor:
        if self.value._version != self.version:
            raise MisuseError(
                "a value that its backward needs was written in place after it was read: write "
                "into a copy, or leave out --activation-checkpointing",
                code="BX5114",
            )
        return self.value


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a function that runs again."""

    held: Held
    requires_grad: bool

    def value(self) -> Tensor:
        return self.held.tensor().detach().requires_grad_(self.requires_grad)


def _argument(value: Any) -> Any:  # noqa: ANN401  # numbers and modules stay as they are
    if isinstance(value, tuple | list) and any(isinstance(part, Tensor) for part in value):
        raise MisuseError(
            "a list of tensors is no argument of again(...): give each by itself", code="BX5115"
        )
    if not isinstance(value, Tensor):
        return value
    return _Argument(_pack(value.detach()), value.requires_grad)


def _autocast(args: tuple[Any, ...]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what the second run runs in, as the first one does now."""
    kind = next((value.device.type for value in args if isinstance(value, Tensor)), "cpu")
    is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    if not is_on:
        return contextlib.nullcontext
    return lambda: torch.autocast(kind, dtype=dtype)


@dataclass(eq=False)
class _Made:
    """One run of a function: how to run it again, and what is still asked for of it.

    Attributes:
        saved: how many tensors it saved.
        users: how many hold a promise of its result.
        inner: by place, what it saved in its second run and nobody has taken yet.
        result: of its second run, while somebody may ask for it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    saved: int = 0
    users: int = 0
    inner: dict[int, Tensor] = field(default_factory=dict)
    result: Tensor | None = None
    dtype: torch.dtype | None = None
    version: int = 0
    nbytes: int = 0

    def inside(self, _: Tensor) -> Held:
        """Promise what the function itself saves."""
        self.saved += 1
        return _Inner(self, self.saved - 1)

    def note(self, result: object, args: tuple[Any, ...], noted: _Noted) -> None:
        """Let others hold promises of the result, where it has a storage of its own."""
        if not isinstance(result, Tensor):
            return
        storage = _storage(result)
        read = [_storage(arg) for arg in args if isinstance(arg, Tensor)]
        if storage is None or storage._cdata in [r._cdata for r in read if r is not None]:
            return
        self.dtype, self.version, self.nbytes = result.dtype, result._version, storage.nbytes()
        # The weak reference keeps the address from being given to another storage.
        noted[storage._cdata] = StorageWeakRef(storage), self

    def can_give(self, tensor: Tensor) -> bool:
        """Whether a view of the result can be made of another run's result."""
        is_plain = tensor.dtype == self.dtype and not tensor.is_conj() and not tensor.is_neg()
        return is_plain and tensor._version == self.version

    def promise(self, tensor: Tensor) -> Held:
        """Promise a view of the result."""
        self.users += 1
        return _Result(self, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def take_inner(self, place: int) -> Tensor:
        """Return what the function saves at a place."""
        if place not in self.inner:
            self._run()
        return self.inner.pop(place)

    def take_result(self) -> Tensor:
        """Return the result; it is kept while others hold promises of it."""
        if self.result is None:
            self._run()
        assert self.result is not None
        self.users, found = self.users - 1, self.result
        if self.users <= 0:
            self.result = None
        return found

    def _run(self) -> None:
        args = [a.value() if isinstance(a, _Argument) else a for a in self.args]
        found: list[Tensor] = []
        # Detached: a node holds its hooks, these hold `found`, and a result among the saved would
        # hold the node: a circle through C++ that no garbage collection sees.
        hooks = saved_tensors_hooks(lambda saved: found.append(saved.detach()), _never)
        with torch.enable_grad(), self.autocast(), hooks:
            result = self.function(*args)
        if len(found) != self.saved:
            raise MisuseError(
                f"{self.function} saved {self.saved} tensors when it first ran and {len(found)} "
                "when it ran again: leave out --activation-checkpointing",
                code="BX5116",
            )
        self.inner = dict(enumerate(found))
        if self.users > 0 and isinstance(result, Tensor):
            self.result = result.detach()
            if self.result.untyped_storage().nbytes() != self.nbytes:
                raise MisuseError(
                    f"{self.function} gave another size when it ran again", code="BX5117"
                )


def _never(_: Any) -> Tensor:  # noqa: ANN401  # nothing is kept of a second run
    raise MisuseError("a gradient was asked for through a value that was made again", code="BX5118")


@dataclass(frozen=True, slots=True)
class _Inner:
    """The promise of what a function saves."""

    made: _Made
    place: int

    def tensor(self) -> Tensor:
        return self.made.take_inner(self.place)


@dataclass(frozen=True, slots=True)
class _Result:
    """The promise of a function's result, or of a view of it."""

    made: _Made
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.made.take_result().as_strided(self.size, self.stride, self.offset)


class MakingAgain(Device):
    """A device of which some stages make results of `again` a second time.

    Attributes:
        makes_again: their numbers.
    """

    makes_again: tuple[int, ...] = ()

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401
        """Run a stage forward; autograd holds promises of what it makes by `again`."""
        if stage not in self.makes_again:
            return super().forward(stage, micro, **values)
        with making_again():
            return super().forward(stage, micro, **values)
