"""Saved activations of a forward, in the device's store until an op's backward asks for them.

    forward     saved tensor ──▶ store             a storage once, whatever views of it are saved
    backward    store ──▶ storage of those bytes   gone when the op that asked is done

Parameters, buffers and inputs of the stage are held by others all the time: they stay as they are.
A storage is known by its address, which is given out again after a free. As long as an address is
looked up here, a weak reference keeps it from being given out. The store has the tensor's value at
the time of saving: later writes into the tensor do no harm.

Of a stage that runs again the store has the received values, which come back before the second run.

Copied into bundles that offload activations. The module knows no schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .coded import MisuseError
from .feature import Compute, Feature
from .offload_malloc import caches_small_blocks, give_freed_memory_back
from .stores import STORED_FROM_BYTES, StoreRoom

TRIMS_EVERY = 64
"""Forwards after which freed memory goes back, where little of it lies between what stays."""

if TYPE_CHECKING:
    from .recompute import Read


class _Tensor(Protocol):
    """Placeholder of a tensor that autograd holds."""

    def tensor(self) -> Tensor:
        """Return the tensor."""


@dataclass
class ActivationStore(Feature):
    """Room for what forwards save; what a backward is done with serves the next forward.

    Attributes:
        room: the device's store.
        free: by size, rooms that were taken and hold nothing any more.
        trims_every: forwards after which freed memory goes back to the system.
    """

    room: StoreRoom
    free: dict[int, list[Tensor]] = field(default_factory=dict)
    trims_every: int = field(default_factory=lambda: 1 if caches_small_blocks() else TRIMS_EVERY)
    _forwards: int = 0

    def compute(self, run: Compute, stage: int, micro: int, values: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        """Run a stage forward, and let what it keeps lie here, but for what is there anyway."""
        device = self.device
        if stage not in device.saving:
            return run(stage, micro, values)
        if stage not in device.recompute:
            module = device.modules[stage]
            with self.saving((*module.parameters(), *module.buffers(), *values.values())):
                return run(stage, micro, values)
        result = run(stage, micro, values)
        batch = [part for each in device.stream.parts.values() for part in each]
        device._saved[stage, micro] = self.put(device._saved[stage, micro], batch)
        return result

    def restore(self, stage: int, micro: int, kept: Any) -> Any:  # noqa: ANN401  # a StoredRead, or not
        """Return what a stage received from here."""
        return kept.back() if isinstance(kept, StoredRead) else kept

    @contextmanager
    def saving(self, held: Iterable[Tensor]) -> Iterator[None]:
        """Put what autograd saves in the block into the store, but for what others hold."""
        stay = [storage for tensor in held if (storage := _storage(tensor)) is not None]
        # the list keeps these storages, the weak references the others' addresses, while it runs
        known: dict[tuple[int, int], tuple[StorageWeakRef, _InStore]] = {}
        pack = partial(self._pack, frozenset(storage._cdata for storage in stay), known)
        with saved_tensors_hooks(pack, _unpack):
            yield
        stay.clear()
        self._forwards += 1
        if self._forwards % self.trims_every == 0:
            give_freed_memory_back()

    def put(self, read: Read, held: Iterable[Tensor]) -> StoredRead:
        """Put what a stage runs again with into the store, but for what others hold."""
        stay = frozenset(s._cdata for tensor in held if (s := _storage(tensor)) is not None)
        known: dict[tuple[int, int], tuple[StorageWeakRef, _InStore]] = {}
        leaves = {
            name: (self._pack(stay, known, value.detach()), value.requires_grad)
            for name, value in read.values.items()
        }
        return StoredRead(leaves, read.copies)

    def _pack(
        self,
        stay: frozenset[int],
        known: dict[tuple[int, int], tuple[StorageWeakRef, _InStore]],
        tensor: Tensor,
    ) -> _Tensor:
        storage = _storage(tensor)
        if storage is None or storage.nbytes() < STORED_FROM_BYTES or storage._cdata in stay:
            return _AsItIs(tensor, tensor._version)
        place = storage._cdata, tensor._version
        if place not in known:
            known[place] = StorageWeakRef(storage), _InStore(self, storage)
        shape = tensor.size(), tensor.stride()
        return _ViewInStore(known[place][1], tensor.dtype, int(tensor.storage_offset()), *shape)


@dataclass(frozen=True, slots=True)
class StoredRead:
    """A `Read` whose values lie in the store: each with whether it wants a gradient."""

    values: Mapping[str, tuple[_Tensor, bool]]
    copies: Mapping[str, Tensor]

    def back(self) -> Read:
        """Return it with its values here, leaves as they were."""
        found = {name: each.tensor().requires_grad_(w) for name, (each, w) in self.values.items()}
        from .recompute import Read  # only bundles that run stages twice have it

        return Read(found, self.copies)


@dataclass(frozen=True, slots=True)
class _AsItIs:
    """A tensor that stays here; with hooks autograd leaves it to them to see that nobody wrote."""

    value: Tensor
    version: int

    def tensor(self) -> Tensor:
        if self.value._version != self.version:
            raise MisuseError(
                "a value that its backward needs was written in place after it was read: write "
                "into a copy",
                code="BX5163",
            )
        return self.value


class _InStore:
    """The bytes of one storage, which went to the store; its room is free when nobody asks more."""

    def __init__(self, store: ActivationStore, storage: torch.UntypedStorage) -> None:
        self.store, self.device = store, storage.device
        waiting = store.free.get(storage.nbytes())
        self.room = waiting.pop() if waiting else store.room.take(storage.nbytes())
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            store.room.write(self.room, whole)

    def back(self) -> torch.UntypedStorage:
        """Return a new storage with the bytes."""
        made = torch.empty_like(self.room, device=self.device)
        with torch.no_grad():
            self.store.room.read(self.room, made)
        return made.untyped_storage()

    def __del__(self) -> None:
        """Give the room to whoever saves as much next."""
        if hasattr(self, "room"):
            self.store.free.setdefault(self.room.numel(), []).append(self.room)


@dataclass(frozen=True, slots=True)
class _ViewInStore:
    """A tensor over a storage that lies in the store."""

    whole: _InStore
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        made = torch.empty(0, dtype=self.dtype, device=self.whole.device)
        return made.set_(self.whole.back(), self.offset, self.size, self.stride)


def _unpack(held: _Tensor) -> Tensor:
    return held.tensor()


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a plain tensor's storage; None for one of several, or of a kind of its own."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage() if plain and not (tensor.is_conj() or tensor.is_neg()) else None
