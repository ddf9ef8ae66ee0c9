"""How ops that pick, order, turn or repeat numbers carry dimensions: what they go along is divided.

The dimension that is picked from, ordered or turned is whole; all others are as they were.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bigbrain_fx.core import ParamRef
from bigbrain_fx.plan.shard.call import Rule, Ruled, ShardCall, tag
from bigbrain_fx.plan.shard.factors import (
    Dims,
    Factor,
    UnlikeError,
    divided_otherwise,
    flat,
    fresh,
    reshaped,
    size,
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


RULES: Mapping[str, Rule] = {
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
