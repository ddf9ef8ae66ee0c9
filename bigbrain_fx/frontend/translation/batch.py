"""The user's batch -> named tensors and a template, and back.

This file knows nests of dicts, tuples and lists; it knows no models.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import InputError

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Stand in a template for the tensor that goes there, by its name in the graph."""

    name: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the batch; `batched` when its dimension 0 is the batch."""

    name: str
    key: Key
    tensor: Tensor
    batched: bool


@dataclass(frozen=True)
class Batch:
    """A batch taken apart: its tensors, and the `template` left, with a `Slot` for each of them."""

    template: object
    entries: tuple[Entry, ...]
    rows: int

    def sized(self, rows: int) -> dict[str, Tensor]:
        """Return the tensors with `rows` rows: the first ones, repeated when there are too few."""
        return {
            entry.name: _sized(entry.tensor, rows) if entry.batched else entry.tensor
            for entry in self.entries
        }

    def last(self, rows: int) -> dict[str, Tensor]:
        """Return the tensors with the last rows of the example, as the last micro-batch has."""
        return {
            entry.name: entry.tensor[-rows:].clone() if entry.batched else entry.tensor
            for entry in self.entries
        }


def _sized(tensor: Tensor, rows: int) -> Tensor:
    have = tensor.shape[0]
    if have < rows:
        tensor = tensor.repeat(-(-rows // have), *[1] * (tensor.dim() - 1))
    return tensor[:rows].clone()


def take_apart(
    batch: object, names: Mapping[Key, str] | None = None, taken: Iterable[str] = ()
) -> Batch:
    """Find the tensors of an example batch.

    The batch size is the most common length of dimension 0 among its tensors (the first one's, when
    several are equally common); tensors of another length are passed whole.

    Args:
        batch: a tensor, dict, tuple or list, nested at will; other entries are constants.
        names: names to give to tensors, by key; others are named after their keys.
        taken: names that are not free.

    Raises:
        InputError: it holds no tensor with a dimension 0.
    """
    found = [(key, value) for key, value in _walk(batch, ()) if isinstance(value, Tensor)]
    lengths = Counter(tensor.shape[0] for _, tensor in found if tensor.dim())
    if not lengths:
        raise InputError(
            f"example_batch() must hold a tensor with a batch dimension, found {_said(batch)}",
            help='return a dict or a tuple of tensors, e.g. {"tokens": torch.zeros(8, 128).long()}',
        )
    rows = lengths.most_common(1)[0][0]
    if rows == 0:
        raise InputError("example_batch() has tensors of 0 rows, expected at least 1")
    given = _named([key for key, _ in found], names or {}, set(taken))
    entries = tuple(
        Entry(given[key], key, tensor, bool(tensor.dim()) and tensor.shape[0] == rows)
        for key, tensor in found
    )
    return Batch(_template(batch, (), given), entries, rows)


def graph_inputs(graph: Graph, batch: object) -> dict[str, Tensor]:
    """Return the tensors of a batch by their names in the graph."""
    return {entry.name: _reach(batch, entry.key) for entry in graph.inputs}


def _reach(batch: object, key: Key) -> Tensor:
    for step in key:
        batch = batch[step]  # type: ignore[index]  # keys come from a batch of this structure
    if not isinstance(batch, Tensor):
        raise InputError(f"batch entry {list(key)} must be a tensor, found {type(batch).__name__}")
    return batch


def fill(template: object, tensors: Mapping[str, Tensor]) -> object:
    """Put tensors into the slots of a template."""
    if isinstance(template, Slot):
        return tensors[template.name]
    if isinstance(template, dict):
        return {key: fill(value, tensors) for key, value in template.items()}
    if isinstance(template, tuple | list):
        return _like(template, [fill(value, tensors) for value in template])
    return template


def _template(value: object, key: Key, names: Mapping[Key, str]) -> object:
    if isinstance(value, Tensor):
        return Slot(names[key])
    if isinstance(value, Mapping):
        return {k: _template(v, (*key, k), names) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return _like(value, [_template(v, (*key, i), names) for i, v in enumerate(value)])
    return value


def _like(original: tuple[object, ...] | list[object], values: list[object]) -> object:
    if isinstance(original, list):
        return values
    make = getattr(type(original), "_make", tuple)  # a named tuple keeps its fields
    return make(values)


def _walk(value: object, key: Key) -> Iterator[tuple[Key, object]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _walk(item, (*key, name))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _walk(item, (*key, index))
    else:
        yield key, value


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
    if isinstance(batch, Tensor):
        return batch.to("meta") if batch.device.type != "meta" else batch
    if isinstance(batch, Mapping):
        return {key: to_meta(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return _like(batch, [to_meta(value) for value in batch])
    return batch


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


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors of a model's output, in order, from dicts, sequences and dataclasses."""
    return [tensor for _, tensor in named_tensors(value)]
