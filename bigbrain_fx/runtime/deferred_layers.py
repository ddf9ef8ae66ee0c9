"""Layers with deferred weight gradients: each notes its input, and its place in autograd's graph.

    forward            x ──▶ layer ──▶ y        x and the place of y in autograd's graph are noted

A layer runs with an alias of its weight that needs no gradient. torch's own kernels run as ever,
and autograd leaves the weight out. A layer without a waiting gradient is torch's own layer.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .coded import MisuseError

Make: TypeAlias = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor | None]"]
"""(input of a layer, gradient of its output) -> gradients of its weight and its bias."""


@dataclass(frozen=True)
class Tap:
    """One run of a layer: what the gradients of its weight and bias are made of, but one.

    Attributes:
        x: what it read; changed since, if its version is another than `version`.
        edge: the place of its output in autograd's graph.
        make: makes the gradients.
        cast: the type in which it computed, where autocast cast its weight.
        once: autocast casts a weight once for all its uses, as it does unless it keeps no casts.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    x: Tensor
    version: int
    edge: GradientEdge
    make: Make
    cast: torch.dtype | None
    once: bool = True


class _Now(threading.local):
    """Place where layers note their runs; None: nothing waits.

    Devices of one process have a thread each: while members of a group exchange, others go on.
    """

    taps: list[Tap] | None = None


_now = _Now()


@contextmanager
def tapping() -> Iterator[list[Tap]]:
    """Let layers in the block note what their weights' gradients need, in the order they run."""
    taps: list[Tap] = []
    _now.taps = taps
    try:
        yield taps
    finally:
        _now.taps = None


def _taps(layer: nn.Module) -> bool:
    """Whether a layer's gradients wait for what it runs now.

    Not those of a layer that torch.compile traces: its graph has no places to note, so they come
    with the backward.
    """
    weight = layer._parameters["weight"]
    assert weight is not None
    asked = _now.taps is not None and torch.is_grad_enabled() and weight.requires_grad
    return asked and not torch.compiler.is_compiling()


def _alias(parameter: Tensor | None) -> Tensor | None:
    """Return the same numbers as a leaf of its own: kernels see that a gradient is wanted."""
    return None if parameter is None else parameter.detach().requires_grad_()


def _computed(x: Tensor) -> Tensor:
    """Return an input in the type in which autocast computes: one copy for now and for later.

    A leaf is left to autocast, which casts it once for all its readers.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype != torch.float32:
        return x
    return x if x.is_leaf and x.requires_grad else x.to(torch.get_autocast_dtype(kind))


def _note(layer: nn.Module, x: Tensor, y: Tensor, make: Make) -> Tensor:
    """Note one run of a layer; x is noted detached, or the whole graph before it would stay."""
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    assert weight is not None
    assert _now.taps is not None
    cast = y.dtype if y.dtype != weight.dtype else None
    # Its place, and not y: what comes next may write y in place. If y is a view, that gives it
    # another place, and what it is a view of keeps its own.
    edge = get_gradient_edge(y if y._base is None else y._base)
    once = torch.is_autocast_cache_enabled()
    _now.taps.append(Tap(weight, bias, x.detach(), x._version, edge, make, cast, once))
    return y


# ---------------------------------------------------------------------- layers


class Linear(nn.Linear):
    """nn.Linear whose weight's and bias's gradients wait where its stage defers them."""

    def forward(self, input: Tensor) -> Tensor:  # as nn.Linear's
        """Apply it."""
        if not _taps(self):
            return super().forward(input)
        x, weight, bias = _computed(input), _alias(self.weight), _alias(self.bias)
        assert weight is not None
        y = F.linear(x, weight, bias)
        added = y.grad_fn is not None and y.grad_fn.name() == "AddBackward0"  # bias by itself
        return _note(self, x, y, partial(_linear, bias is not None, added))


def _linear(has_bias: bool, added: bool, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor | None]:
    """Make the gradients of F.linear's weight and bias by autograd's products."""
    rows, columns = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    weight = rows.t().mm(columns)
    if not has_bias:
        return weight, None
    return weight, g.sum_to_size(g.shape[-1]) if added else rows.sum(0)


class Embedding(nn.Embedding):
    """nn.Embedding whose weight's gradient waits where its stage defers it."""

    def forward(self, input: Tensor) -> Tensor:  # as nn.Embedding's
        """Look up rows."""
        if self.max_norm is not None or self.sparse or not _taps(self):
            return super().forward(input)
        weight = _alias(self.weight)
        assert weight is not None
        y = F.embedding(input, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        padding = -1 if self.padding_idx is None else self.padding_idx
        about = self.num_embeddings, padding, self.scale_grad_by_freq
        return _note(self, input, y, partial(_embedding, about))


def _embedding(about: tuple[int, int, bool], x: Tensor, g: Tensor) -> tuple[Tensor, None]:
    return torch.ops.aten.embedding_dense_backward(g, x, *about), None


def _can_wait(layer: Any) -> bool:  # noqa: ANN401  # any of the six below
    """Whether a convolution is one call of aten's: other paddings take an op more."""
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str) and _taps(layer)


def _convolve(layer: Any, input: Tensor) -> Tensor:  # noqa: ANN401  # any of the six below
    """Run a convolution of torch.nn with aliases of its tensors."""
    x, weight, bias = _computed(input), _alias(layer.weight), _alias(layer.bias)
    padding = (layer.padding, layer.output_padding) if layer.transposed else (layer.padding,)
    tail = (layer.groups, layer.dilation) if layer.transposed else (layer.dilation, layer.groups)
    y = layer.apply_now(x, weight, bias, layer.stride, *padding, *tail)
    return _note(layer, x, y, partial(_convolution, layer))


def _convolution(layer: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor | None]:  # noqa: ANN401
    has_bias = layer.bias is not None
    if x.dim() == len(layer.kernel_size) + 1:  # one sample, without a dimension for several
        x, g = x.unsqueeze(0), g if g.dim() > x.dim() else g.unsqueeze(0)
    _, weight, bias = torch.ops.aten.convolution_backward(
        g,
        x,
        layer.weight.detach().to(g.dtype),
        [layer.out_channels] if has_bias else None,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.transposed,
        layer.output_padding,
        layer.groups,
        [False, True, has_bias],
    )
    return weight, bias


Kind = TypeVar("Kind", bound=type[nn.Module])


def _waiting(kind: Kind, function: str) -> Kind:
    """Return a convolution of torch.nn whose gradients of weight and bias may wait."""

    class Waiting(kind):  # type: ignore[valid-type, misc]  # mypy takes no class from a variable
        __doc__ = f"nn.{kind.__name__} whose weight's and bias's gradients wait where deferred."
        apply_now = staticmethod(getattr(F, function))

        def forward(self, input: Tensor, output_size: list[int] | None = None) -> Any:  # noqa: ANN401
            """Apply it."""
            if output_size is None and _can_wait(self):
                return _convolve(self, input)
            sizes = () if output_size is None else (output_size,)
            return super().forward(input, *sizes)

    Waiting.__name__ = Waiting.__qualname__ = kind.__name__
    return Waiting  # type: ignore[return-value]


Conv1d = _waiting(nn.Conv1d, "conv1d")
Conv2d = _waiting(nn.Conv2d, "conv2d")
Conv3d = _waiting(nn.Conv3d, "conv3d")
ConvTranspose1d = _waiting(nn.ConvTranspose1d, "conv_transpose1d")
ConvTranspose2d = _waiting(nn.ConvTranspose2d, "conv_transpose2d")
ConvTranspose3d = _waiting(nn.ConvTranspose3d, "conv_transpose3d")


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
            MisuseError: what they are made of was written meanwhile.
        """
        weight, bias = self._made()
        yield self.weight, weight
        if self.bias is not None:
            yield self.bias, bias

    def _made(self) -> tuple[Tensor | None, Tensor | None]:
        if self.gradient is None:
            return None, None
        if (self.x._version, self.gradient._version) != self.versions:
            raise MisuseError(
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
    """Gradients of one stage and micro-batch, added up over the uses of each parameter.

    autograd adds a parameter's uses last first. Under autocast it has one cast for all uses that
    want the same type: theirs are added in that type and cast back once, in place of the earliest.
    If autocast keeps no casts (`cache_enabled=False`), each use's gradient is cast back by itself.

    Attributes:
        uses: of each parameter, those that are left; `casts` those of its cast.
        total: the sum so far; `in_cast` in the type of the cast.
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
