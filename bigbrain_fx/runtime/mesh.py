"""Messages between processes that are replaced: a group that may be given up, and made anew.

A generation of a supervised run has a mesh of its own. Its messages have checksums: who knows how
to connect anew can ask for one again.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

# torch exports it, but not for mypy
from torch.distributed import Store  # type: ignore[attr-defined]

from .channel import Channel, Layout
from .checksum import WORD, hashed
from .coded import InputError
from .gloo import ChannelEnd
from .limits import remedy_of, require_threads
from .network import Background, NetworkTransport
from .packets import SpoiledError
from .peers import PeerLostError
from .rendezvous import MESH_THREADS

if TYPE_CHECKING:
    from .control import Control


def sealed_length(nbytes: int) -> int:
    """Return the bytes that a sealed payload of `nbytes` takes."""
    return -(-nbytes // WORD) * WORD + WORD


def seal(payload: Tensor) -> Tensor:
    """Return a copy of a 1-d tensor of bytes, with its checksum."""
    length = payload.numel()
    end = sealed_length(length) - WORD
    sealed = torch.empty(end + WORD, dtype=torch.uint8)
    sealed[:length].copy_(payload)
    if end > length:
        sealed[length:end].zero_()
    ctypes.memmove(sealed.data_ptr() + end, _checksum(sealed, length), WORD)
    return sealed


def is_whole(sealed: Tensor, nbytes: int) -> bool:
    """Whether what `seal` made of `nbytes` bytes has arrived as it left."""
    end = sealed.numel() - WORD
    return ctypes.string_at(sealed.data_ptr() + end, WORD) == _checksum(sealed, nbytes)


def _checksum(sealed: Tensor, nbytes: int) -> bytes:
    return hashed(sealed.view(torch.int64), sealed.numel() // WORD - 1, nbytes)


FORM_S = 10.0  # longest time in which connections of a generation are made
GLOO_PATIENCE = 5  # gloo waits for connections five times as long as its timeout says
ALARM = (1 << 31) - 1  # tag of a message that nobody sends


class MeshTransport(NetworkTransport):
    """Send and receive over a gloo group that is no default group, which `abandon` may close.

    Args:
        ranks, device, deadline_s, store: as of a NetworkTransport.
        mesh: the group.
    """

    background: MeshSends

    def __init__(
        self,
        ranks: dict[str, int],
        device: torch.device,
        deadline_s: float,
        store: Store | None = None,
        *,
        mesh: dist.ProcessGroup,
    ) -> None:
        super().__init__(ranks, device, deadline_s, store)
        self.mesh: dist.ProcessGroup | None = mesh
        self.alarms = _alarms(mesh)

    def abandon(self) -> None:
        """Close a mesh's connections at once, from any thread; waiting threads wake up.

        gloo closes all pairs of a group when one wait has lasted too long. The wait for a message
        that nobody sends therefore lasts a millisecond. The wait must be for a living peer: that
        for a dead one has failed, and closes nothing. (`abort` wakes no receive, and a pair stays
        open while any handle of it is held.)
        """
        for _, work in self.alarms:
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Abandon a mesh and drop everything that belongs to it."""
        self.abandon()
        self.background.stop()
        self.lines.clear()
        self.alarms = []
        self.mesh = None

    def _sends(self) -> MeshSends:
        return MeshSends(self.deadline)

    def layout(self, channel: Channel) -> Layout | None:
        """Return how a channel's messages lie in memory; None before its first one."""
        return self._line(channel).layout

    def _rank(self) -> int:
        return self._open().rank()

    def _open(self) -> dist.ProcessGroup:
        if self.mesh is None:
            raise RuntimeError("the mesh is closed")
        return self.mesh

    def _send_work(self, line: ChannelEnd, payload: Tensor, tag: int) -> Any:  # noqa: ANN401  # work
        return self._open().send([payload], line.peer, tag)

    def _recv_work(self, line: ChannelEnd, payload: Tensor, tag: int) -> Any:  # noqa: ANN401  # work
        return self._open().recv([payload], line.peer, tag)

    # ------------------------------------------------------------------ bytes on the wire

    def _bytes(self, flat: Tensor) -> Tensor:
        return seal(super()._bytes(flat))

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        length = sealed_length(numel * dtype.itemsize)
        return torch.empty(length, dtype=torch.uint8, device=self.wire)

    def _opened(self, arrived: Tensor, numel: int, dtype: torch.dtype, channel: Channel) -> Tensor:
        nbytes = numel * dtype.itemsize
        if not is_whole(arrived, nbytes):
            raise SpoiledError(f"a message's checksum is wrong: {channel}", code="BX5087")
        return arrived[:nbytes].view(dtype)


class MeshSends(Background):
    """Messages that are leaving over a mesh, which may be given up."""

    @property
    def current(self) -> Channel | None:
        """The message that has been leaving for longest."""
        leaving = [found for sends in self.queues.copy().values() if (found := sends.leaving)]
        return min(leaving, key=lambda entry: entry[0])[1] if leaving else None

    def stop(self) -> None:
        """End the threads once they have let go of everything."""
        for sends in self.queues.copy().values():
            sends.under_way.put(None)


def _alarms(mesh: dist.ProcessGroup) -> list[tuple[Tensor, Any]]:
    """Post receives that nobody answers, one for each peer; see `MeshTransport.abandon`.

    Raises:
        PeerLostError: a peer is gone already.
    """
    posted: list[tuple[Tensor, Any]] = []
    for peer in (rank for rank in range(mesh.size()) if rank != mesh.rank()):
        nothing = torch.empty(1, dtype=torch.uint8)
        try:
            posted.append((nothing, mesh.recv([nothing], peer, ALARM)))
        except RuntimeError as error:
            raise PeerLostError(
                "a peer was gone before all were connected", code="BX5091"
            ) from error
    return posted


class PassedOn(Store):
    """A store for one generation: what a device sets, its supervisor passes on to all others."""

    def __init__(self, control: Control, generation: int) -> None:
        super().__init__()
        self.control = control
        self.generation = generation

    def set(self, key: str, value: bytes | str) -> None:
        """Tell all devices a value."""
        told = value.encode() if isinstance(value, str) else bytes(value)
        self.control.put(f"{self.generation}/{key}", told)

    def get(self, key: str) -> bytes:
        """Wait for a value; see `Control.take` for its errors."""
        return self.control.take(f"{self.generation}/{key}", self.generation, FORM_S)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values."""
        for key in keys:
            self.get(key)

    def has_extended_api(self) -> bool:
        """Say that there is nothing but these."""
        return False


def form_mesh(store: PassedOn, rank: int, world: int) -> dist.ProcessGroup:
    """Connect every device with every other over gloo.

    The mesh is no default group: a process may have made many of them, one after another.

    Raises:
        PeerLostError: a device is gone, or the generation has been given up.
        RuntimeError: no thread can be started, see `limits`.
    """
    require_threads(MESH_THREADS)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch has it
    options._devices = [_gloo_device(_listening_place())]
    options._timeout = timedelta(seconds=FORM_S / GLOO_PATIENCE)
    made: list[Any] = []

    def connect() -> None:
        try:
            made.append(dist.ProcessGroupGloo(store, rank, world, options))
        except (RuntimeError, OSError) as error:
            made.append(error)
        store.control.wake()

    # gloo waits in vain for a device that dies now: then this thread is left to itself
    threading.Thread(target=connect, daemon=True, name="connect").start()
    store.control.wait_unless_moved(store.generation, lambda: bool(made))
    mesh = made[0]
    if isinstance(mesh, Exception):
        if remedy_of(mesh) is not None:
            raise mesh
        raise PeerLostError(f"the devices could not be connected: {mesh}", code="BX5131") from mesh
    return cast(dist.ProcessGroup, mesh)


def _listening_place() -> tuple[tuple[str, str], ...]:
    """Return where to listen: the interface that was named, or the address; by itself loopback."""
    interface, address = os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("BIGBRAIN_ADDRESS")
    if interface is None and address is not None:
        return (("hostname", address),)
    return (("interface", interface or "lo"),)


@lru_cache(maxsize=1)
def _gloo_device(place: tuple[tuple[str, str], ...]) -> Any:  # noqa: ANN401  # torch has no name
    [(kind, name)] = place
    try:
        return dist.ProcessGroupGloo.create_device(**{kind: name})
    except RuntimeError as error:
        if kind != "interface" or remedy_of(error) is not None:
            raise
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise InputError(
            f"processes connect by the interface {name!r} (GLOO_SOCKET_IFNAME, else lo), which is "
            f"down, has no address, or is none of this host's ({there}): bring it up (`ip link set "
            "lo up` as root), or name the one by which the other hosts are reached; or train in "
            "one process: `python train.py --in-process`",
            code="BX5133",
        ) from error
