"""Kernels and messages timed, limits of this host, and what a GPU says of itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bigbrain_fx.core import KERNEL, KERNELS
from bigbrain_fx.measure.host import (
    kernels,
    measure,
    worker,
)
from bigbrain_fx.measure.host.clusters import DeviceProbe
from bigbrain_fx.measure.host.figures import Rates, tf32_flops_per_s
from bigbrain_fx.measure.host.limits import usable_cores, usable_memory_bytes
from bigbrain_fx.measure.host.measure import (
    beyond_latency_bytes_per_s,
)
from bigbrain_fx.measure.host.overheads import message_costs
from bigbrain_fx.runtime import Channel

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


class Seen:
    """A transport without another end, which sees how many threads compute."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def begin_step(self, channels: object) -> None: ...

    def finish(self) -> None: ...

    def send(self, channel: Channel, tensor: Tensor) -> None:
        self.threads.add(torch.get_num_threads())

    def recv(self, channel: Channel) -> Tensor:
        self.threads.add(torch.get_num_threads())
        return torch.zeros(channel.shape)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("shared_cores", [True, False])
def test_no_other_thread_computes_between_messages(shared_cores: bool) -> None:
    """On a host of 16 cores, devices of 14 threads had messages of 62 ms: threads that spun."""
    seen = Seen()
    message_s, bytes_per_s = message_costs(
        seen,
        ("r0", "r1"),
        leads=True,
        rounds=3,
        shared_cores=shared_cores,
        device=torch.device("cpu"),
    )
    assert seen.threads == {1}
    assert torch.get_num_threads() == 2
    assert message_s < 0.01
    assert bytes_per_s > 0


GIB = 2**30


def test_a_gpu_says_what_cublas_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.delattr(torch.backends.cuda, "cublas_workspace_size", raising=False)
    said = {"name": "NVIDIA T4", "memory_bytes": GIB}
    assert worker._memory(device) == {**said, "blas_bytes": 32 * 2**20}
    monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 7, raising=False)
    assert worker._memory(device) == {**said, "blas_bytes": 7}


def test_a_rate_stays_sane_when_latency_was_disturbed() -> None:
    assert beyond_latency_bytes_per_s(1000, taken_s=3.0, latency_s=1.0) == 500.0
    assert beyond_latency_bytes_per_s(1000, taken_s=2.0, latency_s=5.0) == 1000.0


def _host(root: Path, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8388608 kB\n",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        (
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n"},
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
            },
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n2:cpu,cpuacct:/\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            GIB,
        ),
        (
            # In a container the named group is the host's, and only the mount's root is there.
            {"proc/self/cgroup": "0::/docker/1f\n", "sys/fs/cgroup/memory.max": f"{5 * GIB}\n"},
            5 * GIB,
        ),
    ],
)
def test_memory_is_what_the_tightest_limit_leaves(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert usable_memory_bytes(_host(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
    ],
)
def test_cores_are_what_the_quota_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert usable_cores(_host(tmp_path, files)) == expected
