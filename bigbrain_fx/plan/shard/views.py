"""How views, copies and cuts of tensors carry dimensions: nothing is computed here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from bigbrain_fx.plan.shard.call import Rule, Ruled, ShardCall
from bigbrain_fx.plan.shard.factors import (
    Dimension,
    Dims,
    Factor,
    UnlikeError,
    cut,
    flat,
    fresh,
    joined,
    reshaped,
    size,
    unify,
)


def _carried(before: Dims, *after: Dims) -> Ruled:
    """Say that what stands before and after an op goes along it."""
    kept = {id(factor) for factor in flat(before)}
    along = {id(f): f for dims in after for f in flat(dims) if id(f) in kept}
    return Ruled(after, tuple(along.values()))


def _reshape(call: ShardCall) -> Ruled:
    before = call.dims(call.op.args[0])
    after = reshaped(before, call.shape)
    return _carried(before, after)


def _transpose(call: ShardCall) -> Ruled:
    before = call.dims(call.op.args[0])
    one, other = (call.number(i, f"dim{i - 1}", 0) % len(before) for i in (1, 2))
    order = list(range(len(before)))
    order[one], order[other] = other, one
    return _carried(before, tuple(before[i] for i in order))


def _permute(call: ShardCall) -> Ruled:
    before = call.dims(call.op.args[0])
    return _carried(before, tuple(before[i] for i in call.numbers(1, "dims")))


def _turned(call: ShardCall) -> Ruled:
    before = call.dims(call.op.args[0])
    return _carried(before, before[::-1] if len(before) == 2 else before)


def _without(call: ShardCall, dim: int) -> tuple[Dims, Dims]:
    before = call.dims(call.op.args[0])
    return before, before[: dim % len(before)] + before[dim % len(before) + 1 :]


def _unbind(call: ShardCall) -> Ruled:
    before, after = _without(call, call.number(1, "dim", 0))
    return _carried(before, *(after for _ in call.op.outputs))


def _select(call: ShardCall) -> Ruled:
    before, after = _without(call, call.number(1, "dim", 0))
    return _carried(before, after)


def _apart(call: ShardCall, dim: int) -> Ruled:
    """Cut a dimension into pieces: fused query, key and value."""
    before = call.dims(call.op.args[0])
    dim %= len(before)
    sizes = [int(spec.shape[dim]) for spec in call.op.outputs]
    pieces = cut(before[dim], sizes) or fresh(sizes)
    return _cut(before, dim, *pieces)


def _cut(before: Dims, dim: int, *pieces: Dimension) -> Ruled:
    """Say that an op cuts pieces out of a dimension, each part from the same part of it."""
    ruled = _carried(before, *((*before[:dim], own, *before[dim + 1 :]) for own in pieces))
    return replace(ruled, along=(*ruled.along, *before[dim]))


def _chunk(call: ShardCall) -> Ruled:
    return _apart(call, call.number(2, "dim", 0))


def _slice(call: ShardCall) -> Ruled:
    """Take start..stop of a dimension: all of it, or one of several pieces."""
    before = call.dims(call.op.args[0])
    dim = call.number(1, "dim", 0) % len(before)
    start, step = call.arg(2, "start", 0) or 0, call.number(4, "step", 1)  # a narrow has none
    have, want = size(before[dim]), call.shape[dim]
    if not isinstance(start, int):
        raise TypeError("start is no number")
    start = max(0, start + have if start < 0 else start)
    own: Dimension = (Factor(want),)
    if call.cuts and (pieces := cut(before[dim], call.cuts)):
        own = pieces[[*accumulate(call.cuts, initial=0)].index(start)]
    elif have == want and step == 1:
        own = before[dim]
    elif step == 1 and want and have % want == 0 and start % want == 0:
        own = reshaped((before[dim],), (have // want, want))[1]
    return _cut(before, dim, own)


def _cat(call: ShardCall) -> Ruled:
    """Join equal pieces as (which, index); others stand one after another, but for empty ones."""
    items = call.op.args[0]
    parts = [call.dims(item) for item in (items if isinstance(items, tuple) else (items,))]
    dim = call.number(1, "dim", 0) % len(parts[0])
    for other in parts[1:]:
        for place, (a, b) in enumerate(zip(parts[0], other, strict=True)):
            if place != dim:
                unify(a, b)
    filled = [part[dim] for part in parts if size(part[dim])] or [parts[0][dim]]
    ruled = _carried(parts[0], (*parts[0][:dim], _end_to_end(filled), *parts[0][dim + 1 :]))
    return replace(ruled, along=(*ruled.along, *filled[0]))


def _end_to_end(pieces: Sequence[Dimension]) -> Dimension:
    own, *others = pieces
    if any(size(other) != size(own) for other in others):
        return (joined(pieces),)
    for other in others:
        unify(own, other)
    return (Factor(len(pieces)), *own)


def _stack(call: ShardCall) -> Ruled:
    items = call.op.args[0]
    parts = [call.dims(item) for item in (items if isinstance(items, tuple) else (items,))]
    dim = call.number(1, "dim", 0) % (len(parts[0]) + 1)
    for other in parts[1:]:
        for a, b in zip(parts[0], other, strict=True):
            unify(a, b)
    after = (*parts[0][:dim], (Factor(len(parts)),), *parts[0][dim:])
    return _carried(parts[0], after)


def _expand(call: ShardCall) -> Ruled:
    """Repeat dimensions of size one: each part is made of the whole."""
    before = call.dims(call.op.args[0])
    after = list(fresh(call.shape))
    shift = len(after) - len(before)
    for place, own in enumerate(before):
        if size(own) == call.shape[shift + place]:
            after[shift + place] = own
    return Ruled((tuple(after),), tuple(flat(after)))


def _repeat_interleave(call: ShardCall) -> Ruled:
    """Repeat each index: (index, which of its copies)."""
    before = call.dims(call.op.args[0])
    times, dim = call.number(1, "repeats", 1), call.number(2, "dim", 0) % len(before)
    after = (*before[:dim], (*before[dim], Factor(times)), *before[dim + 1 :])
    return Ruled((after,), tuple(flat(after)))


def _pad(call: ShardCall) -> Ruled:
    before = call.dims(call.op.args[0])
    after = tuple(
        own if size(own) == want else (Factor(want),)
        for own, want in zip(before, call.shape, strict=True)
    )
    return _carried(before, after)


def _same(call: ShardCall) -> Ruled:
    before = call.dims(call.op.args[0])
    if math.prod(map(size, before)) != math.prod(call.shape):
        raise UnlikeError("a copy of another size")
    return _carried(before, before)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
        _reshape,
    ),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    "permute": _permute,
    **dict.fromkeys(("t", "numpy_T"), _turned),
    "unbind": _unbind,
    "select": _select,
    **dict.fromkeys(("chunk",), _chunk),
    **dict.fromkeys(("split", "split_with_sizes"), _chunk),
    **dict.fromkeys(("slice", "narrow"), _slice),
    **dict.fromkeys(("cat", "concat"), _cat),
    "stack": _stack,
    **dict.fromkeys(("expand", "broadcast_to"), _expand),
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    **dict.fromkeys(("contiguous", "clone", "alias", "detach", "lift_fresh_copy"), _same),
}
