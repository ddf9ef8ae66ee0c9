"""This machine, as profiles name it: its processor, and the rates that `doctor` measures.

This file knows torch and /proc; it knows no models.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bigbrain_fx.doctor import measure
from bigbrain_fx.profiles import Machine

_WINDOW_S = 0.1
_CPU = torch.device("cpu")


def this_machine(threads: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """Measure this host's CPU with so many threads; the caller has set them.

    Args:
        threads: of this process.
        cpuinfo: where Linux names the processor; tests bring their own.
    """
    alone = _alone if threads == 1 else _as_it_is
    rates = [
        alone(partial(measure.matmul_flops_per_s, shape, _WINDOW_S, _CPU))
        for shape in measure.CPU_SHAPES
    ]
    return Machine(
        kind="cpu",
        processor=processor_name(cpuinfo),
        torch_version=torch.__version__,
        threads=threads,
        flops_per_s=statistics.median(rates),
        memory_bytes_per_s=alone(lambda: measure.copy_bytes_per_s(_WINDOW_S, _CPU)),
        launch_s=1.0 / alone(lambda: 1.0 / measure.launch_s(_WINDOW_S, _CPU)),
    )


def _as_it_is(rate: Callable[[], float]) -> float:
    return rate()


def _alone(rate: Callable[[], float]) -> float:
    """Return what a rate would be without other processes: ops are timed by this thread's clock."""
    wall_s, own_s = time.perf_counter(), time.thread_time()
    found = rate()
    share = (time.thread_time() - own_s) / (time.perf_counter() - wall_s)
    return found / share


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name that the processor gives itself, with family and model where they are said.

    Virtual machines often say "AMD EPYC" of all generations alike: the numbers tell them apart.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    name = said.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key} {said[key]}" for key in ("cpu family", "model", "stepping") if key in said]
    return f"{name} ({', '.join(numbers).removeprefix('cpu ')})" if numbers else name
