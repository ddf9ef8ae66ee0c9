"""Limits of a host: memory, threads, disk space, a GPU, a compiler; with remedies.

Printing never stops a training, where a log is full or a reader is gone. This file is stdlib only.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from .coded import CodedError


def tell(text: str) -> None:
    """Print a line for people on stderr, if it can be written."""
    show(text, sys.stderr)


def show(text: str, stream: TextIO) -> None:
    """Print a line, if it can be written; never raises.

    If nobody reads any more, further output is dropped: else printing would fail once more, in a
    thread or when Python ends.
    """
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if error.errno == errno.EPIPE:
            _let_go(stream)
    except ValueError:  # it is closed
        pass


def _let_go(stream: TextIO) -> None:
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def headline(error: BaseException, text: str | None = None) -> str:
    """Return what a terminal shows of an error: its code, and its own words or `text`."""
    said = str(error) if text is None else text
    return f"error[{error.code}]: {said}" if isinstance(error, CodedError) else f"error: {said}"


def note_code(error: BaseException) -> None:
    """Let a traceback end with the error's code; Python 3.10 has no notes."""
    if isinstance(error, CodedError) and hasattr(error, "add_note"):
        error.add_note(f"code: {error.code}")


SHORT = 71  # exit code where the system gives no thread or no memory: EX_OSERR of sysexits.h
THREADS = "raise the limit of processes and threads (`ulimit -u`; in a container its pids limit)"
# Python's threading, and a std::thread of gloo or autograd, whose error has no other type or text.
OF_THREADS = ("can't start new thread", "Resource temporarily unavailable")
HELD_S = 10.0
NO_MEMORY = (
    *("cannot allocate memory", "failed to map segment", "std::bad_alloc"),
    *("out of memory", "not enough memory"),  # of a GPU, and torch's own on a CPU
)
MEMORY = "raise the limit of memory (`ulimit -v`; in a container its own), or free some"
GPU_MEMORY = (
    "let nothing else take the GPU's, or split for less: --activation-checkpointing all, "
    "--offload, more micro-batches, more devices"
)
LONGEST_COMPILE_S = 1800.0  # of a wait for a device whose first step compiles
SHARE_GPUS = "BIGBRAIN_SHARE_GPUS"  # in the environment: processes take a host's GPUs in turn


def is_of_memory(error: BaseException) -> bool:
    """Whether there was no memory left for it."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return any(words in str(error).lower() for words in NO_MEMORY)


def memory_remedy(error: BaseException) -> str:
    """Return what to do where memory has run out: a GPU's, by torch's words for it, or a host's."""
    text = str(error).lower()
    of_gpu = "out of memory" in text and any(word in text for word in ("cuda", "hip", "xpu"))
    return GPU_MEMORY if of_gpu else MEMORY


def remedy_of(error: BaseException) -> str | None:
    """Return what raises the limit that has caused an error, or its cause; None: it is of none."""
    if isinstance(error, RuntimeError) and str(error) in OF_THREADS:
        return THREADS
    return None if error.__cause__ is None else remedy_of(error.__cause__)


def code_of(error: BaseException) -> int | None:
    """Return the exit code for an error that a limit has caused; None: it is of none."""
    return None if remedy_of(error) is None else SHORT


def told(error: BaseException) -> str:
    """Return an error as text, with what raises the limit where it is of one, or of memory."""
    if is_of_memory(error):
        first = str(error).partition("\n")[0]
        return f"memory has run out{f' ({first})' if first else ''}: {memory_remedy(error)}"
    remedy = remedy_of(error)
    return str(error) if remedy is None else f"{error}: {remedy}"


def shown(error: BaseException) -> str:
    """Return what a terminal shows of an error."""
    if is_of_memory(error):
        return f"error[BX5901]: {told(error)}"
    return headline(error) if isinstance(error, CodedError) else f"error[BX5902]: {told(error)}"


def require_threads(count: int) -> None:
    """See that so many threads can be started at once: where a library cannot, it aborts.

    Raises:
        RuntimeError: they cannot, as `remedy_of` knows it.
    """
    is_over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=is_over.wait, args=(HELD_S,), daemon=True)
            thread.start()
            started.append(thread)
    finally:
        is_over.set()
        for thread in started:
            thread.join()


@contextmanager
def saying_limits() -> Iterator[None]:
    """End this process with a message where the system gives it no more of something."""
    try:
        yield
    except (CodedError, RuntimeError, OSError, MemoryError) as error:
        code = SHORT if is_of_memory(error) else code_of(error)
        if code is None:
            note_code(error)
            raise
        tell(shown(error))
        raise SystemExit(code) from error
