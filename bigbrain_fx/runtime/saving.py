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
from pathlib import Path
from typing import TYPE_CHECKING

from .checksum import checksum
from .tensor_file import SaveError, UnnamedFile

if TYPE_CHECKING:
    from .checked_device import CheckedDevice
    from .ledger import Ledger


def save_aside(device: CheckedDevice, folder: Path, name: str | None = None) -> UnnamedFile:
    """Write a device's tensors into a folder, not yet under their name: its own, or another.

    Raises:
        SaveError: they cannot be written.
    """
    path = folder / f"{name or device.name}.safetensors"
    return UnnamedFile(device.state(), path, facts=device.of_run)


def contents(device: CheckedDevice) -> str:
    """Return the checksum of what a device will save."""
    found = (f"{name} {checksum(tensor.cpu())}" for name, tensor in device.state().items())
    return hashlib.blake2b("\n".join(found).encode(), digest_size=8).hexdigest()


def say_contents(device: CheckedDevice, of_all: Iterable[str]) -> None:
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


def save_together(device: CheckedDevice, folder: Path, ledger: Ledger) -> None:
    """Write all devices' tensors, or none; processes may be replaced meanwhile.

    A replacement finds in the ledger who has written.

    Raises:
        SaveError: a device cannot write its own.
    """
    say_contents(device, _told(device, ledger, "contents", contents(device)))
    file, why = _tried(device, folder)
    failed = [text for text in _told(device, ledger, "aside", why) if text]
    failed += filter(None, (ledger.look(f"dropped/{name}") for name in device.names))
    if failed:  # who ends first ends all: not before each has tidied up
        if file is not None:
            file.drop()
        _told(device, ledger, "dropped", failed[0])
        raise SaveError(failed[0], code="BX5147")
    assert file is not None
    file.put()
    for lost in device.stands_for:
        save_aside(device, folder, lost).put()


def _tried(device: CheckedDevice, folder: Path) -> tuple[UnnamedFile | None, str]:
    """Return the device's file, or why it cannot be written."""
    try:
        return save_aside(device, folder), ""
    except SaveError as error:
        return None, str(error)


def _told(device: CheckedDevice, ledger: Ledger, what: str, own: str) -> list[str]:
    """Say something of this device; wait until all have said it, and return it."""
    ledger.post(f"{what}/{device.name}", own)
    return [ledger.wait(f"{what}/{name}") for name in device.names]
