"""Commits from a disk: every byte is checked, and what is broken makes way for the older commit.

What is of something else (another plan, another model) is refused, and nothing ever starts from
scratch by itself. This file is stdlib only and writes nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .disk import read_regular
from .image import ImageError, ImageLayout, read_layout
from .records import (
    BrokenError,
    CommitError,
    Record,
    Say,
    digest,
    read_records,
    refuse_link,
    unsealed,
)

PICKLED = (".pt", ".pth", ".bin", ".pkl", ".ckpt", ".distcp")


@dataclass(frozen=True)
class Loadable:
    """Whether a device can load its part of a commit; empty: it can.

    Attributes:
        broken: why not; an older commit may do.
        refused, code: why no commit will.
    """

    broken: str = ""
    refused: str = ""
    code: str = ""


@dataclass(frozen=True)
class Loaded:
    """A device's part of a commit, checked; `image` is for `State.from_buffer`.

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


def first_loadable(
    found: Sequence[Record], problems: Callable[[Record], Sequence[str]], say: Say
) -> tuple[Record, list[Record]]:
    """Return the newest commit without problems, and the newer ones that have some.

    Raises:
        CommitError: all have; a run never starts from scratch by itself.
    """
    unusable: list[Record] = []
    for record in found:
        wrong = problems(record)
        if not wrong:
            if unusable:
                say(f"WARNING: going back to the older commit of step {record.step}")
            return record, unusable
        for problem in wrong:
            say(f"WARNING: the commit of step {record.step} is broken: {problem}")
        unusable.append(record)
    raise CommitError(
        f"none of the {len(found)} commits is whole: nothing was started; "
        "leave --resume out and give an empty --checkpoint-dir folder to train from the bundle's "
        "weights",
        code="BX5052",
    )


def committed(folder: Path, say: Say) -> list[Record]:
    """Return the commits that there are to resume from, newest first; at least one.

    Raises:
        CommitError: there is none, or no such folder.
    """
    refuse_link(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not there"
        raise CommitError(
            f"{folder} {what}: give the folder that --checkpoint-dir had", code="BX5053"
        )
    found = read_records(folder, say)
    if not found:
        pickled = sorted(p.name for p in folder.rglob("*") if p.suffix in PICKLED)[:3]
        why = f" ({', '.join(pickled)}: pickled files are code and not read)" if pickled else ""
        raise CommitError(
            f"{folder} has no commit{why}: give the folder that --checkpoint-dir had", code="BX5054"
        )
    return found


def load_shard(
    folder: Path, record: Record, device: str, expected: Mapping[str, Any], say: Say
) -> Loaded:
    """Load one device's part of one commit; every byte is checked.

    Raises:
        BrokenError: a file is missing or not as it was written; names file and tensor.
        CommitError: it is of another plan, graph, ..., or a symbolic link.
    """
    if device not in record.devices:
        raise CommitError(
            f"device: expected {device}, found {', '.join(sorted(record.devices))}: this is the "
            "commit of another plan; `bigbrain-fx resplit` moves it to other devices",
            code="BX5055",
        )
    place = folder / record.folder
    refuse_link(place)
    path = place / f"{device}.json"
    manifest = _manifest(path, record.devices[device])
    _require_same(manifest, expected, place, say)
    head, checks = _checks(manifest, path)
    file = place / f"{device}.safetensors"
    image = _mapped(file)
    try:
        layout = _whole(image, head, checks, file)
    except ImageError as error:
        raise BrokenError(f"{file}: {error}", code="BX5056") from error
    if (step := layout.facts.get("step")) != record.step:
        raise BrokenError(
            f"{file}: it is of step {step}, and the record of step {record.step}", code="BX5057"
        )
    return Loaded(record, image, layout, checks)


def _manifest(path: Path, check: str) -> dict[str, Any]:
    _require_file(path)
    try:
        text = read_regular(path)
    except OSError as error:
        raise BrokenError(f"{path}: {error.strerror or error}", code="BX5058") from error
    found = unsealed(text, str(path))
    if digest(text) != check:
        raise BrokenError(
            f"{path}: it is not the one that the commit's record names", code="BX5059"
        )
    return found


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
                f"warning: the commit was made with torch {have}, this is {want}: "
                "it is not promised that the numbers are the same bit for bit"
            )


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _require_file(path: Path) -> None:
    refuse_link(path)
    if not path.is_file():
        raise BrokenError(f"{path}: the file is missing", code="BX5061")


def _mapped(path: Path) -> mmap.mmap:
    """Map a file; writing to the map changes no file."""
    _require_file(path)
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise BrokenError(
            f"{path}: {getattr(error, 'strerror', None) or error}", code="BX5062"
        ) from error


def _checks(manifest: Mapping[str, Any], path: Path) -> tuple[str, dict[str, str]]:
    """Return the checksums of the header and, by name, of the tensors.

    Raises:
        BrokenError: they are not there.
    """
    try:
        checks = {str(name): str(at["sha256"]) for name, at in manifest["tensors"].items()}
        return str(manifest["head"]["sha256"]), checks
    except (KeyError, TypeError, AttributeError) as error:
        raise BrokenError(f"{path}: it is no manifest of a commit", code="BX5063") from error


def _whole(image: mmap.mmap, head: str, checks: Mapping[str, str], file: Path) -> ImageLayout:
    """Compare every byte's checksum; name the tensor that is not as it was written.

    What is loaded is what the header says, so it is the header's tensors that must have one each.
    """
    view = memoryview(image)
    layout = read_layout(view)
    if digest(layout.head) != head:
        raise BrokenError(f"{file}: its header is not as it was written", code="BX5064")
    if set(layout.entries) != set(checks):
        name = min(set(layout.entries) ^ set(checks))
        raise BrokenError(
            f"{file}: its manifest and its header differ in tensor {name!r}", code="BX5065"
        )
    for name, entry in layout.entries.items():
        if digest(view[entry.start : entry.end]) != checks[name]:
            raise BrokenError(f"{file}: tensor {name!r} is not as it was written", code="BX5066")
    return layout
