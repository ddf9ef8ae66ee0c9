"""Lies in a bundle as `gate.py`: after each step a device says so and waits for its next turn.

`tools/peer_supervised.py` copies it there, makes the pipes and calls `wait` from `on_step_end`.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import Tensor

GATES = Path(__file__).resolve().parent / "gates"
SAID = GATES / "said"


class Device(Protocol):
    """What this file knows of the runtime's device."""

    name: str
    first_gradients: dict[str, Tensor]


def wait(device: Device, step: int) -> None:
    """Say when the step ended, processor time and most memory of this process; read a byte."""
    if step == 0:
        first = {name: g.contiguous() for name, g in device.first_gradients.items()}
        save_file(first, GATES / f"first-{device.name}")
    used_s, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = f"{device.name} {os.getpid()} {time.monotonic()} {used_s} {peak}\n"
    _once(SAID, os.O_WRONLY, lambda pipe: os.write(pipe, line.encode()))
    _once(GATES / f"go-{device.name}", os.O_RDONLY, lambda pipe: os.read(pipe, 1))


def _once(path: Path, flags: int, use: Callable[[int], object]) -> None:
    pipe = os.open(path, flags)
    try:
        use(pipe)
    finally:
        os.close(pipe)
