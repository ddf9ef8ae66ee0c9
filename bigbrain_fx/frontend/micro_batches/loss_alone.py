"""The loss alone, as a step that gives gradients: for models too large to be run as a whole.

    batch ─▶ ops with parameters ─▶ results ─▶ loss     seconds to hours
    batch ──────── drawn ────────▶ results ─▶ loss     the ops after the last parameters

A mean over elements that data choose, or over pairs of rows, weighs its micro-batches for any
results of the model. What the model itself does with other rows is not compared: batch norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bigbrain_fx.core import Dim, Graph, Op, TensorSpec, size_of
from bigbrain_fx.frontend.micro_batches.comparison import Comparison, Weights
from bigbrain_fx.frontend.micro_batches.gradients import (
    StepGradients,
    Tensors,
    Trainee,
    unlike_rows,
)
from bigbrain_fx.frontend.tracing.captured import Captured
from bigbrain_fx.frontend.tracing.executor.graph_executor import run_graph
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.translation.batch import Batch, Entry
from bigbrain_fx.frontend.translation.kept import LEAF, LOSS

_ROWS = "rows of the drawn results"  # an entry beside the user's: no graph has this name
_MANY = 2**25  # elements that are drawn: a second
_MOST = 2**28  # of two rows: a minute, and some 7 GiB
_FEW = 2  # rows
_NARROW = 4  # bytes: results of fewer are drawn as float32


@dataclass(frozen=True)
class Drawn:
    """A tensor that stands for a result of the model on the whole batch.

    Attributes:
        value: name of the op.
        tensor: the numbers.
        dim: its dimension that has the rows; None where it has none.
        per_row: positions of each row in that dimension.
    """

    value: str
    tensor: Tensor
    dim: int | None
    per_row: int

    def part(self, rows: Tensor, *, rows_first: bool) -> Tensor:
        """Return what some rows of the batch have: [rows * positions], or [positions * rows]."""
        if self.dim is None:
            return self.tensor
        sizes = (-1, self.per_row) if rows_first else (self.per_row, -1)
        own: Tensor = self.tensor.unflatten(self.dim, sizes)
        return own.index_select(self.dim + (not rows_first), rows).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class LossTrainee(Trainee):
    """A step that is the loss alone; the drawn results stand where parameters would."""

    captured: Captured | None = None
    drawn: tuple[Drawn, ...] = ()
    rows_first: bool = True

    @property
    def names(self) -> list[str]:
        """Names of the drawn results, in the order of their gradients."""
        return [each.value for each in self.drawn]

    @contextmanager
    def moved(self, step: StepGradients) -> Iterator[None]:
        """Stay: any results are as good as others."""
        yield

    def in_float64(self) -> None:
        """Return nothing: casts of the graph are the trace's."""

    def _step(self, tensors: Tensors, share: float, seed: int = 0) -> StepGradients:
        assert self.captured is not None
        rows = tensors[_ROWS].long()
        leaves = [each.tensor.requires_grad_() for each in self.drawn]
        own = {name: tensor for name, tensor in tensors.items() if name != _ROWS}
        with self._running(list(own.values()), seed) as copies:
            given = dict(zip(own, copies, strict=True)) | self._results(rows)
            loss = _loss_of(self.captured, given)
            begin = torch.full_like(loss, share)
            gradients = torch.autograd.grad(loss, leaves, begin, allow_unused=True)
        return StepGradients(float(loss.detach()), list(gradients))

    @contextmanager
    def _running(self, tensors: list[Tensor], seed: int) -> Iterator[list[Tensor]]:
        """Yield copies of a batch; where the user's Python runs, put back what it leaves.

        Looking through all modules takes a second where there are thousands.
        """
        assert self.captured is not None
        if not any(op.target.startswith((LEAF, LOSS)) for op in self.captured.graph.ops):
            with torch.enable_grad():
                yield [tensor.clone() for tensor in tensors]
            return
        in_turn = getattr(self.plain.step, "in_turn", nullcontext)
        with in_turn(), self.plain.seeded(tensors, seed) as copies:
            yield copies

    def _results(self, rows: Tensor) -> dict[str, Tensor]:
        return {e.value: e.part(rows, rows_first=self.rows_first) for e in self.drawn}


def _loss_of(captured: Captured, given: Mapping[str, Tensor]) -> Tensor:
    graph = captured.graph
    assert graph.loss is not None
    functions = captured.functions
    found = run_graph(graph, captured.tensors, given, values=[graph.loss], functions=functions)
    loss = found[graph.loss]
    assert isinstance(loss, Tensor)
    return loss


def losses_alone(
    plain: Plain, captured: Captured, batch: Batch, weights: Weights, count: int
) -> Iterator[tuple[Comparison, Captured]]:
    """Yield comparisons of the loss alone, each with what is captured of it.

    There are two where rows and positions are one dimension, which may have either outermost:
    micro-batches are right if one of them says so.

    Args:
        plain: runs the user's step.
        captured: of the whole model.
        batch: to compare, of the example's shapes.
        weights: of the micro-batches.
        count: of micro-batches.
    """
    graph, sources = _after_parameters(captured.graph)
    rows = _rows(batch, sources, count)
    if not rows:
        return
    own = _with_rows(batch, rows)
    drawn = tuple(_drawn(sources, own))
    alone = replace(captured, graph=graph, batch=own)
    for rows_first in (True, False):
        trainee = LossTrainee(plain, captured=alone, drawn=drawn, rows_first=rows_first)
        yield Comparison(trainee, own, graph, weights, enough_rows=rows), alone
        if all(each.per_row == 1 for each in drawn):
            return


def without_loss(graph: Graph) -> Graph:
    """Return a graph without the ops that `losses_alone` runs."""
    alone, sources = _after_parameters(graph)
    names = {op.name for op in alone.ops} if sources else set[str]()
    return replace(graph, ops=tuple(op for op in graph.ops if op.name not in names))


def _after_parameters(graph: Graph) -> tuple[Graph, list[Op]]:
    """Return the ops that make the loss of results, and the ops that make those; or no ops.

    Ops that draw random numbers are among the latter. There are none where the loss itself has
    parameters, or writes.
    """
    parameters = {p.name for p in graph.params if p.kind == "parameter"}
    needed, kept, sources = {graph.loss}, list[Op](), list[Op]()
    for op in reversed(graph.ops):
        if op.name not in needed:
            continue
        if op.random or not parameters.isdisjoint(op.params):
            sources.append(op)
        else:
            kept.append(op)
            needed.update(op.refs)
    written = {name for op in graph.ops for name in op.mutates}
    is_whole = graph.static_batch is None and not any(op.name == graph.loss for op in sources)
    if not is_whole or not written.isdisjoint(needed) or not all(map(_can_be_drawn, sources)):
        return graph, []
    return replace(graph, ops=tuple(reversed(kept))), sources


def _can_be_drawn(op: Op) -> bool:
    floats = (getattr(torch, spec.dtype).is_floating_point for spec in op.outputs)
    return not op.is_tuple and len(op.outputs) == 1 and all(floats)


# --------------------------------------------------------------------------- what is drawn


def _rows(batch: Batch, sources: list[Op], count: int) -> int:
    """Return how many rows of the batch are compared, two at least; 0 where there are not."""
    rows = batch.rows if sources else 0
    while rows > _FEW and sum(_elements(op, batch, rows) for op in sources) > _MANY:
        rows //= 2
    if sum(_elements(op, batch, rows) for op in sources) > _MOST:
        return 0
    return rows - rows % count if rows >= count else rows if rows >= _FEW else 0


def _elements(op: Op, batch: Batch, rows: int) -> int:
    return math.prod(_shape(op.outputs[0], batch, rows))


def _shape(spec: TensorSpec, batch: Batch, rows: int) -> list[int]:
    lengths = {
        name: entry.tensor.shape[dim] for entry in batch.entries for dim, name in entry.lengths
    }
    return [_size(dim, rows, lengths) for dim in spec.shape]


def _size(dim: Dim, rows: int, lengths: Mapping[str, int]) -> int:
    return size_of(dim, rows, lengths.__getitem__)


def _with_rows(batch: Batch, rows: int) -> Batch:
    """Return some rows of a batch, with an entry that says which rows a part has."""
    numbers = torch.arange(rows, dtype=torch.float64)
    entries = (
        replace(entry, tensor=entry.part(0, rows), of_all=rows if entry.of_all else 0)
        for entry in unlike_rows(batch, rows).entries
    )
    own = Entry(_ROWS, (_ROWS,), numbers, batched=True, said=True)
    return replace(batch, entries=(*entries, own), rows=rows)


def _drawn(sources: list[Op], batch: Batch) -> Iterator[Drawn]:
    """Yield numbers for results; none where one has rows in two dimensions."""
    dice = torch.Generator().manual_seed(0)
    for op in sources:
        spec, rows = op.outputs[0], batch.rows
        own, more = _shape(spec, batch, rows), _shape(spec, batch, 2 * rows)
        dims = [dim for dim, (n, m) in enumerate(zip(own, more, strict=True)) if n != m]
        if len(dims) > 1 or any(own[dim] % rows for dim in dims):
            raise ValueError(f"{op.name} has rows in several dimensions")
        dtype = getattr(torch, spec.dtype)
        kind = dtype if dtype.itemsize >= _NARROW else torch.float32
        numbers = torch.randn(own, generator=dice, dtype=kind)
        yield Drawn(op.name, numbers, *((dims[0], own[dims[0]] // rows) if dims else (None, 1)))
