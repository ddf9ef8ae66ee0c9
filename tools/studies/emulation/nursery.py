"""The place where device processes start: a warm Python that has imported torch, and forks.

    python nursery.py FD        (a program of its own: of ours it imports `processes` alone)

FD is one end of a SOCK_SEQPACKET pair. Each message in is the order for one process, with the file
descriptors for its output; messages out are `ready`, `started` and `ended`. A child joins its
control groups and its namespace, then runs its program as `python PROGRAM` would. When the other
end closes, every child is killed.

Only the thread that computes is held to the device's quota: it goes into the group once the process
group is made, so that gloo's own threads, which serve the link, are born outside of it, and the
threads of OpenMP and autograd, which it starts later, inside.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import select
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

import safetensors.torch  # noqa: F401  # what every bundle imports
import torch
import torch._dynamo  # torch's optimizers import it when they are first used: 3 s of a slow device
import torch.distributed as dist

from bigbrain_fx.processes import become

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
LONGEST_ORDER = 200_000  # bytes

Order = dict[str, Any]
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve orders until the other end closes."""
    door = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who ends us
    tell(door, {"event": "ready", "rss_bytes": resident_bytes(), "torch": torch.__version__})
    children: dict[int, int] = {}  # process id by pidfd
    try:
        serve(door, children)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the owner is gone
    finally:
        for pid in children.values():
            os.kill(pid, signal.SIGKILL)
        os._exit(0)  # Python would take seconds to take torch apart


def serve(door: socket.socket, children: dict[int, int]) -> None:
    """Start what is ordered and report what has ended."""
    while True:
        ready, _, _ = select.select([door.fileno(), *children], (), ())
        for pidfd in set(ready) & set(children):
            _, status = os.waitpid(children[pidfd], 0)
            code = os.waitstatus_to_exitcode(status)
            tell(door, {"event": "ended", "pid": children.pop(pidfd), "code": code})
            os.close(pidfd)
        if door.fileno() in ready:
            message, fds, _, _ = socket.recv_fds(door, LONGEST_ORDER, 2)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                door.close()
                be(json.loads(message), fds)
            for fd in fds:
                os.close(fd)
            children[os.pidfd_open(pid)] = pid
            tell(door, {"event": "started", "pid": pid})


def tell(door: socket.socket, message: Order) -> None:
    """Send one message."""
    door.send(json.dumps(message).encode())


def resident_bytes() -> int:
    """Return what every child begins with: less than we hold, as code is mapped when it is used."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with open("/proc/self/statm", "rb") as file:
            os.write(writer, file.read())
        os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(reader, 1000)
    os.close(reader)
    os.close(writer)
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --------------------------------------------------------------------------- in the child


def be(order: Order, files: list[int]) -> NoReturn:
    """Be the ordered process in its groups and its namespace, to its end."""

    def enter() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for group in order["groups"]:
            enter_group(group)
        enter_namespace(order["namespace"])
        hold_computation(order["quota_group"], order["cpus"])

    become(order, [os.open(os.devnull, os.O_RDONLY), *files], enter)


def enter_group(path: str, thread: int = 0) -> None:
    """Move this process, or a thread, into a control group: `path` is cgroup.procs or tasks."""
    with open(path, "w") as file:
        file.write(str(thread))


def enter_namespace(path: str) -> None:
    """Move this thread, and those it will start, into a network namespace."""
    with open(path) as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {path}")


def hold_computation(group: str, cpus: list[int]) -> None:
    """Put the computing thread into its quota's group as soon as the process group is made."""
    plain = dist.init_process_group

    @functools.wraps(plain)
    def init_process_group(*words: Any, **options: Any) -> None:  # noqa: ANN401
        plain(*words, **options)
        enter_group(group, threading.get_native_id())
        os.sched_setaffinity(threading.get_native_id(), cpus)

    dist.init_process_group = init_process_group


if __name__ == "__main__":
    main()
