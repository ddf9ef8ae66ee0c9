"""A process that has imported torch once, and forks others: seconds less for each of them.

    python -P forking.py MODULE...

Its stdin is a connection: each message is an order (words, folder, environment) with descriptors.
These are the new process's stdin, stdout and stderr, the descriptors of `numbers`, and last a
connection of its own. On that the process's id is sent, and its exit code on request. An order to
be `apart` is of a process that is no child of this one: whoever started this, a subreaper, waits
for it. Modules that are not there are left out. It has no threads and nothing of a user's, and
imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

MESSAGE_BYTES = 1 << 20
MOST_FILES = 60
ABOVE = 600  # no process that is started expects a file descriptor of its parent up here
MODULE = ["-P", "-m"]

Order = dict[str, Any]


def main(modules: Sequence[str]) -> None:
    """Fork as ordered, until the line is closed."""
    line = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who closes the line
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _keep_ends()
    gc.freeze()  # pages of what lives on are not written, and so shared
    selector = selectors.DefaultSelector()
    selector.register(line, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not line:
                _tell(selector, key)
                continue
            text, files, _, _ = socket.recv_fds(line, MESSAGE_BYTES, MOST_FILES)
            if not text:
                return
            _start(selector, json.loads(text), files)


def _keep_ends() -> None:
    """Let what was made here be finalized by no fork: its end is this process's."""
    for made in vars(weakref.finalize)["_registry"]:
        made.atexit = False


def _start(selector: selectors.BaseSelector, order: Order, files: list[int]) -> None:
    own = socket.socket(fileno=files.pop())
    pid = _apart(order, files) if order.get("apart") else _forked(order, files)
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):  # whoever has ordered it does not wait
        own.send(str(pid).encode())
    if order.get("apart"):
        own.close()
    else:
        selector.register(own, selectors.EVENT_READ, pid)


def _forked(order: Order, files: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        become(order, files)
    return pid


def _apart(order: Order, files: list[int]) -> int:
    """Fork a process whose parent ends at once; return its id."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            while os.getppid() == parent:  # it may ask to end with its parent
                os.sched_yield()
            become(order, files)
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    return pid


def _tell(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Send a fork's exit code to who asks for it: it has ended. Its number is free from then on."""
    own: Any = key.fileobj
    with contextlib.suppress(OSError):
        if own.recv(1):
            _, status = os.waitpid(key.data, 0)
            own.send(str(os.waitstatus_to_exitcode(status)).encode())
    selector.unregister(own)
    own.close()


# --------------------------------------------------------------------------- in the new process


def become(
    order: Order, files: Sequence[int], before: Callable[[], object] | None = None
) -> NoReturn:
    """Be the ordered process, to its end.

    Args:
        order: `words`, `folder` and `environment`; `session`: it leads one of its own.
        files: to be its stdin, stdout and stderr, and those of the order's `numbers`.
        before: called when all is as ordered, before its program is run.
    """
    code = 1
    try:
        if order.get("session"):
            os.setsid()
        _take([0, 1, 2, *order.get("numbers", ())], files)
        _open_streams(bool(order["environment"].get("PYTHONUNBUFFERED")))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(order["folder"])
        inherited = _paths()
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.path[:] = [*_paths(), *(path for path in sys.path if path not in inherited)]
        _be_new()
        if before is not None:
            before()
        code = _run(list(order["words"]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take(numbers: Sequence[int], files: Sequence[int]) -> None:
    """Have files under these numbers, and no other."""
    held = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, ABOVE) for file in files]
    for file, number in zip(held, numbers, strict=True):
        os.dup2(file, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in numbers:
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(number)


def _open_streams(unbuffered: bool) -> None:
    """Open the standard streams, buffered as Python does."""
    sys.stdin = open(0, encoding="locale", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _writer(1, unbuffered), _writer(2, True)


def _writer(number: int, unbuffered: bool) -> TextIO:
    file = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(file, "locale", write_through=unbuffered)


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _be_new() -> None:
    """Have random numbers of its own, and as many threads of torch as under its environment."""
    random.seed()
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        numpy_random.seed()
    count = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    if torch is not None and count != torch.get_num_threads():
        torch.set_num_threads(count)


def _run(words: list[str]) -> int:
    """Run `[-P] PROGRAM WORDS` or `-P -m MODULE WORDS` as Python does; return its exit code."""
    try:
        if words[:2] == MODULE:
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        elif words[:1] == MODULE[:1]:
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        return _code_of(error.code)
    finally:
        shut_down, at_exit = "_shutdown", "_run_exitfuncs"
        getattr(threading, shut_down)()
        getattr(importlib.import_module("atexit"), at_exit)()
    return 0


def _code_of(said: object) -> int:
    if said is None or isinstance(said, int):
        return (said or 0) & 0xFF
    print(said, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # taking torch down in order takes a second
