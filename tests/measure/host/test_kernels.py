"""Twenty calls are timed: each runs, in its precision; here the timer is a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bigbrain_fx.core import KERNEL, KERNELS, KernelShape
from bigbrain_fx.measure.host import kernels, measure
from bigbrain_fx.measure.host.clusters import DeviceProbe
from bigbrain_fx.measure.host.figures import Rates, tf32_flops_per_s

CPU = torch.device("cpu")
SMALL = tuple(
    replace(kernel, sizes=sizes)
    for kernel, sizes in zip(
        {(k.family, k.precision, k.sizes[-1] > 1): k for k in KERNELS}.values(),
        (
            (4, 8, 6),
            (4, 8, 6),
            (4, 8, 6),
            (2, 4, 8, 6),
            (2, 4, 5, 6, 3, 1),
            (2, 4, 5, 6, 3, 1),
            (2, 4, 5, 4, 3, 4),
            (2, 2, 8, 4),
            (4, 8),
            (4, 8),
            (4, 8),
        ),
        strict=True,
    )
)


def test_there_are_twenty_of_all_families_and_rates() -> None:
    assert len(KERNELS) == len(KERNEL) == 20
    assert {kernel.precision for kernel in KERNELS} == {"fp32", "tf32", "half"}
    assert all(kernels.kernel_bytes(kernel) < 2**30 for kernel in KERNELS)


def test_every_family_is_called_in_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def once_s(run: Callable[[int], torch.Tensor], window_s: float, sync: object) -> float:
        found = run(0)
        made.append((found.dtype, tuple(found.shape)))
        assert (window_s, run(1).shape) == (0.5, found.shape)
        return 1e-3 * len(made)

    monkeypatch.setattr(measure, "per_call_s", once_s)
    heard: list[None] = []
    found = kernels.kernels_s(0.5, CPU, lambda: heard.append(None), SMALL)
    asked = [kernel for kernel in SMALL if kernel.precision != "tf32"]  # which a CPU has not
    assert list(found) == [kernel.name for kernel in asked]
    assert len(heard) == len(SMALL)
    halves = [torch.bfloat16 if k.precision == "half" else torch.float32 for k in asked]
    assert [dtype for dtype, _ in made] == halves
    shapes = dict(zip((k.family for k in asked), (shape for _, shape in made), strict=True))
    assert (shapes["linear"], shapes["bmm"]) == ((4, 6), (2, 4, 6))
    assert shapes["conv2d"] == (2, 4, 5, 5)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_device_gets_the_tf32_rate_and_the_seconds() -> None:
    tf32 = [kernel for kernel in KERNELS if kernel.precision == "tf32"]
    took_s = {KERNELS[0].name: 1e-3, **{kernel.name: 4e-4 for kernel in tf32}}
    rate = tf32_flops_per_s(took_s)
    assert rate == pytest.approx(2 * 4096 * 1024 * 4096 / 4e-4)
    assert tf32_flops_per_s({KERNELS[0].name: 1e-3}) is None
    rates = Rates(1e13, 1e12, 1e-6)
    device = DeviceProbe("d0", "h", 1, 2**34, rates, kind="cuda", kernels=took_s).device
    assert device.tf32_flops_per_s == pytest.approx(rate, rel=1e-2)
    assert dict(device.kernels) == took_s


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_times_them() -> None:
    found = kernels.kernels_s(0.01, torch.device("cuda", 0))
    assert len(found) >= 15
    assert all(1e-7 < took_s < 1.0 for took_s in found.values())


def test_a_name_says_all() -> None:
    assert KernelShape("bmm", "fp32", (2, 3, 4, 5)).name == "bmm-fp32-2x3x4x5"
