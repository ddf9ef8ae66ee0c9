"""What `--save` writes at the end: the tensors of all devices, or of none.

    every device   writes its file beside its place, and says so
    when all have  each gives its file its name

What is there before stays whole when one disk is full. Only an end of all processes between the
first name and the last leaves some files of each. So each file says of which run it is, and of
which numbers of all devices (two runs may have one seed and as many steps), and who joins them
looks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from .checksum import checksum
from .tensor_file import SaveError, UnnamedFile

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .device import Device
    from .replay import ReplayTransport


def save_aside(device: Device, folder: Path, name: str | None = None) -> UnnamedFile:
    """Write a device's tensors into a folder, not yet under their name: its own, or another.

    Raises:
        SaveError: they cannot be written.
    """
    path = folder / f"{name or device.name}.safetensors"
    return UnnamedFile(device.state(), path, facts=device.of_run)


def contents(device: Device) -> str:
    """Return the checksum of what a device will save."""
    found = (f"{name} {checksum(tensor.cpu())}" for name, tensor in device.state().items())
    return hashlib.blake2b("\n".join(found).encode(), digest_size=8).hexdigest()


def say_contents(device: Device, of_all: Iterable[str]) -> None:
    """Let a device's file say which numbers all devices have; of all, in one order."""
    told = hashlib.blake2b(" ".join(of_all).encode(), digest_size=6).hexdigest()
    device.of_run = {**device.of_run, "contents": int(told, 16)}


def require_room(folder: str | None) -> None:
    """Refuse a folder to save in that cannot be one, before the training and not after it.

    Raises:
        SaveError: it cannot be made, or is not ours to write in.
    """
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(
            f"cannot save in {folder}: {error.strerror or error}: give another folder",
            code="BX5145",
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SaveError(
            f"cannot save in {folder}: it may not be written in: give another folder", code="BX5146"
        )


def save_together(device: Device, folder: Path, store: Store, rank: int, deadline_s: float) -> None:
    """Write all devices' tensors, or none.

    Raises:
        SaveError: a device cannot write its own.
    """
    others = [f"aside/{other}" for other in range(len(device.names))]
    each = [f"contents/{other}" for other in range(len(device.names))]
    store.set(each[rank], contents(device))
    store.wait(each, timedelta(seconds=deadline_s))
    say_contents(device, [store.get(key).decode() for key in each])
    try:
        file = save_aside(device, folder)
    except SaveError as error:
        store.set(others[rank], str(error))
        raise
    store.set(others[rank], "")
    store.wait(others, timedelta(seconds=deadline_s))
    failed = [text for key in others if (text := store.get(key).decode())]
    if failed:
        file.drop()
        raise SaveError(failed[0], code="BX5147")
    file.put()


def save_replayed(device: Device, folder: Path, transport: ReplayTransport) -> None:
    """Write all devices' tensors while processes may die and be replaced.

    A replacement finds on the supervisor's board who has written.

    Raises:
        SaveError: a device cannot write its own.
    """
    transport.control.post(f"contents/{device.name}", contents(device))
    say_contents(device, _told(device, transport, "contents"))
    file, why = _tried(device, folder)
    transport.control.post(f"aside/{device.name}", why)
    failed = [text for text in _told(device, transport, "aside") if text]
    failed += [why for key, why in transport.control.board.items() if key.startswith("dropped/")]
    if failed:  # who ends first ends all: not before each has tidied up
        if file is not None:
            file.drop()
        transport.control.post(f"dropped/{device.name}", failed[0])
        _told(device, transport, "dropped")
        raise SaveError(failed[0], code="BX5148")
    assert file is not None
    file.put()
    for lost in device.stands_for:
        save_aside(device, folder, lost).put()


def _tried(device: Device, folder: Path) -> tuple[UnnamedFile | None, str]:
    """Return the device's file, or why it cannot be written."""
    try:
        return save_aside(device, folder), ""
    except SaveError as error:
        return None, str(error)


def _told(device: Device, transport: ReplayTransport, what: str) -> list[str]:
    """Wait until all have said something, whoever dies meanwhile; return it."""
    board, keys = transport.control.board, [f"{what}/{name}" for name in device.names]

    def all_have() -> bool:
        return all(key in board for key in keys)

    while not all_have():
        if transport.control.wait_for_disk(all_have, transport.generation):
            transport.form()
    return [board[key] for key in keys]
