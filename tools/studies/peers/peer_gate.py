"""Lies in a bundle as `gate.py`: after each step a device says so and waits for its next turn.

`peer_supervised.py` copies it there, makes the pipes and calls `wait` from `on_step_end`.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
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
    if not (_say(line) and _may_go(GATES / f"go-{device.name}")):
        os.kill(os.getppid(), signal.SIGTERM)  # the tool has ended, however: so does the run


def _say(line: str) -> bool:
    try:
        said = os.open(SAID, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # ENXIO: nobody reads
        return False
    os.write(said, line.encode())
    os.close(said)
    return True


def _may_go(path: Path) -> bool:
    """Wait for a byte; False where nobody can write one any more."""
    gate = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    select.select([gate], [], [])
    byte = os.read(gate, 1)
    os.close(gate)
    return bool(byte)
