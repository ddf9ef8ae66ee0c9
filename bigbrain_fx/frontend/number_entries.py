"""Numbers of a batch that change from batch to batch, as tensors without dimensions of a trace.

    {"x": ..., "ntokens": 66}, then {"x": ..., "ntokens": 72} ─▶ ntokens is an input, float32[]

A trace keeps a number for ever. Each one that changes in the first batches becomes a tensor where
the model computes the same from it, bit by bit; where no trace holds with it, nothing changes.
This file knows batches and runs steps; of graphs it reads what an input leads to.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend.forked import apart
from bigbrain_fx.frontend.tracing.batches.constants import (
    numbers_of,
    plain_values,
    require_steady,
    unlike,
    with_value,
)
from bigbrain_fx.frontend.tracing.plain import same_numbers
from bigbrain_fx.frontend.translation.batch_dims import Key
from bigbrain_fx.runtime import as_scalar

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile

_BATCHES = 3
_TYPES = {int: ("float32", "int64"), float: ("float32", "float64")}
"""In the order in which they are tried: a count in float32 can be divided over micro-batches."""
Types = Mapping[Key, str]


def with_numbers(batch: object, numbers: Types) -> object:
    """Return a batch with tensors in the place of numbers."""
    values = dict(plain_values(batch))
    for key, dtype in numbers.items():
        if key in values:
            batch = with_value(batch, key, as_scalar(values[key], dtype))
    return batch


def with_number_inputs(file: ModelFile, numbers: Types) -> ModelFile:
    """Return a model file whose example has tensors in the place of numbers."""
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
    values = {tuple(json.loads(key)): json.loads(own) for key, own in found.items()}
    trial = partial(numbers_of, model=file.model, loss=file.loss, autocast=file.autocast)
    types: dict[Key, str] = {}
    for key, own in values.items():
        if _is_read(file, key, own):
            fits = (d for d in _types(own) if _is_tensor(file.example_batch, key, own, d, trial))
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
        for key, _, value in unlike(example, batch):
            before = first.get(key)
            if type(before) in _TYPES and type(value) in _TYPES:
                found.setdefault(key, [before]).append(value)  # type: ignore[list-item,arg-type]
    return found


def _types(values: list[int | float]) -> tuple[str, ...]:
    return _TYPES[float if any(isinstance(value, float) for value in values) else int]


def _is_read(file: ModelFile, key: Key, values: list[int | float]) -> bool:
    def batches() -> Iterator[object]:
        return (with_value(file.example_batch, key, value) for value in values[1:])

    try:
        require_steady(file.model, file.example_batch, file.loss, batches, file.autocast)
    except Exception:  # it is read, or the model fails with it
        return True
    return False


def _is_tensor(
    example: object,
    key: Key,
    values: list[int | float],
    dtype: str,
    run: Callable[[object], tuple[torch.Tensor | None, ...]],
) -> bool:
    """Whether the model computes the same, bit by bit, from a tensor as from each number."""
    try:
        for value in values:
            plain = run(with_value(example, key, value))
            ours = run(with_value(example, key, as_scalar(value, dtype)))
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
