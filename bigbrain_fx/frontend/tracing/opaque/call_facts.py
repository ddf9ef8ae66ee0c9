"""Facts of one call of an opaque module, and their sizes in terms of what the call is given.

    given [4, 8], [5, 8], [7, 8]   ─▶   given [B, 8]
    result [8, 8], [10, 8], [14, 8]     result [2B, 8]

This file knows shapes; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bigbrain_fx.core import Arg
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.opaque.rules import given_otherwise

Size = int | torch.SymInt
Spec = tuple[tuple[Size, ...], tuple[Size, ...], torch.dtype]


@dataclass(frozen=True)
class Facts:
    """Inputs and results of one call of an opaque module.

    Attributes:
        given: shapes of the tensors among its arguments.
        result: the result, encoded. tensors: shape, strides and type of each tensor in it.
        random: whether it drew random numbers. written: indices of the tensors that it wrote into.
        views: for each output tensor the index of the argument that it is a view of, or None.
        fixed: indices of output tensors without a gradient.
        left: attributes that it set for later readers: their values are in `result`, after the
            results.
        state: attributes that its next call depends on.
    """

    given: tuple[tuple[Size, ...], ...]
    result: Arg
    tensors: tuple[Spec, ...]
    random: bool
    written: tuple[int, ...]
    views: tuple[int | None, ...]
    fixed: frozenset[int]
    left: tuple[str, ...] = ()
    state: tuple[str, ...] = ()


def with_views_of(calls: Sequence[Facts], others: Sequence[Facts]) -> list[Facts]:
    """Return calls with results that are views where other calls' are: a layer may be skipped."""
    if len(calls) != len(others):
        return [*calls]
    return [
        replace(call, views=tuple(map(_either, call.views, other.views)))
        if len(call.views) == len(other.views)
        else call
        for call, other in zip(calls, others, strict=True)
    ]


def _either(view: int | None, other: int | None) -> int | None:
    return other if view is None else view


def fitted(runs: Sequence[Facts], shapes: Sequence[tuple[Size, ...]], path: str) -> Facts:
    """Return the facts with every size as arithmetic over the batch.

    Args:
        runs: the same call at one batch size, or at three.
        shapes: of the call's arguments in the trace.
        path: of the opaque module, for errors.

    Raises:
        CaptureError: a size does not grow evenly with the batch.
    """
    dims = [len(shape) for shape in shapes]
    if any([len(shape) for shape in facts.given] != dims for facts in runs):
        raise given_otherwise(path)
    free = any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)
    same = [replace(facts, given=(), tensors=_no_sizes(facts)) for facts in runs]
    if (free and len(runs) < 3) or any(facts != same[0] for facts in same):
        raise _uneven(path)
    known = list(_known(runs, shapes))
    tensors = tuple(
        (
            tuple(
                _size(sizes, known, path) for sizes in zip(*(one[0] for one in ones), strict=True)
            ),
            tuple(
                _size(sizes, known, path) for sizes in zip(*(one[1] for one in ones), strict=True)
            ),
            ones[0][2],
        )
        for ones in zip(*(facts.tensors for facts in runs), strict=True)
    )
    return replace(runs[0], given=tuple(shapes), tensors=tensors)


def _no_sizes(facts: Facts) -> tuple[Spec, ...]:
    return tuple((tuple(0 for _ in shape), (), dtype) for shape, _, dtype in facts.tensors)


def _known(
    runs: Sequence[Facts], shapes: Sequence[tuple[Size, ...]]
) -> Iterator[tuple[tuple[int, ...], Size]]:
    """Yield each growing size of the arguments: its values in the runs, and in the trace."""
    for i, here in enumerate(shapes):
        for j, size in enumerate(here):
            sizes = tuple(int(facts.given[i][j]) for facts in runs)
            if len(set(sizes)) == len(sizes) > 1:
                yield sizes, size


def _size(
    sizes: tuple[Size, ...], known: Sequence[tuple[tuple[int, ...], Size]], path: str
) -> Size:
    """Write a size in terms of a given one: a multiple and a rest, or an even part."""
    wanted = [int(size) for size in sizes]
    if len(set(wanted)) == 1:
        return wanted[0]
    for given, here in known:
        step, grown = given[1] - given[0], wanted[1] - wanted[0]
        times, parts = grown // step, step // grown if grown else 0
        rest = wanted[0] - times * given[0]
        if [times * g + rest for g in given] == wanted:
            return here * times + rest
        if parts > 1 and [g / parts for g in given] == wanted:
            return here // parts
    raise _uneven(path)


def _uneven(path: str) -> CaptureError:
    return CaptureError(
        f"what the opaque module {path} gives does not grow evenly with the batch",
        code="BX0140k",
        help="let it return tensors whose sizes are a multiple of the batch's, or pad them",
    )
