"""The tensors of all devices -> one checkpoint under the user's names, tied ones under each.

This file knows state dicts and files; it knows no plans.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.core import Param
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.weights.checkpoint import INDEX, listed
from bigbrain_fx.weights.modes import scratch_folder
from bigbrain_fx.weights.stored import Stored
from bigbrain_fx.weights.write import Copy, write_file


@dataclass(frozen=True)
class Joined:
    """Written files, with their numbers of tensors and bytes."""

    files: tuple[Path, ...]
    tensors: int
    bytes: int


def state(params: Sequence[Param], stored: Mapping[str, Stored]) -> list[Copy]:
    """Return the model's whole state dict, in its order; constants are no state.

    Raises:
        InputError: a tensor is nowhere.
    """
    twins: dict[str, Stored] = {}
    for param in params:
        if param.name in stored:
            twins.setdefault(param.canonical, stored[param.name])
    kept = [param for param in params if param.kind != "constant"]
    lost = [p.name for p in kept if p.name not in stored and p.canonical not in twins]
    if lost:
        raise InputError(
            f"{len(lost)} of the model's {len(kept)} tensors are in no file",
            code="BX3727",
            notes=(f"missing: {listed(lost)}",),
            help="give the folder that `run --save` wrote, of this very bundle",
        )
    return [Copy(p.name, p.spec.dtype, stored.get(p.name) or twins[p.canonical]) for p in kept]


def write_joined(copies: Sequence[Copy], out: Path, shard_bytes: int | None = None) -> Joined:
    """Write a checkpoint: one file, or shards and their index as Hugging Face lays them out.

    All or nothing: it is written beside its place and moved there.

    Args:
        copies: what to write.
        out: the file; with `shard_bytes` shards are named after it.
        shard_bytes: the most that one file may hold; a larger tensor has a file of its own.

    Raises:
        InputError: a file is there already, or the disk is full.
    """
    shards = _shards(copies, shard_bytes)
    names = _names(out, len(shards))
    index = [out.name.removesuffix(".safetensors") + INDEX] if len(names) > 1 else []
    there = [name for name in (*names, *index) if (out.parent / name).exists()]
    if there:
        raise InputError(
            f"{listed(there)} exists already",
            code="BX3728",
            at=str(out.parent),
            help="give another --to",
        )
    total = sum(copy.size for copy in copies)
    with os_error_as(f"cannot write {out}", code="BX3729", at=out, help="give another --to"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out) as scratch:
            for name, shard in zip(names, shards, strict=True):
                write_file(scratch / name, shard)
            if index:
                where = {c.name: n for n, shard in zip(names, shards, strict=True) for c in shard}
                text = {"metadata": {"total_size": total}, "weight_map": where}
                (scratch / index[0]).write_text(json.dumps(text, indent=1) + "\n", "utf-8")
            for name in (*names, *index):
                shutil.move(scratch / name, out.parent / name)
    return Joined(tuple(out.parent / name for name in (*names, *index)), len(copies), total)


def _shards(copies: Sequence[Copy], limit: int | None) -> list[list[Copy]]:
    shards: list[list[Copy]] = [[]]
    held = 0
    for copy in copies:
        if limit is not None and shards[-1] and held + copy.size > limit:
            shards.append([])
            held = 0
        shards[-1].append(copy)
        held += copy.size
    return shards


def _names(out: Path, count: int) -> list[str]:
    if count == 1:
        return [out.name]
    stem = out.name.removesuffix(".safetensors")
    return [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
