"""Checks of a model for inference: rows that depend on each other, and torch's fused path.

A bundle cuts a batch into micro-batches, and pads a short one with copies of its last row. Its
results are the model's only where no row of an output depends on other rows.

    rows      a b c d     a a a a     d d d d     c a c b     a b
    outputs   A B C D  ─▶ A A A A     D D D D     C A C B     A B

This runs the model; it knows of a graph only along which dimension an output has the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend.tracing.check import affordable
from bigbrain_fx.frontend.tracing.export import ambient, quiet
from bigbrain_fx.frontend.tracing.plain import Plain, another, state_kept
from bigbrain_fx.frontend.tracing.step import Step
from bigbrain_fx.frontend.translation.batch import Batch

RUNS = 6
"""How often the example's rows are run at most."""

_ROUNDING = {2: 3e-2}  # of the largest number, by the bytes of the element type
_TIES = 0.02  # of whole numbers: the largest of two that are equal but for rounding
Numbers = Sequence[Tensor]


def mixed_outputs(plain: Plain, batch: Batch, dims: Mapping[str, int | None]) -> list[str]:
    """Return the names of the outputs whose rows depend on other rows.

    None: rows are independent; or nothing is known. That is so for one row, a model that draws, or
    a model that fails on such rows.

    Args:
        plain: runs the model as it computes for inference.
        batch: the example; its rows may be equal, so others of their kind are tried first.
        dims: of each output by name, in order, the dimension of the rows; None without one.
    """
    if batch.rows < 2:
        return []
    own = list(batch.sized(batch.rows).values())
    for tensors in (_unlike(batch, another(batch, batch.rows, 0)), own):
        with suppress(Exception):  # the user's own code, in a way it may not know
            return _Beside(plain, batch, tensors).mixed(dims)
    return []


def _unlike(batch: Batch, tensors: Numbers) -> Numbers:
    """Replace numbers of rows that are all equal by different ones that few models refuse."""
    pairs = [(t, e.batched) for t, e in zip(tensors, batch.entries, strict=True)]
    if any(batched and not torch.equal(t[:1].expand_as(t), t) for t, batched in pairs):
        return tensors
    return [_told_apart(t) if batched else t for t, batched in pairs]


def _told_apart(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        dice = torch.Generator().manual_seed(0)
        return torch.rand(tensor.shape, generator=dice, dtype=torch.float64).to(tensor.dtype)
    shape = (-1, *[1] * (tensor.dim() - 1))
    return tensor + (torch.arange(len(tensor)) % 2).view(shape).to(tensor.dtype)


class _Beside:
    """A batch, and the model's results for it."""

    def __init__(self, plain: Plain, batch: Batch, tensors: Numbers) -> None:
        self.plain, self.batch, self.tensors = plain, batch, tensors
        self.whole = plain.run(tensors, 0)
        again = plain.run(tensors, 1)
        self.draws = not all(map(torch.equal, self.whole, again))

    def mixed(self, dims: Mapping[str, int | None]) -> list[str]:
        """Return the names of the outputs that are others beside other rows."""
        if self.draws:
            return []
        unlike = {
            name
            for found, wanted in self._runs([*dims.values()])
            for name, one, other in zip(dims, found, wanted, strict=True)
            if other is None or not are_near(one, other)
        }
        return [name for name in dims if name in unlike]

    def _runs(self, dims: Sequence[int | None]) -> Iterator[tuple[Numbers, list[Tensor | None]]]:
        """Yield the model's results for other batches of these rows, and the expected ones."""
        rows = self.batch.rows
        for picked in _picked(rows):
            yield self._run(picked), self._expected(picked, dims)
        with suppress(Exception):  # a model of one batch size
            half = torch.arange(rows // 2)
            yield self._run(half), self._expected(half, dims)

    def _run(self, picked: Tensor) -> Numbers:
        entries = zip(self.batch.entries, self.tensors, strict=True)
        return self.plain.run([t[picked] if e.batched else t for e, t in entries], 0)

    def _expected(self, picked: Tensor, dims: Sequence[int | None]) -> list[Tensor | None]:
        pairs = zip(self.whole, dims, strict=True)
        return [t if dim is None else _rows_of(t, dim, picked, self.batch.rows) for t, dim in pairs]


def _picked(rows: int) -> Iterator[Tensor]:
    yield torch.zeros(rows, dtype=torch.int64)
    yield torch.full((rows,), rows - 1)
    yield torch.randint(rows, (rows,), generator=torch.Generator().manual_seed(0))


def _rows_of(whole: Tensor, dim: int, picked: Tensor, rows: int) -> Tensor | None:
    """Return the picked rows of an output; None where its rows are no multiple of the batch's."""
    if whole.shape[dim] % rows:
        return None
    by_row: Tensor = whole.movedim(dim, 0).unflatten(0, (rows, -1))
    return by_row[picked].flatten(0, 1).movedim(0, dim)


def are_near(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs of a model are equal but for rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return int((one != other).sum()) <= _TIES * one.numel()
    room = _ROUNDING.get(one.element_size(), 1e-4)
    largest = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, 0.0, room * largest, equal_nan=True)


def remark(name: str, rows: int) -> str:
    """Return the remark on rows that depend on each other, for a bundle."""
    return (
        f"rows do not stand alone: a row of the output {name!r} is another one beside other rows "
        "(a norm or a mean over the batch, an order of its rows, its size). Inference takes whole "
        f"batches of {rows} rows, in one micro-batch, and refuses others"
    )


def remark_of_lone(name: str) -> str:
    """Return the remark on an output without rows, of which each micro-batch has one."""
    return (
        f"the output {name!r} is one value a micro-batch, and goes by all of its rows: those that "
        "fill up a short batch, too"
    )


def rows_mixed(
    step: Step, batch: Batch, dims: Mapping[str, int | None], autocast: str | None
) -> list[str]:
    """Return the outputs of a step in eval mode that have dependent rows."""
    mixed = mixed_outputs(Plain(step, step.model, autocast), batch, dims)
    return [name for name in mixed if dims[name] is not None]


_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_UNLIKE = (
    "nn.TransformerEncoder and its parts have a fused path, taken without gradients, whose numbers "
    "are others here: zeros at places that a padding mask leaves out. The bundle computes as with "
    "torch.backends.mha.set_fastpath_enabled(False): read no such places, or set them to 0 yourself"
)


def asked_for_inference(plain: Plain, batch: Batch, graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """Return the graph with the findings, and remarks; none for a model too large to run here.

    Args:
        plain: runs the model in eval mode.
        batch: the example.
        graph: its trace.
    """
    if not affordable(graph, (RUNS * batch.rows,)):
        return graph, ()
    dims, said = graph.output_dims, tuple[str, ...]()
    for name in mixed_outputs(plain, batch, dims):
        if dims[name] is None:
            said += (remark_of_lone(name),)
        elif graph.rows_apart:
            graph, said = replace(graph, rows_apart=False), (remark(name, batch.rows), *said)
    return graph, said if _fast_path_agrees(plain, batch) else (*said, _UNLIKE)


def _fast_path_agrees(plain: Plain, batch: Batch) -> bool:
    """Whether torch computes the same where it may take its fused path."""
    if not any(isinstance(part, _FUSED) for part in plain.model.modules()):
        return True
    try:
        pairs = zip(_run(plain, batch, True), _run(plain, batch, False), strict=True)
        return all(are_near(one, other) for one, other in pairs)
    except Exception:  # the user's own code, in a way it may not know
        return True


def _run(plain: Plain, batch: Batch, fused: bool) -> tuple[Tensor, ...]:
    before = torch.backends.mha.get_fastpath_enabled()
    tensors = list(batch.sized(batch.rows).values())
    try:
        with quiet(), state_kept(plain.model), ambient(plain.autocast, tensors), torch.no_grad():
            torch.backends.mha.set_fastpath_enabled(fused)
            torch.default_generator.manual_seed(0)
            return tuple(plain.step(*tensors))
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
