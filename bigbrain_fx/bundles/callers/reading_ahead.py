"""The batches of a caller's data that are read before anything is planned, kept as they came.

A plain loop reads a batch when its step begins. Data may go by what happens between two steps.
Those that ask the model, or that the caller's `on_step` knows, are read one at a time.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING

from bigbrain_fx.bundles.callers.module import CallersModule
from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

FEW = 3  # batches that are read in any case; more, up to
MOST = 64  # so many, for so long, as long as they take no more
READ_S = 1.0
READ_BYTES = 2**26
_FIXED = int, float, str, bytes, type, ModuleType, type(None)
_PARTS = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator")  # of a DataLoader


def first_batches(
    batches: Iterator[object],
    data: Iterable[object],
    model: nn.Module,
    on_step: Callable[[int, float], None] | None,
) -> list[object]:
    """Return the batches that are read before anything is planned.

    A loader may fill the same memory again for the next one: what it has overwritten is a copy.

    Raises:
        InputError: a later one asks the model, whose steps are not done.
    """
    most = FEW if isinstance(data, Iterator) else MOST  # what is read ahead, hears no step
    ahead = _Ahead(model, 1 if _knows(on_step, data) else most)
    return [copy if _has_changed(batch, copy) else batch for batch, copy in ahead.read(batches)]


class _Ahead:
    def __init__(self, model: nn.Module, most: int) -> None:
        self._model, self._most, self._asks = model, most, False

    def read(self, batches: Iterator[object]) -> list[tuple[object, object]]:
        """Return batches, each with a copy of what it was when it came."""
        from bigbrain_fx.frontend import mapped

        end_s, left = time.monotonic() + READ_S, READ_BYTES
        found: list[tuple[object, object]] = []
        for batch in islice(self._heard(batches), self._most):
            found.append((batch, mapped(batch, lambda tensor, _: tensor.clone())))
            left -= _bytes_of(batch)
            if self._asks or (len(found) >= FEW and (left < 0 or time.monotonic() > end_s)):
                break
        return found

    def _heard(self, batches: Iterator[object]) -> Iterator[object]:
        number = 0
        while True:
            number += 1
            with self._hearing():
                found = next(batches, _END)
            if self._asks and number > 1:
                raise InputError(
                    f"the data ask the model for batch {number}, which is read before the steps "
                    "of those before it",
                    code="BX3084a",
                    help="with machine(model, example_batch=batch, ...) as session: for batch in "
                    "data: session.step(batch)",
                )
            if found is _END:
                return
            yield found

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        from torch import nn

        if not isinstance(self._model, nn.Module):  # which `split` refuses
            yield
            return
        watch = CallersModule(self._model, lambda: None).enter()
        try:
            yield
        finally:
            self._asks |= watch.is_read
            watch.leave()


_END = object()


def _has_changed(batch: object, copy: object) -> bool:
    from bigbrain_fx.frontend import named_tensors

    pairs = zip(named_tensors(batch), named_tensors(copy), strict=True)
    return not all(_is_same(now, was) for (_, now), (_, was) in pairs)


def _is_same(now: Tensor, was: Tensor) -> bool:
    import torch

    if now is was or now.is_nested or now.layout is not torch.strided:
        return now is was
    return now.shape == was.shape and torch.equal(now, was)


def _bytes_of(batch: object) -> int:
    from bigbrain_fx.frontend import named_tensors

    return sum(tensor.nbytes for _, tensor in named_tensors(batch))


def _knows(on_step: object, data: Iterable[object]) -> bool:
    """Whether the caller's function reads the data, or a part of them: it may change them."""
    known = {id(value) for value in _read_by(on_step) if not isinstance(value, _FIXED)}
    return any(id(part) in known for part in _parts_of(data))


def _read_by(on_step: object) -> Iterator[object]:
    function = getattr(on_step, "__func__", on_step)
    if inspect.isfunction(function):
        read = inspect.getclosurevars(function)
        yield from (*read.nonlocals.values(), *read.globals.values())
    owner = getattr(on_step, "__self__", on_step)
    yield from getattr(owner, "__dict__", {}).values()


def _parts_of(data: Iterable[object]) -> Iterator[object]:
    yield data
    yield from (getattr(data, name, None) for name in _PARTS)
    if inspect.isgenerator(data):
        yield from inspect.getgeneratorlocals(data).values()
