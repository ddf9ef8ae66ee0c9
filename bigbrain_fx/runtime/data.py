"""Data by step number: step t takes the t-th batch, split on dimension 0 into equal micro-batches.

Every device reads the same stream and keeps what its stages need, so no input is ever sent. The
stream has random state of its own: drawing data never moves the generators of the model.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .checksum import checksum

Spec = tuple[str, tuple[int, ...]]  # element type and shape


class BatchError(ValueError):
    """Report a batch that is not like the one the model was split with; names step and entry."""


def require_same(what: str, mine: str, first: str) -> None:
    """Refuse a batch that is another one than what somebody has read before.

    Args:
        what: was read: "the batch of step 7".
        mine: who reads it now, and its digest.
        first: who has said its digest first, and that.

    Raises:
        BatchError: the digests differ.
    """
    device, digest = mine.split(" ", 1)
    other, seen = first.split(" ", 1)
    if seen == digest:
        return
    whose = f"before {device} was replaced" if device == other else "between devices"
    raise BatchError(
        f"{what} differs {whose}: {other} has {seen}, {device} has {digest}: every process must "
        "get the same from batches(seed): seed all random numbers with it, use no time or process "
        "id, sort listings of files and sets, and let no file change meanwhile"
    )


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
        self.digests: dict[str, str] = {}
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
                    f"batches(seed) ended before step {step}; yield one batch per step: begin "
                    "anew at its end (`while True:` around the loop), or run fewer --steps"
                )
            self.step += 1
            if self.step == step:
                self.parts = {name: self._split(name, batch) for name in self.inputs}

    def get(self, name: str, micro: int) -> Tensor:
        """Return one input of one micro-batch."""
        return self.parts[name][micro]

    def digest(self) -> str:
        """Return a hash of the current batch: shapes, types, and a checksum of every entry."""
        text = json.dumps(self.digests, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def _split(self, name: str, batch: object) -> list[Tensor]:
        """Return one tensor per micro-batch, each in memory of its own.

        A view may start at any address, and kernels round differently where one is not aligned.
        """
        found = self._checked(name, _pick(batch, self.inputs[name], self.step))
        self.digests[name] = f"{_said(found)} {checksum(found)}"
        value = found.to(self.device)
        if name in self.whole:
            return [value.clone()] * self.micro_batches
        rows = value.shape[0]
        if rows % self.micro_batches:
            raise BatchError(
                f"step {self.step}: batch entry {name!r} has {rows} rows, "
                f"not a multiple of {self.micro_batches} micro-batches{_FEWER_ROWS}"
            )
        return [part.clone() for part in value.split(rows // self.micro_batches)]

    def _checked(self, name: str, value: object) -> Tensor:
        """Return a batch entry that is like the traced one: messages have room for no other."""
        found, wanted = _said(value), self.specs.get(name)
        expected = _text(*wanted) if wanted else "a tensor"
        if not isinstance(value, Tensor) or (wanted and found != expected):
            raise BatchError(
                f"step {self.step}: batch entry {name!r} is {found}, "
                f"but the model was split for {expected}{self._remedy(name, value)}"
            )
        return value

    def _remedy(self, name: str, value: object) -> str:
        """Say what to change in `batches` so that an entry fits."""
        wanted = self.specs.get(name)
        if not isinstance(value, Tensor) or wanted is None:
            return ": make it a tensor in batches(), as with torch.as_tensor"
        dtype, shape = wanted
        if len(shape) == value.dim() and shape != tuple(value.shape):
            is_short = name not in self.whole and shape[1:] == tuple(value.shape[1:])
            return _FEWER_ROWS if is_short else _pad(shape, tuple(value.shape))
        if shape == tuple(value.shape):
            return f": give it the type torch.{dtype} in batches(), with .to(torch.{dtype})"
        return ": reshape it in batches()"


_FEWER_ROWS = (
    ": give all batches as many rows: leave a smaller last one out (DataLoader(..., "
    "drop_last=True)), or split again with an example_batch() of this size"
)


def _pad(wanted: tuple[int, ...], found: tuple[int, ...]) -> str:
    """Say how to pad a tensor; a longer one can only be cut, or the model split for its length."""
    dim = next(d for d in reversed(range(len(wanted))) if wanted[d] != found[d])
    length = wanted[dim]
    if found[dim] > length:
        return (
            f": cut dimension {dim} to {length} in batches(), or split again with an "
            "example_batch() of the greatest length and pad all others to it"
        )
    pads = ", ".join(["0, 0"] * (len(wanted) - 1 - dim) + [f"0, {length} - x.shape[{dim}]"])
    return (
        f": pad dimension {dim} to {length} in batches(), "
        f"x = torch.nn.functional.pad(x, ({pads})), with a value that your loss leaves out"
    )


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
