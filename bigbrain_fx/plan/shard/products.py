"""How elementwise ops, reductions and products carry dimensions."""

from __future__ import annotations

from collections.abc import Mapping

from bigbrain_fx.core import Arg, ParamRef
from bigbrain_fx.plan.shard.call import Rule, Ruled, ShardCall, tag
from bigbrain_fx.plan.shard.factors import Dimension, Dims, flat, fresh, size, unify


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
}
