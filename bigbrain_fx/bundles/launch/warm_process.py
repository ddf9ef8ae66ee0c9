"""A process that has imported torch once, and forks the processes of devices, as `warm` asks.

    python -P warm_process.py

Its stdin is a line: each message is a program's words, folder and environment, with the descriptors
that are to be the new process's stdin, its log, and a line of its own, on which its exit code is
asked for. It has no threads, no generators that anybody drew from, and nothing of a user's.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import selectors
import socket
import sys
import threading
import traceback
from typing import Any

MESSAGE_BYTES = 1 << 20


def main() -> None:
    """Fork as asked, until the line is closed."""
    line = socket.socket(fileno=os.dup(0))
    for name in ("torch", "torch._dynamo"):  # the first step of an optimizer asks for the second
        importlib.import_module(name)
    gc.freeze()  # pages of what lives on are not written, and so shared
    serve(line)


def serve(line: socket.socket) -> None:
    """Fork, and tell how forks have ended."""
    selector = selectors.DefaultSelector()
    selector.register(line, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not line:
                _tell(selector, key)
                continue
            text, files, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 3)
            if not text:
                return
            _fork(selector, json.loads(text), files)


def _fork(selector: selectors.BaseSelector, order: dict[str, Any], files: list[int]) -> None:
    pid = os.fork()
    if pid == 0:
        _be(order, *files)
    for file in files[:2]:
        os.close(file)
    own = socket.socket(fileno=files[2])
    own.send(str(pid).encode())
    selector.register(own, selectors.EVENT_READ, pid)


def _tell(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Send a fork's exit code to who asks for it: it has ended. Its number is free from then on."""
    own: Any = key.fileobj
    if own.recv(1):
        _, status = os.waitpid(key.data, 0)
        own.send(str(os.waitstatus_to_exitcode(status)).encode())
    selector.unregister(own)
    own.close()


def _be(order: dict[str, Any], stdin: int, log: int, _: int) -> None:
    """Become a process of its own session that runs a program, to its end."""
    code = 1
    try:
        os.setsid()
        for file, place in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(file, place)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        sys.argv = order["words"]
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        _roll_anew()
        code = _run(sys.argv[0])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(program: str) -> int:
    """Run a program as Python does; return its exit code."""
    try:
        runpy.run_path(program, run_name="__main__")
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


def _roll_anew() -> None:
    """Give Python's and NumPy's dice a place of their own, as a new Python has one."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


if __name__ == "__main__":
    main()
