"""Entries of a batch beside its tensors, and which of them affect the model.

    {"x": ..., "ntokens": 66}, then {"x": ..., "ntokens": 72} ─▶ ntokens is an input, float32[]
    {"x": ..., "phase": "warm", "views": [a, b], "mask": None} ─▶ phase is "warm", 2 views, no mask

A number is a constant of the trace. A number that changes in the first batches becomes a tensor
without dimensions, where the model's results stay bitwise equal. Other entries that affect the
model must stay as in the example: a run stops where one differs. The module knows batches; of
graphs it reads the ops behind an input.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.entry_trial import NOTHING, FakeTrial, Trial, trial_of, with_value
from bigbrain_fx.frontend.forked import apart
from bigbrain_fx.frontend.tracing.plain import same_numbers
from bigbrain_fx.frontend.tracing.step import Loss
from bigbrain_fx.frontend.translation.batch_dims import Key
from bigbrain_fx.runtime import APART, as_scalar

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile
    from bigbrain_fx.frontend.tracing.captured import Captured

_BATCHES = 3
PLAIN = (type(None), bool, int, float, str)
_TYPES = {int: ("float32", "int64"), float: ("float32", "float64")}
"""In the order in which they are tried: a count in float32 can be divided over micro-batches."""
_LONG = 500  # characters
_NO_VALUES = (" at 0x", "tensor(", "array(")  # what repr says of what it does not say whole
PlainValue = None | bool | int | float | str
Fixed = tuple[Key, PlainValue]
Types = Mapping[Key, str]


# --------------------------------------------------------------------------- parts of a batch


def nodes(batch: object, key: Key = ()) -> Iterator[tuple[Key, object]]:
    """Yield every part of a batch under its key, containers before their items."""
    yield key, batch
    if isinstance(batch, Mapping):
        for name, value in batch.items():
            yield from nodes(value, (*key, name))
    elif isinstance(batch, tuple | list):
        for i, value in enumerate(batch):
            yield from nodes(value, (*key, i))


def plain_values(batch: object) -> Iterator[tuple[Key, PlainValue]]:
    """Yield key and value of each number, text, truth value or None of a batch."""
    for key, value in nodes(batch):
        if value is None or isinstance(value, bool | int | float | str):
            yield key, value


def _beside_tensors(batch: object) -> Iterator[tuple[Key, object]]:
    """Yield entries that may affect a model: values, lengths of lists, orders of dicts, objects."""
    yield from plain_values(batch)
    for key, value in nodes(batch):
        if key and isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            yield key, len(value)
    for key, value in nodes(batch):
        if isinstance(value, Mapping) and len(value) > 1:
            yield key, ", ".join(map(str, value))
    known = Tensor, Mapping, tuple, list, *PLAIN
    yield from ((key, value) for key, value in nodes(batch) if not isinstance(value, known))


def changes_of(
    example: object, batch: object, key: Key = ()
) -> Iterator[tuple[Key, object, object]]:
    """Yield a batch's differences from the example, numbers of tensors left out."""
    if isinstance(example, Mapping) and isinstance(batch, Mapping):
        if [name for name in batch if name in example] != [n for n in example if n in batch]:
            names = sorted(example, key=[*batch, *example].index)
            yield key, example, {name: example[name] for name in names}  # in another order
        for name in (*batch, *(name for name in example if name not in batch)):
            one, other = example.get(name, NOTHING), batch.get(name, NOTHING)
            yield from changes_of(one, other, (*key, name))
    elif isinstance(example, tuple | list) and isinstance(batch, tuple | list):
        if key and len(example) != len(batch):
            yield key, example, batch
        for i, (one, other) in enumerate(zip(example, batch, strict=False)):
            yield from changes_of(one, other, (*key, i))
    elif not (isinstance(example, Tensor) and isinstance(batch, Tensor)):
        plain = isinstance(example, PLAIN) and isinstance(batch, PLAIN)
        if not (plain and (example == batch or example != example)):  # NaN
            yield key, example, batch


def _at(batch: object, key: Key) -> object:
    for part in key:
        batch = batch[part]  # type: ignore[index]  # a key of this very batch
    return batch


# --------------------------------------------------------------------------- numbers as inputs


def with_numbers(batch: object, numbers: Types) -> object:
    """Return a batch with tensors in the place of numbers."""
    values = dict(plain_values(batch))
    for key, dtype in numbers.items():
        if key in values:
            batch = with_value(batch, key, as_scalar(values[key], dtype))
    return batch


def with_number_inputs(file: ModelFile, numbers: Types) -> ModelFile:
    """Return a model file with an example that has tensors in the place of numbers."""
    if not numbers:
        return file
    example = with_numbers(file.example_batch, numbers)
    return replace(file, example_batch=example, numbers=numbers)


def numbers_in(graph: Graph, example: object) -> Types:
    """Return the inputs of a graph that are numbers in the example, and their types."""
    values = dict(plain_values(example))
    return {entry.key: entry.spec.dtype for entry in graph.inputs if entry.key in values}


def changing_numbers(file: ModelFile, seed: int) -> Types:
    """Return the numbers that change in the first batches and that the model reads, by type.

    Empty where one of them, or anything else that changes, is no tensor to the model.
    """
    if not any(type(value) in _TYPES for _, value in plain_values(file.example_batch)):
        return {}
    found = apart(partial(_drawn, file, seed)) or {}  # a fork: what `batches` sets stays as it is
    trial = Trial(file.model, file.example_batch, file.loss, file.autocast)
    types: dict[Key, str] = {}
    for name, text in found.items():
        key, values = tuple(json.loads(name)), json.loads(text)
        reads = any(trial.reads({key: value}) for value in values[1:])
        if reads or goes_by(trial, key, values[0]):  # it may count later, as a threshold does
            fits = (dtype for dtype in _types(values) if _is_tensor(trial, key, values, dtype))
            dtype = next(fits, None)
            types |= {} if dtype is None else {key: dtype}
    return types


def _drawn(file: ModelFile, seed: int) -> Mapping[str, str]:
    """Return the values of each number that changes in the first batches, as JSON."""
    drawn: list[object] = []
    with suppress(Exception):  # whoever reads them for a run says what is wrong
        for batch in itertools.islice(file.batches(seed), _BATCHES) if file.batches else ():
            micro = file.micro if file.parts > 1 else None
            drawn.extend([batch] if micro is None else micro(batch, file.parts))
    found = _changing(file.example_batch, drawn)
    return {json.dumps(key): json.dumps(values) for key, values in found.items()}


def _changing(example: object, drawn: list[object]) -> dict[Key, list[int | float]]:
    """Return the values of each number that changes, the example's first."""
    first = dict(plain_values(example))
    found: dict[Key, list[int | float]] = {}
    for batch in drawn:
        for key, _, value in changes_of(example, batch):
            before = first.get(key)
            if type(before) in _TYPES and type(value) in _TYPES:
                found.setdefault(key, [before]).append(value)  # type: ignore[list-item,arg-type]
    return found


def _types(values: list[int | float]) -> tuple[str, ...]:
    return _TYPES[float if any(isinstance(value, float) for value in values) else int]


def _is_tensor(trial: Trial, key: Key, values: list[int | float], dtype: str) -> bool:
    """Whether the model computes the same, bit by bit, from a tensor as from each number."""
    try:
        for value in values:
            plain, ours = (trial.run_with({key: v}) for v in (value, as_scalar(value, dtype)))
            if len(plain) != len(ours) or not all(map(same_numbers, plain, ours)):
                return False
    except Exception:  # the user's own code: range(tensor), say
        return False
    return True


def assumes_number(graph: Graph, numbers: Types) -> bool:
    """Whether an assumption of a trace goes by a number: it may hold for the first batches only."""
    led = {entry.name for entry in graph.inputs if entry.key in numbers}
    for op in graph.ops:
        if led & {*op.refs}:
            if op.checks:
                return True
            led.add(op.name)
    return False


# --------------------------------------------------------------------------- what must stay


def fixed_parts(file: ModelFile, captured: Captured) -> tuple[tuple[Key, object], ...]:
    """Return the entries that must stay as in the example; none where it comes again and again.

    Entries that are written are among them: no other may be the memory of one.

    Raises:
        InputError: as `fixed_entries`.
    """
    if file.batches is None:
        return ()
    apart = ((e.key, APART) for e in captured.batch.entries if e.name in captured.written)
    found = fixed_entries(file.model, file.example_batch, file.loss, file.autocast)
    return (*found, *apart)


def fixed_entries(
    model: nn.Module, example: object, loss: Loss | None, autocast: str | None
) -> tuple[Fixed, ...]:
    """Return the entries beside tensors that affect the model, with their values.

    The value of a list is its length; of a dict, where it counts, the order of its names. The value
    of an object (an enum, a slice) is its repr. A model that is costly to run is tried without
    numbers. Where that cannot be, all entries count but the texts of lists: names of rows, say.

    Raises:
        InputError: an object counts, and its repr is the same for other objects.
    """
    found = [*_beside_tensors(example)]
    if not found:
        return ()
    trial = trial_of(model, example, loss, autocast)
    if trial.runs:
        counts = partial(goes_by, trial, unread=_unread_texts(trial, found))
        return tuple((k, _kept(k, v)) for k, v in found if counts(k, v))
    if not isinstance(trial, FakeTrial):
        return ()  # `trace` says what is wrong with the example
    return tuple((k, _kept(k, v)) for k, v in found if not _names_rows(_at(example, k), k))


def _names_rows(held: object, key: Key) -> bool:
    """Whether an entry is a list of texts, or a text of a list."""
    if isinstance(held, list | tuple):
        return all(isinstance(item, str) for item in held)
    return isinstance(held, str) and bool(key) and isinstance(key[-1], int)


def _unread_texts(trial: Trial, found: Iterable[tuple[Key, object]]) -> frozenset[Key]:
    """Return all texts where one run shows that none is read; else none of them."""
    texts = {key: own for key, _ in found if isinstance(own := _at(trial.example, key), str)}
    asked: list[str] = []
    with suppress(Exception):  # the user's own code
        changed = trial.differs({key: _noting(asked)(own) for key, own in texts.items()})
        return frozenset() if asked or changed else frozenset(texts)
    return frozenset()


def _kept(key: Key, value: object) -> PlainValue:
    """Return the value that a run compares: a plain value itself, an object's repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    said = repr(value)
    if len(said) < _LONG and not any(part in said for part in _NO_VALUES):
        return said
    name = ".".join(map(str, key))
    raise InputError(
        f"the model goes by {name} of the batch, an object of {type(value).__name__}: a trace "
        "keeps what it is in the example, and a run cannot tell whether it stays so",
        code="BX2109",
        at="example_batch",
        help="give as tensors what is read of it (torch.from_numpy(array), torch.tensor(number)); "
        "or as a number or a text, which must be the same in all batches",
    )


def goes_by(trial: Trial, key: Key, value: object, unread: Container[Key] = ()) -> bool:
    """Whether the model computes something else, or fails, with another value there."""
    if key in unread:
        return False
    asked: list[str] = []
    try:
        for other in _others(_at(trial.example, key), value, asked):
            if trial.differs({key: other}):
                return True
    except Exception:  # the user's own code: it fails with a longer list in plain PyTorch, too
        return not isinstance(_at(trial.example, key), list | tuple)
    return bool(asked)


def _others(held: object, value: object, asked: list[str]) -> Iterator[object]:
    """Yield values to try; a text records its comparisons in `asked`."""
    if isinstance(held, list | tuple):
        yield [*held, held[-1] if held else 0.0]
    elif isinstance(held, Mapping):
        yield dict(reversed([*held.items()]))
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + type(value)(more) for more in (1, 10, 1_000, 1_000_000))
        yield type(value)(0)
        yield -value - 1
    elif isinstance(value, str):
        yield _noting(asked)(value)
    else:
        yield object()


def _noting(asked: list[str]) -> type[str]:
    """Return texts that record their uses, other than printing."""

    class Noting(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            asked.append("==")
            return str.__eq__(self, other)

        def __ne__(self, other: object) -> bool:
            asked.append("!=")
            return str.__ne__(self, other)

        def __hash__(self) -> int:
            asked.append("hash")
            return str.__hash__(self)

        def __contains__(self, part: object) -> bool:
            asked.append("in")
            return isinstance(part, str) and str.__contains__(self, part)

        def __getattribute__(self, name: str) -> object:
            if not name.startswith("__"):
                asked.append(name)
            return str.__getattribute__(self, name)

    return Noting
