"""Random numbers of a step on the whole batch, replayed for its micro-batches.

    whole    torch.randn(8, 4) ─▶ z
    parts    torch.randn(2, 4) ─▶ z[0:2], z[2:4], z[4:6], z[6:8]

Two steps can be compared only under the same draws. Noise that forward adds (a VAE's, a diffusion
model's) has a row for each row of the batch. Where rows and other positions are one dimension
(dropout of [time * rows, d]) their order is unknown: all are then the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass
class Draws:
    """Results of the random ops of a step on the whole batch, in order.

    Attributes:
        rows: of that batch; 0 where parts may have any rows of it.
        is_on: whether ops are looked at, which costs time.
    """

    rows: int = 0
    is_on: bool = True
    _whole: list[list[Any]] = field(default_factory=list, init=False)
    _taken: list[int] = field(default_factory=list, init=False)  # rows that parts have had, by op

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the results of random ops in a step on the whole batch."""
        self._whole = []
        self._taken = []
        with _Watch(self._record) if self.is_on else nullcontext():
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give the next part its rows of the recorded numbers."""
        calls = iter(range(len(self._whole)))

        def replay(found: list[Any]) -> list[Any]:
            call = next(calls, None)
            return found if call is None else self._rows(call, found)

        with _Watch(replay) if self.is_on else nullcontext():
            yield

    def end_if_none(self) -> None:
        """Look at no more ops where the batch has drawn nothing."""
        self.is_on = bool(self._whole)

    def first_part(self) -> None:
        """Begin with the first rows again."""
        self._taken = [0] * len(self._whole)

    def _record(self, found: list[Any]) -> list[Any]:
        for value in found:
            if isinstance(value, Tensor) and value.is_floating_point() and self._is_mixed(value):
                value.fill_(value.square().mean().sqrt())  # no zero, as a mean or one draw may be
        self._whole.append([v.clone() if isinstance(v, Tensor) else v for v in found])
        return found

    def _is_mixed(self, drawn: Tensor) -> bool:
        """Whether rows are not a dimension of their own."""
        sizes = drawn.shape
        return self.rows not in sizes and any(not self.rows or n % self.rows == 0 for n in sizes)

    def _rows(self, call: int, found: list[Any]) -> list[Any]:
        whole, start, count = self._whole[call], self._taken[call], 0
        if len(whole) != len(found):
            return found
        for number, (of_all, own) in enumerate(zip(whole, found, strict=True)):
            dim = _divided(of_all, own)
            if dim is not None:
                count = own.shape[dim]
                found[number] = _put(own, of_all.narrow(dim, start, count))
            elif isinstance(own, Tensor) and own.shape == of_all.shape:
                found[number] = _put(own, of_all)
        self._taken[call] += count
        return found


def _divided(whole: object, part: object) -> int | None:
    """Return the dimension in which a part has fewer rows; None where that is not all."""
    if not (isinstance(whole, Tensor) and isinstance(part, Tensor) and whole.dim() == part.dim()):
        return None
    pairs = enumerate(zip(whole.shape, part.shape, strict=True))
    unlike = [dim for dim, (of_all, own) in pairs if of_all != own]
    fits = len(unlike) == 1 and part.shape[unlike[0]] < whole.shape[unlike[0]]
    return unlike[0] if fits else None


def _put(own: Tensor, numbers: Tensor) -> Tensor:
    """Write numbers into a random op's result, which may be a tensor that it wrote in place."""
    return own.copy_(numbers) if own.shape == numbers.shape else own


class _Watch(TorchDispatchMode):
    """Pass the result of each random op of torch to a function."""

    def __init__(self, change: Callable[[list[Any]], list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._change = change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        found = func(*args, **(kwargs or {}))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not is_random or func.overloadpacket is torch.ops.aten.randperm:  # of so many rows
            return found
        leaves, layout = tree_flatten(found)
        return tree_unflatten(self._change(leaves), layout)
