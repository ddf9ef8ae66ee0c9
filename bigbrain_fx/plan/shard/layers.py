"""How ops carry dimensions: elementwise ops, reductions, products, and layers of all kinds."""

from __future__ import annotations

from collections.abc import Mapping

from bigbrain_fx.core import Arg, ParamRef
from bigbrain_fx.plan.shard.factors import (
    Dimension,
    Dims,
    Factor,
    Rule,
    Ruled,
    ShardCall,
    UnlikeError,
    divided_otherwise,
    flat,
    fresh,
    reshaped,
    size,
    tag,
    unify,
)


def _embedding(call: ShardCall) -> Ruled:
    """Look rows up: each rank has some of them, and gives zeros for the others."""
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

    Groups of channels that were shuffled are whole: no rank has one of them.
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
    """Return a rule: normalised dimensions are whole; weight and bias are on the result."""
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

_LAYERS: Mapping[str, Rule] = {
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


# ------------------------------------------------------------------------------------------------
# How elementwise ops, reductions and products carry dimensions.


def _broadcast(after: Dims, before: Dims) -> None:
    """Make dimensions the same from the right; those of size one are repeated."""
    for own, given in zip(reversed(after), reversed(before), strict=False):
        if size(given) != 1:
            unify(own, given)


def _elementwise(call: ShardCall) -> Ruled:
    after = fresh(call.shape)
    for before in call.tensors():
        _broadcast(after, before)
    return Ruled((after,), tuple(flat(after)))


def _over(
    call: ShardCall, dims: tuple[int, ...], *, keep: bool
) -> tuple[Dims, Dims, list[Dimension]]:
    """Return (before, after, dimensions that are gone) of a reduction; none listed means all."""
    before = call.dims(call.op.args[0])
    gone = {d % len(before) for d in dims} if dims else set(range(len(before)))
    after = tuple(() if i in gone else own for i, own in enumerate(before) if keep or i not in gone)
    return before, after, [before[i] for i in sorted(gone)]


def _sum(call: ShardCall) -> Ruled:
    listed = call.arg(1, "dim") if call.op.target.split(".")[-1] != "default" else None
    dims = () if listed is None else call.numbers(1, "dim")
    _, after, gone = _over(call, dims, keep=bool(call.arg(2, "keepdim", False)))
    return Ruled((after,), tuple(flat(after)), tuple(flat(gone)))


def _along_the_rest(call: ShardCall) -> Ruled:
    """Leave one dimension whole: softmax, running sums, the largest few."""
    before = call.dims(call.op.args[0])
    dim = call.number(2 if call.op.target.startswith("aten.topk") else 1, "dim", -1) % len(before)
    kept = (*before[:dim], *before[dim + 1 :])
    if any(len(spec.shape) not in (len(before), len(kept)) for spec in call.op.outputs):
        raise TypeError("over everything")
    outs = tuple(
        (*before[:dim], *fresh((int(spec.shape[dim]),)), *before[dim + 1 :])
        if len(spec.shape) == len(before)
        else kept
        for spec in call.op.outputs
    )
    return Ruled(outs, tuple(flat(kept)))


def _extreme(call: ShardCall) -> Ruled:
    """Reduce by the largest, not by a sum: what is gone is whole."""
    if call.op.target.split(".")[-1] == "default" and len(call.op.args) < 2:
        raise TypeError("over everything")
    dims = call.numbers(1, "dim")
    _, after, _ = _over(call, dims, keep=bool(call.arg(2, "keepdim", False)))
    return Ruled((after,) * len(call.op.outputs), tuple(flat(after)))


def _one_hot(call: ShardCall) -> Ruled:
    """Classes are made here; each part of them from all indices."""
    after = (*call.dims(call.op.args[0]), *fresh(call.shape[-1:]))
    return Ruled((after,), tuple(flat(after[:-1])))


def _linear(call: ShardCall) -> Ruled:
    x, weight = call.dims(call.op.args[0]), call.dims(call.op.args[1])
    unify(x[-1], weight[1])
    bias = call.arg(2, "bias")
    if call.is_tensor(bias):
        unify(weight[0], call.dims(bias)[0])
    after = (*x[:-1], weight[0])
    tag(flat(weight), "hidden")
    return Ruled((after,), tuple(flat(after)), tuple(flat((x[-1],))))


def _multiplied(a: Dims, b: Dims, call: ShardCall, shape: tuple[int, ...]) -> Ruled:
    if min(len(a), len(b)) < 2:
        raise TypeError("a product with a vector")
    unify(a[-1], b[-2])
    batch = fresh(shape[:-2])
    _broadcast(batch, a[:-2])
    _broadcast(batch, b[:-2])
    after = (*batch, a[-2], b[-1])
    _tag_product(call, batch, (a[-1], b[-1]))
    return Ruled((after,), tuple(flat(after)), tuple(flat((a[-1],))))


def _tag_product(call: ShardCall, batch: Dims, sides: Dims) -> None:
    """Products that parameters have a batch of are experts; others' are heads."""
    params = [arg for arg in call.op.args if isinstance(arg, ParamRef)]
    stacked = any(len(call.dims(param)) > 2 for param in params)
    tag(flat(batch), "experts" if stacked else "heads")
    if params:
        tag(flat(sides), "hidden")


def _matmul(call: ShardCall) -> Ruled:
    a, b = call.dims(call.op.args[0]), call.dims(call.op.args[1])
    return _multiplied(a, b, call, call.shape)


def _addmm(call: ShardCall) -> Ruled:
    """Add a product to a bias: input + a @ b."""
    if call.arg(3, "beta", 1) != 1 or call.arg(4, "alpha", 1) != 1:
        raise TypeError("scaled")
    a, b = call.dims(call.op.args[1]), call.dims(call.op.args[2])
    found = _multiplied(a, b, call, call.shape)
    _broadcast(found.outs[0], call.dims(call.op.args[0]))
    return found


def _grouped_mm(call: ShardCall) -> Ruled:
    """Multiply runs of rows by a matrix of each expert; offsets of the runs need all rows."""
    x, experts = call.dims(call.op.args[0]), call.dims(call.op.args[1])
    if (len(x), len(experts)) != (2, 3) or len(call.op.args) > 3:
        raise TypeError("another form of it")
    unify(x[1], experts[1])
    tag(flat(experts[1:]), "hidden")
    after = (x[0], experts[2])
    whole = tuple(flat((x[0], experts[0])))
    return Ruled((after,), tuple(flat(after[1:])), tuple(flat(x[1:])), whole)


def _einsum(call: ShardCall) -> Ruled:
    equation, operands = call.op.args[0], call.op.args[1]
    assert isinstance(equation, str)
    assert isinstance(operands, tuple)
    sides, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow or "." in equation:
        raise TypeError("an equation without a result, or with dots")
    of: dict[str, Dimension] = {}
    for letters, operand in zip(sides.split(","), operands, strict=True):
        for letter, own in zip(letters, call.dims(operand), strict=True):
            unify(of.setdefault(letter, own), own)
    after = tuple(of[letter] for letter in result)
    _tag_letters(sides.split(","), result, operands, of)
    gone = tuple(own for letter, own in of.items() if letter not in result)
    return Ruled((after,), tuple(flat(after)), tuple(flat(gone)))


def _tag_letters(
    sides: list[str], result: str, operands: tuple[Arg, ...], of: dict[str, Dimension]
) -> None:
    for letters, operand in zip(sides, operands, strict=True):
        for letter in letters if isinstance(operand, ParamRef) else "":
            shared = letter in result and all(letter in other for other in sides)
            tag(flat((of[letter],)), "experts" if shared else "hidden")


_ELEMENTWISE = """
__and__ __or__ _to_copy abs acos add addcdiv addcmul and asin atan atan2 bitwise_and bitwise_not
bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip copy copysign cos cosh div dropout
elu eq erf erfc exp exp2 expm1 fill floor floor_divide fmod frac ge gelu gt hardshrink hardsigmoid
hardswish hardtanh hypot isfinite isinf isnan le leaky_relu lerp log log10 log1p log2 log_sigmoid
logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish
mul nan_to_num ne neg ones_like pow reciprocal relu relu6 remainder round rsqrt rsub selu sigmoid
sign silu sin sinh softplus softshrink sqrt square sub tan tanh threshold to trunc where xlogy
zeros_like
"""

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "cumsum", "topk", "argmax", "argmin"),
        _along_the_rest,
    ),
    **dict.fromkeys(("amax", "amin"), _extreme),
    "one_hot": _one_hot,
    "linear": _linear,
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "einsum": _einsum,
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), _grouped_mm),
    **_LAYERS,
}
