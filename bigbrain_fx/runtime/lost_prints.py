"""Prints that a full disk does not take are lost: no print ends a training."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any


class _Log(io.RawIOBase):
    """A file to write to; what a full disk does not take is dropped: no print ends a training."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd

    def write(self, data: Any) -> int:  # noqa: ANN401  # any buffer
        rest = memoryview(data).cast("B")
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self.fd, rest) :]
        return len(memoryview(data).cast("B"))


def let_prints_be_lost() -> None:
    """Let prints of this process be lost, rather than raise, where its log cannot take them."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is not None:
            fd = old.fileno()
            setattr(
                sys, name, io.TextIOWrapper(_Log(fd), old.encoding, "replace", None, True, True)
            )
