"""Operators that move data: shapes, slices, gathers, casts; on tensors and on host arrays."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.onnx.nodes import Node, Result, operator
from bigbrain_fx.frontend.onnx.ops_math import axes_of
from bigbrain_fx.frontend.onnx.values import (
    HOST_LIMIT,
    Host,
    Number,
    Value,
    host,
    number,
    numbers,
    sizes,
    tensor_of,
    torch_dtype,
)


@operator("Shape")
def _shape(node: Node, x: Value) -> Host:
    shape = list(x.shape) if isinstance(x, np.ndarray) else list(tensor_of(x).shape)
    end = node.optional("end")
    return host(shape[node.attribute("start", 0) : cast("int | None", end)])


@operator("Size")
def _size(_node: Node, x: Value) -> Host:
    return host(x.size if isinstance(x, np.ndarray) else tensor_of(x).numel())


@operator("Reshape")
def _reshape(node: Node, x: Value, shape: Value) -> Value:
    wanted = sizes(shape, node.at)
    given: tuple[int, ...] = tuple(x.shape) if x is not None else ()
    if not node.attribute("allowzero", 0):
        wanted = [given[i] if _is(size, 0) else size for i, size in enumerate(wanted)]
    if isinstance(x, np.ndarray):
        return x.reshape([int(size) for size in wanted])
    return tensor_of(x).reshape(wanted)


def _is(size: object, value: int) -> bool:
    """Whether a size is this number; a symbolic one is not, and asking it would fix the batch."""
    return isinstance(size, int) and size == value


@operator("Flatten")
def _flatten(node: Node, x: Value) -> Tensor:
    a, axis = tensor_of(x), node.attribute("axis", 1)
    axis = axis + a.dim() if axis < 0 else axis
    if axis == 0:
        return a.reshape(1, -1)
    if axis == a.dim():
        return a.reshape(-1, 1)
    rows = a.flatten(0, axis - 1) if axis > 1 else a
    return rows.flatten(1)


@operator("Transpose")
def _transpose(node: Node, x: Value) -> Value:
    order = node.optional("perm")
    if isinstance(x, np.ndarray):
        return x.transpose(cast("list[int] | None", order))
    a = tensor_of(x)
    return a.permute(cast("list[int]", order or list(range(a.dim()))[::-1]))


@operator("Squeeze")
def _squeeze(node: Node, x: Value, axes: Value = None) -> Value:
    rank = x.ndim if x is not None else 0
    dims = axes_of(node, axes, rank)
    if isinstance(x, np.ndarray):
        return x.squeeze(tuple(dims)) if dims else x.squeeze()
    a = tensor_of(x)
    return a.squeeze(dims) if dims else a.squeeze()


@operator("Unsqueeze")
def _unsqueeze(node: Node, x: Value, axes: Value = None) -> Value:
    count = len(cast("list[int]", node.optional("axes") or [])) or len(numbers(axes, node.at))
    rank = (x.ndim if x is not None else 0) + count
    dims = sorted(axes_of(node, axes, rank))
    if isinstance(x, np.ndarray):
        return np.expand_dims(x, tuple(dims))
    a = tensor_of(x)
    for dim in dims:
        a = a.unsqueeze(dim)
    return a


@operator("Concat")
def _concat(node: Node, *values: Value) -> Value:
    axis = node.attribute("axis", 0)
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate(cast("list[Host]", list(values)), axis=axis)
    like = next(value for value in values if isinstance(value, Tensor))
    return torch.cat([tensor_of(value, dtype=like.dtype) for value in values], axis)


@operator("Split")
def _split(node: Node, x: Value, lengths: Value = None) -> Result:
    axis, given = node.attribute("axis", 0), node.optional("split")
    parts = cast("list[int] | None", given)
    if lengths is not None:
        parts = sizes(lengths, node.at)
    if isinstance(x, np.ndarray):
        bounds = np.cumsum(parts or [x.shape[axis] // len(node.outputs)] * len(node.outputs))
        return tuple(np.split(x, bounds[:-1].astype(int), axis))
    a = tensor_of(x)
    if parts is not None:
        return tuple(torch.split(a, parts, axis))
    count = len(node.outputs)
    chunk = (a.shape[axis] + count - 1) // count
    return tuple(torch.split(a, chunk, axis))


@operator("Slice")
def _slice(node: Node, x: Value, *bounds: Value) -> Value:
    starts, ends, axes, steps = _slice_bounds(node, bounds)
    if isinstance(x, np.ndarray):
        return x[_slices(x.ndim, starts, ends, axes, steps)]
    a = tensor_of(x)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step > 0:
            key: list[slice] = [slice(None)] * (axis % a.dim())
            a = a[(*key, slice(start, end, step))]
        else:
            a = _backwards(a, start, end, axis % a.dim(), step)
    return a


def _slice_bounds(node: Node, bounds: tuple[Value, ...]) -> tuple[list[int], ...]:
    if node.opset < 10:
        starts = node.attribute("starts", cast("list[int]", []))
        ends, axes = node.attribute("ends", starts), node.optional("axes")
        return starts, ends, cast("list[int]", axes or list(range(len(starts)))), [1] * len(starts)
    starts, ends = sizes(bounds[0], node.at), sizes(bounds[1], node.at)
    given = bounds[2] if len(bounds) > 2 else None
    axes = list(range(len(starts))) if given is None else sizes(given, node.at)
    step = bounds[3] if len(bounds) > 3 else None
    return starts, ends, axes, [1] * len(starts) if step is None else sizes(step, node.at)


def _slices(
    rank: int, starts: list[int], ends: list[int], axes: list[int], steps: list[int]
) -> tuple[slice, ...]:
    found = [slice(None)] * rank
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        stop = None if step < 0 and end < -HOST_LIMIT else end
        found[axis] = slice(start, stop, step)
    return tuple(found)


def _backwards(a: Tensor, start: int, end: int, axis: int, step: int) -> Tensor:
    """Slice with a negative step, which torch does not have: flip, then slice."""
    last = a.shape[axis] - 1
    first = min(start if start >= 0 else start + a.shape[axis], last)
    stop = max(end if end >= 0 else end + a.shape[axis], -1)
    key: list[slice] = [slice(None)] * axis
    return a.flip(axis)[(*key, slice(last - first, last - stop, -step))]


@operator("Expand")
def _expand(node: Node, x: Value, shape: Value) -> Tensor:
    a, wanted = tensor_of(x), sizes(shape, node.at)
    rank = max(a.dim(), len(wanted))
    own = [1] * (rank - a.dim()) + list(a.shape)
    asked = [1] * (rank - len(wanted)) + wanted
    both = zip(asked, own, strict=True)
    return a.expand([have if _is(want, 1) else want for want, have in both])


@operator("Tile")
def _tile(node: Node, x: Value, repeats: Value) -> Value:
    times = sizes(repeats, node.at)
    if isinstance(x, np.ndarray):
        return np.tile(x, times)
    return tensor_of(x).repeat(times)


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Pad")
def _pad(node: Node, x: Value, *more: Value) -> Tensor:
    a = tensor_of(x)
    pads, value, axes = _pad_given(node, more, a.dim())
    mode = _PAD_MODES[node.attribute("mode", "constant")]
    flat = [0] * (2 * a.dim())
    for i, axis in enumerate(axes):
        place = 2 * (a.dim() - 1 - axis % a.dim())
        flat[place], flat[place + 1] = pads[i], pads[i + len(axes)]
    while len(flat) > 2 and _is(flat[-1], 0) and _is(flat[-2], 0):
        flat = flat[:-2]
    if mode == "constant":
        return F.pad(a, flat, value=value)
    lead = a.dim() - max(len(flat) // 2 + 1, 2)  # torch wants one or two axes ahead of the padded
    a = a.reshape(-1, *a.shape[lead + 1 :]) if lead > 0 else a
    found = F.pad(a if a.dim() > len(flat) // 2 else a.unsqueeze(0), flat, mode=mode)
    return found.reshape(
        *tensor_of(x).shape[: tensor_of(x).dim() - len(flat) // 2],
        *found.shape[-(len(flat) // 2) :],
    )


def _pad_given(node: Node, more: tuple[Value, ...], rank: int) -> tuple[list[int], Any, list[int]]:
    if node.opset < 11:
        return (
            node.attribute("pads", cast("list[int]", [])),
            node.attribute("value", 0.0),
            list(range(rank)),
        )
    value = more[1] if len(more) > 1 else None
    axes = more[2] if len(more) > 2 else None
    filled = 0.0 if value is None else number(value, node.at)
    return (
        sizes(more[0], node.at),
        filled,
        list(range(rank)) if axes is None else sizes(axes, node.at),
    )


# --------------------------------------------------------------------------- gathers and scatters


@operator("Gather")
def _gather(node: Node, x: Value, index: Value) -> Value:
    axis = node.attribute("axis", 0)
    if isinstance(x, np.ndarray) and isinstance(index, np.ndarray):
        return host(np.take(x, index.astype(int), axis=axis))
    a = tensor_of(x)
    axis = axis % a.dim()
    if isinstance(index, np.ndarray) and index.ndim == 0:
        return a.select(axis, cast("int", number(index, node.at)))
    where = tensor_of(index, a, torch.int64)
    if axis == 0 and a.dim() == 2 and a.is_floating_point():
        return F.embedding(where, a)
    shape = [*a.shape[:axis], *where.shape, *a.shape[axis + 1 :]]
    return torch.index_select(a, axis, where.reshape(-1)).reshape(shape)


@operator("GatherElements")
def _gather_elements(node: Node, x: Value, index: Value) -> Tensor:
    a, where = tensor_of(x), tensor_of(index)
    axis = node.attribute("axis", 0) % a.dim()
    return torch.gather(a, axis, _not_negative(where, a.shape[axis]))


def _not_negative(index: Tensor, size: int) -> Tensor:
    whole = index.to(torch.int64)
    return torch.where(whole < 0, whole + size, whole)


@operator("GatherND")
def _gather_nd(node: Node, x: Value, index: Value) -> Tensor:
    a, where = tensor_of(x), tensor_of(index).to(torch.int64)
    batched = node.attribute("batch_dims", 0)
    lead: list[Tensor] = []
    for dim in range(batched):
        shape = [1] * (where.dim() - 1)
        shape[dim] = -1
        lead.append(torch.arange(a.shape[dim], device=a.device).reshape(shape))
    return a[(*lead, *where.unbind(-1))]


@operator("ScatterElements", "Scatter")
def _scatter_elements(node: Node, x: Value, index: Value, updates: Value) -> Tensor:
    a, axis = tensor_of(x), node.attribute("axis", 0)
    where = _not_negative(tensor_of(index), a.shape[axis])
    new = tensor_of(updates, a, a.dtype)
    kind = node.attribute("reduction", "none")
    if kind == "none":
        return torch.scatter(a, axis, where, new)
    return torch.scatter_reduce(a, axis, where, new, _REDUCTIONS[kind], include_self=True)


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterND")
def _scatter_nd(node: Node, x: Value, index: Value, updates: Value) -> Tensor:
    a, where = tensor_of(x), tensor_of(index).to(torch.int64)
    kind = node.attribute("reduction", "none")
    if kind not in ("none", "add"):
        raise CaptureError(
            f"ScatterND with reduction {kind} has no counterpart here", code="BX2090", at=node.at
        )
    return a.index_put(where.unbind(-1), tensor_of(updates, a, a.dtype), accumulate=kind == "add")


@operator("OneHot")
def _one_hot(node: Node, index: Value, depth: Value, values: Value) -> Tensor:
    where, count = tensor_of(index).to(torch.int64), int(cast("int", number(depth, node.at)))
    axis = node.attribute("axis", -1) % (where.dim() + 1)
    hot = torch.arange(count, device=where.device) == _not_negative(where, count).unsqueeze(-1)
    off, on = tensor_of(values).unbind(0)
    return torch.where(hot, on, off).movedim(-1, axis)


# --------------------------------------------------------------------------- makers and casts


@operator("Cast")
def _cast(node: Node, x: Value) -> Value:
    kind = torch_dtype(node.attribute("to", 1), node.at)
    if isinstance(x, np.ndarray) and x.size <= HOST_LIMIT:
        return host([_cast_number(value, kind) for value in x.reshape(-1)]).reshape(x.shape)
    return tensor_of(x).to(kind)


def _cast_number(value: Any, kind: torch.dtype) -> Number:  # noqa: ANN401  # any number
    if isinstance(value, torch.SymInt) and not kind.is_floating_point:
        return value
    if kind == torch.bool:
        return bool(value)
    return float(value) if kind.is_floating_point else int(value)


@operator("CastLike")
def _cast_like(_node: Node, x: Value, like: Value) -> Tensor:
    return tensor_of(x).to(tensor_of(like).dtype)


@operator("ConstantOfShape")
def _constant_of_shape(node: Node, shape: Value) -> Value:
    wanted, given = sizes(shape, node.at), node.optional("value")
    fill, kind = (0.0, torch.float32)
    if given is not None:
        import onnx.numpy_helper

        proto = cast("Any", given)
        fill = onnx.numpy_helper.to_array(proto).reshape(-1)[0].item()
        kind = torch_dtype(proto.data_type, node.at)
    plain = all(isinstance(size, int) for size in wanted)
    if plain and len(wanted) == 1 and wanted[0] <= HOST_LIMIT and not kind.is_floating_point:
        return host([fill] * wanted[0])
    return torch.full(wanted, fill, dtype=kind)


@operator("Range")
def _range(node: Node, start: Value, limit: Value, delta: Value) -> Tensor:
    first, last, step = (cast("int", number(value, node.at)) for value in (start, limit, delta))
    kind = torch.float32 if any(isinstance(v, float) for v in (first, last, step)) else torch.int64
    return torch.arange(first, last, step, dtype=kind)


@operator("EyeLike")
def _eye_like(node: Node, x: Value) -> Tensor:
    a, code = tensor_of(x), node.optional("dtype")
    kind = a.dtype if code is None else torch_dtype(cast("int", code), node.at)
    ones = torch.ones_like(a, dtype=kind)
    offset = node.attribute("k", 0)
    return ones.triu(offset).tril(offset)


@operator("Trilu")
def _trilu(node: Node, x: Value, offset: Value = None) -> Tensor:
    k = 0 if offset is None else int(cast("int", number(offset, node.at)))
    return (
        torch.triu(tensor_of(x), k) if node.attribute("upper", 1) else torch.tril(tensor_of(x), k)
    )


@operator("DepthToSpace")
def _depth_to_space(node: Node, x: Value) -> Tensor:
    a, block = tensor_of(x), node.attribute("blocksize", 1)
    if node.attribute("mode", "DCR") == "CRD":
        return F.pixel_shuffle(a, block)
    rows, channels, height, width = a.shape
    cut = a.reshape(rows, block, block, channels // block**2, height, width)
    return cut.permute(0, 3, 4, 1, 5, 2).reshape(rows, -1, height * block, width * block)


@operator("SpaceToDepth")
def _space_to_depth(node: Node, x: Value) -> Tensor:
    a, block = tensor_of(x), node.attribute("blocksize", 1)
    if node.attribute("mode", "DCR") == "CRD":
        return F.pixel_unshuffle(a, block)
    rows, channels, height, width = a.shape
    cut = a.reshape(rows, channels, height // block, block, width // block, block)
    return cut.permute(0, 3, 5, 1, 2, 4).reshape(rows, -1, height // block, width // block)
