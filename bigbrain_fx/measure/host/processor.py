"""The name that this host's processor gives itself, as profiles and cluster files have it.

This file knows /proc; it measures nothing.
"""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name that the processor gives itself, with family and model where they are said.

    Virtual machines often say "AMD EPYC" of all generations: the numbers tell them apart.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    name = said.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key} {said[key]}" for key in ("cpu family", "model", "stepping") if key in said]
    return f"{name} ({', '.join(numbers).removeprefix('cpu ')})" if numbers else name
