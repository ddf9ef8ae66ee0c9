"""Keep freed memory in the process: activations come and go with every micro-batch.

glibc gives large freed blocks back to the system at once and faults them in again at the next
micro-batch. On CPUs that costs about a tenth of a step. Linux with glibc only; elsewhere nothing
happens.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BYTES = 1 << 30  # glibc takes an int


def keep_freed_memory() -> bool:
    """Raise malloc's trim and mmap thresholds; return whether that worked."""
    return mallopt(M_MMAP_THRESHOLD, KEEP_BYTES) and mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)


def mallopt(what: int, value: int) -> bool:
    """Set one of malloc's numbers; return whether that worked."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(what, value))
    except (AttributeError, OSError):  # musl has none
        return False
