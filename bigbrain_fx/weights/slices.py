"""Tensors of a file -> the parts that one rank has of them, and parts -> whole tensors again.

A part of NAME is stored as NAME[RANK]: all devices' files together name each tensor once. A
dimension that is read as (rest, size, inner) is narrowed in its middle. In memory that is runs of
bytes at equal distances, of several lengths where different pieces follow each other. This file
moves bytes; it knows no plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from bigbrain_fx.core import Shard
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.weights.stored import CODES, DTYPES, Stored, read_header
from bigbrain_fx.weights.write import pieces_of, write_tensors


def part_name(name: str, member: int) -> str:
    """Return the name under which a rank's part of a tensor is stored."""
    return f"{name}[{member}]"


def part_shape(whole: Sequence[int], shard: Shard) -> tuple[int, ...]:
    """Return the shape of a part."""
    own = whole[shard.dim] // shard.size * (shard.stop - shard.start)
    return (*whole[: shard.dim], own, *whole[shard.dim + 1 :])


def cut_bytes(data: bytes, whole: Sequence[int], shard: Shard, width: int) -> bytes:
    """Return a part's bytes, of the whole tensor's; an element has `width`."""
    return _ByteRuns.of(whole, shard, width).cut(data)


@dataclass(frozen=True)
class _ByteRuns:
    """Bytes of a part in the whole: its runs (start, length), each `period` again."""

    count: int
    period: int
    runs: tuple[tuple[int, int], ...]

    @staticmethod
    def of(whole: Sequence[int], shard: Shard, width: int) -> _ByteRuns:
        pieces = (shard.inner,) if isinstance(shard.inner, int) else shard.inner
        cell, length = prod(whole[shard.dim + 1 :]) * width, shard.stop - shard.start
        runs, period = [], 0
        for inner in pieces:
            runs.append((period + shard.start * inner * cell, length * inner * cell))
            period += shard.size * inner * cell
        rest = whole[shard.dim] // (shard.size * sum(pieces))
        return _ByteRuns(prod(whole[: shard.dim]) * rest, period, tuple(runs))

    def _all(self) -> Iterator[tuple[int, int]]:
        for i in range(self.count):
            for first, length in self.runs:
                yield i * self.period + first, length

    def cut(self, data: bytes) -> bytes:
        return b"".join(data[start : start + length] for start, length in self._all())

    def put(self, part: bytes, into: bytearray) -> None:
        taken = 0
        for start, length in self._all():
            into[start : start + length] = part[taken : taken + length]
            taken += length


@dataclass(frozen=True)
class _ToWrite:
    """A tensor to write: its name, type and shape, and where its bytes come from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Stored, Shard | None], ...]  # one part to cut, or several to join

    def data(self, *, joins: bool) -> Iterator[bytes]:
        width = DTYPES[CODES[self.dtype]][1]
        if not joins:
            stored, shard = self.parts[0]
            data = b"".join(pieces_of(stored))
            yield data if shard is None else _ByteRuns.of(stored.shape, shard, width).cut(data)
            return
        whole = bytearray(prod(self.shape) * width)
        for stored, shard in self.parts:
            assert shard is not None
            _ByteRuns.of(self.shape, shard, width).put(b"".join(pieces_of(stored)), whole)
        yield bytes(whole)


def cut_file(path: Path, shards: Iterable[Shard]) -> None:
    """Leave in a safetensors file the parts that a rank has, under names that say so.

    Raises:
        InputError: the disk is full.
    """
    own = {shard.param: shard for shard in shards}
    made = []
    for name, stored in read_header(path).items():
        shard = own.get(name)
        shape = stored.shape if shard is None else part_shape(stored.shape, shard)
        kept = name if shard is None else part_name(name, shard.member)
        made.append(_ToWrite(kept, stored.dtype, shape, ((stored, shard),)))
    scratch = path.with_name(f".cut-{path.name}")
    _write(scratch, made, joins=False)
    scratch.replace(path)


def whole_tensors(
    found: Mapping[str, Stored],
    shards: Sequence[Shard],
    shapes: Mapping[str, Sequence[int]],
    scratch: Path,
) -> dict[str, Stored]:
    """Return tensors by the model's names; those that are there in parts are put together.

    Args:
        found: by the names under which they are stored.
        shards: of all ranks.
        shapes: of the whole tensors, by name.
        scratch: a file that is written for them; keep it while they are needed.

    Raises:
        InputError: a part is nowhere, or of another shape; or the disk is full.
    """
    of: dict[str, list[Shard]] = {}
    for shard in shards:
        of.setdefault(shard.param, []).append(shard)
    named = {part_name(s.param, s.member): s for s in shards}
    rest = {name: stored for name, stored in found.items() if name not in named}
    made = []
    for name, own in of.items():
        stored = [found.get(part_name(name, shard.member)) for shard in own]
        if not any(stored):
            continue
        whole = tuple(int(n) for n in shapes[name])
        for part, shard in zip(stored, own, strict=True):
            if part is None or part.shape != part_shape(whole, shard):
                raise InputError(
                    f"the part of {name!r} that TP rank {shard.member} has is not complete",
                    code="BX3736",
                    help="gather the files of all devices of this bundle in one folder",
                )
        pairs = tuple((p, s) for p, s in zip(stored, own, strict=True) if p is not None)
        made.append(_ToWrite(name, pairs[0][0].dtype, whole, pairs))
    if not made:
        return dict(rest)
    _write(scratch, made, joins=True)
    return {**rest, **read_header(scratch)}


def _write(path: Path, made: Sequence[_ToWrite], *, joins: bool) -> None:
    help_ = "free some space, or give another place"
    with os_error_as(f"cannot write {path}", code="BX3737", help=help_):
        write_tensors(path, [(m.name, m.dtype, m.shape, m.data(joins=joins)) for m in made])
