"""Data by step number: step t takes the t-th batch, split on dimension 0 into equal micro-batches.

Every device reads the same stream and keeps what its stages need, so no input is ever sent. The stream
has random state of its own: drawing data never moves the generators of the model.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Stream:
    """The batches of one run, by step.

    Args:
        batches: `batches(seed)` gives one batch after another.
        seed: passed to it, and seeds the stream's own random state.
        inputs: model input -> its place in a batch (dict keys and positions).
        whole: inputs that are not split into micro-batches.
        micro_batches: how many parts a batch is split into.
        device: where the tensors go.
    """

    def __init__(
        self,
        batches: Callable[[int], Iterator[Any]],
        seed: int,
        inputs: Mapping[str, tuple[str | int, ...]],
        whole: tuple[str, ...],
        micro_batches: int,
        device: torch.device,
    ) -> None:
        self.inputs = inputs
        self.whole = whole
        self.micro_batches = micro_batches
        self.device = device
        self.step = -1
        self.parts: dict[str, list[Tensor]] = {}
        self.random = _RandomState(seed)
        with self.random:
            self.iterator = iter(batches(seed))

    def advance(self, step: int) -> None:
        """Load the batch of `step`, reading on from where the stream is; it never goes back."""
        if step < self.step:
            raise ValueError(f"the data stream is at step {self.step} and cannot go back to {step}")
        while self.step < step:
            with self.random:
                batch = next(self.iterator, None)
            if batch is None:
                raise ValueError(
                    f"batches(seed) ended before step {step}; yield one batch per step"
                )
            self.step += 1
            if self.step == step:
                self.parts = {
                    name: self._split(name, _pick(batch, key)) for name, key in self.inputs.items()
                }

    def get(self, name: str, micro: int) -> Tensor:
        """Return one input of one micro-batch."""
        return self.parts[name][micro]

    def digest(self) -> str:
        """Return a hash of the current batch: shapes, types and every byte."""
        state = hashlib.blake2b(digest_size=12)
        for name in sorted(self.parts):
            for part in self.parts[name]:
                state.update(f"{name}{tuple(part.shape)}{part.dtype}".encode())
                state.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return state.hexdigest()

    def _split(self, name: str, value: Any) -> list[Tensor]:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"batch entry {name!r} is {type(value).__name__}, but a tensor was traced"
            )
        value = value.to(self.device)
        if name in self.whole:
            return [value] * self.micro_batches
        rows = value.shape[0]
        if rows % self.micro_batches:
            raise ValueError(
                f"batch entry {name!r} has {rows} rows, not a multiple of {self.micro_batches} micro-batches"
            )
        return list(value.split(rows // self.micro_batches))


def _pick(batch: Any, key: tuple[str | int, ...]) -> Any:
    for part in key:
        try:
            batch = batch[part]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"the batch has no entry {'.'.join(map(str, key))!r}") from error
    return batch


class _RandomState:
    """The stream's random state, in force inside `with`: torch's and Python's default generators."""

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
