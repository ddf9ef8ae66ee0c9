"""How malloc treats what offloading frees: large blocks apart from small ones, and given back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .malloc import KEEP_BYTES, M_MMAP_THRESHOLD, mallopt

APART_BYTES = 1 << 14
TUNABLES, UNCACHED = b"GLIBC_TUNABLES=", b"glibc.malloc.tcache_count=0"


@contextmanager
def apart() -> Iterator[None]:
    """Map what is large by itself meanwhile: it leaves no hole in the heap when it goes.

    Holes of one size are used in turn, so that a process holds as many of them as there are.
    """
    mallopt(M_MMAP_THRESHOLD, APART_BYTES)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)


def give_freed_memory_back() -> None:
    """Return free memory to the system, wherever it lies.

    With offloaded activations, small tensors that stay lie between the freed blocks. The next
    forward would not find enough memory there, and the process would hold as much as without
    offloading.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def caches_small_blocks() -> bool:
    """Return whether malloc caches small freed blocks, which it does by default.

    Before each tensor, which is aligned, malloc frees a block of a few bytes. A block that is
    cached and given out again is no part of the tensor's memory when that is free. The next tensor
    of the size then does not fit. A launcher sets the variable in the environment
    (`supervisor.processes.uncached`).
    """
    try:
        began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return not any(each.startswith(TUNABLES) and UNCACHED in each for each in began_with)
