"""The weights/ folder of a bundle: a safetensors file per device, or where its tensors are.

    weights/index.json           who answers for each trained parameter, in model order; checksums
    weights/d0.safetensors       the tensors of device d0, by the model's names
    weights/d0.references.json   those that d0 reads from the user's checkpoint instead
    weights/unused.safetensors   state that no device reads: kept for `export`
    weights/source.json          the checkpoint that all came from, if one was given

This file knows that folder; the bundle's own runtime reads it without us.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bigbrain_fx.core import Param
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.weights.checkpoint import Checkpoint, joined
from bigbrain_fx.weights.checksum import checksum_of
from bigbrain_fx.weights.stored import Stored, read_json
from bigbrain_fx.weights.write import Copy, write_file

REFERENCES = ".references.json"
SOURCE = "source.json"
INDEX = "index.json"
ENDING = ".safetensors"


class Rest(Protocol):
    """Source of tensors that no checkpoint holds, such as tables that the model computes."""

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        """Write tensors by name into safetensors files."""

    def write_batch(self, path: Path) -> None:
        """Write the example batch."""


@dataclass(frozen=True)
class FromCheckpoint:
    """Write a bundle's weights out of a checkpoint, a piece of a tensor at a time.

    Attributes:
        params: of the model's graph.
        sources: where each tensor of the state dict is.
        checkpoint: the user's files; only tensors in these can be left there.
        rest: who has all other tensors.
        by_reference: leave the numbers in the checkpoint and say where each is.
    """

    params: Sequence[Param]
    sources: Mapping[str, Stored]
    checkpoint: Checkpoint
    rest: Rest
    by_reference: bool = False

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        """Write the files; each holds, or refers to, the tensors named.

        Raises:
            InputError: the disk is full, or the checkpoint went away.
        """
        with os_error_as(
            "cannot write weights",
            code="BX3721",
            at=folder,
            help="free some space, or leave the numbers where they are: --weights-by-reference",
        ):
            for file, names in files.items():
                self._write(folder, file, names)
        place = json.dumps({"checkpoint": str(self.checkpoint.path)}, indent=1)
        (folder / SOURCE).write_text(place + "\n", encoding="utf-8")

    def write_batch(self, path: Path) -> None:
        """Write the example batch."""
        self.rest.write_batch(path)

    def _write(self, folder: Path, file: str, names: Sequence[str]) -> None:
        scratch = folder / f".rest-{file}"
        self.rest.write_weights(folder, {scratch.name: [n for n in names if n not in self.sources]})
        others = joined([scratch])
        left = [name for name in names if self._stays(name)]
        found = {**others, **{n: self.sources[n] for n in names if n in self.sources}}
        kinds = {param.name: param.spec.dtype for param in self.params}
        here = [Copy(n, kinds.get(n, found[n].dtype), found[n]) for n in names if n not in left]
        write_file(folder / file, here)
        scratch.unlink()
        if left:
            text = json.dumps({name: _reference(self.sources[name]) for name in left}, indent=1)
            (folder / (file.removesuffix(ENDING) + REFERENCES)).write_text(text + "\n", "utf-8")

    def _stays(self, name: str) -> bool:
        if not self.by_reference or name not in self.sources:
            return False
        source = self.sources[name]
        return self.checkpoint.tensors.get(source.key) == source


def write_index(folder: Path, owner: Mapping[str, str]) -> None:
    """Write the index of a weights/ folder, with a checksum of each tensor that is in it.

    Tensors that stay in the user's checkpoint are not read for it.

    Raises:
        InputError: a file cannot be read or written.
    """
    with os_error_as(
        f"cannot write {INDEX}",
        code="BX3722",
        at=folder,
        help="free some space, or give another place",
    ):
        stored = joined(sorted(folder.glob(f"[!.]*{ENDING}")))
        checksums = {name: checksum_of(tensor) for name, tensor in stored.items()}
        text = json.dumps({"owner": owner, "checksums": checksums}, indent=1)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def rewrite_index(folder: Path, old: Path, owner: Mapping[str, str]) -> None:
    """Write the index of a weights/ folder that takes the place of `old`, for the same devices.

    A bundle of bigbrain-fx 0.1.0 knows no checksums, and gets none. What cannot be read any more is
    written anew.

    Raises:
        InputError: a file cannot be read or written.
    """
    if not (old / INDEX).exists():
        return
    try:
        found = read_json(old / INDEX)
    except (OSError, ValueError, RecursionError):
        found = {"owner": owner}
    if not isinstance(found, dict) or "owner" in found:
        write_index(folder, owner)
    else:
        (folder / INDEX).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _reference(stored: Stored) -> dict[str, str]:
    return {"file": str(stored.file), "key": stored.key}


def source_of_weights(folder: Path) -> Path | None:
    """Return the checkpoint that a bundle's weights/ was written from, if there was one."""
    found = _source(folder).get("checkpoint")
    return None if found is None else Path(found)


def note_trained(folder: Path, steps: int) -> None:
    """Note that a bundle's weights are those of a run after so many steps."""
    (folder / SOURCE).write_text(json.dumps({"trained_steps": steps}) + "\n", encoding="utf-8")


def trained_steps(folder: Path) -> int | None:
    """Return what `note_trained` noted; None: the weights are the model's, or a checkpoint's."""
    found = _source(folder).get("trained_steps")
    return None if found is None else int(found)


def _source(folder: Path) -> dict[str, Any]:
    try:
        found = read_json(folder / SOURCE)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(
            f"{SOURCE} cannot be read", code="BX3723", at=str(folder / SOURCE)
        ) from error
    if not isinstance(found, dict) or not found.keys() & {"checkpoint", "trained_steps"}:
        raise InputError(
            f"{SOURCE} says nothing of the weights", code="BX3724", at=str(folder / SOURCE)
        )
    return found


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return all tensors of a weights/ folder by name, references followed.

    Raises:
        InputError: there are none, or a file is damaged or gone.
    """
    files = sorted(folder.glob(f"[!.]*{ENDING}"))
    if not files:
        raise InputError(
            f"expected weights in {folder}, found none",
            code="BX3725",
            at=str(folder),
            help="give a folder that `run --save` wrote, or a bundle's weights/",
        )
    found = joined(files)
    for listing in sorted(folder.glob(f"[!.]*{REFERENCES}")):
        for name, stored in _followed(listing).items():
            found.setdefault(name, stored)
    return found


def _followed(listing: Path) -> dict[str, Stored]:
    try:
        entries = read_json(listing)
        files = {str(entry["file"]) for entry in entries.values()}
        headers = {file: joined([Path(file)]) for file in sorted(files)}
        return {name: headers[entry["file"]][entry["key"]] for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{listing.name} does not lead to the tensors that it lists",
            code="BX3726",
            at=str(listing),
            help="put the checkpoint back, or `bigbrain-fx load` one into the bundle",
        ) from error


def unused_file(devices: Sequence[str]) -> str:
    """Return the file for state that no device reads; no device has a file of that name."""
    name = "unused"
    while name in devices:
        name += "_"
    return name + ENDING
