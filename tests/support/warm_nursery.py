"""The program that `tests.support.warm` starts: it imports torch once, then forks per order.

    python -P warm_nursery.py FD

FD is one end of a SOCK_SEQPACKET pair. An order is JSON and the file descriptors of stdin, stdout
and stderr, then those that the process finds under the numbers in `fds`; the answer is the process
id. A process is forked twice: its parent ends at once, and
whoever started us, a subreaper, becomes its parent and waits for it as for any child.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn, TextIO

LONGEST_ORDER = 200_000  # bytes
MOST_FDS = 50
ABOVE = 600  # no process that is started expects a file descriptor of its parent up here
IMPORTED = (
    "safetensors.torch",
    "torch.distributed",
    # What torch imports when it first exports, and when one of its optimizers first steps.
    "sympy.combinatorics.tensor_can",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.output_code",
    "torch.export._trace",
    # What the children of capture, verify and export import.
    "bigbrain_fx.frontend.translation.leaf",
    "bigbrain_fx.frontend.modelfile",
    "bigbrain_fx.frontend.translation.oracle",
    "bigbrain_fx.frontend.tracing.trace",
    "bigbrain_fx.bundles.launch",
    "bigbrain_fx.verification.inference",
    "bigbrain_fx.verification.module",
    "bigbrain_fx.verification.plain",
    "bigbrain_fx.verification.reference",
)
# Extras, which a machine may not have.
IMPORTED_IF_THERE = (
    "onnxscript",
    "torch.onnx._internal.exporter._core",
    "transformers.modeling_utils",
)
Order = dict[str, Any]


def main() -> None:
    """Import, then start what is ordered until the other end closes."""
    door = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who closes the door
    path = list(sys.path)
    for name in IMPORTED:
        importlib.import_module(name)
    for name in IMPORTED_IF_THERE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    while True:
        message, fds, _, _ = socket.recv_fds(door, LONGEST_ORDER, MOST_FDS)
        if not message:
            return
        pid = start(json.loads(message), fds, path, door)
        for fd in fds:
            os.close(fd)
        door.send(str(pid).encode())


def start(order: Order, fds: list[int], path: list[str], door: socket.socket) -> int:
    """Fork a process that is not our child; return its id."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("an import has started threads: a fork would be without them")
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            for fd in (door.detach(), reader, writer):
                os.close(fd)
            while os.getppid() == parent:  # it may ask to end with its parent
                os.sched_yield()
            become(order, fds, path)
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    return pid


# --------------------------------------------------------------------------- in the new process


def become(order: Order, fds: list[int], path: list[str]) -> NoReturn:
    """Be the ordered process, to its end."""
    code = 1
    try:
        take_streams(fds[:3], bool(order["environment"].get("PYTHONUNBUFFERED")))
        take_fds(fds[3:], order["fds"])
        if order["session"]:
            os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        take_threads()
        run(order["words"], path)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def take_fds(fds: list[int], numbers: list[int]) -> None:
    """Have the given files under the numbers that they had where the process was ordered."""
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ABOVE) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(held, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def take_streams(fds: list[int], unbuffered: bool) -> None:
    """Make the given files stdin, stdout and stderr, buffered as Python does."""
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = writer(1, unbuffered), writer(2, True)


def writer(fd: int, unbuffered: bool) -> TextIO:
    """Return a text stream as Python makes them for its own output."""
    file = open(fd, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(file, write_through=unbuffered)


def take_threads() -> None:
    """Let torch compute with as many threads as an import under this environment would."""
    import torch

    count = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    if count != torch.get_num_threads():
        torch.set_num_threads(count)


def run(words: list[str], path: list[str]) -> None:
    """Run `-P -m MODULE WORDS` or `PROGRAM WORDS`, as Python would."""
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [*given, *path]
    if words[:2] == ["-P", "-m"]:
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
    os._exit(0)  # taking torch down in order takes a second
