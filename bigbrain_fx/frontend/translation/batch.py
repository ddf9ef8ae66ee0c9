"""The user's batch -> named tensors and a template, and back.

This file knows nests of dicts, tuples and lists; it knows no models.
"""

from __future__ import annotations

import itertools
import keyword
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import InputError, about_code
from bigbrain_fx.frontend.translation.batch_dims import (
    BatchDims,
    Key,
    cut_offsets,
    dims_of,
    offsets_of,
)
from bigbrain_fx.runtime import is_number, walk


@dataclass(frozen=True, slots=True)
class Slot:
    """Stand in a template for the tensor that goes there, by its name in the graph.

    Its first dimension goes to where the user has it.
    """

    name: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the batch; `batched` when its dimension 0 is the batch.

    Where another dimension `dim` of the user's tensor is the batch, it is first in `tensor`; `said`
    when the user named it. With `per_row` it holds offsets into the rows laid end to end, each of
    so many positions. With `of_all` it has a count over that many rows. Dimensions in `lengths` may
    be shorter in other batches; each has the name of its length in the graph.
    """

    name: str
    key: Key
    tensor: Tensor
    batched: bool
    dim: int = 0
    said: bool = False
    per_row: int = 0
    of_all: int = 0
    lengths: tuple[tuple[int, str], ...] = ()

    def part(self, first: int, rows: int) -> Tensor:
        """Return a micro-batch's part of the entry, in memory of its own.

        Offsets are counted from its first row. Offsets into other rows become its begin or end, so
        that all parts have as many.
        """
        if self.batched:
            return self.tensor[first : first + rows].clone()
        if self.of_all:
            part = self.tensor.double() * rows / self.of_all
            return part.to(self.tensor.dtype)
        if not self.per_row:
            return self.tensor
        return cut_offsets(self.tensor, first * self.per_row, (first + rows) * self.per_row)

    def takes(self, tensor: Tensor) -> bool:
        """Whether another batch may have this tensor here."""
        free, own = dict(self.lengths), self.tensor
        same = tensor.dtype == own.dtype and tensor.dim() == own.dim()
        pairs = enumerate(zip(tensor.shape, own.shape, strict=False))
        return same and all(n == m or (i in free and 1 < n < m) for i, (n, m) in pairs)

    @property
    def said_name(self) -> str | int:
        """Return the name in a model file: "x", 0, "pair.0"."""
        return self.key[0] if len(self.key) == 1 else ".".join(map(str, self.key))


@dataclass(frozen=True)
class Batch:
    """A batch taken apart: its tensors, and the `template` left, with a `Slot` for each of them."""

    template: object
    entries: tuple[Entry, ...]
    rows: int

    def sized(self, rows: int) -> dict[str, Tensor]:
        """Return the tensors with `rows` rows: the first ones, repeated when there are too few."""
        return {
            e.name: _sized(e.tensor, rows) if e.batched else e.part(0, rows) for e in self.entries
        }

    def part(self, first: int, rows: int) -> dict[str, Tensor]:
        """Return the tensors of a micro-batch of these rows."""
        return {entry.name: entry.part(first, rows) for entry in self.entries}

    def like(self, batch: object) -> Batch | None:
        """Return this batch with the tensors of another one; None where one has another shape."""
        entries = []
        for entry in self.entries:
            try:
                tensor = _first(_reach(batch, entry.key, entry.tensor.dtype), entry.dim)
            except (InputError, IndexError):
                return None
            if not entry.takes(tensor):
                return None
            entries.append(replace(entry, tensor=tensor))
        return replace(self, entries=tuple(entries))

    @property
    def lengths(self) -> tuple[str, ...]:
        """The names of its free lengths."""
        return tuple(dict.fromkeys(name for entry in self.entries for _, name in entry.lengths))

    def with_lengths(self, lengths: Mapping[Key, tuple[tuple[int, str], ...]]) -> Batch:
        """Return this batch with free lengths, by entry."""
        entries = (replace(e, lengths=lengths.get(e.key, ())) for e in self.entries)
        return replace(self, entries=tuple(entries))

    def of_one_length(self) -> Batch:
        """Return this batch without free lengths."""
        return replace(self, entries=tuple(replace(entry, lengths=()) for entry in self.entries))

    def shorter(self, lengths: Mapping[str, int]) -> Batch:
        """Return this batch with the first positions of each free length, by its name."""
        return replace(self, entries=tuple(_shorter(entry, lengths) for entry in self.entries))

    def last(self, rows: int) -> dict[str, Tensor]:
        """Return the tensors with the last rows of the example, as the last micro-batch has."""
        return self.part(self.rows - rows, rows)


def _shorter(entry: Entry, lengths: Mapping[str, int]) -> Entry:
    tensor = entry.tensor
    for dim, name in entry.lengths:
        tensor = tensor.narrow(dim, 0, lengths[name])
    return replace(entry, tensor=tensor.clone() if entry.lengths else tensor)


def _sized(tensor: Tensor, rows: int) -> Tensor:
    have = tensor.shape[0]
    if have < rows:
        tensor = tensor.repeat(-(-rows // have), *[1] * (tensor.dim() - 1))
    return tensor[:rows].clone()


def take_apart(
    batch: object,
    names: Mapping[Key, str] | None = None,
    taken: Iterable[str] = (),
    dims: BatchDims | None = None,
    whole: Collection[Key] = (),
) -> Batch:
    """Find the tensors of an example batch.

    The batch size is the most common length of dimension 0 among its tensors (the first one's, when
    several are equally common). Tensors of another length are not cut. For an entry in `dims` that
    dimension's length counts. Tensors of a list with an item for each row (boxes of an image) have
    no rows of the batch.

    Args:
        batch: a tensor, dict, tuple or list, nested at will; other entries are constants.
        names: names for tensors, by key; other tensors are named after their keys.
        taken: names that are not free.
        dims: which dimension is the batch, None for none, by entry.
        whole: keys of tensors that are not cut, of any length.

    Raises:
        InputError: it holds no tensor with a dimension 0; or `dims` does not fit it.
    """
    found = [(key, value) for key, value in walk(batch) if isinstance(value, Tensor)]
    with about_code():  # a step that runs whole takes any batch
        _require_strided(found)
        _require_plain_keys([key for key, _ in found])
    said = dims_of(found, dims or {})
    whole = {*whole, *(key for key in _of_items(found) if key not in said)}
    said |= dict.fromkeys(whole)
    found = [(key, _first(value, said.get(key) or 0)) for key, value in found]
    own = [tensor.shape[0] for key, tensor in found if said.get(key) is not None]
    asked = [tensor.shape[0] for key, tensor in found if tensor.dim() and key not in said]
    lengths = Counter(own or asked)
    if not lengths:
        with about_code():
            raise _no_rows(batch)
    rows = lengths.most_common(1)[0][0]
    if rows == 0:
        raise InputError(
            "example_batch() has tensors of 0 rows, expected at least 1", code="BX2167"
        )
    given = _named([key for key, _ in found], names or {}, set(taken))
    entries = tuple(
        Entry(given[key], key, tensor, _has_rows(key, tensor, rows, said), said.get(key) or 0)
        for key, tensor in found
    )
    offsets = {k: n for k, n in offsets_of(found, dims or {}, rows).items() if k not in whole}
    entries = tuple(
        replace(e, said=e.key in said, per_row=n, batched=e.batched and not n)
        for e in entries
        for n in (offsets.get(e.key, 0),)
    )
    slots = {entry.key: Slot(entry.name, entry.dim) for entry in entries}
    return Batch(mapped(batch, lambda _, key: slots[key]), entries, rows)


def _of_items(found: Sequence[tuple[Key, Tensor]]) -> Iterator[Key]:
    """Yield the keys within lists whose items differ in length, one item for each row of others."""
    lists: dict[Key, dict[Key, set[int]]] = {}
    for key, tensor in found:
        for at in (n for n, step in enumerate(key) if n and isinstance(step, int)):
            lengths = lists.setdefault(key[:at], {}).setdefault(key[at + 1 :], set())
            lengths.add(tensor.shape[0] if tensor.dim() else -1)
    for path, parts in lists.items():
        items = {key[len(path)] for key, _ in found if key[: len(path)] == path}
        others = {t.shape[0] for key, t in found if t.dim() and key[: len(path)] != path}
        if len(items) in others and any(len(lengths) > 1 for lengths in parts.values()):
            yield from (key for key, _ in found if key[: len(path)] == path)


def _no_rows(batch: object) -> InputError:
    return InputError(
        f"example_batch() must hold a tensor with a batch dimension, found {_said(batch)}",
        code="BX2166",
        help='return a dict or a tuple of tensors, e.g. {"tokens": torch.zeros(8, 128).long()}; '
        "arrays become tensors by torch.from_numpy(array), in batches() as well",
    )


def _require_plain_keys(keys: Sequence[Key]) -> None:
    """Refuse keys that no plan, and no copy of one, can write: a tuple, an enum, a tensor."""
    for step in itertools.chain.from_iterable(keys):
        if isinstance(step, bool) or not isinstance(step, str | int):
            raise InputError(
                f"the batch has the key {step!r}, of type {type(step).__name__}: expected texts or "
                "whole numbers, by which a bundle finds its entries",
                code="BX2168",
                help="name the entry by a text, and read it so in forward and loss: "
                '{"pair": tensor} for {(0, 1): tensor}, {kind.name: tensor} for an enum',
            )


def _require_strided(found: Sequence[tuple[Key, Tensor]]) -> None:
    for key, tensor in found:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise InputError(
                f"batch entry {'.'.join(map(str, key)) or 'x'!r} is a {kind} tensor, and only "
                "tensors of plain memory (strided) are split by rows and sent",
                code="BX2169",
                help="give what it is made of, and put it together in forward: padded values and "
                "lengths for a nested tensor; dense rows, or indices and values with "
                "batch_dims = {...: None}, for a sparse one",
            )


def _has_rows(key: Key, tensor: Tensor, rows: int, said: Mapping[Key, int | None]) -> bool:
    if key in said:
        return said[key] is not None
    return bool(tensor.dim()) and tensor.shape[0] == rows


def _first(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0) if dim else tensor


def graph_inputs(
    graph: Graph, batch: object, dims: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a batch by their names in the graph, their rows first.

    Args:
        graph: that reads them.
        batch: the user's.
        dims: where the rows are of an input that has them elsewhere.
    """
    known = dims or {}
    return {
        e.name: _first(_reach(batch, e.key, getattr(torch, e.spec.dtype)), known.get(e.name, 0))
        for e in graph.inputs
    }


def _reach(batch: object, key: Key, dtype: torch.dtype) -> Tensor:
    """Return the tensor of an entry; of a number one of this type."""
    said = ".".join(map(str, key))
    try:
        for step in key:
            batch = batch[step]  # type: ignore[index]  # of the structure of the example, or refused
    except (KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"a batch has no entry {said!r}",
            code="BX2173",
            help="every batch must be like example_batch(): mend batches() and split again",
        ) from error
    if is_number(batch):
        return torch.tensor(batch, dtype=dtype)
    if not isinstance(batch, Tensor):
        raise InputError(
            f"batch entry {said!r} must be a tensor, found {type(batch).__name__}", code="BX2174"
        )
    return batch


def fill(template: object, tensors: Mapping[str, Tensor]) -> object:
    """Put tensors into the slots of a template."""
    if isinstance(template, Slot):
        tensor = tensors[template.name]
        return tensor.movedim(0, template.dim) if template.dim else tensor
    if isinstance(template, dict):
        return {key: fill(value, tensors) for key, value in template.items()}
    if isinstance(template, tuple | list):
        return _like(template, [fill(value, tensors) for value in template])
    return template


def mapped(nest: Any, change: Callable[[Tensor, Key], object], key: Key = ()) -> Any:  # noqa: ANN401
    """Return a nest like this one with every tensor changed, which may go by its path."""
    if isinstance(nest, Tensor):
        return change(nest, key)
    if isinstance(nest, Mapping):
        return {k: mapped(value, change, (*key, k)) for k, value in nest.items()}
    if isinstance(nest, tuple | list):
        return _like(nest, [mapped(value, change, (*key, i)) for i, value in enumerate(nest)])
    return nest


def tensors_in(nest: object) -> Iterator[Tensor]:
    """Yield the tensors of a nest in order."""
    return (leaf for _, leaf in walk(nest) if isinstance(leaf, Tensor))


def _like(original: tuple[object, ...] | list[object], values: list[object]) -> object:
    if isinstance(original, list):
        return values
    make = getattr(type(original), "_make", tuple)  # a named tuple keeps its fields
    return make(values)


def _named(keys: list[Key], names: Mapping[Key, str], used: set[str]) -> dict[Key, str]:
    given = {}
    for key in keys:
        wanted = names.get(key) or "_".join(str(step) for step in key)
        given[key] = unique(identifier(wanted), used)
    return given


def identifier(text: str) -> str:
    """Make a Python name of any text: "image size" -> "image_size", "class" -> "class_"."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    if not name or name[0].isdigit():
        name = f"batch_{name}".rstrip("_")
    return name + "_" if keyword.iskeyword(name) or keyword.issoftkeyword(name) else name


def unique(name: str, used: set[str]) -> str:
    """Return the name, with a number when it is taken, and take it."""
    candidate, count = name, 0
    while candidate in used:
        count += 1
        candidate = f"{name}_{count}"
    used.add(candidate)
    return candidate


def _said(batch: object) -> str:
    return f"{type(batch).__name__}" + (
        f" of {len(batch)}" if isinstance(batch, dict | tuple | list) else ""
    )


def to_meta(batch: object) -> object:
    """Return the batch with every tensor on the meta device: shapes without data."""
    return mapped(batch, lambda tensor, _: tensor.to("meta"))


def named_tensors(value: object, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a model's output with the keys that lead to them: "states.2".

    In order, from dicts, sequences and dataclasses; a lone tensor is called "output".
    """
    if isinstance(value, Tensor):
        return [(name or "output", value)]
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, tuple | list):
        parts = list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    else:
        fields = getattr(value, "__dataclass_fields__", ())
        parts = [(field, getattr(value, field)) for field in fields]
    before = f"{name}." if name else ""
    return [pair for key, part in parts for pair in named_tensors(part, f"{before}{key}")]
