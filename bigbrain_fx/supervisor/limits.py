"""Limits of the system that a run has met, and how they are raised."""

from __future__ import annotations

import errno
import signal
from collections.abc import Sequence

from .coded import CodedError

THREADS = "raise the limit of processes and threads (`ulimit -u`; in a container its pids limit)"
NO_THREAD = "can't start new thread"  # of Python's threading
ABORTED = "terminate called"  # what libstdc++ says where a library cannot start a thread, or worse
REMEDIES = {
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "the host has as many open files as it may have (`sysctl fs.file-max`)",
    errno.EAGAIN: THREADS,
    errno.ENOMEM: "free memory, or raise the limit (`ulimit -v`)",
}


def with_remedy(error: BaseException) -> str:
    """Return what an error says, and what to do where it is of a limit."""
    remedy = remedy_of(error)
    return f"{error}: {remedy}" if remedy else str(error)


def remedy_of(error: BaseException) -> str | None:
    """Return what raises the limit that an error is of; None: it is of none."""
    if isinstance(error, RuntimeError):
        return THREADS if str(error) == NO_THREAD else None
    return REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None


def require_limit(error: OSError | RuntimeError) -> None:
    """Raise what is a fault, and no limit of the system that was met."""
    if isinstance(error, RuntimeError) and remedy_of(error) is None:
        raise error


def of_abort(code: int, tail: Sequence[str]) -> str | None:
    """Return what may help where a library has ended a process, which then said no more."""
    if code != -signal.SIGABRT or not any(ABORTED in line for line in tail):
        return None
    return f"a library gave up, as gloo does where it can start no thread: {THREADS}"


def headline(error: BaseException, text: str | None = None) -> str:
    """Return what a terminal shows of an error: its code, and its own words or `text`."""
    said = str(error) if text is None else text
    return f"error[{error.code}]: {said}" if isinstance(error, CodedError) else f"error: {said}"
