"""This machine, as profiles name it: a processor or a GPU, and the rates that `doctor` measures.

This file knows torch and /proc; it knows no models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bigbrain_fx.costs import Machine
from bigbrain_fx.errors import InputError
from bigbrain_fx.measure.host import measure
from bigbrain_fx.measure.host.processor import processor_name as processor_name

_WINDOW_S = 0.1


def chosen_device(text: str) -> torch.device:
    """Return the device that a user names; a CUDA device always with its index.

    Args:
        text: "auto" for the first CUDA device, or the CPU where there is none; "cpu"; "cuda" for
            the first CUDA device; "cuda:1".

    Raises:
        InputError: it is none of these, or this host lacks it.
    """
    kind, colon, index = text.partition(":")
    if text in ("auto", "cpu"):
        first = text == "auto" and torch.cuda.is_available()
        return torch.device("cuda", 0) if first else torch.device("cpu")
    if kind != "cuda" or (colon and not (index.isascii() and index.isdecimal())):
        known = "auto, cpu, cuda or cuda:1"
        raise InputError(
            f"expected {known}, found {text!r}", code="BX1515", at="--device", help="--device auto"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise _no_such_gpu(text, count)
    return torch.device("cuda", int(index or 0))


def _no_such_gpu(text: str, count: int) -> InputError:
    if count == 0:
        return InputError(
            f"this host has no CUDA device for {text!r}",
            code="BX1516",
            at="--device",
            notes=(f"torch {torch.__version__} says so: torch.cuda.is_available()",),
            help="--device cpu, or run it where nvidia-smi lists a GPU, with a CUDA build of torch",
        )
    last = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
    return InputError(
        f"this host has no CUDA device {text!r}, it has {last}",
        code="BX1517",
        at="--device",
        help=f"--device cuda:{count - 1}",
    )


def this_machine(
    threads: int, device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")
) -> Machine:
    """Measure a device of this host.

    Args:
        threads: of this process; the caller has set them.
        device: the CPU or a CUDA device.
        cpuinfo: where Linux names the processor; tests bring their own.
    """
    on_cuda = device.type == "cuda"
    alone = _as_it_is if on_cuda or threads > 1 else _alone
    rates = [
        alone(partial(measure.matmul_flops_per_s, shape, _WINDOW_S, device))
        for shape in (measure.GPU_SHAPES if on_cuda else measure.CPU_SHAPES)
    ]
    return Machine(
        kind=device.type,
        processor=torch.cuda.get_device_name(device) if on_cuda else processor_name(cpuinfo),
        torch_version=torch.__version__,
        threads=threads,
        flops_per_s=statistics.median(rates),
        memory_bytes_per_s=alone(lambda: measure.copy_bytes_per_s(_WINDOW_S, device)),
        launch_s=1.0 / alone(lambda: 1.0 / measure.launch_s(_WINDOW_S, device)),
    )


def _as_it_is(rate: Callable[[], float]) -> float:
    return rate()


def _alone(rate: Callable[[], float]) -> float:
    """Return what a rate would be without other processes: ops are timed by this thread's clock."""
    wall_s, own_s = time.perf_counter(), time.thread_time()
    found = rate()
    share = (time.thread_time() - own_s) / (time.perf_counter() - wall_s)
    return found / share
