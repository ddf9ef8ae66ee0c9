"""How much memory and how many cores this process may use, by the kernel's own words.

This module reads /proc and /sys; it measures nothing.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from bigbrain_fx.supervisor import group_folders, host_bytes, number_in, text_of

_ROOT = Path("/")


def usable_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that can be had without swapping, under the control group's limit.

    Args:
        root: where /proc and /sys are; tests bring their own.
    """
    limits = [_host_bytes(root)]
    for folder in group_folders(root, "memory"):
        limits.extend(
            number_in(folder / name) for name in ("memory.max", "memory.limit_in_bytes")
        )  # version 2, version 1
    return int(min(limits))


def usable_cores(root: Path = _ROOT) -> int:
    """Return the cores this process may run on, under the control group's quota; at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in group_folders(root, "cpu"):
        cores = min(cores, _quota_cores(folder))
    return max(1, math.floor(cores))


def _host_bytes(root: Path) -> float:
    found = host_bytes(root)
    if found < math.inf:
        return found
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _quota_cores(folder: Path) -> float:
    quota, *period = text_of(folder / "cpu.max").split() or ["max"]  # version 2: "200000 100000"
    if quota.isdigit() and period:
        return int(quota) / int(period[0])
    quota_us = number_in(folder / "cpu.cfs_quota_us")  # version 1; -1 is no quota
    period_us = number_in(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us < math.inf and period_us < math.inf else math.inf
