"""Data by step number: step t takes the t-th batch, split on dimension 0 into micro-batches.

Every device reads the same stream and keeps what its stages need, so no input is ever sent.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from .coded import InputError

Spec = tuple[str, tuple[int, ...]]  # element type and shape
Key = tuple[str | int, ...]  # what leads to an entry of a batch: dict keys and positions


class BatchError(InputError, ValueError):
    """Report a batch that is not like the one the model was split with; names step and entry."""


class BatchStream:
    """The batches of one run, by step.

    Args:
        batches: `batches(seed)` gives one batch after another.
        seed: passed to it, and seeds the stream's own random state.
        inputs: model input -> its place in a batch.
        whole: inputs that are not split into micro-batches.
        micro_batches: how many parts a batch is split into.
        device: where the tensors go.
        specs: model input -> element type and shape (-1: any size) of its entry in every batch.
    """

    def __init__(
        self,
        batches: Callable[..., Iterator[object]],
        seed: int,
        inputs: Mapping[str, Key],
        whole: tuple[str, ...],
        micro_batches: int,
        device: torch.device,
        specs: Mapping[str, Spec] | None = None,
    ) -> None:
        self.batches: Any = batches if signature(batches).parameters else lambda _seed: batches()
        self.inputs, self.whole, self.specs = inputs, whole, specs or {}
        self.micro_batches, self.device, self.seed, self.step = micro_batches, device, seed, -1
        self.parts: dict[str, list[Tensor]] = {}
        self._start()

    def _start(self) -> None:
        self.random = RandomState(self.seed)
        with self.random:
            self.iterator = iter(self.batches(self.seed))

    def advance(self, step: int) -> None:
        """Load the batch of `step`, reading on from where the stream is; it never goes back."""
        if step < self.step:
            raise ValueError(f"the data stream is at step {self.step} and cannot go back to {step}")
        while self.step < step:
            batch = self._next(step)
            self.step += 1
            if self.step == step:
                self._take(batch)

    def get(self, name: str, micro: int) -> Tensor:
        """Return one input of one micro-batch."""
        return self.parts[name][micro]

    def _next(self, step: int) -> object:
        with self.random:
            batch = next(self.iterator, None)
        if batch is None:
            raise BatchError(f"batches(seed) ended before step {step}", code="BX5203")
        return batch

    def _take(self, batch: object) -> None:
        """Split the batch of this step into its micro-batches."""
        self.parts = {name: self._split(name, batch) for name in self.inputs}

    def _split(self, name: str, batch: object) -> list[Tensor]:
        """Return one tensor per micro-batch, each in memory of its own: aligned, not a view."""
        value = self._entry(name, batch).to(self.device)
        if name in self.whole:
            return [value.clone()] * self.micro_batches
        return [part.clone() for part in value.tensor_split(self.micro_batches)]

    def _entry(self, name: str, batch: Any) -> Tensor:  # noqa: ANN401  # nested as the user likes
        """Return a batch entry that is like the traced one: messages have room for no other."""
        dtype, shape = self.specs[name]
        for part in self.inputs[name]:
            batch = batch[part]
        if shape == () and isinstance(batch, int | float):
            batch = torch.tensor(batch, dtype=getattr(torch, dtype))
        shape = getattr(batch, "shape", shape) if -1 in shape else shape
        have = f"{batch.dtype}{[*batch.shape]}" if isinstance(batch, Tensor) else type(batch)
        if have != (want := f"torch.{dtype}{[*shape]}"):
            said = f"step {self.step}: batch entry {name!r} is {have}, the model takes {want}"
            raise BatchError(f"{said}: make all alike, or say pad or drop_last", code="BX5204")
        found: Tensor = batch.resolve_conj().resolve_neg()
        return found


class RandomState:
    """The stream's random state: torch's, Python's and NumPy's own generators have it inside."""

    def __init__(self, seed: int) -> None:
        numpy_random = sys.modules.get("numpy.random")  # nothing here needs it: a user may
        own = numpy_random.RandomState(seed % 2**32).get_state() if numpy_random else None
        torch_state = torch.Generator().manual_seed(seed).get_state()
        self.own = torch_state, random.Random(seed).getstate(), own

    def __enter__(self) -> None:
        self.outer = _states()
        _set_states(self.own)

    def __exit__(self, *_: object) -> None:
        self.own = _states()
        _set_states(self.outer)


def _states() -> tuple[Any, ...]:
    numpy_random = sys.modules.get("numpy.random")
    return torch.get_rng_state(), random.getstate(), numpy_random and numpy_random.get_state()


def _set_states(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy.random"].set_state(state[2])
