"""Checkpoints on a disk: the states of all devices at one step, which outlive processes.

    FOLDER/commit-40.json            the record: written when all devices have written theirs
    FOLDER/commit-40-g2/d0.json      the manifest of one device: a checksum per tensor
    FOLDER/commit-40-g2/d0.safetensors
    FOLDER/generation.json           the fence: who has an older number writes no more

A checkpoint counts once its record has its name, and the files that a record names are on the disk
before. A run goes on from the newest one that every device can load, each byte of it checked. One
of another plan or model is refused, and nothing starts from scratch by itself. Two stay unless more
are asked for. This file is stdlib only: a process without torch may read and write, too.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint_format import (
    FOLDER,
    RECORD,
    BrokenError,
    CommitError,
    FencedError,
    Part,
    Record,
    Say,
    digest,
    folder_name,
    manifest_of,
    reason_of,
    record_of,
    sealed,
    unsealed,
)
from .disk import Disk, listed, locked, read_regular, require_regular
from .image import Buffer, ImageLayout, read_layout

KEPT = 2
ASIDE = ".set-aside"  # ending of records that count no more: a user went back behind them
PICKLED = (".pt", ".pth", ".bin", ".pkl", ".ckpt", ".distcp")


@dataclass(frozen=True)
class Fence:
    """Permission to write: newest generation, its starter (None: unknown), checkpoints to keep."""

    generation: int
    launcher: str | None
    keep: int


@dataclass(frozen=True)
class Loaded:
    """A device's part of a checkpoint, checked; `image` is for `State.from_buffer`.

    `checks` are the checksums of its tensors, by name.
    """

    record: Record
    image: mmap.mmap
    layout: ImageLayout
    checks: Mapping[str, str]

    def forget(self) -> None:
        """Let the system take back the memory of what was read; the file still has it."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.image.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class CheckpointStore:
    """A folder of checkpoints, and the disk that it is on.

    A writer names its generation, and is refused with FencedError where that was replaced. A full
    disk is an OSError, and leaves no part of a file behind.
    """

    folder: Path
    disk: Disk = Disk()  # noqa: RUF009  # it keeps nothing

    # ------------------------------------------------------------------ who may write

    def prepare(self, say: Say) -> None:
        """Make the folder if it is not there; warn of who else may write in it.

        Raises:
            CommitError: it is a symbolic link, or a file.
        """
        _refuse_link(self.folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise CommitError(
                f"{self.folder}: expected a folder of checkpoints, found a file", code="BX5016"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.warn_of_others(say)

    def warn_of_others(self, say: Say) -> None:
        """Say who else can change these checkpoints."""
        folder, found = self.folder, self.folder.stat()
        if hasattr(os, "getuid") and found.st_uid not in (os.getuid(), 0):
            say(f"warning: {folder} belongs to user {found.st_uid}, who can change its checkpoints")
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            say(f"warning: everyone on this host can write in {folder}: chmod o-w {folder}")

    def begin_generation(self, launcher: str = "", keep: int | None = None) -> int:
        """Begin a generation, from 1: all older ones can write no more.

        `launcher` names who started it; `keep` checkpoints stay (None: as many as before).
        """
        with locked(self.folder):
            before = self.fence()
            number = before.generation + 1
            body = {"generation": number, "launcher": launcher, "keep": keep or before.keep}
            self.disk.put(self.folder / "generation.json", [sealed(body)])
            return number

    def fence(self) -> Fence:
        """Return the newest generation: by its file, or the names of folders if that is broken."""
        path, said = self.folder / "generation.json", dict[str, Any]()
        with suppress(OSError, BrokenError):
            found = unsealed(read_regular(path), str(path))
            said = found if type(found.get("generation")) is int else {}
        names = (FOLDER.fullmatch(place.name) for place in listed(self.folder, "commit-*-g*"))
        newest = max((int(match[2]) for match in names if match), default=0)
        keep = said.get("keep")
        return Fence(
            max(newest, said.get("generation", 0)),
            str(said.get("launcher", "")) if said else None,
            keep if type(keep) is int and keep >= KEPT else KEPT,
        )

    def _require_newest(self, generation: int) -> None:
        """Refuse a process that was replaced and does not know it."""
        newest = self.fence().generation
        if newest > generation:
            raise FencedError(
                f"generation {generation} was replaced by {newest}: it writes no more checkpoints",
                code="BX5017",
            )

    # ------------------------------------------------------------------ writing

    def write_part(
        self,
        device: str,
        image: Buffer,
        generation: int,
        about: Mapping[str, Any] | None = None,
    ) -> Part:
        """Write a device's image and its manifest; they count once `commit` names them.

        Args:
            device: its name.
            image: what `State.copy_into` wrote; it must not change meanwhile. May be longer.
            generation: of the writer.
            about: what the state is of, as in `about_of`, where the image itself does not say.
        """
        self._require_newest(generation)
        layout = read_layout(image)
        step = int(layout.facts["step"])
        place = self.folder / folder_name(step, generation)
        self.disk.make(place)
        self.disk.sync(self.folder)
        manifest = manifest_of(device, layout, image, generation, about or {})
        try:
            self.disk.put(place / f"{device}.safetensors", [memoryview(image)[: layout.size]])
            self.disk.put(place / f"{device}.json", [manifest])
        except OSError:
            self.disk.remove(place / f"{device}.safetensors")
            raise
        return Part(step, digest(manifest))

    def commit(
        self,
        parts: Mapping[str, Part],
        generation: int,
        about: Mapping[str, Any],
        *,
        aside: bool = False,
    ) -> Record:
        """Make a checkpoint of what all devices have written; from here on it is the newest.

        `aside`: under a name that does not count until somebody renames it.
        """
        steps = {part.step for part in parts.values()}
        if len(steps) != 1:
            raise ValueError(f"a checkpoint is of one step, not of {sorted(steps)}")
        step = steps.pop()
        devices = {device: part.manifest for device, part in parts.items()}
        record = Record(step, generation, folder_name(step, generation), devices, dict(about))
        with locked(self.folder):
            self._require_newest(generation)
            name = f"commit-{step}.json{ASIDE * aside}"
            self.disk.put(self.folder / name, [record.text.encode()])
        return record

    # ------------------------------------------------------------------ choosing and reading

    def records(self, say: Say = lambda _: None) -> list[Record]:
        """Return the checkpoints, newest first; `say` receives broken records.

        Raises:
            CommitError: one is a symbolic link, or of a newer format.
        """
        found = []
        for path in listed(self.folder, "commit-*.json"):
            if not RECORD.fullmatch(path.name):
                continue
            _refuse_link(path)
            try:
                found.append(record_of(read_regular(path), str(path)))
            except BrokenError as error:
                say(f"warning: {error}: this checkpoint is lost")
            except OSError as error:
                say(f"warning: {path}: {reason_of(error)}: this checkpoint is lost")
        return sorted(found, key=lambda record: (-record.generation, -record.step))

    def to_resume(self, say: Say) -> list[Record]:
        """Return the checkpoints that there are to go on from, newest first; at least one.

        Raises:
            CommitError: there is none, or no such folder.
        """
        folder = self.folder
        _refuse_link(folder)
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "is not there"
            raise CommitError(
                f"{folder} {what}: give the folder that --checkpoint-dir had", code="BX5053"
            )
        found = self.records(say)
        if not found:
            pickled = sorted(p.name for p in folder.rglob("*") if p.suffix in PICKLED)[:3]
            why = f" ({', '.join(pickled)}: pickled files are code and not read)" if pickled else ""
            raise CommitError(
                f"{folder} has no checkpoint{why}: give the folder that --checkpoint-dir had",
                code="BX5054",
            )
        return found

    def load(self, record: Record, device: str, expected: Mapping[str, Any], say: Say) -> Loaded:
        """Load one device's part of one checkpoint; every byte is checked.

        Raises:
            BrokenError: a file is missing or not as it was written; names file and tensor.
            CommitError: it is of another plan, graph, ..., or a symbolic link.
        """
        if device not in record.devices:
            raise CommitError(
                f"device: expected {device}, found {', '.join(sorted(record.devices))}: this is "
                "the checkpoint of another plan; `bigbrain-fx resplit` moves it to other devices",
                code="BX5055",
            )
        place = self.folder / record.folder
        _refuse_link(place)
        with _reading(path := place / f"{device}.json"):
            text = read_regular(path)
            manifest = unsealed(text, str(path))
            if digest(text) != record.devices[device]:
                raise ValueError("it is not the one that the checkpoint's record names")
            checks = {str(name): str(at["sha256"]) for name, at in manifest["tensors"].items()}
            head = str(manifest["head"]["sha256"])
        _require_same(manifest, expected, place, say)
        with _reading(file := place / f"{device}.safetensors"):
            require_regular(file)
            with file.open("rb") as opened:  # writing to the map changes no file
                image = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            layout = _whole(image, head, checks)
            if (step := layout.facts.get("step")) != record.step:
                raise ValueError(f"it is of step {step}, and the record of step {record.step}")
        return Loaded(record, image, layout, checks)

    # ------------------------------------------------------------------ retention

    def prune(
        self,
        generation: int,
        keep: int = KEPT,
        unusable: Sequence[Record] = (),
        needed: Collection[str] = (),
    ) -> list[str]:
        """Remove what no longer counts, after a record was written; return the folders that stay.

        Args:
            generation: of the writer.
            keep: how many checkpoints stay.
            unusable: those that could not be loaded: they are removed, and none is counted.
            needed: the folders of older ones that stay, too.
        """
        with locked(self.folder):
            self._require_newest(generation)
            bad = {record.folder for record in unusable}
            found = [record for record in self.records() if record.folder not in bad]
            kept = [r for number, r in enumerate(found) if number < keep or r.folder in needed]
            steps = {record.step for record in kept}
            for path in listed(self.folder, "commit-*.json"):
                if (m := RECORD.fullmatch(path.name)) and int(m[1]) not in steps:
                    self.disk.remove(path)
            self.disk.sync(self.folder)
            folders = [record.folder for record in kept]
            self.prune_folders(folders, generation)
            for path in listed(self.folder, ".*.tmp"):
                self.disk.remove(path)
            for path in listed(self.folder, f"commit-*.json{ASIDE}"):  # nobody can go back to these
                if not listed(self.folder, f"{path.name.removesuffix(f'.json{ASIDE}')}-g*"):
                    self.disk.remove(path)
            return folders

    def prune_folders(self, kept: Sequence[str], generation: int = 0) -> None:
        """Remove folders of states older than the newest of `kept`, or than a generation.

        Every device does, for a disk that the writer of the record does not see.
        """
        newest = max((int(m[1]) for name in kept if (m := FOLDER.fullmatch(name))), default=-1)
        for place in listed(self.folder, "commit-*-g*"):
            found = FOLDER.fullmatch(place.name)
            if found is None or place.name in kept:
                continue
            if int(found[1]) < newest or int(found[2]) < generation:
                self._drop(place)

    def drop(self, step: int, generation: int) -> None:
        """Remove the parts of a step, unless a record names them."""
        if not any(record.step == step for record in self.records()):
            self._drop(self.folder / folder_name(step, generation))

    def _drop(self, place: Path) -> None:
        if place.is_symlink() or not place.is_dir():
            return
        for path in sorted(place.iterdir()):
            self.disk.remove(path)
        self.disk.remove(place)


def first_loadable(
    found: Sequence[Record], problems: Callable[[Record], Sequence[str]], say: Say
) -> tuple[Record, list[Record]]:
    """Return the newest checkpoint without problems, and the newer ones that have some.

    Raises:
        CommitError: all have; a run never starts from scratch by itself.
    """
    unusable: list[Record] = []
    for record in found:
        wrong = problems(record)
        if not wrong:
            if unusable:
                say(f"WARNING: going back to the older checkpoint of step {record.step}")
            return record, unusable
        for problem in wrong:
            say(f"WARNING: the checkpoint of step {record.step} is broken: {problem}")
        unusable.append(record)
    raise CommitError(
        f"none of the {len(found)} checkpoints is whole: nothing was started; "
        "leave --resume out and give an empty --checkpoint-dir folder to train from the bundle's "
        "weights",
        code="BX5052",
    )


def _refuse_link(path: Path) -> None:
    """Refuse a symbolic link: what it leads to may be anyone's."""
    if path.is_symlink():
        raise CommitError(
            f"{path} is a symbolic link: give the folder of checkpoints itself", code="BX5124"
        )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Let a file with which anything is wrong make way for an older checkpoint: BrokenError."""
    _refuse_link(path)
    try:
        yield
    except (BrokenError, CommitError):
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        is_said = isinstance(error, OSError | ValueError)
        said = getattr(error, "strerror", None) or error
        why = said if is_said else "it is no part of a checkpoint"
        raise BrokenError(f"{path}: {why}", code="BX5058") from error


def _require_same(
    manifest: Mapping[str, Any], expected: Mapping[str, Any], place: Path, say: Say
) -> None:
    for field, want in expected.items():
        have = manifest.get(field)
        if have == want:
            continue
        if field != "torch":
            raise CommitError(
                f"{place}: {field}: expected {want!r}, found {have!r}: it is of another bundle: "
                "go on with that one, or move it: `bigbrain-fx resplit THAT --devices CLUSTER "
                f"--checkpoint-dir {place.parent} --out NEW`, and NEW goes on",
                code="BX5060",
            )
        if _minor(str(have)) != _minor(str(want)):
            say(
                f"warning: the checkpoint was made with torch {have}, this is {want}: "
                "it is not promised that the numbers are the same bit for bit"
            )


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _whole(image: mmap.mmap, head: str, checks: Mapping[str, str]) -> ImageLayout:
    """Compare every byte's checksum; name the tensor that is not as it was written.

    The header says which tensors are loaded: each of the header's tensors must have one checksum.
    """
    view = memoryview(image)
    layout = read_layout(view)
    if digest(layout.head) != head:
        raise ValueError("its header is not as it was written")
    if set(layout.entries) != set(checks):
        name = min(set(layout.entries) ^ set(checks))
        raise ValueError(f"its manifest and its header differ in tensor {name!r}")
    for name, entry in layout.entries.items():
        if digest(view[entry.start : entry.end]) != checks[name]:
            raise ValueError(f"tensor {name!r} is not as it was written")
    return layout
