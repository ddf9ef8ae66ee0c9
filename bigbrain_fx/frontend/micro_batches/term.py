"""Search for the first value of a graph that does not consist of its micro-batches' values.

    whole    h [8, d]   s [8, 8]          parts   h [4, d] | h [4, d]   s [4, 4] | s [4, 4]
             h is the parts one after another; s is not: here rows meet each other

A value consists of its parts when it is their concatenation, their mean or their sum, or equal to
each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from bigbrain_fx.core import Op, Ref
from bigbrain_fx.frontend.micro_batches.draws import Draws
from bigbrain_fx.frontend.micro_batches.gradients import Tensors
from bigbrain_fx.frontend.tracing.captured import Captured
from bigbrain_fx.frontend.tracing.executor.graph_executor import run_graph
from bigbrain_fx.frontend.translation.kept import LOSS

_MEMORY = 2**30  # bytes of values that may be held
_BOUNDS = ("abs", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum")
Values = dict[str, tuple[Tensor, ...]]


def first_apart(captured: Captured, whole: Tensors, parts: Sequence[Tensors], draws: Draws) -> str:
    """Return the line and the code of the first such value; empty without a finding."""
    graph = captured.graph
    if graph.static_batch is not None:
        return ""
    with suppress(Exception):  # the user's own code, on rows that it may not know
        with draws.recording():
            one = _values(captured, whole)
        others = list(_values_again(captured, parts, draws))
        for op in graph.ops:
            found = one.get(op.name, ())
            pieces = [other.get(op.name, ()) for other in others]
            if not all(map(_is_together, found, zip(*pieces, strict=True))):
                return _said(op)
    return ""


def bound_of_a_mean(captured: Captured, parts: Sequence[Tensors]) -> str:
    """Return the line and the code of a bound of one number that all rows make; else nothing.

    Parts agree with their batch as long as all of them are on one side: abs(loss - b) + b.
    """
    ops = [op for op in captured.graph.ops if _is_bound(op)]
    with suppress(Exception):  # the user's own code, on rows that it may not know
        one, other = (_values(captured, part) for part in parts[: 2 if ops else 0])
        for op in ops:
            names = [arg.value for arg in op.args if isinstance(arg, Ref)]
            pairs = ((one[name], other[name]) for name in names if name in one)
            if any(not _near(a, b) for pair in pairs for a, b in zip(*pair, strict=True)):
                return _said(op)
    return ""


def _is_bound(op: Op) -> bool:
    own = op.outputs[0] if len(op.outputs) == 1 else None
    is_number = own is not None and not own.shape and own.requires_grad
    return is_number and op.target.split(".")[1] in _BOUNDS


def _said(op: Op) -> str:
    if op.target == LOSS:
        return "the loss is opaque, and is not the mean of its parts"
    return f"{op.source or op.name} ({op.code or op.target})"


def _values_again(captured: Captured, parts: Sequence[Tensors], draws: Draws) -> Iterator[Values]:
    draws.first_part()
    for part in parts:
        with draws.again():
            found = _values(captured, part)
        yield found


def _values(captured: Captured, inputs: Tensors) -> Values:
    """Return every floating point value of a run, copied: later ops may write into it."""
    found, held = Values(), [0]

    def note(op: Op, value: object) -> None:
        values = value if isinstance(value, tuple | list) else (value,)
        own = tuple(v.detach().clone() for v in values if isinstance(v, Tensor))
        held[0] += sum(v.nbytes for v in own)
        if held[0] > _MEMORY:
            raise MemoryError
        found[op.name] = own

    tensors = {n: t.detach().clone() for n, t in captured.tensors.items()}
    own = {name: tensor.clone() for name, tensor in inputs.items()}
    with torch.no_grad():
        run_graph(captured.graph, tensors, own, functions=captured.functions, watch=note)
    return found


def _is_together(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether a value is put together of its parts'."""
    if any(part.dim() != whole.dim() for part in parts):
        return False
    if all(part.shape == whole.shape for part in parts):
        return _is_reduced(whole, parts)
    ways = (d for d in range(whole.dim()) if sum(p.shape[d] for p in parts) == whole.shape[d])
    return any(_are_joined(whole, parts, d) for d in ways if _fits(whole, parts, d))


def _are_joined(whole: Tensor, parts: Sequence[Tensor], dim: int) -> bool:
    """Whether parts stand one after another along a dimension, or along the inner one of two in it.

    [time, rows, d] laid out as [time * rows, d] is an example of the latter.
    """
    outer = math.gcd(*(part.shape[dim] for part in parts))
    for each in (n for n in range(1, outer + 1) if outer % n == 0):
        pieces = [part.unflatten(dim, (each, -1)) for part in parts]
        if _near(whole, torch.cat(pieces, dim + 1).flatten(dim, dim + 1)):
            return True
    return False


def _fits(whole: Tensor, parts: Sequence[Tensor], dim: int) -> bool:
    rest = [size for d, size in enumerate(whole.shape) if d != dim]
    return all([s for d, s in enumerate(p.shape) if d != dim] == rest for p in parts)


def _is_reduced(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    if all(_near(whole, part) for part in parts):
        return True
    stacked = torch.stack([part.double() for part in parts])
    return _near(whole, stacked.mean(0)) or _near(whole, stacked.sum(0))


def _near(whole: Tensor, other: Tensor) -> bool:
    if not whole.numel():
        return True
    one, two = whole.double(), other.double()
    largest = float(one.abs().nan_to_num(0, 0, 0).max())
    room = 3e-2 if whole.element_size() == 2 else 1e-4
    return torch.allclose(one, two, 0.0, room * largest, equal_nan=True)
