"""Factors between timed kernels of a GPU and the roofline's forecasts, by family.

Families are products at one rate, convolutions at one, those of one channel a group, attention and
passes over memory. Attention has a family for each precision: its kernels in half precision say
nothing of those in float32. A timed kernel is forecast as an op of a model would be. The factor is
the middle of measured over forecast, drawn towards 1 as if one more kernel had been as forecast.
Single kernels are off by a fifth either way. The module knows one device at a time and no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import exp, log, prod
from statistics import median

from bigbrain_fx.core import (
    KERNEL,
    Device,
    Graph,
    Input,
    KernelShape,
    Op,
    Param,
    ParamRef,
    Ref,
    TensorSpec,
)

from .calls import GraphScope, PricedCall
from .cuda_clock import CudaClock
from .op_rules import OP_RULES

AS_FORECAST = 1
"""Kernels that count as forecast. Without it the mean over cards of 5 kernels is worse: 25.1 % of
linear layers, not 23.4 (`python -m tools.studies.published_gpus.kernels` has the rest)."""

Residuals = Mapping[str, float]
"""Measured over forecast, by `CudaClock.likeness`."""


def residual(device: Device, likeness: str) -> float:
    """Return by what a device's forecasts of a family are multiplied; 1 where nothing was timed."""
    return residuals_of(device).get(likeness, 1.0) if device.kernels else 1.0


@lru_cache(maxsize=256)
def residuals_of(device: Device) -> Residuals:
    """Return the factors of a device with timed kernels."""
    return fitted_residuals(((KERNEL[name], took_s) for name, took_s in device.kernels), device)


def fitted_residuals(timed: Iterable[tuple[KernelShape, float]], device: Device) -> Residuals:
    """Return the factor of each family that kernels were timed of."""
    found: dict[str, list[float]] = {}
    for kernel, took_s in timed:
        clock = clock_of(kernel, device)
        found.setdefault(clock.likeness, []).append(log(took_s / clock.forward_s()))
    return {
        likeness: exp(median(logs) * len(logs) / (len(logs) + AS_FORECAST))
        for likeness, logs in found.items()
    }


def clock_of(kernel: KernelShape, device: Device) -> CudaClock:
    """Return the forecast of a kernel as of an op of a model."""
    if kernel.precision == "tf32":
        device = replace(device, matmul_precision="high")
    call = call_of(kernel)
    name = call.op.target.split(".")[1]
    return CudaClock(call, OP_RULES[name], name, device)


@lru_cache(maxsize=1024)
def call_of(kernel: KernelShape) -> PricedCall:
    """Write a kernel as the one op of a graph."""
    read, weights, out, flops = _sides(kernel)
    dtype = "float16" if kernel.precision == "half" else "float32"
    last = kernel.family == "conv2d" and kernel.precision == "half"
    specs = [_spec(shape, dtype, last) for shape in read]
    params = [Param(f"w{i}", _spec(shape, dtype, last), f"w{i}") for i, shape in enumerate(weights)]
    result = _spec(out, dtype, last)
    moved = [*specs, *(param.spec for param in params)]
    inputs = [Input(f"x{i}", (f"x{i}",), spec) for i, spec in enumerate(specs)]
    op = Op(
        "kernel",
        f"aten.{_ATEN.get(kernel.family, kernel.family)}.default",
        (*(Ref(one.name) for one in inputs), *(ParamRef(one.name) for one in params)),
        outputs=(result,),
        flops=flops,
        reads_bytes=sum(spec.nbytes for spec in moved),
        writes_bytes=result.nbytes,
    )
    graph = Graph("kernel", (op,), tuple(inputs), tuple(params), ("kernel",), "kernel", batch=1)
    return PricedCall(op, GraphScope(graph))


_ATEN = {"attention": "scaled_dot_product_attention"}
_Shape = tuple[int, ...]


def _sides(kernel: KernelShape) -> tuple[Sequence[_Shape], Sequence[_Shape], _Shape, int]:
    """Return the shapes of what is read, of weights and of the result, and the flops."""
    match kernel.family, kernel.sizes:
        case "linear", (rows, inner, columns):
            return [(rows, inner)], [(columns, inner)], (rows, columns), 2 * prod(kernel.sizes)
        case "bmm", (batch, rows, inner, columns):
            factors = [(batch, rows, inner), (batch, inner, columns)]
            return factors, [], (batch, rows, columns), 2 * prod(kernel.sizes)
        case "conv2d", (batch, inside, side, out, window, groups):
            weight = (out, inside // groups, window, window)
            flops = 2 * batch * side * side * prod(weight)
            return [(batch, inside, side, side)], [weight], (batch, out, side, side), flops
        case "attention", (batch, heads, length, width):
            flops = 4 * batch * heads * length * length * width
            return [kernel.sizes] * 3, [], kernel.sizes, flops
        case "add", sizes:
            return [sizes, sizes], [], sizes, prod(sizes)
        case _, sizes:
            return [sizes], [], sizes, prod(sizes)


def _spec(shape: _Shape, dtype: str, channels_last: bool) -> TensorSpec:
    """Return a dense tensor's, its channels last where it is asked to be of four sides."""
    order = [0, 2, 3, 1] if channels_last and len(shape) == 4 else list(range(len(shape)))
    strides = [0] * len(shape)
    step = 1
    for side in reversed(order):
        strides[side] = step
        step *= shape[side]
    return TensorSpec(shape, dtype, tuple(strides))
