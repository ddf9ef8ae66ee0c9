"""Gradients of weights that wait: made when they are asked for, and added as autograd adds them.

    backward_weight    (x, gradient of y) ──▶ gradients of weight and bias

They are made by the products of an undivided backward, so they are the same bits; several uses of
one weight are added last first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .coded import CodedError
from .deferred_layers import Make, Tap


class DeferredError(CodedError, RuntimeError):
    """Report a gradient that waits and cannot be made as an undivided backward would make it."""


@dataclass(frozen=True)
class WaitingTap:
    """A tap whose output's gradient is known; it holds nothing of autograd's graph."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    x: Tensor
    gradient: Tensor | None  # None: the loss does not depend on this run of the layer
    versions: tuple[int, int]
    make: Make
    cast: torch.dtype | None
    once: bool = True

    def parts(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield the gradients of weight and bias.

        Raises:
            DeferredError: what they are made of was written meanwhile.
        """
        weight, bias = self._made()
        yield self.weight, weight
        if self.bias is not None:
            yield self.bias, bias

    def _made(self) -> tuple[Tensor | None, Tensor | None]:
        if self.gradient is None:
            return None, None
        if (self.x._version, self.gradient._version) != self.versions:
            raise DeferredError(
                "the input of a layer whose weight's gradient waits was written in place after the "
                "layer read it: write into a copy, or leave the stage out of "
                "--delay-weight-gradients",
                code="BX5035",
            )
        x = self.x if self.cast is None or not self.x.is_floating_point() else self.x.to(self.cast)
        return self.make(x, self.gradient)


def waiting_tap(tap: Tap, gradient: Tensor | None) -> WaitingTap:
    """Return a run of a layer whose output's gradient has come."""
    versions = tap.version, 0 if gradient is None else gradient._version
    return WaitingTap(tap.weight, tap.bias, tap.x, gradient, versions, tap.make, tap.cast, tap.once)


@dataclass
class _Sums:
    """The gradients of one stage and micro-batch, added up over the uses of each parameter.

    autograd adds a parameter's uses last first. Under autocast it has one cast for all uses that
    want the same type: theirs are added in that type and cast back once, in place of the earliest.
    Where autocast keeps no casts (`cache_enabled=False`), each use's is cast back by itself.

    Attributes:
        uses: of each parameter, those that are left; `casts` those of its cast.
        total: what is added so far; `in_cast` in the type of the cast.
    """

    uses: Counter[int]
    casts: Counter[int]
    total: dict[int, Tensor] = field(default_factory=dict)
    in_cast: dict[int, Tensor] = field(default_factory=dict)

    def add(self, parameter: nn.Parameter, gradient: Tensor | None, *, cast: bool) -> Tensor | None:
        """Add one use's part; return the sum when no use is left."""
        key = id(parameter)
        self.uses[key] -= 1
        if cast:
            _plus(self.in_cast, key, gradient)
            self.casts[key] -= 1
            found = None if self.casts[key] else self.in_cast.pop(key, None)
            gradient = found
        gradient = None if gradient is None else gradient.to(parameter.dtype)
        _plus(self.total, key, gradient)
        return None if self.uses[key] else self.total.pop(key, None)


def _plus(sums: dict[int, Tensor], key: int, gradient: Tensor | None) -> None:
    if gradient is not None:
        sums[key] = sums[key] + gradient if key in sums else gradient


def tensors_of(waits: WaitingTap | Tap) -> Iterator[nn.Parameter]:
    """Yield the parameters whose gradients a run of a layer makes."""
    yield waits.weight
    if waits.bias is not None:
        yield waits.bias


def _is_shared(waits: WaitingTap) -> bool:
    """Whether a run's weight was cast, by a cast that other runs read, too."""
    return waits.cast is not None and waits.once


def made(waiting: list[WaitingTap]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter and its gradient, as soon as it is complete; empties the list."""
    uses = Counter(id(p) for waits in waiting for p in tensors_of(waits))
    casts = Counter(id(p) for w in waiting if _is_shared(w) for p in tensors_of(w))
    sums = _Sums(uses, casts)
    while waiting:
        waits = waiting.pop()
        for parameter, part in waits.parts():
            total = sums.add(parameter, part, cast=_is_shared(waits))
            if total is not None:
                yield parameter, total
