"""How layers carry dimensions: tables, attention, convolutions, norms, pools and losses."""

from __future__ import annotations

from collections.abc import Mapping

from bigbrain_fx.core import Arg
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


def _embedding(call: ShardCall) -> Ruled:
    """Look rows up: each member has some of them, and gives zeros for the others."""
    table, index = call.dims(call.op.args[0]), call.dims(call.op.args[1])
    if call.arg(3, "scale_grad_by_freq", False) or call.arg(4, "sparse", False):
        raise TypeError("gradients of its own kind")
    after = (*index, table[1])
    tag(flat(table[:1]), "vocabulary")
    tag(flat(table[1:]), "hidden")
    return Ruled((after,), tuple(flat(after)), tuple(flat(table[:1])))


def _attention(call: ShardCall) -> Ruled:
    """Heads go along; groups of query heads share a head of keys and values, or all share one."""
    q, k, v = (call.dims(arg) for arg in call.op.args[:3])
    grouped = bool(call.arg(7, "enable_gqa", False))
    for place in range(len(q) - 2):
        for given in (k, v):
            if size(given[place]) != 1:  # one is repeated
                _same_heads(q, given, place, grouped=grouped)
    unify(k[-2], v[-2])
    mask = call.arg(3, "attn_mask")
    if call.is_tensor(mask):
        _masked(q, call.dims(mask))
    if len(q) > 3:
        tag(flat(q[-3:-2]), "heads")
    tag(flat((q[-2], k[-2])), "sequence")
    after = (*q[:-1], v[-1])
    whole = tuple(flat((q[-1], k[-1], k[-2])))
    return Ruled((after,), tuple(flat((*q[:-2], v[-1]))), whole=whole)


def _same_heads(q: Dims, k: Dims, place: int, *, grouped: bool) -> None:
    if not grouped or size(q[place]) == size(k[place]):
        unify(q[place], k[place])
        return
    pair = reshaped((q[place],), (size(k[place]), size(q[place]) // size(k[place])))
    unify(pair[0], k[place])


def _masked(q: Dims, mask: Dims) -> None:
    for own, given in zip(reversed(q[:-2]), reversed(mask[:-2]), strict=False):
        if size(given) != 1:
            unify(own, given)


def _convolution(call: ShardCall, *, transposed: bool, groups: int) -> Ruled:
    """Filters go along, channels are summed; with groups, each has its own of both.

    Groups of channels that were shuffled are whole: no member has one of them.
    """
    x, weight = call.dims(call.op.args[0]), call.dims(call.op.args[1])
    if len(x) != len(weight):
        raise TypeError("no batch")
    mine, other = (0, 1) if transposed else (1, 0)
    channels, filters = size(x[1]) // groups, call.shape[1] // groups
    inputs = reshaped((x[1],), (groups, channels))
    given, found = _weight_sides(weight, groups, channels, filters, transposed=transposed)
    unify(inputs[0], given[0])
    unify(inputs[1], given[1])
    after = (x[0], (*inputs[0], *found), *fresh(call.shape[2:]))
    bias = call.arg(2, "bias")
    if call.is_tensor(bias):
        unify(after[1], call.dims(bias)[0])
    tag(flat((weight[mine], weight[other], *inputs)), "channels")
    along = tuple(flat((x[0], after[1])))
    whole = divided_otherwise(inputs, x[1])
    return Ruled((after,), along, tuple(flat(inputs[1:])), whole)


def _weight_sides(
    weight: Dims, groups: int, channels: int, filters: int, *, transposed: bool
) -> tuple[Dims, tuple[Factor, ...]]:
    """Return ((groups, channels of one), filters of one) of a weight."""
    if transposed:
        pair = reshaped((weight[0],), (groups, channels))
        return pair, weight[1]
    pair = reshaped((weight[0],), (groups, filters))
    return (pair[0], weight[1]), pair[1]


def _conv(call: ShardCall) -> Ruled:
    return _convolution(call, transposed=False, groups=call.number(6, "groups", 1))


def _conv_transpose(call: ShardCall) -> Ruled:
    return _convolution(call, transposed=True, groups=call.number(6, "groups", 1))


def _pool(call: ShardCall) -> Ruled:
    """Pools and resizings leave rows and channels as they are."""
    x = call.dims(call.op.args[0])
    spatial = {"1": 1, "2": 2, "3": 3}[next(c for c in call.op.target if c in "123")]
    kept = x[: len(x) - spatial]
    outs = tuple((*kept, *fresh(map(int, spec.shape[len(kept) :]))) for spec in call.op.outputs)
    return Ruled(outs, tuple(flat(kept)))


def _batch_norm(call: ShardCall) -> Ruled:
    x = call.dims(call.op.args[0])
    for place in range(1, 5):
        if call.is_tensor(call.op.args[place]):
            unify(x[1], call.dims(call.op.args[place])[0])
    tag(flat(x[1:2]), "channels")
    return Ruled(((*fresh((size(x[0]),)), x[1], *fresh(call.shape[2:])),), tuple(flat(x[1:2])))


def _group_norm(call: ShardCall) -> Ruled:
    """Whole groups go along; within one, channels and positions are whole."""
    x, groups = call.dims(call.op.args[0]), call.number(1, "num_groups", 1)
    pair = reshaped((x[1],), (groups, size(x[1]) // groups))
    own = (*pair[0], Factor(size(pair[1])))
    for place, name in ((2, "weight"), (3, "bias")):
        given = call.arg(place, name)
        if call.is_tensor(given):
            unify(own, call.dims(given)[0])
    after = (x[0], own, *fresh(call.shape[2:]))
    whole = divided_otherwise(pair[:1], x[1])
    return Ruled((after,), tuple(flat((x[0], pair[0]))), whole=whole)


def _layer_norm(call: ShardCall) -> Ruled:
    """What is normalised is whole; weight and bias are on what comes out."""
    x, count = call.dims(call.op.args[0]), len(call.numbers(1, "normalized_shape"))
    own = fresh(call.shape[-count:])
    for place, name in ((2, "weight"), (3, "bias")):
        given: Arg = call.arg(place, name)
        if call.is_tensor(given):
            for a, b in zip(own, call.dims(given), strict=True):
                unify(a, b)
    return Ruled(((*x[:-count], *own),), tuple(flat(x[:-count])))


def _cross_entropy(call: ShardCall) -> Ruled:
    """Classes are summed, in three small sums; all else is averaged with what is ignored."""
    logits, targets = call.dims(call.op.args[0]), call.dims(call.op.args[1])
    if len(targets) == len(logits) or len(logits) < 2:
        raise UnlikeError("targets are probabilities, or one row")
    plain = call.arg(2, "weight") is None and not call.arg(5, "label_smoothing", 0.0)
    for own, given in zip((logits[0], *logits[2:]), targets, strict=True):
        unify(own, given)
    tag(flat(logits[1:2]), "vocabulary")
    mean = call.arg(3, "reduction", 1) != 0
    after = () if mean else targets
    return Ruled((after,), tuple(flat(after)), tuple(flat(logits[1:2])) if plain else ())


def _pointwise_loss(call: ShardCall) -> Ruled:
    """Losses that are the mean, or the sum, of what each number gives."""
    x = call.dims(call.op.args[0])
    for other in call.tensors():
        if len(other) != len(x):
            raise UnlikeError("weights of another shape")
        for own, given in zip(x, other, strict=True):
            unify(own, given)
    if not call.shape:
        return Ruled(((),), (), tuple(flat(x)))
    return Ruled((x,), tuple(flat(x)))


POINTWISE = "binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss huber_loss kl_div"
_POOLS = """
max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_bilinear2d upsample_bicubic2d
"""

RULES: Mapping[str, Rule] = {
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose),
    **dict.fromkeys(_POOLS.split(), _pool),
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    "cross_entropy_loss": _cross_entropy,
    **dict.fromkeys(POINTWISE.split(), _pointwise_loss),
}
