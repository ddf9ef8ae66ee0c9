"""Ops as one rank runs them, where it is not the same op on narrower tensors.

Sizes in arguments become the rank's (`local_sizes`); a bias is added once, after the parts. Tables
look up their own rows. Random numbers are drawn whole, by the key of the op, and the own part is
taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bigbrain_fx.core import Arg, Const, Op, ParamRef, Place, Ref, TensorSpec
from bigbrain_fx.plan.shard.layers import POINTWISE
from bigbrain_fx.plan.shard.local_op import (
    Form,
    Local,
    cut_up,
    grouped,
    plainly,
    repeated,
    scaled,
    sized,
    sliced,
    tiled,
)
from bigbrain_fx.plan.shard.saved import beside_layer, dense, lies

# ---------------------------------------------------------------- sums


def _typed(local: Local, suffix: str, value: Arg, spec: TensorSpec, dtype: str) -> Arg:
    """Cast a value where autocast, which casts for the op, does not for what replaces it."""
    if spec.dtype == dtype:
        return value
    own = replace(spec, dtype=dtype)
    return local.emit(suffix, "aten.to.dtype", value, Const(f"torch.{dtype}"), spec=own)


def _with_bias(
    local: Local, given: Op, bias: Ref | ParamRef, shape: tuple[int, ...] = ()
) -> list[Op]:
    """Add the bias once, to the sum of the parts."""
    own = local.spec(bias)
    held, spec = local.once(bias)
    local.op = beside_layer(local.op)
    part = replace(beside_layer(given), name=local.forms.name(f"{local.op.name}_part"))
    local.made.append(part)
    total = local.total("sum", Ref(part.name))
    value = _typed(local, "bias_cast", held, own, spec.dtype)
    if shape:
        turned = dense((*own.shape, *shape[1:]), spec.dtype, grad=own.requires_grad)
        value = local.emit("bias", "aten.reshape.default", value, shape, spec=turned)
    local.emit("", "aten.add.Tensor", total, value, spec=spec)
    return local.made


def _linear(local: Local) -> list[Op]:
    bias = local.op.args[2] if len(local.op.args) > 2 else None
    if not local.summed or not isinstance(bias, Ref | ParamRef):
        return plainly(local)
    return _with_bias(local, replace(local.given, args=local.given.args[:2]), bias)


def _addmm(local: Local) -> list[Op]:
    if not local.summed:
        return plainly(local)
    bias = local.op.args[0]
    assert isinstance(bias, Ref | ParamRef)
    product = "mm" if local.op.target.startswith("aten.addmm") else "bmm"
    given = replace(
        local.given, target=f"aten.{product}.default", args=local.given.args[1:3], kwargs=()
    )
    return _with_bias(local, given, bias)


def _convolution(local: Local) -> list[Op]:
    """Convolve the own channels, or the own groups."""
    has, place = local.place_of_arg(0), 6
    if not local.summed:
        groups = local.arg(place, "groups", 1)
        if has is None or has.dim != 1 or groups == 1:
            return plainly(local)
        return [local.with_arg(place, scaled(local.part, groups))]
    bias = local.op.args[2] if len(local.op.args) > 2 else None
    if not isinstance(bias, Ref | ParamRef):
        return plainly(local)
    ones = (1,) * (len(local.op.outputs[0].shape) - 2)
    return _with_bias(local, local.with_arg(2, None), bias, (-1, *ones))


def _averaged(local: Local) -> list[Op]:
    """Weigh a mean by how much of what is averaged the rank has."""
    if not local.summed:
        return plainly(local)
    spec = local.op.outputs[0]
    mean = replace(local.given, name=local.forms.name(f"{local.op.name}_mean"))
    local.made.append(mean)
    weight = local.part.length / local.part.axis.size
    part = local.emit("part", "aten.mul.Tensor", Ref(mean.name), weight, spec=spec)
    local.total("", part)
    return local.made


def _mean_loss(local: Local) -> list[Op]:
    place = 4 if local.op.target.startswith("aten.binary") else 2
    return plainly(local) if local.arg(place, "reduction", 1) != 1 else _averaged(local)


# ---------------------------------------------------------------- tables and classes


def _within(
    local: Local, index: Arg, spec: TensorSpec, left_out: Ref | None = None
) -> tuple[Ref, Ref]:
    """Return (indices into the own rows, whether they are another rank's, or left out).

    An index of no rank stays out of range, so that torch stops for it as it does in one process.
    """
    part, ints = local.part, replace(spec, requires_grad=False)
    bools = replace(ints, dtype="bool")
    at = local.emit("at", "aten.sub.Tensor", index, part.start, spec=ints)
    below = local.emit("below", "aten.lt.Scalar", at, 0, spec=bools)
    least = local.emit("least", "aten.ge.Scalar", index, 0, spec=bools)
    before = local.emit("before", "aten.logical_and.default", below, least, spec=bools)
    above = local.emit("above", "aten.ge.Scalar", at, part.length, spec=bools)
    most = local.emit("most", "aten.lt.Scalar", index, part.axis.size, spec=bools)
    after = local.emit("after", "aten.logical_and.default", above, most, spec=bools)
    away = local.emit("away", "aten.logical_or.default", before, after, spec=bools)
    if left_out is not None:
        away = local.emit("others", "aten.logical_or.default", away, left_out, spec=bools)
    own = local.emit("row", "aten.masked_fill.Scalar", at, away, 0, spec=ints)
    return own, away


def _embedding(local: Local) -> list[Op]:
    """Look up the own rows; zeros for the others', so that the sum has each once."""
    if not local.summed:
        return plainly(local)
    index, spec = local.spec(local.op.args[1]), local.op.outputs[0]
    own, away = _within(local, local.given.args[1], index)
    padding = local.arg(2, "padding_idx", -1)
    assert isinstance(padding, int)
    inside = 0 <= padding - local.part.start < local.part.length
    row = padding - local.part.start if inside else -1
    table = local.given.args[0]
    found = local.emit("found", "aten.embedding.default", table, own, row, spec=spec)
    bools = dense((*index.shape, 1), "bool", grad=False)
    mask = local.emit("mask", "aten.unsqueeze.default", away, -1, spec=bools)
    part = local.emit("part", "aten.masked_fill.Scalar", found, mask, 0.0, spec=spec)
    local.total("", part)
    return local.made


def _cross_entropy(local: Local) -> list[Op]:
    """Add up over the own classes: the largest, the sum of powers, and the target's own.

    Source: Megatron-LM's vocabulary-parallel loss (Shoeybi et al., 2019, section 3).
    """
    if not local.summed:
        return plainly(local)
    logits, targets = local.given.args[:2]
    index = replace(local.spec(local.op.args[1]), requires_grad=False)
    wide = local.part.narrow(
        local.spec(local.op.args[0]), local.place_of_arg(0) or Place("", 1), local.forms.whole.batch
    )
    dtype = local.op.outputs[0].dtype
    logits = _typed(local, "logits", logits, wide, dtype)
    wide = replace(wide, dtype=dtype)
    rows = dense(index.shape, dtype, grad=wide.requires_grad)
    shifted = _shifted(local, logits, wide, rows)
    powers = local.emit("powers", "aten.exp.default", shifted, spec=wide)
    part = local.emit("part", "aten.sum.dim_IntList", powers, (1,), spec=rows)
    total = local.reduced("sum", part, rows)
    log = local.emit("log", "aten.log.default", total, spec=rows)
    ignored = local.arg(4, "ignore_index", -100)
    bools = replace(index, dtype="bool")
    left_out = local.emit("ignored", "aten.eq.Scalar", targets, ignored, spec=bools)
    picked = _picked(local, shifted, *_within(local, targets, index, left_out), rows, index)
    error = local.emit("error", "aten.sub.Tensor", log, picked, spec=rows)
    return _averaged_rows(local, error, left_out, rows, index)


def _shifted(local: Local, logits: Arg, wide: TensorSpec, rows: TensorSpec) -> Ref:
    """Subtract the largest of all classes."""
    flat = replace(wide, requires_grad=False)
    shape = (rows.shape[0], 1, *rows.shape[1:])
    single = dense(shape, rows.dtype, grad=False)
    plain = local.emit("plain", "aten.detach.default", logits, spec=flat)
    most = local.emit("most", "aten.amax.default", plain, (1,), True, spec=single)
    most = local.reduced("largest", most, single, "max")
    return local.emit("shifted", "aten.sub.Tensor", logits, most, spec=wide)


def _picked(
    local: Local, shifted: Ref, own: Ref, away: Ref, rows: TensorSpec, index: TensorSpec
) -> Ref:
    """Return the target's class of each row, whoever has it."""
    shape = (index.shape[0], 1, *index.shape[1:])
    column = dense(shape, index.dtype, grad=False)
    at = local.emit("column", "aten.unsqueeze.default", own, 1, spec=column)
    found = dense(shape, rows.dtype, grad=rows.requires_grad)
    one = local.emit("found", "aten.gather.default", shifted, 1, at, spec=found)
    flat = local.emit("flat", "aten.squeeze.dim", one, 1, spec=rows)
    part = local.emit("target", "aten.masked_fill.Scalar", flat, away, 0.0, spec=rows)
    return local.reduced("picked", part, rows)


def _averaged_rows(
    local: Local, error: Ref, left_out: Ref, rows: TensorSpec, index: TensorSpec
) -> list[Op]:
    reduction, spec = local.arg(3, "reduction", 1), local.op.outputs[0]
    bools = replace(index, dtype="bool")
    name = "" if reduction == 0 else "kept"
    kept = local.emit(name, "aten.masked_fill.Scalar", error, left_out, 0.0, spec=rows)
    if reduction == 0:
        return local.made
    total = local.emit("" if reduction == 2 else "total", "aten.sum.default", kept, spec=spec)
    if reduction == 2:
        return local.made
    counted = local.emit("counted", "aten.logical_not.default", left_out, spec=bools)
    number = dense((), index.dtype, grad=False)
    count = local.emit("count", "aten.sum.default", counted, spec=number)
    local.emit("", "aten.div.Tensor", total, count, spec=spec)
    return local.made


# ---------------------------------------------------------------- random numbers


def _draw(local: Local, shape: tuple[Arg, ...], spec: TensorSpec, p: Arg) -> Ref:
    """Drop out ones of the whole shape, as the op itself would have drawn.

    Numbers are drawn one by one as the input lies in memory.
    """
    order = lies(spec, local.forms.whole.batch)
    sizes = tuple(shape[dim] for dim in order)
    whole = dense([spec.shape[dim] for dim in order], spec.dtype, grad=False)
    kind, device = Const(f"torch.{spec.dtype}"), Const("device")
    ones = local.emit("ones", "aten.ones.default", sizes, spec=whole, dtype=kind, device=device)
    drawn = local.emit("drawn", "aten.dropout.default", ones, p, True, spec=whole)
    local.made[-1] = replace(local.made[-1], random=True)
    return drawn if sizes == shape else _turned_back(local, "laid", drawn, order, spec)


def _turned_back(
    local: Local, suffix: str, value: Ref, order: Sequence[int], spec: TensorSpec
) -> Ref:
    """Put dimensions that were put into an order back where they were."""
    back = tuple(order.index(dim) for dim in range(len(order)))
    return local.emit(suffix, "aten.permute.default", value, back, spec=spec)


def relaid(local: Local, value: Ref, spec: TensorSpec) -> Ref:
    """Let a whole value lie in memory as it does undivided: what draws goes by that."""
    order = lies(spec, local.forms.whole.batch)
    if order == tuple(range(len(order))):
        return local.emit("laid", "aten.contiguous.default", value, spec=spec)
    turned = dense([spec.shape[dim] for dim in order], spec.dtype, grad=spec.requires_grad)
    by_rows = local.emit("order", "aten.permute.default", value, order, spec=turned)
    laid = local.emit("rows", "aten.contiguous.default", by_rows, spec=turned)
    return _turned_back(local, "laid", laid, order, spec)


def _shape(local: Local, value: Arg, spec: TensorSpec, place: Place | None) -> tuple[Arg, ...]:
    """Return the sizes of the whole tensor, asking the rank's own for those of the batch."""
    return tuple(
        n if isinstance(n, int) else _asked(local, value, dim, place)
        for dim, n in enumerate(spec.shape)
    )


def _asked(local: Local, value: Arg, dim: int, place: Place | None) -> Ref:
    rows = local.emit("rows", "aten.sym_size.int", value, dim, spec=None)
    if place is None or place.dim != dim:
        return rows
    times = local.emit("times", "operator.mul", rows, local.part.axis.size, spec=None)
    return local.emit("all", "operator.floordiv", times, local.part.length, spec=None)


def _own(local: Local, value: Ref, spec: TensorSpec, place: Place) -> Ref:
    """Take the rank's part of what nobody needs a gradient of."""
    name = local.forms.name(f"{local.op.name}_own")
    own = local.part.narrow(spec, place, local.forms.whole.batch)
    args = (place.dim, place.inner, local.part.lengths)
    about = "split", name, value, own, local.op
    local.made.append(local.forms.exchange(*about, *args, whole=spec))
    return Ref(name)


def _dropout(local: Local) -> list[Op]:
    place, p = local.place(local.op.name), local.op.args[1]
    if place is None or not local.op.args[2] or p == 0:
        return plainly(local)
    whole = replace(local.op.outputs[0], requires_grad=False)
    value = local.given.args[0]
    drawn = _draw(local, _shape(local, value, whole, place), whole, p)
    whole = dense(whole.shape, whole.dtype, grad=False)
    mask = _own(local, drawn, whole, place)
    local.emit("", "aten.mul.Tensor", value, mask, spec=local.given.outputs[0])
    return local.made


def _attention(local: Local) -> list[Op]:
    """Attend with the own heads; with dropout, in single steps, since what it draws is whole."""
    p = local.arg(4, "dropout_p", 0.0)
    if not p:
        return plainly(local)
    q, k, v = local.given.args[:3]
    place = local.place_of_arg(0)
    scores = _scores(local, q, k)
    whole = replace(_scores_spec(local), requires_grad=False)
    drawn = _draw(local, _shape(local, q, whole, place), whole, p)
    if place is not None:
        drawn = _own(local, drawn, whole, place)
    spec = local.made[-1].outputs[0]
    spec = replace(spec, requires_grad=True)
    weights = local.emit("weights", "aten.softmax.int", scores, -1, spec=spec)
    kept = local.emit("kept", "aten.mul.Tensor", weights, drawn, spec=spec)
    local.emit("", "aten.matmul.default", kept, v, spec=local.given.outputs[0])
    return local.made


def _scores_spec(local: Local) -> TensorSpec:
    q, k = local.spec(local.op.args[0]), local.spec(local.op.args[1])
    return dense((*q.shape[:-1], k.shape[-2]), local.op.outputs[0].dtype, grad=True)


def _scores(local: Local, q: Arg, k: Arg) -> Ref:
    """Return the scaled products of queries and keys, with what is masked at minus infinity."""
    whole, place = _scores_spec(local), local.place_of_arg(0)
    spec = whole if place is None else local.part.narrow(whole, place, local.forms.whole.batch)
    given = local.spec(local.op.args[1])
    turned = TensorSpec(
        (*given.shape[:-2], given.shape[-1], given.shape[-2]),
        given.dtype,
        (*given.strides[:-2], given.strides[-1], given.strides[-2]),
        given.requires_grad,
    )
    if local.place_of_arg(1) is not None and place is not None:
        turned = local.part.narrow(turned, place, local.forms.whole.batch)
    width = given.shape[-1]
    scale = local.arg(6, "scale")
    if scale is None:
        assert isinstance(width, int)
        scale = width**-0.5
    keys = local.emit("keys", "aten.transpose.int", k, -2, -1, spec=turned)
    products = local.emit("products", "aten.matmul.default", q, keys, spec=spec)
    scores = local.emit("scores", "aten.mul.Tensor", products, scale, spec=spec)
    return _masked(local, scores, spec)


def _masked(local: Local, scores: Ref, spec: TensorSpec) -> Ref:
    mask, minus = local.arg(3, "attn_mask"), Const("-inf")
    if isinstance(mask, Ref | ParamRef):
        given = local.spec(local.op.args[3])
        if given.dtype != "bool":
            bias = _typed(local, "mask", local.arg(3, "attn_mask"), given, spec.dtype)
            return local.emit("biased", "aten.add.Tensor", scores, bias, spec=spec)
        hidden = local.emit("hidden", "aten.logical_not.default", mask, spec=given)
        return local.emit("seen", "aten.masked_fill.Scalar", scores, hidden, minus, spec=spec)
    if not local.arg(5, "is_causal", False):
        return scores
    square = dense(spec.shape[-2:], "bool", grad=False)
    kind, device = Const("torch.bool"), Const("device")
    ones = local.emit(
        "all", "aten.ones.default", square.shape, spec=square, dtype=kind, device=device
    )
    later = local.emit("later", "aten.triu.default", ones, 1, spec=square)
    return local.emit("seen", "aten.masked_fill.Scalar", scores, later, minus, spec=spec)


_CONVOLUTIONS = (
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
)

BIAS: Mapping[str, int] = {"linear": 2, "addmm": 0, "baddbmm": 0, **dict.fromkeys(_CONVOLUTIONS, 2)}
"""Which argument is added once, after the parts of a sum; no part reads it."""

LOCAL: Mapping[str, Form] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "unflatten", "expand", "broadcast_to"), sized
    ),
    "repeat_interleave": repeated,
    "repeat": tiled,
    **dict.fromkeys(("slice", "narrow"), sliced),
    **dict.fromkeys(("split", "split_with_sizes"), cut_up),
    "group_norm": grouped,
    "linear": _linear,
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    "mean": _averaged,
    **dict.fromkeys(POINTWISE.split(), _mean_loss),
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
}
