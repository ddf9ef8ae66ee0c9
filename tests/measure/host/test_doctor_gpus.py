"""What the probe says of GPUs, and of rates that were disturbed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bigbrain_fx.measure.host import (
    worker,
)
from bigbrain_fx.measure.host.limits import usable_cores, usable_memory_bytes
from bigbrain_fx.measure.host.measure import (
    beyond_latency_bytes_per_s,
)

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
