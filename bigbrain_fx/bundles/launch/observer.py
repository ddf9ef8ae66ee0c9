"""A device's process that notes when its instructions begin and end: `observer.py FOLDER train.py`.

The program stands in front of a bundle's program, in the process itself, and wraps methods of the
bundle's own `Device`. It imports nothing of ours, and bundles have no copy of it.
Every note is written at once, so that the notes of a killed process are there. Lines of a file:

    ["device", name, pid]   ["begin", what, ns]   ["end", ns, bytes held or null]

with ns of the host's monotonic clock. Two files take turns, so that the newest steps are kept.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

STEPS = 100  # in one file; with the other one, so many to twice as many are kept
BY_STAGE = {"forward": "forward", "backward": "backward", "backward_weight": "weights"}
BY_CHANNEL = tuple(
    f"{verb}{kind}" for kind in ("", "_tied", "_norms", "_losses") for verb in ("recv", "send")
)
WHOLE = {
    "optimizer_step": "optimizer step",
    "sum_gradients": "sum gradients",
    "gather_weights": "gather weights",
    "exchange_statistics": "exchange statistics",
}


class _Heap(ctypes.Structure):
    """Result of glibc's `mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in ["arena", "ordblks", "smblks", "hblks"])
    _fields_ += tuple((n, ctypes.c_size_t) for n in ["hblkhd", "usmblks", "fsmblks", "uordblks"])
    _fields_ += tuple((name, ctypes.c_size_t) for name in ["fordblks", "keepcost"])


def heap() -> Callable[[], int] | None:
    """Return what says how many bytes malloc has given out; None: this libc does not say."""
    try:
        read = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    read.restype = _Heap

    def given() -> int:
        found = read()
        return int(found.uordblks + found.hblkhd)

    return given


class StepNotes:
    """The notes of one device in this process.

    Live bytes of a CPU are the device's tensors at the beginning of its first step, and then what
    malloc gives out and takes back. Those of a GPU are what torch has allocated.
    """

    def __init__(self, folder: str, device: Any) -> None:  # noqa: ANN401  # the bundle's `Device`
        self.folder, self.name, self.steps = folder, device.name, 0
        self.file: int | None = None
        self.live = _of_gpu(device) if device.device.type == "cuda" else _of_heap(device)

    def begin(self, what: str) -> None:
        """Something begins."""
        self._write(["begin", what, time.monotonic_ns()])

    def end(self, computed: bool = False) -> None:
        """Note the end of the newest instruction; bytes are counted after computations (0.1 ms)."""
        ended_ns = time.monotonic_ns()
        self._write(["end", ended_ns, self.live() if computed else None])

    def begin_step(self, step: int) -> None:
        """A step begins; sometimes a file does."""
        if self.steps % STEPS == 0:
            self._open(self.steps // STEPS % 2)
        self.steps += 1
        self.begin(f"step {step}")

    def _open(self, turn: int) -> None:
        self._close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with suppress(OSError):  # a full disk stops no training
            self.file = os.open(os.path.join(self.folder, f"{os.getpid()}.{turn}"), flags, 0o666)
        self._write(["device", self.name, os.getpid()])

    def _write(self, note: list[Any]) -> None:
        if self.file is None:
            return
        try:
            os.write(self.file, json.dumps(note).encode() + b"\n")
        except OSError:
            self._close()

    def _close(self) -> None:
        if self.file is not None:
            with suppress(OSError):
                os.close(self.file)
            self.file = None


def _of_gpu(device: Any) -> Callable[[], int | None]:  # noqa: ANN401  # as above
    torch = sys.modules["torch"]
    return lambda: int(torch.cuda.memory_allocated(device.device))


def _of_heap(device: Any) -> Callable[[], int | None]:  # noqa: ANN401  # as above
    given = heap()
    if given is None:
        return lambda: None
    beyond = _own_bytes(device) - given()
    return lambda: beyond + given()


def _own_bytes(device: Any) -> int:  # noqa: ANN401  # as above
    """Return the bytes of a device's weights, buffers and optimizer's state."""
    optimizer = getattr(device, "optimizer", None)
    states = optimizer.state.values() if optimizer is not None else ()
    held = [*device.state().values(), *(v for state in states for v in state.values())]
    storages = [t.untyped_storage() for t in held if hasattr(t, "untyped_storage")]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def observe(folder: str) -> None:
    """Wrap what a step calls, in the bundle's own runtime."""
    base = _device_class()
    run_step, seen = base.run_step, set[type]()
    unless = _warming()

    @functools.wraps(run_step)
    def noted(device: Any, step: int) -> Any:  # noqa: ANN401  # as `run_step`
        if unless():
            return run_step(device, step)
        if not hasattr(device, "_notes"):
            device._notes = StepNotes(folder, device)
        if type(device) not in seen:
            seen.add(type(device))
            _wrap_all(type(device))
        device._notes.begin_step(step)
        try:
            return run_step(device, step)
        finally:
            device._notes.end()

    base.run_step = noted


def _device_class() -> Any:  # noqa: ANN401  # the bundle's own
    """Return the class whose `run_step` all devices have; an older bundle has one for all."""
    try:
        return importlib.import_module("runtime.forward_device").ForwardDevice
    except ImportError:
        return importlib.import_module("runtime.device").Device


def _warming() -> Callable[[], bool]:
    """Return what says whether a spare only warms itself up; a lean bundle has no spares."""
    try:
        member: Any = importlib.import_module("runtime.member")
    except ImportError:
        return lambda: False
    warm_up, now = member.warm_up, list[bool]()

    @functools.wraps(warm_up)
    def marked(*given: Any) -> None:  # noqa: ANN401  # as `warm_up`
        now.append(True)
        try:
            warm_up(*given)
        finally:
            now.pop()

    member.warm_up = marked
    return lambda: bool(now)


def _wrap_all(cls: type) -> None:
    """Wrap the instructions of an emitted class; what its bases call of each other is within."""
    for name, what in BY_STAGE.items():
        _wrap(cls, name, lambda stage, micro, what=what: f"{what} {stage} #{micro}", True)
    for name in BY_CHANNEL:
        _wrap(cls, name, functools.partial(_message, name.split("_")[0]))
    for name, what in WHOLE.items():
        _wrap(cls, name, lambda what=what: what, True)


def _message(verb: str, channel: Any, micro: int | None = None, *_: Any) -> str | None:  # noqa: ANN401
    """Return the name of a bar, as the forecast has it; None: nothing is sent."""
    if channel.is_local:
        return None
    what = f"{verb} {channel.kind} {channel.value} {channel.source}->{channel.target}"
    is_of_micro = micro is not None and channel.kind in ("activation", "gradient")
    return f"{what} #{micro}" if is_of_micro else what


def _wrap(cls: Any, name: str, what: Callable[..., str | None], computes: bool = False) -> None:  # noqa: ANN401
    method = getattr(cls, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def noted(device: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401  # any instruction
        said = what(*given)
        if said is None or not hasattr(device, "_notes"):
            return method(device, *given, **named)
        device._notes.begin(said)
        try:
            return method(device, *given, **named)
        finally:
            device._notes.end(computes)

    setattr(cls, name, noted)


if __name__ == "__main__":
    _, _folder, _program, *_words = sys.argv
    sys.path[0] = os.getcwd()  # the bundle's folder, not the one of this file
    sys.argv = [_program, *_words]
    observe(_folder)
    runpy.run_path(_program, run_name="__main__")
