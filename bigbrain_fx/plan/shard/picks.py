"""How ops that pick, order, turn or repeat numbers carry dimensions: what they go along is divided.

The dimension that is picked from, ordered or turned is whole; all others are as they were.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from bigbrain_fx.core import ParamRef
from bigbrain_fx.plan.shard.factors import (
    Dimension,
    Dims,
    Factor,
    Rule,
    Ruled,
    ShardCall,
    UnlikeError,
    cut,
    divided_otherwise,
    flat,
    fresh,
    joined,
    reshaped,
    size,
    tag,
    unify,
)

_EVERYWHERE = "over everything"


def _gather(call: ShardCall) -> Ruled:
    """Take a number for each index: the other dimensions are the same in both."""
    x, index = call.dims(call.op.args[0]), call.dims(call.op.args[2])
    dim = call.number(1, "dim", 0) % len(x)
    for place, (own, given) in enumerate(zip(x, index, strict=True)):
        if place == dim:
            continue
        if size(own) != size(given):
            raise UnlikeError("fewer indices than numbers")
        unify(own, given)
    return Ruled((index,), tuple(flat(index)), whole=tuple(flat((x[dim],))))


def _index(call: ShardCall) -> Ruled:
    """Take rows by a list of them: its dimensions stand where the rows stood."""
    x, picked = call.dims(call.op.args[0]), call.op.args[1]
    assert isinstance(picked, tuple)
    places = [place for place, item in enumerate(picked) if item is not None]
    if len(places) != 1:
        raise TypeError("several lists")
    dim = places[0]
    index = call.dims(picked[dim])
    after = (*x[:dim], *index, *x[dim + 1 :])
    if [*map(size, after)] != [*call.shape]:
        raise UnlikeError("a mask")
    if isinstance(call.op.args[0], ParamRef):
        tag(flat((*x[:dim], *x[dim + 1 :])), "hidden")
    return Ruled((after,), tuple(flat(after)), whole=tuple(flat((x[dim],))))


def _index_select(call: ShardCall) -> Ruled:
    x, index = call.dims(call.op.args[0]), call.dims(call.op.args[2])
    dim = call.number(1, "dim", 0) % len(x)
    after = (*x[:dim], *(index or fresh((1,))), *x[dim + 1 :])
    return Ruled((after,), tuple(flat(after)), whole=tuple(flat((x[dim],))))


def _rest(call: ShardCall, dims: Collection[int]) -> Ruled:
    """Leave some dimensions whole: each keeps its place, of a size of its own."""
    before = call.dims(call.op.args[0])
    gone = {dim % len(before) for dim in dims}
    kept = tuple(own for place, own in enumerate(before) if place not in gone)
    outs: list[Dims] = []
    for spec in call.op.outputs:
        if len(spec.shape) == len(before):
            outs.append(
                tuple(
                    (Factor(int(spec.shape[place])),) if place in gone else own
                    for place, own in enumerate(before)
                )
            )
        elif len(spec.shape) == len(kept):
            outs.append(kept)
        else:
            raise TypeError(_EVERYWHERE)
    return Ruled(tuple(outs), tuple(flat(kept)))


def _turned(call: ShardCall) -> Ruled:
    return _rest(call, call.numbers(1, "dims"))


def _rolled(call: ShardCall) -> Ruled:
    dims = call.numbers(2, "dims") if len(call.op.args) > 2 else ()
    if not dims:
        raise TypeError(_EVERYWHERE)
    return _rest(call, dims)


def _ordered(call: ShardCall) -> Ruled:
    return _rest(call, (call.number(1, "dim", -1),))


def _reduced(call: ShardCall) -> Ruled:
    """Reduce by what is no sum of what the parts give: the largest of each row, a deviation."""
    if call.op.target.endswith((".default", ".other")) and len(call.op.args) < 2:
        raise TypeError(_EVERYWHERE)
    return _rest(call, call.numbers(1, "dim"))


def _largest(call: ShardCall) -> Ruled:
    if not call.op.target.endswith(".dim"):
        raise TypeError("of two tensors, or over everything")
    return _reduced(call)


def _length(call: ShardCall) -> Ruled:
    """Return norms of vectors: which norm stands before the dimensions."""
    if call.arg(2, "dim") is None:
        raise TypeError(_EVERYWHERE)
    return _rest(call, call.numbers(2, "dim"))


def _triangle(call: ShardCall) -> Ruled:
    return _rest(call, (-2, -1))


def _repeat(call: ShardCall) -> Ruled:
    """Lay copies side by side: (which copy, index)."""
    before, times = call.dims(call.op.args[0]), call.op.args[1]
    assert isinstance(times, tuple)
    before = (*fresh((1,) * (len(times) - len(before))), *before)
    after = tuple(
        own if size(own) == want else (Factor(want // size(own)), *own)
        for own, want in zip(before, call.shape, strict=True)
    )
    return Ruled((after,), tuple(flat(after)))


def _gated(call: ShardCall) -> Ruled:
    """Multiply the first half by a gate of the second."""
    x = call.dims(call.op.args[0])
    dim = call.number(1, "dim", -1) % len(x)
    own = reshaped((x[dim],), (2, size(x[dim]) // 2))[1]
    after = (*x[:dim], own, *x[dim + 1 :])
    return Ruled((after,), tuple(flat(after)), whole=divided_otherwise([own], x[dim]))


def _shuffled(call: ShardCall) -> Ruled:
    """Lay channels out as pixels: (channel, pixels of it)."""
    x, times = call.dims(call.op.args[0]), call.number(1, "upscale_factor", 1)
    if len(x) != 4:
        raise TypeError("no batch")
    own = reshaped((x[1],), (size(x[1]) // times**2, times**2))[0]
    after = (x[0], own, *fresh(call.shape[2:]))
    return Ruled((after,), tuple(flat(after[:2])), whole=divided_otherwise([own], x[1]))


PICKS: Mapping[str, Rule] = {
    "gather": _gather,
    "index": _index,
    "index_select": _index_select,
    "flip": _turned,
    "roll": _rolled,
    **dict.fromkeys(("cumprod", "logcumsumexp"), _ordered),
    **dict.fromkeys(("logsumexp", "var", "std"), _reduced),
    **dict.fromkeys(("max", "min"), _largest),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _length),
    **dict.fromkeys(("tril", "triu"), _triangle),
    "repeat": _repeat,
    "glu": _gated,
    "pixel_shuffle": _shuffled,
}


# ------------------------------------------------------------------------------------------------
# How views, copies and cuts of tensors carry dimensions: nothing is computed here.


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


def _turned_sizes(call: ShardCall) -> Ruled:
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


VIEWS: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
        _reshape,
    ),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    "permute": _permute,
    **dict.fromkeys(("t", "numpy_T"), _turned_sizes),
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
