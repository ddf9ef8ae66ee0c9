"""Keep freed memory in the process: activations come and go with every micro-batch.

Where they go to a store meanwhile, it must not: what is small and stays would lie between the freed
blocks, and the process would hold as much as if they had stayed.

glibc gives large freed blocks back to the system at once and faults them in again at the next
micro-batch; on CPUs that costs about a tenth of a step. Linux with glibc only; elsewhere nothing
happens.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BYTES = 1 << 30  # glibc takes an int
GIVE_BACK_BYTES = 1 << 16


def keep_freed_memory(*, keep: bool = True) -> bool:
    """Set malloc's trim and mmap thresholds; return whether that worked.

    `keep` off: larger blocks go back to the system, each by itself.
    """
    nbytes = KEEP_BYTES if keep else GIVE_BACK_BYTES
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl has none
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, nbytes)) and bool(mallopt(M_TRIM_THRESHOLD, nbytes))
