"""Commits: the states of all devices at one step, on a disk: whoever dies, this stays.

    FOLDER/commit-40.json            the record: written when all devices have written theirs
    FOLDER/commit-40-g2/d0.json      the manifest of one device: a checksum per tensor
    FOLDER/commit-40-g2/d0.safetensors
    FOLDER/generation.json           the fence: who has an older number writes no more

A name never leads to a part of a file, and the files that a record names are on the disk before the
record is. Two commits are kept unless more are asked for; older ones are removed after. No format
of others notices a flipped bit, so each tensor has its checksum. This file is stdlib only: a
supervisor without torch may write the record, too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .disk import Disk, listed, locked, read_regular
from .image import Buffer, read_layout
from .records import (
    FOLDER,
    RECORD,
    BrokenError,
    CommitError,
    FencedError,
    Record,
    Say,
    Shard,
    digest,
    folder_name,
    manifest_of,
    read_records,
    refuse_link,
    sealed,
    unsealed,
)

KEPT = 2
ASIDE = ".set-aside"  # ending of records that count no more: a user went back behind them
DISK = Disk()


# --------------------------------------------------------------------------- the folder


def open_folder(folder: Path, say: Say) -> None:
    """Make the folder of commits if it is not there; warn of who else may write in it.

    Raises:
        CommitError: it is a symbolic link, or a file.
        OSError: it cannot be made.
    """
    refuse_link(folder)
    if folder.exists() and not folder.is_dir():
        raise CommitError(f"{folder}: expected a folder of commits, found a file", code="BX5016")
    folder.mkdir(parents=True, exist_ok=True)
    warn_of_others(folder, say)


def warn_of_others(folder: Path, say: Say) -> None:
    """Say who else can change the commits of a folder."""
    found = folder.stat()
    if hasattr(os, "getuid") and found.st_uid not in (os.getuid(), 0):
        say(f"warning: {folder} belongs to user {found.st_uid}, who can change its commits")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        say(f"warning: everyone on this host can write in {folder}: chmod o-w {folder}")


def open_generation(
    folder: Path, disk: Disk = DISK, launcher: str = "", keep: int | None = None
) -> int:
    """Begin a new generation: all older ones can commit no more. Return its number, from 1.

    `launcher` names who started it, so that `launcher_of` can tell a restart from another run;
    `keep` is how many commits stay from now on (None: as many as before).
    """
    with locked(folder):
        number = newest_generation(folder) + 1
        kept = number_kept(folder) if keep is None else keep
        body = {"generation": number, "launcher": launcher, "keep": kept}
        disk.put(folder / "generation.json", [sealed(body)])
        return number


def launcher_of(folder: Path) -> str | None:
    """Return who started the newest generation, None if that is not known."""
    fence = _fence(folder)
    return None if fence is None else str(fence.get("launcher", ""))


def number_kept(folder: Path) -> int:
    """Return how many commits stay in a folder, as its last run was told."""
    found = (_fence(folder) or {}).get("keep")
    return found if type(found) is int and found >= KEPT else KEPT


def newest_generation(folder: Path) -> int:
    """Return the number of the newest generation, 0 if there was none."""
    found = [int(m[2]) for p in listed(folder, "commit-*-g*") if (m := FOLDER.fullmatch(p.name))]
    fence = _fence(folder)
    if fence is not None:
        found.append(fence["generation"])
    return max(found, default=0)


def _fence(folder: Path) -> dict[str, Any] | None:
    """Return what the fence says; None where it cannot be read: folders' names say it as well."""
    path = folder / "generation.json"
    with suppress(OSError, BrokenError):
        found = unsealed(read_regular(path), str(path))
        return found if type(found.get("generation")) is int else None
    return None


def require_newest(folder: Path, generation: int) -> None:
    """Refuse a process that was replaced and does not know it.

    Raises:
        FencedError: there is a newer generation.
    """
    newest = newest_generation(folder)
    if newest > generation:
        raise FencedError(
            f"generation {generation} was replaced by {newest}: it writes no commits any more",
            code="BX5017",
        )


# --------------------------------------------------------------------------- writing


def write_shard(
    folder: Path,
    device: str,
    image: Buffer,
    generation: int,
    about: Mapping[str, Any] | None = None,
    disk: Disk = DISK,
) -> Shard:
    """Write a device's image and its manifest; they count once `write_record` names them.

    Args:
        folder: of all commits.
        device: its name.
        image: what `State.copy_into` wrote; it must not change meanwhile. May be longer.
        generation: of the writer.
        about: what the state is of, as in `about_of`, where the image itself does not say.
        disk: where to write.

    Raises:
        FencedError: the writer was replaced.
        OSError: the disk is full: nothing of it is left behind.
    """
    require_newest(folder, generation)
    layout = read_layout(image)
    step = int(layout.facts["step"])
    place = folder / folder_name(step, generation)
    disk.make(place)
    disk.sync(folder)
    manifest = manifest_of(device, layout, image, generation, about or {})
    shard = Shard(device, step, digest(manifest), layout.size)
    try:
        disk.put(place / f"{device}.safetensors", [memoryview(image)[: layout.size]])
        disk.put(place / f"{device}.json", [manifest])
    except OSError:
        disk.remove(place / f"{device}.safetensors")
        raise
    return shard


def write_record(
    folder: Path,
    shards: Sequence[Shard],
    generation: int,
    about: Mapping[str, Any],
    disk: Disk = DISK,
    *,
    aside: bool = False,
) -> Record:
    """Make a commit of what all devices have written; from here on it is the newest.

    `aside`: under a name that does not count until somebody renames it.

    Raises:
        FencedError: the writer was replaced.
        OSError: the disk is full.
    """
    steps = {shard.step for shard in shards}
    if len(steps) != 1:
        raise ValueError(f"a commit is of one step, not of {sorted(steps)}")
    step = steps.pop()
    devices = {shard.device: shard.manifest for shard in shards}
    record = Record(step, generation, folder_name(step, generation), devices, dict(about))
    with locked(folder):
        require_newest(folder, generation)
        disk.put(folder / f"commit-{step}.json{ASIDE * aside}", [record.text.encode()])
    return record


def prune(
    folder: Path,
    generation: int,
    unusable: Sequence[Record] = (),
    disk: Disk = DISK,
    keep: int = KEPT,
    needed: Collection[str] = (),
) -> list[Record]:
    """Remove what no longer counts, after a record was written: all but the newest commits.

    Args:
        folder: of all commits.
        generation: of the writer.
        unusable: commits that could not be loaded: they are removed, and none is counted.
        disk: where they are.
        keep: how many commits stay.
        needed: the folders of older ones that stay, too.

    Returns:
        The commits that are kept, newest first.

    Raises:
        FencedError: the writer was replaced.
    """
    with locked(folder):
        require_newest(folder, generation)
        bad = {record.folder for record in unusable}
        found = [r for r in read_records(folder, lambda _: None) if r.folder not in bad]
        kept = [r for number, r in enumerate(found) if number < keep or r.folder in needed]
        steps = {record.step for record in kept}
        for path in listed(folder, "commit-*.json"):
            if (m := RECORD.fullmatch(path.name)) and int(m[1]) not in steps:
                disk.remove(path)
        disk.sync(folder)
        prune_folders(folder, [record.folder for record in kept], disk, generation)
        for path in listed(folder, ".*.tmp"):
            disk.remove(path)
        for path in listed(folder, f"commit-*.json{ASIDE}"):  # nobody can go back to these
            if not listed(folder, f"{path.name.removesuffix(f'.json{ASIDE}')}-g*"):
                disk.remove(path)
        return kept


def prune_folders(
    folder: Path, kept: Sequence[str], disk: Disk = DISK, generation: int = 0
) -> None:
    """Remove folders of states that are older than the newest of `kept`, or than a generation.

    Every device does, for a disk that the writer of the record does not see.
    """
    newest = max((int(m[1]) for name in kept if (m := FOLDER.fullmatch(name))), default=-1)
    for place in listed(folder, "commit-*-g*"):
        found = FOLDER.fullmatch(place.name)
        if found is None or place.name in kept:
            continue
        if int(found[1]) < newest or int(found[2]) < generation:
            drop(place, disk)


def drop(place: Path, disk: Disk = DISK) -> None:
    """Remove a folder of states, which no record names.

    Raises:
        OSError: it cannot be removed.
    """
    if place.is_symlink() or not place.is_dir():
        return
    for path in sorted(place.iterdir()):
        disk.remove(path)
    disk.remove(place)
