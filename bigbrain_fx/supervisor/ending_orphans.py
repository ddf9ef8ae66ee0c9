"""Wait for the end of a process, and then end the groups of processes that it has left behind.

    python -I -S ending_orphans.py PID     and, as stdin, lines of "+GROUP" and "-GROUP"

It is started by `outliving`, and imports next to nothing, so that it starts fast and stays small.
"""

import os
import select
import signal
import sys
from contextlib import suppress

ROOM = 1 << 16
SAID = 0  # stdin


def main(parent: int) -> None:
    """Follow what is said to the parent's end; then end what is left."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)  # whatever ends the parent must not end this first
    groups: set[int] = set()
    os.set_blocking(SAID, False)
    looked = select.poll()
    for file in (SAID, *_end_of(parent)):
        looked.register(file, select.POLLIN)
    rest: bytes | None = b""
    while rest is not None:
        is_over = any(file != SAID for file, _ in looked.poll())
        rest = _heard(rest, groups, is_over)
    for group in groups:
        _end(group)


def _end_of(parent: int) -> list[int]:
    """Return what can be read once the parent has ended: forks of it may keep our stdin open."""
    try:
        return [os.pidfd_open(parent)]
    except OSError:  # it has ended, or the kernel knows no such thing: stdin tells
        return []


def _heard(rest: bytes, groups: set[int], is_over: bool) -> bytes | None:
    """Take what was said since; return the beginning of a line, None where no more will come."""
    while True:
        try:
            part = os.read(SAID, ROOM)
        except BlockingIOError:
            return None if is_over else rest
        if not part:
            return None
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            _take(line, groups)


def _take(line: bytes, groups: set[int]) -> None:
    if line.startswith(b"+"):
        groups.add(int(line[1:]))
    else:
        groups.discard(int(line[1:]))


def _end(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
