"""Limits of the system that a run has met, and how they are raised."""

from __future__ import annotations

import errno

THREADS = "raise the limit of processes and threads (`ulimit -u`)"
REMEDIES = {
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "the host has as many open files as it may have (`sysctl fs.file-max`)",
    errno.EAGAIN: THREADS,
    errno.ENOMEM: "free memory, or raise the limit (`ulimit -v`)",
}


def with_remedy(error: OSError) -> str:
    """Return what an error says, and what to do where it is of a limit."""
    remedy = REMEDIES.get(error.errno or 0)
    return f"{error}: {remedy}" if remedy else str(error)
