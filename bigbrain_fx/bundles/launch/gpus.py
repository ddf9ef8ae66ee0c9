"""Requirements of a plan on this host before any process starts: GPUs' drivers, a C++ compiler.

The module refuses where there is certainly no GPU; the devices' processes count the GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from bigbrain_fx.core import Device
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan
from bigbrain_fx.runtime import LONGEST_COMPILE_S, CompilerError, require_compiler

_DEV = Path("/dev")
_DRIVERS = ("nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg")  # NVIDIA, its Jetsons, ROCm, WSL


def require_gpus(devices: Iterable[Device], dev: Path | None = None) -> None:
    """Refuse what wants GPUs on a host that has no driver of one, before anything is started.

    Args:
        devices: that shall compute on this host.
        dev: where drivers have their files; tests bring their own.

    Raises:
        InputError: one of the devices is a GPU, and there is none.
    """
    gpus = [device.name for device in devices if device.kind == "cuda"]
    if not gpus or sys.platform != "linux" or _has_driver(dev or _DEV):
        return
    raise InputError(
        f"{', '.join(gpus)} of this plan {'is a GPU' if len(gpus) == 1 else 'are GPUs'}, and this "
        "host has none: no driver has a file in /dev",
        code="BX3051",
        help="run it where they are; `python train.py --in-process --steps 2` in the bundle "
        "computes it here on the CPU; or split for what `bigbrain-fx doctor` finds here",
    )


def _has_driver(dev: Path) -> bool:
    return any(any(dev.glob(name)) for name in _DRIVERS)


PATIENCE_S = 300.0  # longest wait for a message


def require_compilers(plan: Plan) -> None:
    """Refuse to start processes that could not compile their stages.

    Raises:
        InputError: this host lacks a C++ compiler, and a CPU device has compiled stages.
    """
    if not plan.stages.compiled:
        return
    for name in plan.stages.devices:
        if plan.cluster.device[name].kind == "cpu":
            try:
                require_compiler(name)
            except CompilerError as error:
                what, _, help_ = str(error).rpartition(": ")
                raise InputError(what, code=error.code, help=help_) from error


def patience_s(plan: Plan, asked_s: float | None) -> float:
    """Return how long a device is waited for: in its first step it may compile."""
    if asked_s is not None:
        return asked_s
    return LONGEST_COMPILE_S if plan.stages.compiled else PATIENCE_S
