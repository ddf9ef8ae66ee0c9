"""What timed kernels say of a GPU's forecasts; the timer is a stand-in: seconds are given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import KERNELS, Cluster, Device, Link, ParamRef, Ref
from estimators.analytical import Analytical
from estimators.cuda_residuals import AS_FORECAST, clock_of, fitted_residuals, residual
from tests.support.synthetic import cluster_of, graph_of, op, tensor, weight

GPU = Device(
    *("gpu", "h", "cuda", 1 << 34, 1e13, 1e12, 1e-5),
    half_flops_per_s=8e13,
    tf32_flops_per_s=4e13,
    units=80,
)


def slowed(factors: dict[str, float]) -> Device:
    """Return the GPU with kernels that took their forecasts, times a factor by family."""
    clocks = {kernel.name: clock_of(kernel, GPU) for kernel in KERNELS}
    timed = [(n, c.forward_s() * factors.get(c.likeness, 1.0)) for n, c in clocks.items()]
    return replace(GPU, kernels=tuple(timed))


def test_every_kernel_is_forecast_as_an_op_of_its_family() -> None:
    found = {clock_of(kernel, GPU).likeness for kernel in KERNELS}
    assert found == {
        *("product fp32", "product tf32", "product half", "convolution tf32"),
        *("convolution half", "depthwise half", "attention half", "pass"),
    }
    old = replace(GPU, tf32_flops_per_s=None)
    conv = next(kernel for kernel in KERNELS if kernel.family == "conv2d")
    assert clock_of(conv, old).likeness == "convolution fp32"


def test_a_factor_is_found_again_and_is_of_its_family_alone() -> None:
    device = slowed({"product half": 1.5, "pass": 0.8})
    four, three = 4 / (4 + AS_FORECAST), 3 / (3 + AS_FORECAST)
    assert residual(device, "product half") == pytest.approx(1.5**four)
    assert residual(device, "pass") == pytest.approx(0.8**three)
    assert residual(device, "attention half") == pytest.approx(1.0)
    assert residual(device, "unheard") == 1.0
    assert residual(GPU, "product half") == 1.0
    three_s = [(kernel, clock_of(kernel, GPU).forward_s()) for kernel in KERNELS[:3]]
    timed = [(kernel, by * s) for (kernel, s), by in zip(three_s, (9.0, 2.0, 1.0), strict=True)]
    assert fitted_residuals(timed, GPU) == {"product fp32": pytest.approx(2.0**three)}


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
        for one in (device, GPU)
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

    plain, slow = cost(GPU, "v"), cost(slowed({"product fp32": 2.0}), "v")
    factor = residual(slowed({"product fp32": 2.0}), "product fp32")
    assert 1.5 < factor < 2.0
    assert slow[:2] == pytest.approx((factor * plain[0], factor * plain[1]))
    assert slow[2] == plain[2]  # its process is no slower
    assert cost(slowed({"product fp32": 2.0}), "a") == pytest.approx(cost(GPU, "a"))
