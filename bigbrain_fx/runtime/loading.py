"""Commits from a disk: every byte is checked, and what is broken makes way for the older commit.

What is of something else (another plan, another model) is refused, and nothing ever starts from
scratch by itself. This file is stdlib only and writes nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .disk import read_regular, require_regular
from .image import ImageLayout, read_layout
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
    with _reading(path := place / f"{device}.json"):
        text = read_regular(path)
        manifest = unsealed(text, str(path))
        if digest(text) != record.devices[device]:
            raise ValueError("it is not the one that the commit's record names")
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


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Let a file with which anything is wrong make way for an older commit.

    Raises:
        BrokenError: names it.
        CommitError: it is a symbolic link, or of a newer format.
    """
    refuse_link(path)
    try:
        yield
    except (BrokenError, CommitError):
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        is_said = isinstance(error, OSError | ValueError)
        why = getattr(error, "strerror", None) or error if is_said else "it is no part of a commit"
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
                f"warning: the commit was made with torch {have}, this is {want}: "
                "it is not promised that the numbers are the same bit for bit"
            )


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _whole(image: mmap.mmap, head: str, checks: Mapping[str, str]) -> ImageLayout:
    """Compare every byte's checksum; name the tensor that is not as it was written.

    What is loaded is what the header says, so it is the header's tensors that must have one each.
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
