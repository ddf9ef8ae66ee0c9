"""Layers: convolutions, pools, norms, resizing, dropout, attention."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.onnx.nodes import Node, Result, operator
from bigbrain_fx.frontend.onnx.values import Value, number, numbers, sizes, tensor_of

_CONV: list[Any] = [None, F.conv1d, F.conv2d, F.conv3d]
_CONV_TRANSPOSE: list[Any] = [None, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]
_MAX_POOL: list[Any] = [None, F.max_pool1d, F.max_pool2d, F.max_pool3d]
_AVG_POOL: list[Any] = [None, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d]


def _ints(node: Node, name: str, default: list[int]) -> list[int]:
    return list(node.attribute(name, default))


def _pads(
    node: Node, a: Tensor, kernel: list[int], strides: list[int], dilations: list[int]
) -> list[int]:
    """Return the padding as ONNX writes it: all starts, then all ends."""
    rank, auto = len(kernel), node.attribute("auto_pad", "NOTSET")
    if auto in ("NOTSET", "VALID"):
        return _ints(node, "pads", [0] * 2 * rank) if auto == "NOTSET" else [0] * 2 * rank
    begins, ends = [], []
    for size, k, stride, dilation in zip(a.shape[2:], kernel, strides, dilations, strict=True):
        count = (size + stride - 1) // stride
        total = max((count - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        small = total // 2
        begins.append(total - small if auto == "SAME_LOWER" else small)
        ends.append(small if auto == "SAME_LOWER" else total - small)
    return begins + ends


def _padded(a: Tensor, pads: list[int], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Return the padding that a torch layer can do; pad asymmetric dimensions here."""
    rank = len(pads) // 2
    if pads[:rank] == pads[rank:]:
        return a, pads[:rank]
    return _pad_here(a, pads, value), [0] * rank


def _pad_here(a: Tensor, pads: list[int], value: float = 0.0) -> Tensor:
    rank = len(pads) // 2
    pairs = list(zip(pads[:rank], pads[rank:], strict=True))
    return F.pad(a, [p for pair in reversed(pairs) for p in pair], value=value)


@operator("Conv")
def _conv(node: Node, x: Value, weight: Value, bias: Value = None) -> Tensor:
    a, w = tensor_of(x), tensor_of(weight)
    rank = w.dim() - 2
    strides, dilations = _ints(node, "strides", [1] * rank), _ints(node, "dilations", [1] * rank)
    a, pads = _padded(a, _pads(node, a, list(w.shape[2:]), strides, dilations))
    b = None if bias is None else tensor_of(bias, a)
    found = _CONV[rank](a, w, b, strides, pads, dilations, node.attribute("group", 1))
    return cast("Tensor", found)


@operator("ConvTranspose")
def _conv_transpose(node: Node, x: Value, weight: Value, bias: Value = None) -> Tensor:
    a, w = tensor_of(x), tensor_of(weight)
    rank = w.dim() - 2
    strides, dilations = _ints(node, "strides", [1] * rank), _ints(node, "dilations", [1] * rank)
    extra = _ints(node, "output_padding", [0] * rank)
    pads = _transposed_pads(node, a, w, strides, dilations, extra)
    b = None if bias is None else tensor_of(bias, a)
    groups = node.attribute("group", 1)
    if pads[:rank] == pads[rank:]:
        call = _CONV_TRANSPOSE[rank]
        return cast("Tensor", call(a, w, b, strides, pads[:rank], extra, groups, dilations))
    found = _CONV_TRANSPOSE[rank](a, w, b, strides, 0, extra, groups, dilations)
    cut = [-p for pair in reversed(list(zip(pads[:rank], pads[rank:], strict=True))) for p in pair]
    return F.pad(found, cut)


def _transposed_pads(
    node: Node, a: Tensor, w: Tensor, strides: list[int], dilations: list[int], extra: list[int]
) -> list[int]:
    rank, auto = w.dim() - 2, node.attribute("auto_pad", "NOTSET")
    shape = node.optional("output_shape")
    if shape is None and auto in ("NOTSET", "VALID"):
        return _ints(node, "pads", [0] * 2 * rank)
    begins, ends = [], []
    for i in range(rank):
        size = a.shape[2 + i]
        full = strides[i] * (size - 1) + extra[i] + (w.shape[2 + i] - 1) * dilations[i] + 1
        asked = cast("list[int]", shape)[-rank + i] if shape is not None else size * strides[i]
        total = full - asked
        small = total // 2
        begins.append(small if auto == "SAME_UPPER" else total - small)
        ends.append(total - small if auto == "SAME_UPPER" else small)
    return begins + ends


@operator("MaxPool")
def _max_pool(node: Node, x: Value) -> Tensor:
    a, kernel = tensor_of(x), _ints(node, "kernel_shape", [])
    rank = len(kernel)
    strides, dilations = _ints(node, "strides", [1] * rank), _ints(node, "dilations", [1] * rank)
    low = -torch.inf if a.is_floating_point() else torch.iinfo(a.dtype).min
    a, pads = _padded(a, _pads(node, a, kernel, strides, dilations), low)
    if any(2 * pad > k for pad, k in zip(pads, kernel, strict=True)):
        a, pads = F.pad(a, [p for pad in reversed(pads) for p in (pad, pad)], value=low), [0] * rank
    if len(node.outputs) > 1:
        raise CaptureError(
            "MaxPool with indices has no counterpart here", code="BX2083", at=node.at
        )
    ceil = bool(node.attribute("ceil_mode", 0))
    return cast("Tensor", _MAX_POOL[rank](a, kernel, strides, pads, dilations, ceil))


@operator("AveragePool")
def _average_pool(node: Node, x: Value) -> Tensor:
    a, kernel = tensor_of(x), _ints(node, "kernel_shape", [])
    rank = len(kernel)
    strides, dilations = _ints(node, "strides", [1] * rank), _ints(node, "dilations", [1] * rank)
    if any(step != 1 for step in dilations):
        raise CaptureError(
            "AveragePool with dilations has no counterpart in torch", code="BX2084", at=node.at
        )
    given = _pads(node, a, kernel, strides, dilations)
    counted, ceil = (
        bool(node.attribute("count_include_pad", 0)),
        bool(node.attribute("ceil_mode", 0)),
    )
    if given[:rank] == given[rank:] and all(
        2 * p <= k for p, k in zip(given, kernel, strict=False)
    ):
        return cast("Tensor", _AVG_POOL[rank](a, kernel, strides, given[:rank], ceil, counted))
    none = [0] * rank
    total = _AVG_POOL[rank](_pad_here(a, given), kernel, strides, none, ceil, True)
    if counted:
        return cast("Tensor", total)
    ones = _pad_here(torch.ones_like(a), given)
    return cast("Tensor", total / _AVG_POOL[rank](ones, kernel, strides, none, ceil, True))


@operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: Node, x: Value) -> Tensor:
    a = tensor_of(x)
    dims = list(range(2, a.dim()))
    return a.mean(dims, keepdim=True) if "Average" in node.op else a.amax(dims, keepdim=True)


# --------------------------------------------------------------------------- norms


@operator("BatchNormalization")
def _batch_norm(node: Node, x: Value, *more: Value) -> Result:
    a = tensor_of(x)
    scale, bias, mean, variance = (tensor_of(value, a) for value in more)
    if node.attribute("training_mode", 0):
        raise CaptureError(
            "BatchNormalization in training mode returns its statistics instead of keeping them",
            code="BX2085",
            at=node.at,
            help="export the model in eval mode",
        )
    eps = node.attribute("epsilon", 1e-5)
    return F.batch_norm(a, mean, variance, scale, bias, False, 0.1, eps)


@operator("InstanceNormalization")
def _instance_norm(node: Node, x: Value, scale: Value, bias: Value) -> Tensor:
    a, eps = tensor_of(x), node.attribute("epsilon", 1e-5)
    return F.instance_norm(a, weight=tensor_of(scale), bias=tensor_of(bias), eps=eps)


@operator("LayerNormalization")
def _layer_norm(node: Node, x: Value, scale: Value, bias: Value = None) -> Result:
    a, weight = tensor_of(x), tensor_of(scale)
    axis, eps = node.attribute("axis", -1) % a.dim(), node.attribute("epsilon", 1e-5)
    shape = list(a.shape[axis:])
    b = None if bias is None else tensor_of(bias, a)
    if list(weight.shape) == shape:
        normed = F.layer_norm(a, shape, weight, b, eps)
    else:
        normed = F.layer_norm(a, shape, eps=eps) * weight
        normed = normed if b is None else normed + b
    if len(node.outputs) == 1:
        return normed
    dims = list(range(axis, a.dim()))
    mean = a.mean(dims, keepdim=True)
    return normed, mean, torch.rsqrt((a - mean).square().mean(dims, keepdim=True) + eps)


@operator("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(node: Node, x: Value, scale: Value) -> Tensor:
    a, weight = tensor_of(x), tensor_of(scale)
    axis, eps = node.attribute("axis", -1) % a.dim(), node.attribute("epsilon", 1e-5)
    normed = F.rms_norm(a, list(a.shape[axis:]), eps=eps)
    return normed * weight


@operator("GroupNormalization")
def _group_norm(node: Node, x: Value, scale: Value, bias: Value) -> Tensor:
    a, groups, eps = tensor_of(x), node.attribute("num_groups", 1), node.attribute("epsilon", 1e-5)
    weight, b = tensor_of(scale), tensor_of(bias)
    if weight.shape[0] == a.shape[1]:
        return F.group_norm(a, groups, weight, b, eps)
    each = a.shape[1] // groups  # before opset 21 there is one scale for each group
    return F.group_norm(a, groups, weight.repeat_interleave(each), b.repeat_interleave(each), eps)


@operator("MeanVarianceNormalization")
def _mean_variance(node: Node, x: Value) -> Tensor:
    a, dims = tensor_of(x), _ints(node, "axes", [0, 2, 3])
    mean = a.mean(dims, keepdim=True)
    deviation = ((a * a).mean(dims, keepdim=True) - mean * mean).sqrt()
    return (a - mean) / (deviation + 1e-9)


@operator("LRN")
def _lrn(node: Node, x: Value) -> Tensor:
    alpha, beta = node.attribute("alpha", 1e-4), node.attribute("beta", 0.75)
    return F.local_response_norm(
        tensor_of(x), node.attribute("size", 1), alpha, beta, node.attribute("bias", 1.0)
    )


@operator("Dropout")
def _dropout(node: Node, x: Value, ratio: Value = None, training: Value = None) -> Result:
    a = tensor_of(x)
    p = 0.5 if ratio is None else float(cast("float", number(ratio, node.at)))
    active = training is not None and bool(number(training, node.at))
    out = F.dropout(a, p, active) if active else a
    return (out, torch.ones_like(a, dtype=torch.bool)) if len(node.outputs) > 1 else out


# --------------------------------------------------------------------------- resizing

_RESIZE_MODES = {
    "nearest": {1: "nearest", 2: "nearest", 3: "nearest"},
    "linear": {1: "linear", 2: "bilinear", 3: "trilinear"},
    "cubic": {2: "bicubic"},
}


@operator("Resize", "Upsample")
def _resize(node: Node, x: Value, *more: Value) -> Tensor:
    a = tensor_of(x)
    node.read.update(("nearest_mode", "keep_aspect_ratio_policy"))  # nothing to most modes
    scales, shape = _resize_given(node, more)
    mode = _resize_mode(node, a.dim() - 2)
    options: dict[str, Any] = {}
    if mode == "nearest":
        mode = _nearest(node, _is_whole(a, scales, shape))
    else:
        options["align_corners"] = _align(node, bool(shape))
        if any(type(size) is int and size == 1 for size in shape[2:]):
            raise _cannot_resize(node, f"mode {mode} to one pixel")
    if mode == "bicubic" and node.attribute("cubic_coeff_a", -0.75) != -0.75:
        raise _cannot_resize(node, "cubic_coeff_a other than -0.75")
    if shape:
        return F.interpolate(a, size=tuple(shape[2:]), mode=mode, **options)
    return F.interpolate(a, scale_factor=tuple(scales[2:]), mode=mode, **options)


def _is_whole(a: Tensor, scales: list[float], shape: list[int]) -> bool:
    """Whether every size grows by an integer factor."""
    if shape:
        return all(new % old == 0 for new, old in zip(shape[2:], a.shape[2:], strict=True))
    return all(float(factor).is_integer() for factor in scales[2:])


def _nearest(node: Node, whole: bool) -> str:
    how = node.attribute("coordinate_transformation_mode", "half_pixel")
    rounding = node.attribute("nearest_mode", "round_prefer_floor")
    if node.op == "Upsample" or node.opset < 11 or (how, rounding) == ("asymmetric", "floor"):
        return "nearest"
    if how == "half_pixel" and rounding == "round_prefer_floor" and whole:
        return "nearest-exact"  # torch rounds ties up; a whole factor has none
    raise _cannot_resize(node, f"mode nearest with {how} and {rounding}")


def _align(node: Node, sized: bool) -> bool:
    """Return torch's align_corners for a mode that interpolates."""
    if node.op == "Upsample" or node.opset < 11:
        return False
    how = node.attribute("coordinate_transformation_mode", "half_pixel")
    if how in ("half_pixel", "pytorch_half_pixel"):
        return False
    if how == "align_corners" and sized:
        return True
    raise _cannot_resize(node, f"coordinates {how}")


def _cannot_resize(node: Node, what: str) -> CaptureError:
    return CaptureError(
        f"{node.op} with {what} has no counterpart in torch", code="BX2086", at=node.at
    )


def _resize_mode(node: Node, rank: int) -> str:
    mode = node.attribute("mode", "nearest")
    if node.attribute("antialias", 0) or node.optional("axes") is not None:
        raise _cannot_resize(node, "antialias or axes")
    known = _RESIZE_MODES.get(mode, {})
    if rank not in known:
        raise _cannot_resize(node, f"mode {mode} over {rank} axes")
    return known[rank]


def _resize_given(node: Node, more: tuple[Value, ...]) -> tuple[list[float], list[int]]:
    if node.op == "Upsample" or node.opset < 11:
        given = node.optional("scales")
        factors = cast("list[float]", given) if given is not None else numbers(more[0], node.at)
        return [float(f) for f in cast("list[float]", factors)], []
    scales = more[1] if len(more) > 1 else None
    shape = more[2] if len(more) > 2 else None
    if shape is not None and not (isinstance(shape, np.ndarray) and shape.size == 0):
        return [], sizes(shape, node.at)
    return [float(cast("float", f)) for f in numbers(scales, node.at)], []


@operator("GridSample")
def _grid_sample(node: Node, x: Value, grid: Value) -> Tensor:
    mode = node.attribute("mode", "bilinear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    padding, align = (
        node.attribute("padding_mode", "zeros"),
        bool(node.attribute("align_corners", 0)),
    )
    return F.grid_sample(tensor_of(x), tensor_of(grid), mode, padding, align)


# --------------------------------------------------------------------------- attention


@operator("Attention")
def _attention(
    node: Node, q: Value, k: Value, v: Value, mask: Value = None, *past: Value
) -> Tensor:
    """Scaled dot-product attention of opset 23, without cache, soft cap and further outputs."""
    if any(value is not None for value in past) or len(node.outputs) > 1:
        raise CaptureError(
            "Attention with a cache has no counterpart here", code="BX2087", at=node.at
        )
    if node.attribute("softcap", 0.0):
        raise CaptureError(
            "Attention with softcap has no counterpart here", code="BX2088", at=node.at
        )
    query, key, value = tensor_of(q), tensor_of(k), tensor_of(v)
    flat = query.dim() == 3
    if flat:
        heads, groups = node.attribute("q_num_heads", 1), node.attribute("kv_num_heads", 1)
        query = query.unflatten(-1, (heads, -1)).transpose(1, 2)
        key, value = (t.unflatten(-1, (groups, -1)).transpose(1, 2) for t in (key, value))
    scale = node.optional("scale")
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else tensor_of(mask),
        is_causal=bool(node.attribute("is_causal", 0)),
        scale=cast("float | None", scale),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).flatten(2) if flat else out
