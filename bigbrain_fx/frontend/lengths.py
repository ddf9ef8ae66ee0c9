"""Free lengths of rows: the dimensions of a batch in which other batches are shorter or longer.

    lengths = (64, 128, 256)   batches have one of these lengths, or are filled up to it (`pad`)
    no `lengths`               found in the first batches: each keeps the length that it has

The example becomes as long as the longest batch, and plans are made for that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING

from bigbrain_fx.core import length_name
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.forked import apart
from bigbrain_fx.frontend.tracing.blank import is_blank
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.tracing.step import Step, route
from bigbrain_fx.frontend.translation.batch import Batch, Entry, fill, named_tensors, take_apart
from bigbrain_fx.frontend.translation.batch_dims import Key

if TYPE_CHECKING:
    from torch import Tensor

    from bigbrain_fx.frontend.modelfile import ModelFile

FIRST_BATCHES = 16  # in which lengths are looked for

Sizes = dict[tuple[Key, int], list[int]]  # (entry, dimension, rows first) -> in the example, then


@dataclass(frozen=True)
class _Seen:
    """One tensor of a batch as it was drawn."""

    dtype: str
    shape: tuple[int, ...]


def with_lengths(file: ModelFile, seed: int, *, draws: bool) -> ModelFile:
    """Return a model file with its free lengths; its example is the longest batch.

    Args:
        file: the model file, for its batches.
        seed: of the batches.
        draws: read the first batches, too; else the file's declarations alone count.

    Raises:
        InputError: a batch is longer than the longest of `lengths`, or has another length and no
            `pad`.
    """
    if file.parts > 1 or file.lengths == ():
        return file
    if file.lengths is None and (file.batches is None or file.pad or not draws):
        return file
    batch = take_apart(file.example_batch, dims=file.batch_dims)
    drawn = _drawn(file, seed) if draws and file.batches is not None else []
    found = _varying(batch, drawn) or (_declared_dims(file, batch) if file.lengths else {})
    sizes = _with_whole(batch, drawn, found)
    if not found or sizes is None:
        return file
    longest = _with_free(file, sizes, _fitted(file, sizes, seed))
    return longest if file.lengths or _runs(longest) else file


def grown(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor with so many positions in a dimension: its own, again and again."""
    import torch

    places = torch.arange(size, device=tensor.device) % tensor.shape[dim]
    return tensor.index_select(dim, places)


def free_dims(sizes: Mapping[tuple[Key, int], Sequence[int]]) -> dict[Key, list[tuple[int, str]]]:
    """Return the free lengths of each entry; dimensions that were always equal have one name."""
    names: dict[tuple[int, ...], str] = {}
    free: dict[Key, list[tuple[int, str]]] = {}
    for (key, dim), found in sizes.items():
        numbers, own = count(), tuple(found)
        if own not in names:
            taken = {*names.values()}
            names[own] = next(
                name for n in numbers if (name := length_name(max(own), n)) not in taken
            )
        free.setdefault(key, []).append((dim, names[own]))
    return free


def _runs(file: ModelFile) -> bool:
    """Whether the model takes its example; a size that varies need not be a length."""
    if any(is_blank(tensor) for tensor in file.model.state_dict().values()):
        return True
    apart = take_apart(file.example_batch)
    how = route(file.model, file.example_batch, file.loss is not None)
    with suppress(Exception):
        step = Step(file.model, file.loss, apart, how)
        Plain(step, file.model, file.autocast).run([e.tensor for e in apart.entries], 0)
        return True
    return False


def _may_vary(entry: Entry) -> bool:
    return entry.batched and entry.tensor.dim() > 1


def _drawn(file: ModelFile, seed: int) -> list[dict[str, _Seen]]:
    """Return the tensors of the first batches, by the names of their keys."""
    found = apart(partial(_shapes, file, seed)) or {}  # a fork: what `batches` sets stays
    batches = (json.loads(found[number]) for number in sorted(found, key=int))
    return [{n: _Seen(dtype, tuple(shape)) for n, (dtype, shape) in b.items()} for b in batches]


def _shapes(file: ModelFile, seed: int) -> Mapping[str, str]:
    found: dict[str, str] = {}
    with suppress(Exception):  # whoever reads them for a run says what is wrong
        for number, batch in enumerate(islice(file.batches(seed), FIRST_BATCHES)):  # type: ignore[misc]
            shapes = {name: (str(t.dtype), [*t.shape]) for name, t in named_tensors(batch)}
            found[str(number)] = json.dumps(shapes)
    return found


def _varying(batch: Batch, drawn: Sequence[Mapping[str, _Seen]]) -> Sizes:
    """Return the dimensions that differ between batches, but for that of the rows."""
    sizes: Sizes = {}
    for entry in filter(_may_vary, batch.entries):
        shapes = [tuple(entry.tensor.shape), *_shapes_of(entry, drawn)]
        for dim in range(1, entry.tensor.dim()):
            own = [shape[dim] for shape in shapes]
            if len({*own}) > 1:
                sizes[entry.key, dim] = own
    return sizes


def _shapes_of(entry: Entry, drawn: Sequence[Mapping[str, _Seen]]) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of an entry in batches, its rows first."""
    for batch in drawn:
        seen = batch.get(".".join(map(str, entry.key)) or "output")
        like = str(entry.tensor.dtype), entry.tensor.dim()
        if seen is not None and seen.shape and (seen.dtype, len(seen.shape)) == like:
            rest = list(seen.shape)
            yield (rest.pop(entry.dim), *rest)


def _declared_dims(file: ModelFile, batch: Batch) -> Sizes:
    """Return the dimensions that are as long as the rows of the first entry that `pad` names.

    Without `pad`, the first entry of integers counts, else the first entry.
    """
    rows = [*filter(_may_vary, batch.entries)]
    named = [e for e in rows if str(e.said_name) in {*map(str, file.pad)}]
    whole = [e for e in rows if not e.tensor.is_floating_point()]
    first = next(iter((*named, *whole, *rows)), None)
    if first is None:
        return {}
    length = first.tensor.shape[1]
    return {
        (entry.key, dim): [length]
        for entry in rows
        for dim in range(1, entry.tensor.dim())
        if entry.tensor.shape[dim] == length
    }


def _with_whole(batch: Batch, drawn: Sequence[Mapping[str, _Seen]], sizes: Sizes) -> Sizes | None:
    """Add the dimensions of tensors without the batch's rows that are always as long, too.

    None where one varies by itself: boxes of all images, edges of graphs.
    """
    known, more = {tuple(found) for found in sizes.values()}, {}
    for entry in (entry for entry in batch.entries if not entry.batched):
        shapes = [tuple(entry.tensor.shape), *_shapes_of(entry, drawn)]
        for dim in range(entry.tensor.dim()):
            own = [shape[dim] for shape in shapes]
            if tuple(own) in known:
                more[entry.key, dim] = own
            elif len({*own}) > 1:
                return None
    return sizes | more


def _fitted(file: ModelFile, sizes: Sizes, seed: int) -> Sizes:
    """Return the sizes that batches have once they are filled up."""
    if file.lengths is None:
        return sizes
    fitted: Sizes = {}
    for (key, dim), found in sizes.items():
        pairs = enumerate(found)
        own = [_bucket(file, seed, ".".join(map(str, key)), n, size) for n, size in pairs]
        fitted[key, dim] = [*own, max(file.lengths)]
    return fitted


def _bucket(file: ModelFile, seed: int, name: str, number: int, size: int) -> int:
    """Return the length to which a batch is filled up.

    Raises:
        InputError: there is none.
    """
    assert file.lengths
    fits = [length for length in file.lengths if length >= size]
    what = f"batch {number} of batches({seed})" if number else "the example batch"
    if not fits:
        raise InputError(
            f"{what} has {name!r} of length {size}, and the longest of `lengths` is "
            f"{max(file.lengths)}",
            code="BX2203",
            at="lengths",
            help=f"lengths = {(*file.lengths, size)}; or cut rows in batches()",
        )
    is_filled = any(f"{name}.".startswith(f"{entry}.") for entry in file.pad)
    if size != fits[0] and not is_filled:
        raise InputError(
            f"{what} has {name!r} of length {size}, which is none of lengths = {file.lengths}",
            code="BX2204",
            at="lengths",
            help=f"say what fills it up to {fits[0]}: pad = {{{name!r}: 0}}, with what the loss "
            "leaves out for labels (-100); or leave `lengths` out, and each batch keeps its own",
        )
    return fits[0]


def _with_free(file: ModelFile, sizes: Sizes, fitted: Sizes) -> ModelFile:
    free = free_dims(fitted)
    batch = take_apart(file.example_batch, dims=file.batch_dims)
    longer = {entry.name: entry.tensor for entry in batch.entries}
    for entry in batch.entries:
        for dim, _ in free.get(entry.key, ()):
            most = max(fitted[entry.key, dim])
            longer[entry.name] = grown(longer[entry.name], dim, most)
    is_longer = any(max(found) > sizes[at][0] for at, found in fitted.items())
    example = fill(batch.template, longer) if is_longer else file.example_batch
    return replace(
        file, example_batch=example, free={key: tuple(dims) for key, dims in free.items()}
    )
