"""Description of a checkpoint, as JSON with a checksum of its own: records and manifests.

    commit-40.json       the record: step, generation, folder, and each device's manifest
    commit-40-g2/d0.json the manifest: of each tensor dtype, shape, place and SHA-256

This file is stdlib only, and reads and writes no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .coded import CodedError, InputError
from .disk import read_regular
from .image import Buffer, ImageLayout
from .json_once import once

FORMAT = 1
FOLDER = re.compile(r"commit-(\d+)-g(\d+)")
RECORD = re.compile(r"commit-(\d+)\.json")
AGREED = ("plan", "graph", "seed", "torch", "micro_batches")
Say = Callable[[str], None]


class CommitError(InputError, ValueError):
    """Report commits that must not be used, or that there are none; for the user to act on."""


class BrokenError(CodedError, ValueError):
    """Report a file of a commit that is not as it was written; an older commit may do."""


class FencedError(CodedError, RuntimeError):
    """Report that a newer generation has taken over: this one writes nothing more."""


@dataclass(frozen=True, slots=True)
class Part:
    """A device's report on its part of a checkpoint: written, loadable, or the reason why not.

    Attributes:
        step: of the checkpoint, where the part is written.
        manifest: the checksum of its manifest: the record remembers it.
        why: it is not written, or cannot be loaded.
        code: of the error that holds for all checkpoints; "": another one may do.
    """

    step: int = -1
    manifest: str = ""
    why: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """A checkpoint: at which step, by which generation, in which folder, and of whom.

    Attributes:
        devices: device -> checksum of its manifest.
        about: what all devices agree on: hashes of plan and graph, seed, torch's version.
    """

    step: int
    generation: int
    folder: str
    devices: Mapping[str, str]
    about: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The record as JSON with its checksum: `record_of` reads it."""
        return sealed(asdict(self)).decode()


def folder_name(step: int, generation: int) -> str:
    """Return where a generation writes a step: no two generations write the same file."""
    return f"commit-{step}-g{generation}"


def about_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says of all devices, from the facts of any one's state."""
    return {name: facts.get(name) for name in AGREED}


def graph_hash(plan_json: bytes) -> str:
    """Return the hash of the model in a plan.json, which no other split of it changes.

    The hash covers every op with its module path, and therefore also the keys of all random draws.
    """
    text = json.dumps(json.loads(plan_json)["graph"], sort_keys=True, separators=(",", ":"))
    return digest(text.encode())[:16]


def graph_in(bundle: Path) -> str:
    """Return the hash of the model of a bundle.

    Raises:
        CommitError: its plan.json cannot be read.
    """
    path = bundle / "plan.json"
    try:
        return graph_hash(read_regular(path))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CommitError(
            f"{path} is not as it was written: copy the bundle again", code="BX5120"
        ) from error


def manifest_of(
    device: str, layout: ImageLayout, image: Buffer, generation: int, about: Mapping[str, Any]
) -> bytes:
    """Describe an image, with the SHA-256 of each tensor and of the rest."""
    view = memoryview(image)
    tensors = {
        name: {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "place": [entry.start, entry.end],
            "sha256": digest(view[entry.start : entry.end]),
        }
        for name, entry in layout.entries.items()
    }
    return sealed(
        {
            "device": device,
            "step": int(layout.facts["step"]),
            "generation": generation,
            "size": layout.size,
            "head": {"place": [0, len(layout.head)], "sha256": digest(layout.head)},
            "tensors": tensors,
            **about_of({**layout.facts, **about}),
        }
    )


def record_of(text: bytes, where: str) -> Record:
    """Read a record.

    Raises:
        BrokenError: its checksum is wrong, or it is no record.
        CommitError: it is of a newer format.
    """
    found = unsealed(text, where)
    with suppress(KeyError, TypeError, AttributeError):
        record = Record(**{name: found[name] for name in Record.__slots__})
        if _is_sound(record):
            return record
    raise BrokenError(f"{where}: it is no record of a checkpoint", code="BX5122")


def _is_sound(record: Record) -> bool:
    numbers = type(record.step) is int and type(record.generation) is int
    checks = all(isinstance(check, str) for check in record.devices.values())
    is_its_own = record.folder == folder_name(record.step, record.generation)
    return numbers and checks and is_its_own and isinstance(record.about, dict)


def reason_of(error: Exception) -> str:
    """Say in a few words why something could not be read or written."""
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return f"{type(error).__name__}: {error}"


def digest(data: Buffer) -> str:
    """Return the SHA-256 of some bytes; as fast as any checksum where the processor knows it."""
    return hashlib.sha256(data).hexdigest()


def sealed(body: Mapping[str, Any]) -> bytes:
    """Return JSON that tells when a bit of it is flipped."""
    whole = {"format": FORMAT, **body}
    return (json.dumps({**whole, "check": _check(whole)}, indent=1) + "\n").encode()


def unsealed(text: bytes, where: str) -> dict[str, Any]:
    """Read what `sealed` wrote.

    Raises:
        BrokenError: a bit of it is another, or it is cut off.
        CommitError: it is of a newer format.
    """
    try:
        found = json.loads(text, object_pairs_hook=once)
        check = found.pop("check")
        number = found["format"]
        is_sound = check == _check(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenError(f"{where}: it is not whole", code="BX5125") from error
    if not is_sound:
        raise BrokenError(f"{where}: its checksum is wrong", code="BX5126")
    if number != FORMAT:
        raise CommitError(
            f"{where}: format: expected {FORMAT}, found {number!r}: "
            "use the bundle of the bigbrain-fx that wrote it",
            code="BX5127",
        )
    del found["format"]
    return dict(found)


def _check(body: Mapping[str, Any]) -> str:
    return digest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
