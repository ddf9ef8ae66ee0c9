"""Tensors of a device in its store, and not in its memory, until they are needed.

    update     store ──▶ a piece of the state ──▶ optimizer.step() ──▶ store      piece by piece

A store on a disk is a file without a name. Nobody else can open it, two runs in one folder do not
meet, and a dead process leaves nothing behind: no half-written state is read. A state that is to
last is copied from it (commits, snapshots). The space of a store on the disk is taken before it is
written. A full disk is an error with a message, and no write into a mapped file fails later.

Between two steps `optimizer.state` holds tensors that are mapped from the store, and a copy of a
device's state finds it where it always is.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from .image import Buffer
from .offload_malloc import apart, give_freed_memory_back
from .optimizer_state import StateError
from .update_pieces import OncePerStep, only, pieces

if TYPE_CHECKING:  # only bundles that offload weights have it
    from .stored_weights import StoredWeights

STORED_FROM_BYTES = 4096  # what is kept of a smaller parameter stays with the device: it is a page
State = dict[str, Any]  # what an optimizer keeps for a parameter


class StoreError(StateError):
    """Report a store that cannot be used, or that is full; says which, and what to do."""


class StoreRoom(Protocol):
    """Place of bytes until they are needed again."""

    def take(self, nbytes: int) -> Tensor:
        """Return room for so many bytes, as a tensor of them."""

    def leave(self, room: Tensor) -> None:
        """Let go of the memory that reading or writing a room has taken."""

    def write(self, room: Tensor, data: Tensor) -> None:
        """Put bytes into a room of as many; nothing of it stays in memory."""

    def read(self, room: Tensor, data: Tensor) -> None:
        """Fill a tensor of bytes from a room of as many; nothing else of it stays in memory."""

    def buffer(self, nbytes: int) -> Buffer:
        """Return room for a copy of the device's state."""


class HostRoom:
    """The memory of a GPU's host; `pinned`, copies need not be staged."""

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned

    def take(self, nbytes: int) -> Tensor:
        """Return room for so many bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned)

    def leave(self, room: Tensor) -> None:
        """Keep it: it is where it belongs."""

    def write(self, room: Tensor, data: Tensor) -> None:
        """Copy there."""
        room.copy_(data)

    def read(self, room: Tensor, data: Tensor) -> None:
        """Copy from there."""
        data.copy_(room)

    def buffer(self, nbytes: int) -> Buffer:
        """Return memory."""
        return bytearray(nbytes)


class DiskRoom:
    """A file without a name in a folder.

    Args:
        folder: on the disk; it must be there.
        device: whose it is.
        nbytes: that will be needed, as planned: taken now, so that a disk that is too full is
            known before the first step.

    Raises:
        StoreError: there is no such folder, it may not be written in, or it lacks the room.
    """

    def __init__(self, folder: str, device: str, nbytes: int) -> None:
        self.folder, self.device = folder, device
        self.file = self._nameless()
        weakref.finalize(self, os.close, self.file)
        self.used = 0
        self._maps: dict[int, mmap.mmap] = {}
        self._starts: dict[int, int] = {}  # of rooms, in the file
        self._reserve(self.file, nbytes)
        self.taken = nbytes

    def take(self, nbytes: int) -> Tensor:
        """Return room for so many bytes, in whole pages of the file.

        Raises:
            StoreError: the disk is full.
        """
        start, size = self.used, _pages_bytes(nbytes)
        if start + size > self.taken:
            self._reserve(self.file, start + size)
            self.taken = start + size
        self.used += size
        mapped = mmap.mmap(self.file, size, offset=start)
        room = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes)
        self._maps[room.data_ptr()], self._starts[room.data_ptr()] = mapped, start
        return room

    def leave(self, room: Tensor) -> None:
        """Unmap the pages from this process; the file has what was written."""
        self._maps[room.data_ptr()].madvise(mmap.MADV_DONTNEED)

    def write(self, room: Tensor, data: Tensor) -> None:
        """Write into the file, past its mapping: pages that are mapped are this process's memory.

        Raises:
            StoreError: the disk fails.
        """
        self._move(os.pwrite, room, data.cpu())

    def read(self, room: Tensor, data: Tensor) -> None:
        """Read from the file.

        Raises:
            StoreError: the disk fails.
        """
        here = data if data.device.type == "cpu" else torch.empty_like(data, device="cpu")
        self._move(lambda file, part, at: os.preadv(file, [part], at), room, here)
        if here is not data:
            data.copy_(here)

    def _move(
        self, move: Callable[[int, memoryview, int], int], room: Tensor, data: Tensor
    ) -> None:
        start, done = self._starts[room.data_ptr()], 0
        whole = memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")
        try:
            while done < len(whole):
                moved = move(self.file, whole[done:], start + done)
                if not moved:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += moved
        except OSError as error:
            raise StoreError(
                f"the store of {self.device} in {self.folder} fails: {error.strerror or error}: "
                "give another folder (--offload-dir); checkpoints are as they were",
                code="BX5164",
            ) from error

    def buffer(self, nbytes: int) -> Buffer:
        """Return a file of its own, which goes when nobody has it any more.

        Raises:
            StoreError: the disk is full.
        """
        file = self._nameless()
        try:
            self._reserve(file, _pages_bytes(nbytes))
            return mmap.mmap(file, _pages_bytes(nbytes))
        finally:
            os.close(file)

    def _nameless(self) -> int:
        try:
            with tempfile.TemporaryFile(dir=_folder(self.folder, self.device)) as file:
                return os.dup(file.fileno())
        except OSError as error:
            raise StoreError(
                f"the store of {self.device} cannot be written in {self.folder}: "
                f"{error.strerror or error}: give another folder (--offload-dir)",
                code="BX5165",
            ) from error

    def _reserve(self, file: int, nbytes: int) -> None:
        """Have the disk's promise of so many bytes."""
        if not nbytes:
            return
        try:
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            free = os.statvfs(self.folder)
            raise StoreError(
                f"the store of {self.device} in {self.folder} needs {_mib(nbytes)} and cannot have "
                f"it: {error.strerror or error} ({_mib(free.f_bavail * free.f_frsize)} are free): "
                "free some or give another folder (--offload-dir); checkpoints are as they were",
                code="BX5166",
            ) from error


def _pages_bytes(nbytes: int) -> int:
    """Return the bytes of the pages that so many take."""
    return -(-max(1, nbytes) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _folder(folder: str, device: str) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise StoreError(
            f"the store of {device} is to be in {folder}, which is no folder here: make it, or "
            "give another with --offload-dir",
            code="BX5167",
        )
    return path


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


class StoredState:
    """An optimizer whose state lies in a store but for the piece that is being updated."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        room: StoreRoom,
        weights: StoredWeights | None = None,
    ) -> None:
        self.optimizer, self.room, self.weights = optimizer, room, weights
        self.least_bytes = STORED_FROM_BYTES if weights is None else 0  # the rest grows with depth
        self.rooms: dict[tuple[int, str], Tensor] = {}  # parameter and key -> its bytes
        self.places: dict[tuple[int, str], Tensor] = {}  # the tensors over them
        self.homes: dict[tuple[int, str], torch.device] = {}  # where the optimizer made it

    def step(self) -> None:
        """Update all parameters, the state of a piece of them at a time.

        Raises:
            StateError: the optimizer's groups depend on which parameters a piece is of.
        """
        with nullcontext() if self.weights is None else apart():
            once = OncePerStep(self.optimizer.param_groups)
            for piece in pieces(self.optimizer):
                self._step_piece(piece, once)

    def _step_piece(self, piece: Sequence[nn.Parameter], once: OncePerStep) -> None:
        known = len(self.rooms)
        for parameter in piece:
            self._fetch(parameter)
        with self._here(piece), only(self.optimizer, piece) as groups, once.piece(groups):
            self.optimizer.step()
        for parameter in piece:
            self._put(parameter)
        if self.weights is not None and len(self.rooms) > known:
            give_freed_memory_back()  # a first state: what is small lies between what has gone

    def keep(self, parameter: nn.Parameter, key: str, value: Tensor) -> Tensor:
        """Return what is to be kept of a tensor of the state: itself, or its place in the store."""
        if parameter.nbytes < self.least_bytes or not is_dense(value):
            return value
        place = id(parameter), key
        room = self.rooms.get(place)
        if room is None or room.numel() < span_bytes(value):
            room = self.rooms[place] = self.room.take(span_bytes(value))
            self.places.pop(place, None)
        self.homes[place] = value.device
        self.places[place] = put(self.room, room, value, self.places.get(place))
        return self.places[place]

    def put_home(self, facts: dict[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
        """Note in the facts of a state the home of the optimizer's tensors, and not the store.

        Another device, with no store, then gets the tensors on their home.
        """
        stored = {
            f"optimizer:{key}:{name}": self.homes[id(parameter), key] == parameter.device
            for name, parameter in parameters.items()
            for key in self.optimizer.state.get(parameter, {})
            if (id(parameter), key) in self.homes
        }
        facts["on_cpu"] = [name for name in facts["on_cpu"] if not stored.get(name, False)]

    def _here(self, piece: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Have the weights of a piece in memory meanwhile, where they lie in the store, too."""
        return nullcontext() if self.weights is None else self.weights.here_for(piece)

    def _fetch(self, parameter: nn.Parameter) -> None:
        state: State = self.optimizer.state.get(parameter, {})
        for key in state:
            place = id(parameter), key
            if place in self.homes:
                state[key] = fetched(self.room, self.rooms[place], state[key], self.homes[place])

    def _put(self, parameter: nn.Parameter) -> None:
        state: State = self.optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = self.keep(parameter, key, value)


def is_dense(value: Tensor) -> bool:
    """Whether a tensor's elements fill its bytes, each once."""
    has_some = value.dim() > 0 and value.numel() > 0 and value.layout is torch.strided
    return has_some and span_bytes(value) == value.numel() * value.element_size()


def span_bytes(value: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    steps = zip(value.shape, value.stride(), strict=True)
    return value.element_size() * (1 + sum((size - 1) * step for size, step in steps))


def bytes_of(value: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, in the order in which they lie."""
    whole = torch.empty(0, dtype=torch.uint8, device=value.device)
    start = value.storage_offset() * value.element_size()
    found: Tensor = whole.set_(value.untyped_storage(), start, (span_bytes(value),), (1,))
    return found


def like_in(room: Tensor, value: Tensor) -> Tensor:
    """Return a tensor of another's kind, shape and strides over some bytes."""
    flat = room[: span_bytes(value)].view(value.dtype)
    return flat.as_strided(value.shape, value.stride())


def put(store: StoreRoom, room: Tensor, value: Tensor, place: Tensor | None = None) -> Tensor:
    """Put a dense tensor into a room; return its place there: the one from before, if it fits.

    Past the mapping, if it can be: to write a page that is mapped costs more than the copy. No
    place is made anew each time: what is small and stays would lie between what goes.
    """
    if place is None or not _is_like(place, value):
        place = like_in(room, value)
    if value.device.type == "cpu":
        store.write(room, bytes_of(value))
    else:
        place.copy_(value)
    store.leave(room)
    return place


def _is_like(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def fetched(store: StoreRoom, room: Tensor, stored: Tensor, where: torch.device) -> Tensor:
    """Return a copy of a dense tensor that lies in a room; of one that does not, as well."""
    made = torch.empty_strided(stored.shape, stored.stride(), dtype=stored.dtype, device=where)
    if where.type == "cpu" and stored.data_ptr() == room.data_ptr():
        store.read(room, bytes_of(made))
    else:
        made.copy_(stored)
    store.leave(room)
    return made


def room_of(folder: str | None, device: str, nbytes: int) -> StoreRoom:
    """Return a device's store: in a folder, or in its host's memory."""
    return HostRoom(pinned=True) if folder is None else DiskRoom(folder, device, nbytes)
