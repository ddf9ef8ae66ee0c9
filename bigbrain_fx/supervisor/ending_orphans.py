"""Wait for the end of a process, and then end the groups of processes that it has left behind.

    python -I -S ending_orphans.py PID     and, as stdin, lines of "+GROUP MARK" and "-GROUP"

A process that has left its group is known by the mark in its environment. One whose group is taken
back is ended at once: its starter has ended.

It is started by `outliving`, and imports next to nothing, so that it starts fast and stays small.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress

ROOM = 1 << 16
SAID = 0  # stdin
MARK = b"BIGBRAIN_STARTED="  # as `outliving` has it
ROUND_S = 0.01
ROUNDS = 100  # of looking through all processes, until none is found


def main(parent: int) -> None:
    """Follow what is said to the parent's end; then end what is left."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)  # whatever ends the parent must not end this first
    groups: dict[int, bytes] = {}  # and the mark of each
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
    _end_marked(set(groups.values()))


def _end_of(parent: int) -> list[int]:
    """Return what can be read once the parent has ended: forks of it may keep our stdin open."""
    try:
        return [os.pidfd_open(parent)]
    except OSError:  # it has ended, or the kernel knows no such thing: stdin tells
        return []


def _heard(rest: bytes, groups: dict[int, bytes], is_over: bool) -> bytes | None:
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


def _take(line: bytes, groups: dict[int, bytes]) -> None:
    group, _, mark = line[1:].partition(b" ")
    if line.startswith(b"+"):
        groups[int(group)] = mark
    else:
        _end_marked({groups.pop(int(group), b"")})


def _end(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _end_marked(marks: set[bytes]) -> None:
    """End all that carry one of some marks; what they start meanwhile carries it, too."""
    wanted = {MARK + mark for mark in marks if mark}
    for _ in range(ROUNDS if wanted else 0):
        found = []
        with suppress(OSError):  # no file is left, or no /proc is there
            found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if not any([_end_if(pid, wanted) for pid in found]):
            return
        time.sleep(ROUND_S)


def _end_if(pid: int, wanted: set[bytes]) -> bool:
    """End a process if it carries a mark; return whether it did."""
    with suppress(OSError):  # it has ended, or is another user's
        end = os.pidfd_open(pid)  # first: its number may become another's
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_one = not wanted.isdisjoint(file.read().split(b"\0"))
            if is_one:
                signal.pidfd_send_signal(end, signal.SIGKILL)
            return is_one
        finally:
            os.close(end)
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]))
