"""Data by step number, compared, and known: no batch has entries that the first one has not.

    {"x": ..., "t": {"y": ...}}, then {"x": ..., "t": {"y": ..., "w": ...}}: t.w is new

A trace has looked for entries once. Bundles that replace processes have this file. The module knows
nests of dicts, tuples and lists; it splits none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from .compared_stream import ComparedStream
from .stream import BatchError


class KnownStream(ComparedStream):
    """The batches of one run, by step; args as of a BatchStream."""

    names: object = None  # of the first batch's entries

    def _note_first(self) -> None:
        stay = getattr(self.batches, "names_stay", False)  # of those that the caller sends
        if self.names is None and self.step < 0 and not stay:
            with self.random, self._calling(0):
                self.names = names_of(next(self.iterator, None))

    def _next(self, step: int) -> object:
        batch = self._drawn(step)
        self._require_like_first(batch, step)
        return batch

    def _drawn(self, step: int) -> object:
        return super()._next(step)

    def _require_like_first(self, batch: object, step: int) -> None:
        """Refuse a batch that a trace of the example does not hold for."""
        self.names = names_of(batch) if self.names is None else self.names
        require_known(self.names, batch, step)


def names_of(batch: object) -> Any:  # noqa: ANN401  # a nest of any kind
    """Return the nest of a batch without what it holds: keys, positions, and of arrays the kind."""
    if isinstance(batch, Mapping):
        return {key: names_of(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [names_of(value) for value in batch]
    return _kind(batch)


def _kind(value: object) -> str | None:
    """Return whose array a value is: torch's, or another's (of NumPy, of pandas)."""
    if isinstance(value, Tensor):
        return "a tensor"
    return "an array" if hasattr(value, "__array__") else None


def require_known(first: object, batch: object, step: int) -> None:
    """Refuse entries that the first batch has not, or not so: forward or loss may look for them.

    Args:
        first: its names.
        batch: one of later.
        step: that takes it.

    Raises:
        BatchError: there are such.
    """
    new = sorted(_shown(key) for key in _new(first, batch, ()))
    if new:
        raise BatchError(_NEW_ENTRY.format(step=step, names=", ".join(new)), code="BX5037")
    for key, before, now in _turned(first, batch, ()):
        raise BatchError(
            _TURNED.format(step=step, name=_shown(key), before=before, now=now), code="BX5038"
        )


def _new(first: Any, batch: object, key: tuple[object, ...]) -> Iterator[tuple[object, ...]]:  # noqa: ANN401
    """Yield what leads to new entries; how long a list within a batch is, is looked at apart."""
    if isinstance(first, dict) and isinstance(batch, Mapping):
        for name, value in batch.items():
            known = name in first
            yield from _new(first[name], value, (*key, name)) if known else ((*key, name),)
    elif isinstance(first, list) and isinstance(batch, tuple | list):
        yield from () if key else ((i,) for i in range(len(first), len(batch)))
        for i, (one, other) in enumerate(zip(first, batch, strict=False)):
            yield from _new(one, other, (*key, i))


def _turned(
    first: Any,  # noqa: ANN401  # a nest of any kind
    batch: object,
    key: tuple[object, ...],
) -> Iterator[tuple[tuple[object, ...], str, str]]:
    """Yield what was a tensor and is another array now, or the other way round.

    Of entries that the trace has not read nothing else is known: `if isinstance(w, np.ndarray)`.
    """
    if isinstance(first, dict) and isinstance(batch, Mapping):
        for name in first.keys() & batch.keys():
            yield from _turned(first[name], batch[name], (*key, name))
    elif isinstance(first, list) and isinstance(batch, tuple | list):
        for i, (one, other) in enumerate(zip(first, batch, strict=False)):
            yield from _turned(one, other, (*key, i))
    elif isinstance(first, str) and (now := _kind(batch)) not in (None, first):
        yield key, first, str(now)


def _shown(key: tuple[object, ...]) -> str:
    return repr(key[0]) if len(key) == 1 else repr(".".join(map(str, key)))


_NEW_ENTRY = (
    "step {step}: the batch has the entry {names}, which the first batch has not, and the model "
    "was split without: give every batch the same entries, and example_batch(), too (a mask or a "
    "weight of ones where there is none), or leave it out"
)
_TURNED = (
    "step {step}: batch entry {name} is {now}, and was {before} in the first batch: give it as a "
    "tensor in every batch, with torch.as_tensor, and in example_batch(), too"
)
