"""How much memory and how many cores this process may use, by the kernel's own words.

This room reads /proc and /sys; it measures nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that can be had without swapping, under the control group's limit.

    Args:
        root: where /proc and /sys are; tests bring their own.
    """
    limits = [_available_bytes(root)]
    for folder in _group_folders(root, "memory"):
        limits.extend(
            _number(folder / name) for name in ("memory.max", "memory.limit_in_bytes")
        )  # version 2, version 1
    return int(min(limits))


def usable_cores(root: Path = _ROOT) -> int:
    """Return the cores this process may run on, under the control group's quota; at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _group_folders(root, "cpu"):
        cores = min(cores, _quota_cores(folder))
    return max(1, math.floor(cores))


def _available_bytes(root: Path) -> float:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _quota_cores(folder: Path) -> float:
    quota, *period = _text(folder / "cpu.max").split() or ["max"]  # version 2: "200000 100000"
    if quota.isdigit() and period:
        return int(quota) / int(period[0])
    quota_us = _number(folder / "cpu.cfs_quota_us")  # version 1; -1 is no quota
    period_us = _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us < math.inf and period_us < math.inf else math.inf


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of the groups around it.

    In a container the path in /proc/self/cgroup may be the host's, and not exist here: then the
    mount's own root is what applies.
    """
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controllers if controllers else base
        folder = mount / path.lstrip("/")
        while folder != mount:
            yield folder
            folder = folder.parent
        yield mount
    yield from (base, base / controller)


def _number(path: Path) -> float:
    """Return the positive number in a file; infinity for none, for "max" and for -1."""
    text = _text(path).strip()
    return int(text) if text.isdigit() and int(text) > 0 else math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""  # this kernel, or this container, does not have the file
