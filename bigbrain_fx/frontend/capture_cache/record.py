"""A captured model as JSON, and back: its tensors are those of the model that was just built.

A capture is cached only where decoding gives the same capture. It then has no functions of the
user's and no constants of the trace, and its batch is taken apart equally.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend.tracing.captured import Captured
from bigbrain_fx.frontend.translation.batch import Batch, take_apart
from bigbrain_fx.frontend.translation.params import store, tensor_names

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile

Record = Mapping[str, Any]
_NO_NUMBERS = torch.zeros(0)


def record_of(captured: Captured, file: ModelFile) -> Record | None:
    """Return a capture as JSON; None where it cannot be had back from that."""
    record = {
        "graph": TypeAdapter(Graph).dump_python(captured.graph, mode="json"),
        "names": [[list(entry.key), entry.name] for entry in captured.batch.entries],
        "warnings": list(captured.warnings),
        "written": list(captured.written),
        "device_lines": list(captured.device_lines),
    }
    if captured.functions or file.numbers or file.parts > 1:
        return None
    again = captured_of(record, file)
    return record if again is not None and _is_same(again, captured) else None


def captured_of(record: Record, file: ModelFile) -> Captured | None:
    """Return a capture of a model file that was loaded; None where the record does not fit it."""
    try:
        graph = TypeAdapter(Graph).validate_python(record["graph"])
        device_lines = tuple(map(str, record["device_lines"]))
        batch = _batch(record, file).with_lengths(file.free if graph.lengths else {})
        told = tuple(map(str, record["warnings"])), batch, tuple(map(str, record["written"]))
    except (ValidationError, BigBrainError, LookupError, TypeError):
        return None
    tensors = store(file.model, {}).tensors
    fits = tensors.keys() == {param.name for param in graph.params}
    return Captured(graph, tensors, {}, *told, device_lines) if fits else None


def _batch(record: Record, file: ModelFile) -> Batch:
    names = {tuple(key): str(name) for key, name in record["names"]}
    return take_apart(file.example_batch, names, tensor_names(file.model), file.batch_dims)


def _is_same(one: Captured, other: Captured) -> bool:
    """Whether two captures stand for the same things."""
    same = one.tensors.keys() == other.tensors.keys()
    same = same and all(one.tensors[name] is other.tensors[name] for name in one.tensors)
    return same and one.graph == other.graph and _described(one.batch) == _described(other.batch)


def _described(batch: Batch) -> object:
    entries = [(replace(e, tensor=_NO_NUMBERS), tuple(e.tensor.shape)) for e in batch.entries]
    return batch.rows, [(str(entry), shape) for entry, shape in entries], batch.template
