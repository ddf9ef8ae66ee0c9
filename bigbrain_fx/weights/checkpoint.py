"""A checkpoint on disk -> its tensors by name: one safetensors file, or a folder of them.

This file reads headers and the index; it reads no numbers and knows no models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.errors import InputError
from bigbrain_fx.weights.stored import Stored, facts_of, read_header, read_json

INDEX = ".safetensors.index.json"
_SHOWN = 5


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint by name, and where it is."""

    path: Path
    tensors: Mapping[str, Stored]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read the headers of a checkpoint; the numbers stay on disk.

    Args:
        path: a safetensors file, its index ("model.safetensors.index.json"), or a folder. A folder
            has an index and its shards, or model.safetensors, or several files that together hold
            each tensor once (what `run --save` writes).

    Raises:
        InputError: there is none, a shard is missing, or a file is damaged.
    """
    place = Path(path)
    if place.is_dir():
        return Checkpoint(place.resolve(), _of_folder(place.resolve()))
    if not place.is_file():
        raise InputError(
            f"expected a checkpoint at {place}, found nothing",
            code="BX3703",
            at=str(place),
            help="give a .safetensors file, or a folder of them",
        )
    place = place.resolve()
    tensors = _of_index(place) if place.name.endswith(INDEX) else read_header(place)
    return Checkpoint(place, tensors)


def _of_folder(folder: Path) -> dict[str, Stored]:
    indexes = sorted(folder.glob(f"*{INDEX}"))
    if indexes:
        return _of_index(_preferred(indexes, f"model{INDEX}"))
    files = sorted(folder.glob("*.safetensors"))
    if not files and (folder / ".metadata").is_file():
        raise InputError(
            f"{folder} is a checkpoint of torch.distributed.checkpoint, expected .safetensors",
            code="BX3704",
            at=str(folder),
            help="split without weights, then `bigbrain-fx load BUNDLE --from` it; with the "
            "optimizer's state: `bigbrain-fx resplit BUNDLE --from-dcp` it",
        )
    if not files:
        raise _no_tensors(folder)
    whole = _preferred(files, "model.safetensors")
    if whole.name == "model.safetensors":
        return read_header(whole)
    require_one_save(folder)
    return joined(files)


def _preferred(files: Sequence[Path], name: str) -> Path:
    return next((file for file in files if file.name == name), files[0])


def require_one_save(folder: Path) -> None:
    """Refuse files of `--save` of two runs: a process may be killed between two of their names.

    Raises:
        InputError: their files say that they are of different ones.
    """
    files = sorted(folder.glob("[!.]*.safetensors"))
    told = {file: facts_of(file) for file in files}
    if len(set(told.values())) > 1:
        raise InputError(
            f"{folder} has files of different runs",
            code="BX3705",
            at=str(folder),
            notes=tuple(f"{f.name}: {facts or 'it does not say'}" for f, facts in told.items()),
            help="a run was ended while it gave its files their names: run it again with --save, "
            "or take the weights of a checkpoint by --checkpoint-dir",
        )


def joined(files: Sequence[Path]) -> dict[str, Stored]:
    """Return the tensors of several files; one that is in many is taken from the first.

    Raises:
        InputError: two files have different tensors of one name.
    """
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in read_header(file).items():
            first = found.setdefault(name, stored)
            if (first.shape, first.dtype) != (stored.shape, stored.dtype):
                raise InputError(
                    f"{first.file.name} and {file.name} have different tensors called {name!r}",
                    code="BX3706",
                    at=str(file),
                    help="give one of the files, or a folder with one checkpoint in it",
                )
    return found


def _of_index(index: Path) -> dict[str, Stored]:
    where = _weight_map(index)
    shards = {}
    for name in dict.fromkeys(where.values()):
        if Path(name).name != name:
            raise InputError(
                f"the index names {name!r}, expected a file beside it", code="BX3707", at=str(index)
            )
        shards[name] = read_header(index.with_name(name)) if (index.parent / name).is_file() else {}
    lost = [name for name, file in where.items() if name not in shards[file]]
    if lost:
        files = ", ".join(dict.fromkeys(where[name] for name in lost))
        raise InputError(
            f"the checkpoint lacks {len(lost)} of the {len(where)} tensors that its index lists",
            code="BX3708",
            at=str(index),
            notes=(f"missing: {listed(lost)}", f"expected in {files}"),
            help="copy all shards into the folder",
        )
    return {name: shards[file][name] for name, file in where.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = read_json(index)["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index.name} is no index of a checkpoint",
            code="BX3709",
            at=str(index),
            help='expected JSON with "weight_map": {tensor: file}',
        ) from error


def _no_tensors(folder: Path) -> InputError:
    pickled = sorted(
        p.name for ending in ("bin", "pt", "pth", "ckpt") for p in folder.glob(f"*.{ending}")
    )
    return InputError(
        f"expected .safetensors files in {folder}, found none",
        code="BX3710",
        at=str(folder),
        notes=(f"pickled files are code and are not read: {listed(pickled)}",) if pickled else (),
        help="safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        if pickled
        else "give the folder that holds model.safetensors",
    )


def listed(names: Sequence[str]) -> str:
    """Name the first few of many."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
