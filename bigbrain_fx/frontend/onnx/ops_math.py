"""Elementwise operators, matrix products and reductions, on tensors and on host arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bigbrain_fx.core import words
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.onnx.nodes import Node, Result, operator
from bigbrain_fx.frontend.onnx.values import Host, Number, Value, host, numbers, operands, tensor_of

# --------------------------------------------------------------------------- one operand

_TORCH = words(
    """
    Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsNaN Log Neg Reciprocal
    Round Sigmoid Sign Sin Sinh Sqrt Tan Tanh
    """
)
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name.lower()) for name in _TORCH},
    "BitwiseNot": torch.bitwise_not,
    "Det": torch.linalg.det,
    "HardSwish": F.hardswish,
    "Mish": F.mish,
    "Not": torch.logical_not,
    "Relu": F.relu,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
}

_ON_HOST: dict[str, Callable[[Any], Number]] = {
    "Abs": abs,
    "Ceil": math.ceil,
    "Floor": math.floor,
    "Neg": lambda v: -v,
    "Not": lambda v: not v,
    "Sqrt": math.sqrt,
}


@operator(*_UNARY)
def _unary(node: Node, x: Value) -> Value:
    if isinstance(x, np.ndarray) and node.op in _ON_HOST:
        return _each(_ON_HOST[node.op], x)
    return _UNARY[node.op](tensor_of(x))


def _each(function: Callable[[Any], Number], x: Host) -> Host:
    return host([function(value) for value in x.reshape(-1)]).reshape(x.shape)


@operator("Identity")
def _identity(_node: Node, x: Value) -> Value:
    return x


@operator("Elu", "Celu", "LeakyRelu", "ThresholdedRelu")
def _with_alpha(node: Node, x: Value) -> Tensor:
    a, default = tensor_of(x), 0.01 if node.op == "LeakyRelu" else 1.0
    alpha = node.attribute("alpha", default)
    match node.op:
        case "Elu":
            return F.elu(a, alpha)
        case "Celu":
            return F.celu(a, alpha)
        case "LeakyRelu":
            return F.leaky_relu(a, alpha)
    return F.threshold(a, alpha, 0.0)


@operator("HardSigmoid")
def _hard_sigmoid(node: Node, x: Value) -> Tensor:
    alpha, beta = node.attribute("alpha", 0.2), node.attribute("beta", 0.5)
    return (tensor_of(x) * alpha + beta).clamp(0.0, 1.0)


@operator("Selu")
def _selu(node: Node, x: Value) -> Tensor:
    alpha = node.attribute("alpha", 1.6732632423543772)
    gamma = node.attribute("gamma", 1.0507009873554805)
    return F.elu(tensor_of(x), alpha) * gamma


@operator("Gelu")
def _gelu(node: Node, x: Value) -> Tensor:
    return F.gelu(tensor_of(x), approximate=node.attribute("approximate", "none"))


@operator("Swish")
def _swish(node: Node, x: Value) -> Tensor:
    alpha, a = node.attribute("alpha", 1.0), tensor_of(x)
    return F.silu(a) if alpha == 1.0 else a * torch.sigmoid(a * alpha)


@operator("Shrink")
def _shrink(node: Node, x: Value) -> Tensor:
    bias, bound, a = node.attribute("bias", 0.0), node.attribute("lambd", 0.5), tensor_of(x)
    outside = torch.where(a < -bound, a + bias, torch.where(a > bound, a - bias, 0.0))
    return outside.to(a.dtype)


@operator("IsInf")
def _is_inf(node: Node, x: Value) -> Tensor:
    a = tensor_of(x)
    low, high = node.attribute("detect_negative", 1), node.attribute("detect_positive", 1)
    if low and high:
        return torch.isinf(a)
    if low:
        return torch.isneginf(a)
    return torch.isposinf(a) if high else torch.zeros_like(a, dtype=torch.bool)


@operator("Clip")
def _clip(node: Node, x: Value, low: Value = None, high: Value = None) -> Tensor:
    bounds = [node.optional("min"), node.optional("max")]  # attributes before opset 11
    for i, given in enumerate((low, high)):
        if given is not None:
            bounds[i] = numbers(given, node.at)[0] if isinstance(given, np.ndarray) else given
    a = tensor_of(x)
    if bounds == [None, None]:
        return a
    if isinstance(bounds[0], Tensor) or isinstance(bounds[1], Tensor):
        tensors = [None if b is None else torch.as_tensor(b, dtype=a.dtype) for b in bounds]
        return torch.clamp(a, tensors[0], tensors[1])
    return torch.clamp(a, cast("float | None", bounds[0]), cast("float | None", bounds[1]))


# --------------------------------------------------------------------------- two operands


def _div(a: Any, b: Any) -> Any:  # noqa: ANN401  # tensors and numbers alike
    whole = all(not t.is_floating_point() for t in (a, b) if isinstance(t, Tensor))
    return torch.div(a, b, rounding_mode="trunc") if whole else a / b


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b,
    "And": lambda a, b: a & b,
    "BitwiseAnd": lambda a, b: a & b,
    "BitwiseOr": lambda a, b: a | b,
    "BitwiseXor": lambda a, b: a ^ b,
    "Div": _div,
    "Equal": lambda a, b: a == b,
    "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b,
    "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
    "Mul": lambda a, b: a * b,
    "Or": lambda a, b: a | b,
    "Sub": lambda a, b: a - b,
    "Xor": lambda a, b: a ^ b,
}


def _host_div(a: Any, b: Any) -> Any:  # noqa: ANN401  # numbers and symbolic sizes alike
    return a / b if isinstance(a, float) or isinstance(b, float) else a // b


@operator(*_BINARY)
def _binary(node: Node, a: Value, b: Value) -> Value:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        function = _host_div if node.op == "Div" else _BINARY[node.op]
        return _pairwise(function, a, b)
    left, right = operands(a, b)
    return cast("Tensor", _BINARY[node.op](left, right))


def _pairwise(function: Callable[[Any, Any], Any], a: Host, b: Host) -> Host:
    left, right = np.broadcast_arrays(a, b)
    pairs = zip(left.reshape(-1), right.reshape(-1), strict=True)
    found = [function(x, y) for x, y in pairs]
    plain = [bool(v) if isinstance(v, torch.SymBool) else v for v in found]
    return host(plain).reshape(left.shape)


@operator("Mod")
def _mod(node: Node, a: Value, b: Value) -> Value:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _pairwise(lambda x, y: x % y, a, b)
    left, right = operands(a, b)
    of_c = bool(node.attribute("fmod", 0))
    return torch.fmod(left, right) if of_c else torch.remainder(left, right)


@operator("Pow")
def _pow(_node: Node, a: Value, b: Value) -> Value:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _pairwise(lambda x, y: x**y, a, b)
    left, right = operands(a, b)
    found = torch.pow(left, right)
    return found.to(left.dtype) if isinstance(left, Tensor) else found


@operator("BitShift")
def _shift(node: Node, a: Value, b: Value) -> Tensor:
    left, right = tensor_of(a), tensor_of(b)
    to_left = node.attribute("direction", "LEFT") == "LEFT"
    whole, by = left.to(torch.int64), right.to(torch.int64)
    return (whole << by if to_left else whole >> by).to(left.dtype)


@operator("PRelu")
def _prelu(_node: Node, x: Value, slope: Value) -> Tensor:
    a = tensor_of(x)
    return torch.where(a >= 0, a, a * tensor_of(slope, a))


@operator("Max", "Min", "Sum", "Mean")
def _variadic(node: Node, *values: Value) -> Value:
    known: dict[str, Callable[[Any, Any], Any]] = {"Max": max, "Min": min, "Sum": _BINARY["Add"]}
    pick = known.get(node.op)
    if pick and all(isinstance(value, np.ndarray) for value in values):
        return reduce(lambda a, b: _pairwise(pick, a, b), cast("list[Host]", list(values)))
    like = next((value for value in values if isinstance(value, Tensor)), None)
    tensors = [tensor_of(value, like) for value in values]
    join: Callable[[Tensor, Tensor], Tensor] = {"Max": torch.maximum, "Min": torch.minimum}.get(
        node.op, torch.add
    )
    total = reduce(join, tensors)
    return total / len(tensors) if node.op == "Mean" else total


@operator("Where")
def _where(_node: Node, condition: Value, a: Value, b: Value) -> Value:
    if all(isinstance(value, np.ndarray) for value in (condition, a, b)):
        parts = np.broadcast_arrays(*cast("list[Host]", [condition, a, b]))
        rows = zip(*(part.reshape(-1) for part in parts), strict=True)
        return host([x if c else y for c, x, y in rows]).reshape(parts[0].shape)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.size == b.size == 1:
        left, right = a.item(), b.item()  # no constants in the trace
    else:
        left, right = operands(a, b)
    return torch.where(tensor_of(condition), left, right)


# --------------------------------------------------------------------------- products


@operator("MatMul")
def _matmul(_node: Node, a: Value, b: Value) -> Tensor:
    return torch.matmul(tensor_of(a), tensor_of(b))


@operator("Gemm")
def _gemm(node: Node, a: Value, b: Value, c: Value = None) -> Tensor:
    left, right = tensor_of(a), tensor_of(b)
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    if node.attribute("transA", 0):
        left = left.t()
    is_linear = node.attribute("transB", 0) and alpha == 1.0 and beta == 1.0
    bias = None if c is None else tensor_of(c, left)
    if is_linear and (bias is None or bias.dim() == 1):
        return F.linear(left, right, bias)
    product = left @ (right.t() if node.attribute("transB", 0) else right)
    product = product if alpha == 1.0 else product * alpha
    if bias is None:
        return product
    return product + (bias if beta == 1.0 else bias * beta)


@operator("Einsum")
def _einsum(node: Node, *values: Value) -> Tensor:
    return torch.einsum(node.attribute("equation", ""), *[tensor_of(value) for value in values])


# --------------------------------------------------------------------------- reductions


def axes_of(node: Node, axes: Value, rank: int) -> list[int]:
    """Return the axes of an operator that takes them as an attribute or as an input."""
    given = node.optional("axes")
    found = cast("list[int]", given) if given is not None else None
    if axes is not None:
        found = [int(cast("int", entry)) for entry in numbers(axes, node.at)]
    return [axis % rank if rank else 0 for axis in (found or [])]


_REDUCE: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceL1": lambda x, dims, keep: x.abs().sum(dims, keepdim=keep),
    "ReduceL2": lambda x, dims, keep: x.square().sum(dims, keepdim=keep).sqrt(),
    "ReduceLogSum": lambda x, dims, keep: x.sum(dims, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, dims, keep: torch.logsumexp(x, dims, keepdim=keep),
    "ReduceMax": lambda x, dims, keep: torch.amax(x, dims, keepdim=keep),
    "ReduceMean": lambda x, dims, keep: x.mean(dims, keepdim=keep),
    "ReduceMin": lambda x, dims, keep: torch.amin(x, dims, keepdim=keep),
    "ReduceSum": lambda x, dims, keep: x.sum(dims, keepdim=keep),
    "ReduceSumSquare": lambda x, dims, keep: x.square().sum(dims, keepdim=keep),
}
_REDUCE_ON_HOST: dict[str, Callable[[list[Any]], Number]] = {
    "ReduceMax": max,
    "ReduceMin": min,
    "ReduceProd": math.prod,
    "ReduceSum": sum,
}


@operator(*_REDUCE, "ReduceProd")
def _reduce(node: Node, x: Value, axes: Value = None) -> Value:
    keep = bool(node.attribute("keepdims", 1))
    if isinstance(x, np.ndarray) and x.ndim <= 1 and node.op in _REDUCE_ON_HOST:
        return host([_REDUCE_ON_HOST[node.op](list(x.reshape(-1)))]).reshape((1,) if keep else ())
    a = tensor_of(x)
    dims = axes_of(node, axes, a.dim())
    if not dims:
        if node.attribute("noop_with_empty_axes", 0):
            return _REDUCE[node.op](a.unsqueeze(-1), [-1], False) if node.op in _REDUCE else a
        dims = list(range(a.dim()))
    if node.op == "ReduceProd":
        for dim in sorted(dims, reverse=True):
            a = a.prod(dim, keepdim=keep)
        return a
    return _REDUCE[node.op](a, dims, keep)


@operator("ArgMax", "ArgMin")
def _arg(node: Node, x: Value) -> Tensor:
    a, axis = tensor_of(x), node.attribute("axis", 0)
    if node.attribute("select_last_index", 0):
        raise CaptureError(
            f"{node.op} with select_last_index has no counterpart here", code="BX2082", at=node.at
        )
    find = torch.argmax if node.op == "ArgMax" else torch.argmin
    return find(a, axis, keepdim=bool(node.attribute("keepdims", 1)))


@operator("CumSum", "CumProd")
def _cumulative(node: Node, x: Value, axis: Value) -> Tensor:
    a, dim = tensor_of(x), int(cast("int", numbers(axis, node.at)[0]))
    backward = bool(node.attribute("reverse", 0))
    a = a.flip(dim) if backward else a
    found = a.cumsum(dim) if node.op == "CumSum" else a.cumprod(dim)
    if node.attribute("exclusive", 0):
        first = torch.full_like(a.narrow(dim, 0, 1), 0 if node.op == "CumSum" else 1)
        found = torch.cat([first, found.narrow(dim, 0, a.shape[dim] - 1)], dim)
    return (found.flip(dim) if backward else found).to(a.dtype)


@operator("Softmax", "LogSoftmax", "Hardmax")
def _softmax(node: Node, x: Value) -> Tensor:
    a = tensor_of(x)
    function = _SOFTMAX[node.op]
    if node.opset >= 13:
        return function(a, dim=node.attribute("axis", -1))
    axis = node.attribute("axis", 1) % a.dim()  # before 13 all axes from this one on are one
    return function(a.flatten(axis), dim=-1).reshape(a.shape)


def _hardmax(a: Tensor, dim: int) -> Tensor:
    return torch.zeros_like(a).scatter(dim, a.argmax(dim, keepdim=True), 1.0)


_SOFTMAX: dict[str, Callable[..., Tensor]] = {
    "Hardmax": _hardmax,
    "LogSoftmax": F.log_softmax,
    "Softmax": F.softmax,
}


@operator("TopK")
def _top_k(node: Node, x: Value, count: Value) -> Result:
    largest, ordered = node.attribute("largest", 1), node.attribute("sorted", 1)
    k = int(cast("int", numbers(count, node.at)[0]))
    axis = node.attribute("axis", -1)
    return tuple(torch.topk(tensor_of(x), k, axis, bool(largest), bool(ordered)))


@operator("LpNormalization")
def _lp_normalization(node: Node, x: Value) -> Tensor:
    a, p, axis = tensor_of(x), node.attribute("p", 2), node.attribute("axis", -1)
    return F.normalize(a, p, axis)
