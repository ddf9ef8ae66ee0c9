"""Data by step number: step t takes the t-th batch, split on dimension 0 into equal micro-batches.

Every device reads the same stream and keeps what its stages need, so no input is ever sent. The
stream has random state of its own: drawing data never moves the generators of the model.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .tensor_file import raw

Spec = tuple[str, tuple[int, ...]]  # element type and shape


class BatchError(ValueError):
    """Report a batch that is not like the one the model was split with; names step and entry."""


class Stream:
    """The batches of one run, by step.

    Args:
        batches: `batches(seed)` gives one batch after another; `batches(seed, start)`, if it takes
            that, the same from batch `start` on, which must depend on no random state of before.
        seed: passed to it, and seeds the stream's own random state.
        inputs: model input -> its place in a batch (dict keys and positions).
        whole: inputs that are not split into micro-batches.
        micro_batches: how many parts a batch is split into.
        device: where the tensors go.
        specs: model input -> element type and shape of its entry in every batch.
    """

    def __init__(
        self,
        batches: Callable[..., Iterator[object]],
        seed: int,
        inputs: Mapping[str, tuple[str | int, ...]],
        whole: tuple[str, ...],
        micro_batches: int,
        device: torch.device,
        specs: Mapping[str, Spec] | None = None,
    ) -> None:
        self.inputs = inputs
        self.whole = whole
        self.micro_batches = micro_batches
        self.device = device
        self.specs = specs or {}
        self.batches = batches
        self.seed = seed
        self._start()

    def _start(self, step: int = 0) -> None:
        self.step = step - 1
        self.parts: dict[str, list[Tensor]] = {}
        self.random = _RandomState(self.seed)
        with self.random:
            batches = self.batches(self.seed, start=step) if step else self.batches(self.seed)
            self.iterator = iter(batches)

    def rewind(self, step: int) -> None:
        """Be ready for `step`, which may have been read already.

        `batches(seed, start)` starts there; a function without `start` is read up to it.
        """
        if "start" in inspect.signature(self.batches).parameters:
            self._start(step)
        elif step < self.step:
            self._start()

    def advance(self, step: int) -> None:
        """Load the batch of `step`, reading on from where the stream is; it never goes back."""
        if step < self.step:
            raise ValueError(f"the data stream is at step {self.step} and cannot go back to {step}")
        while self.step < step:
            with self.random:
                batch = next(self.iterator, None)
            if batch is None:
                raise BatchError(
                    f"batches(seed) ended before step {step}; yield one batch per step"
                )
            self.step += 1
            if self.step == step:
                self.parts = {name: self._split(name, batch) for name in self.inputs}

    def get(self, name: str, micro: int) -> Tensor:
        """Return one input of one micro-batch."""
        return self.parts[name][micro]

    def digest(self) -> str:
        """Return a hash of the current batch: shapes, types and every byte."""
        state = hashlib.blake2b(digest_size=12)
        for name in sorted(self.parts):
            for part in self.parts[name]:
                state.update(f"{name}{tuple(part.shape)}{part.dtype}".encode())
                state.update(raw(part))
        return state.hexdigest()

    def _split(self, name: str, batch: object) -> list[Tensor]:
        """Return one tensor per micro-batch, each in memory of its own.

        A view may start at any address, and kernels round differently where one is not aligned.
        """
        value = self._checked(name, _pick(batch, self.inputs[name], self.step)).to(self.device)
        if name in self.whole:
            return [value.clone()] * self.micro_batches
        rows = value.shape[0]
        if rows % self.micro_batches:
            raise BatchError(
                f"step {self.step}: batch entry {name!r} has {rows} rows, "
                f"not a multiple of {self.micro_batches} micro-batches"
            )
        return [part.clone() for part in value.split(rows // self.micro_batches)]

    def _checked(self, name: str, value: object) -> Tensor:
        """Return a batch entry that is like the traced one: messages have room for no other."""
        found, wanted = _said(value), self.specs.get(name)
        expected = _text(*wanted) if wanted else "a tensor"
        if not isinstance(value, Tensor) or (wanted and found != expected):
            raise BatchError(
                f"step {self.step}: batch entry {name!r} is {found}, "
                f"but the model was split for {expected}"
            )
        return value


def _said(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return _text(str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _pick(batch: object, key: tuple[str | int, ...], step: int) -> object:
    found: Any = batch  # dicts, tuples and lists, nested as the user likes
    for part in key:
        try:
            found = found[part]
        except (KeyError, IndexError, TypeError) as error:
            where = ".".join(map(str, key))
            raise BatchError(f"step {step}: the batch has no entry {where!r}") from error
    return found


class _RandomState:
    """The stream's random state: torch's and Python's default generators have it inside `with`."""

    def __init__(self, seed: int) -> None:
        self.torch_state = torch.Generator().manual_seed(seed).get_state()
        self.python_state = random.Random(seed).getstate()

    def __enter__(self) -> None:
        self.outer = torch.get_rng_state(), random.getstate()
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)

    def __exit__(self, *_: object) -> None:
        self.torch_state, self.python_state = torch.get_rng_state(), random.getstate()
        torch.set_rng_state(self.outer[0])
        random.setstate(self.outer[1])
