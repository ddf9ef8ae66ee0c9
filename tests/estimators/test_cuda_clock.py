"""Seconds of kernels on a GPU, by its rates and beside timed ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import (
    BLAS_BYTES_FROM_HOPPER_ON,
    KERNELS,
    Cluster,
    Device,
    Link,
    Op,
    OpCost,
    Param,
    ParamRef,
    Ref,
    TensorSpec,
)
from estimators.analytical import Analytical
from estimators.calls import GraphScope, PricedCall
from estimators.compiled import Compiled
from estimators.cuda_residuals import AS_FORECAST, clock_of, fitted_residuals, residual
from estimators.cuda_rules import AUTOCAST_LAUNCHES, BACKWARD_LAUNCHES, FITTED, FORWARD_LAUNCHES
from estimators.matrices import MatrixShape, copied_numbers, matrix_shape
from tests.support.synthetic import cluster_of, graph_of, op, tensor, weight

GPU = Device(
    *("gpu", "h", "cuda", 1 << 30, 1e12, 1e12, 1e-5),
    half_flops_per_s=8e12,
    tf32_flops_per_s=4e12,
    units=1,
)
WIDE = tensor(1024, 1024)


def cost(
    last: Op,
    *before: Op,
    params: tuple[Param, ...] = (),
    device: Device = GPU,
    autocast: str | None = None,
    by: type[Analytical] | type[Compiled] = Analytical,
) -> OpCost:
    """Return the cost of the last op of a graph on a device."""
    graph = replace(graph_of((*before, last), params), autocast=autocast)
    found = by().estimate(graph, Cluster((device,), Link(0.0, 1e9)))
    return found.op_cost(last.name, device.name)


def product(out: TensorSpec, **more: object) -> tuple[Op, Op]:
    first = op("a", "aten.neg.default", out=WIDE)
    return first, op("v", "aten.linear.default", Ref("a"), ParamRef("w"), out=out, **more)


def convolution(out: TensorSpec, shape: tuple[int, ...], inside: int, **more: object) -> OpCost:
    first = op("a", "aten.neg.default", out=tensor(8, inside, 32, 32, dtype=out.dtype))
    args = Ref("a"), ParamRef("w")
    last = op("v", "aten.conv2d.default", *args, out=out, flops=10**11, **more)
    return cost(last, first, params=(Param("w", tensor(*shape, dtype=out.dtype), "w"),))


def test_a_process_starts_ops_while_its_gpu_works() -> None:
    small = op("v", "aten.relu.default", Ref("a"))
    found = cost(small, op("a", "aten.neg.default"))
    assert found.host_forward_s == pytest.approx(FORWARD_LAUNCHES * GPU.launch_s)
    assert 0.0 < found.forward_s < found.host_forward_s / 2
    assert found.host_backward_s == pytest.approx(BACKWARD_LAUNCHES * GPU.launch_s)
    cast = cost(small, op("a", "aten.neg.default"), autocast="float16")
    assert cast.host_forward_s == pytest.approx(AUTOCAST_LAUNCHES * found.host_forward_s)
    cpu = cost(small, op("a", "aten.neg.default"), device=replace(GPU, kind="cpu"))
    assert (cpu.host_forward_s, cpu.host_backward_s) == (0.0, 0.0)
    assert cpu.forward_s >= FORWARD_LAUNCHES * GPU.launch_s


def test_graphs_of_kernels_are_started_at_once() -> None:
    first, last = op("a", "aten.neg.default", out=WIDE), op("v", "aten.relu.default", Ref("a"))
    big = replace(last, outputs=(WIDE,), reads_bytes=WIDE.nbytes, writes_bytes=WIDE.nbytes)
    eager, fused = cost(big, first), cost(big, first, by=Compiled)
    assert (fused.host_forward_s, fused.host_backward_s) == (0.0, 0.0)
    assert fused.forward_s < eager.forward_s


def test_products_take_tf32_when_asked_and_convolutions_by_themselves() -> None:
    first, last = product(WIDE, flops=10**11)
    params = (weight("w", 1024, 1024),)
    plain = cost(last, first, params=params).forward_s
    asked = replace(GPU, matmul_precision="high")
    assert cost(last, first, params=params, device=asked).forward_s == pytest.approx(plain / 4)
    old = replace(asked, tf32_flops_per_s=None)
    assert cost(last, first, params=params, device=old).forward_s == pytest.approx(plain)


def test_a_type_that_a_card_lacks_has_the_float32_rate() -> None:
    half = tensor(1024, 1024, dtype="bfloat16")
    first, last = product(half, flops=10**11)
    first, params = replace(first, outputs=(half,)), (Param("w", half, "w"),)
    fast = cost(last, first, params=params).forward_s
    lacking = replace(GPU, lacks=("bfloat16",))
    assert cost(last, first, params=params, device=lacking).forward_s == pytest.approx(
        8 * fast, 1e-3
    )


def test_autocast_casts_what_it_reads_in_float32() -> None:
    half = tensor(1024, 1024, dtype="float16")
    first, last = product(half, flops=10**9)
    weights = (Param("w", half, "w"),)
    cast = cost(last, first, params=weights).forward_s
    plain = cost(last, replace(first, outputs=(half,)), params=weights).forward_s
    assert cast - plain == pytest.approx(6 * WIDE.numel / GPU.memory_bytes_per_s)


def test_a_causal_mask_halves_attention() -> None:
    shape = tensor(2, 4, 512, 64)
    qkv = [op(name, "aten.neg.default", out=shape) for name in "qkv"]
    target = "aten.scaled_dot_product_attention.default"
    args = Ref("q"), Ref("k"), Ref("v")
    full = op("o", target, *args, out=shape, flops=10**11)
    masked = op("o", target, *args, None, 0.0, True, out=shape, flops=10**11)
    named = replace(full, kwargs=(("is_causal", True),))
    whole = cost(full, *qkv).forward_s
    assert cost(masked, *qkv).forward_s == pytest.approx(whole / 2)
    assert cost(named, *qkv).forward_s == pytest.approx(whole / 2)


def test_a_depthwise_convolution_is_no_product() -> None:
    out = tensor(8, 64, 32, 32, dtype="float16")
    dense = convolution(out, (64, 64, 3, 3), 64)
    grouped = convolution(out, (64, 4, 3, 3), 64)
    depthwise = convolution(out, (64, 1, 3, 3), 64)
    assert dense.forward_s < grouped.forward_s < depthwise.forward_s


def test_half_precision_is_turned_to_channels_last() -> None:
    plain = replace(tensor(8, 64, 32, 32, dtype="float16"), strides=(65536, 1024, 32, 1))
    last = replace(plain, strides=(65536, 1, 2048, 64))
    moved = {"reads_bytes": 10**9, "writes_bytes": 10**9}
    turned = convolution(plain, (64, 64, 3, 3), 64, **moved)
    assert convolution(last, (64, 64, 3, 3), 64, **moved).forward_s < turned.forward_s


def test_fewer_flops_are_needed_for_a_3x3_in_float32() -> None:
    old = replace(GPU, tf32_flops_per_s=None)
    first = op("a", "aten.neg.default", out=tensor(8, 64, 32, 32))

    def taken_s(window: int, *more: object) -> float:
        out = tensor(8, 64, 32, 32)
        args = (Ref("a"), ParamRef("w"), *more)
        last = op("v", "aten.conv2d.default", *args, out=out, flops=10**11)  # type: ignore[arg-type]
        params = (weight("w", 64, 64, window, window),)
        return cost(last, first, params=params, device=old).forward_s

    assert taken_s(3) < taken_s(5)
    assert taken_s(3) < taken_s(3, None, (2, 2))


def test_half_precision_products_are_slower_where_tensor_cores_read_no_whole_words() -> None:
    def of(columns: int, dtype: str = "float16") -> float:
        out = tensor(1024, columns, dtype=dtype)
        first, last = product(out, flops=2 * 1024 * 1024 * columns * 1000)
        params = (Param("w", tensor(columns, 1024, dtype=dtype), "w"),)
        return cost(replace(last, outputs=(out,)), first, params=params).forward_s / columns

    assert 3 < of(50257) / of(50304) < 3.5  # GPT-2's vocabulary, and what it is padded to
    assert of(50300) / of(50304) == pytest.approx(2.0, 0.01)
    assert of(50257, "float32") / of(50304, "float32") == pytest.approx(1.0, 0.01)


def test_kernels_of_attention_are_amperes_on_later_cards() -> None:
    q = tensor(1, 1, 64, 64, dtype="float16")
    first = op("a", "aten.neg.default", out=q)
    args = Ref("a"), Ref("a"), Ref("a")
    last = op("v", "aten.scaled_dot_product_attention.default", *args, out=q, flops=10**12)
    later = replace(GPU, blas_bytes=BLAS_BYTES_FROM_HOPPER_ON)
    slower = cost(last, first, device=later).forward_s / cost(last, first).forward_s
    assert slower == pytest.approx(1 / FITTED.attention_from_hopper_on, 0.01)


def test_wide_groups_are_slow_backward_in_channels_last() -> None:
    def backward_s(inside: int, *, last: bool) -> float:
        out = tensor(8, 128, 32, 32, dtype="float16")
        strides = (128 * 1024, 1, 128 * 32, 128) if last else (128 * 1024, 1024, 32, 1)
        spec, shape = replace(out, strides=strides), (128, inside, 3, 3)
        return convolution(spec, shape, 128).backward_s

    wide, narrow = (backward_s(n, last=True) / backward_s(n, last=False) for n in (64, 32))
    assert wide > 3 * narrow


def test_tiles_cover_more_than_a_small_product() -> None:
    window = MatrixShape(49, 32, 49, 1)
    assert window.covered(backward=False) == pytest.approx((128 / 49) ** 2)
    assert MatrixShape(4096, 1024, 1024, 8).covered(backward=True) == 1.0


def call_of(first: TensorSpec, target: str, out: TensorSpec, flops: int = 0) -> PricedCall:
    before = op("a", "aten.neg.default", out=first)
    last = op("v", target, Ref("a"), Ref("a"), out=out, flops=flops)
    return PricedCall(last, GraphScope(graph_of((before, last))))


def test_rows_of_a_linear_layer_are_all_leading_sides() -> None:
    out = tensor(4, 6, 100)
    call = call_of(tensor(4, 6, 24), "aten.linear.default", out, flops=2 * 4 * 6 * 24 * 100)
    assert matrix_shape(call, "linear") == MatrixShape(24, 24, 100, 4)
    assert matrix_shape(call, "matmul") == MatrixShape(6, 24, 100, 4)


def test_operands_of_another_layout_are_copied() -> None:
    """Heads that were split off a width and turned to the front; a tensor that was turned."""
    batch, length, heads, wide = 2, 16, 4, 8
    split = tensor(batch, heads, length, wide)
    split = replace(split, strides=(heads * length * wide, length * wide, wide, 1))
    turned = replace(split, strides=(length * heads * wide, wide, heads * wide, 1))
    assert copied_numbers(call_of(split, "aten.matmul.default", split), "matmul") == 0
    assert copied_numbers(call_of(turned, "aten.matmul.default", split), "matmul") > 0
    plain = replace(tensor(2, 16, 8), strides=(128, 8, 1))
    back = replace(plain, strides=(128, 1, 16))
    assert copied_numbers(call_of(plain, "aten.linear.default", plain), "linear") == 0
    assert copied_numbers(call_of(back, "aten.linear.default", plain), "linear") > 0
    assert copied_numbers(call_of(back, "aten.bmm.default", plain), "bmm") == 0


# --------------------------------------------------------------------------- timed kernels


CARD = Device(
    *("gpu", "h", "cuda", 1 << 34, 1e13, 1e12, 1e-5),
    half_flops_per_s=8e13,
    tf32_flops_per_s=4e13,
    units=80,
)


def slowed(factors: dict[str, float]) -> Device:
    """Return the CARD with kernels that took their forecasts, times a factor by family."""
    clocks = {kernel.name: clock_of(kernel, CARD) for kernel in KERNELS}
    timed = [(n, c.forward_s() * factors.get(c.likeness, 1.0)) for n, c in clocks.items()]
    return replace(CARD, kernels=tuple(timed))


def test_every_kernel_is_forecast_as_an_op_of_its_family() -> None:
    found = {clock_of(kernel, CARD).likeness for kernel in KERNELS}
    assert found == {
        *("product fp32", "product tf32", "product half", "convolution tf32"),
        *("convolution half", "depthwise half", "attention half", "pass"),
    }
    old = replace(CARD, tf32_flops_per_s=None)
    conv = next(kernel for kernel in KERNELS if kernel.family == "conv2d")
    assert clock_of(conv, old).likeness == "convolution fp32"


def test_a_factor_is_found_again_and_is_of_its_family_alone() -> None:
    device = slowed({"product half": 1.5, "pass": 0.8})
    four, three = 4 / (4 + AS_FORECAST), 3 / (3 + AS_FORECAST)
    assert residual(device, "product half") == pytest.approx(1.5**four)
    assert residual(device, "pass") == pytest.approx(0.8**three)
    assert residual(device, "attention half") == pytest.approx(1.0)
    assert residual(device, "unheard") == 1.0
    assert residual(CARD, "product half") == 1.0
    three_s = [(kernel, clock_of(kernel, CARD).forward_s()) for kernel in KERNELS[:3]]
    timed = [(kernel, by * s) for (kernel, s), by in zip(three_s, (9.0, 2.0, 1.0), strict=True)]
    assert fitted_residuals(timed, CARD) == {"product fp32": pytest.approx(2.0**three)}


@pytest.mark.parametrize(("dtype", "factor"), [("float16", 0.5**0.5), ("float32", 1.0)])
def test_attention_in_half_says_nothing_of_attention_in_float32(dtype: str, factor: float) -> None:
    device = slowed({"attention half": 0.5})
    wide = tensor(16, 16, 1024, 64, dtype=dtype)
    names = ("q", "k", "v")
    first = [op(name, "aten.neg.default", out=wide) for name in names]
    sdpa = "aten.scaled_dot_product_attention.default"
    last = op("s", sdpa, *map(Ref, names), out=wide, flops=10**12)
    graph = graph_of((*first, last), ())
    took = [
        Analytical().estimate(graph, cluster_of(one)).op_cost("s", one.name)
        for one in (device, CARD)
    ]
    assert took[0].forward_s / took[1].forward_s == pytest.approx(factor)
    assert took[0].backward_s / took[1].backward_s == pytest.approx(factor)


def test_ops_of_a_model_are_corrected_forward_and_backward() -> None:
    wide = tensor(1024, 1024)
    params = (weight("w", 1024, 1024),)
    first = op("a", "aten.neg.default", out=wide)
    last = op("v", "aten.linear.default", Ref("a"), ParamRef("w"), out=wide, flops=2 * 1024**3)
    graph = graph_of((first, last), params)

    def cost(device: Device, name: str) -> tuple[float, float, float]:
        found = Analytical().estimate(graph, Cluster((device,), Link(0.0, 1e9)))
        own = found.op_cost(name, "gpu")
        return own.forward_s, own.backward_s, own.host_forward_s

    plain, slow = cost(CARD, "v"), cost(slowed({"product fp32": 2.0}), "v")
    factor = residual(slowed({"product fp32": 2.0}), "product fp32")
    assert 1.5 < factor < 2.0
    assert slow[:2] == pytest.approx((factor * plain[0], factor * plain[1]))
    assert slow[2] == plain[2]  # its process is no slower
    assert cost(slowed({"product fp32": 2.0}), "a") == pytest.approx(cost(CARD, "a"))
