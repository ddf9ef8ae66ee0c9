"""Keep freed memory in the process: activations come and go with every micro-batch.

glibc gives large freed blocks back to the system at once and faults them in again at the next
micro-batch; on CPUs that costs about a tenth of a step. Linux with glibc only; elsewhere nothing
happens.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BYTES = 1 << 30  # glibc takes an int
APART_BYTES = 1 << 14


def keep_freed_memory() -> bool:
    """Raise malloc's trim and mmap thresholds; return whether that worked."""
    return _mallopt(M_MMAP_THRESHOLD, KEEP_BYTES) and _mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)


@contextmanager
def apart() -> Iterator[None]:
    """Map what is large by itself meanwhile: it leaves no hole in the heap when it goes.

    Holes of one size are used in turn, so that a process holds as many of them as there are.
    """
    _mallopt(M_MMAP_THRESHOLD, APART_BYTES)
    try:
        yield
    finally:
        _mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)


def _mallopt(what: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(what, value))
    except (AttributeError, OSError):  # musl has none
        return False


def give_freed_memory_back() -> None:
    """Give what is free now back to the system, wherever it lies.

    Where activations went to a store, what is small and stays lies between the freed blocks: the
    next forward would not find room there, and the process would hold as much as if they had
    stayed.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
