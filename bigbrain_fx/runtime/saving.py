"""Files of `--save` at the end: the tensors of all devices, or of none.

    every device   writes its file beside its place, and says so
    when all have  each gives its file its name, keeps an earlier file aside, and says so
    when all have  each drops the earlier file; one that could not lets all take theirs back

Two failures remain possible. Processes may end between the first name and the last report, all of
them or one without a replacement. Or a file system fails again as a file is taken back. Then some
files are of each run. Each file therefore names its run, and the numbers of all devices, as two
runs may have one seed and as many steps. A reader that joins files compares them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .checksum import checksum
from .tensor_file import SaveError, UnnamedFile

if TYPE_CHECKING:
    from .checked_device import CheckedDevice
    from .checkpoint_options import Ledger


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

    A replacement finds in the ledger who has written, and stands by what was said before it.

    Raises:
        SaveError: a device cannot write its own.
    """
    say_contents(device, _told(device, ledger, "contents", contents(device)))
    files, why = _tried(device, folder)
    why = _first(device, ledger, "aside", why) or _named(files)
    why = _first(device, ledger, "named", why)
    if why:  # who ends first ends all: not before each has tidied up
        for file in files:
            file.take_back()
        _told(device, ledger, "dropped", why)
        raise SaveError(why, code="BX5147")
    for file in files:
        file.settle()


def _tried(device: CheckedDevice, folder: Path) -> tuple[list[UnnamedFile], str]:
    """Return a device's files, also of those that it stands for, and why one is not written."""
    files: list[UnnamedFile] = []
    try:
        for name in (device.name, *device.stands_for):
            files.append(save_aside(device, folder, name))  # noqa: PERF401  # one may raise
    except SaveError as error:
        return files, str(error)
    return files, ""


def _named(files: Sequence[UnnamedFile]) -> str:
    """Give files their names; return why one cannot have it."""
    try:
        for file in files:
            file.put()
    except SaveError as error:
        return str(error)
    return ""


def _first(device: CheckedDevice, ledger: Ledger, what: str, why: str) -> str:
    """Report the result of this device, and return the first device's failure, if there is one.

    An earlier process's report of a failure stands: other devices may have received it.
    """
    said = ledger.look(f"{what}/{device.name}") or why
    return next(filter(None, _told(device, ledger, what, said)), "")


def _told(device: CheckedDevice, ledger: Ledger, what: str, own: str) -> list[str]:
    """Say something of this device; wait until all have said it, and return it."""
    ledger.post(f"{what}/{device.name}", own)
    return [ledger.wait(f"{what}/{name}") for name in device.names]
