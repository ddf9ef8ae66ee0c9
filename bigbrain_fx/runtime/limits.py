"""Limits of the system that a process has met: what each is called, and what raises it.

This file is stdlib only.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .coded import CodedError
from .needs import is_of_memory, memory_told
from .telling import headline, note_code, tell

SHORT = 71  # exit code where the system gives no thread or no folder: EX_OSERR of sysexits.h
TOO_LONG = 74  # and where a file may not grow as it must: EX_IOERR
THREADS = "raise the limit of processes and threads (`ulimit -u`; in a container its pids limit)"
FOLDER = "let TMPDIR name a folder that files can be written in, and raise `ulimit -f` if it is 0"
LENGTH = "raise `ulimit -f`, the size that files may have here"
# Python's threading, and a std::thread of gloo or autograd, whose error has no other type or text.
OF_THREADS = ("can't start new thread", "Resource temporarily unavailable")
FORKING = ("_execute_child", "_launch")  # of subprocess and of multiprocessing
HELD_S = 10.0


def code_of(error: BaseException) -> int | None:
    """Return the exit code for an error that a limit has caused; None: it is of none."""
    remedy = remedy_of(error)
    if remedy is None:
        return None
    return TOO_LONG if remedy == LENGTH else SHORT


def remedy_of(error: BaseException) -> str | None:
    """Return what raises the limit that has caused an error; None: it is of none."""
    for cause in _causes(error):
        if isinstance(cause, RuntimeError) and str(cause) in OF_THREADS:
            return THREADS
        if isinstance(cause, OSError) and cause.errno == errno.EAGAIN and _is_of_forking(cause):
            return THREADS
        if isinstance(cause, OSError) and cause.errno == errno.EFBIG:
            return LENGTH
        if isinstance(cause, FileNotFoundError) and "No usable temporary directory" in str(cause):
            return FOLDER
    return None


def told(error: BaseException) -> str:
    """Return an error in words, with what raises the limit where it is of one, or of memory."""
    if is_of_memory(error):
        return memory_told(error)
    remedy = remedy_of(error)
    return str(error) if remedy is None else f"{error}: {remedy}"


def shown(error: BaseException) -> str:
    """Return what a terminal shows of an error."""
    if is_of_memory(error):
        return f"error[BX5901]: {memory_told(error)}"
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
    """End this process in words where the system gives it no more of something."""
    try:
        yield
    except (CodedError, RuntimeError, OSError, MemoryError) as error:
        code = SHORT if is_of_memory(error) else code_of(error)
        if code is None:
            note_code(error)
            raise
        tell(shown(error))
        raise SystemExit(code) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised for."""
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:
        yield at
        seen.add(id(at))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _is_of_forking(error: BaseException) -> bool:
    """Whether a process was being started: a pipe that must not wait fails by the same number."""
    at, name = error.__traceback__, ""
    while at is not None:
        name = at.tb_frame.f_code.co_name
        at = at.tb_next
    return name in FORKING
