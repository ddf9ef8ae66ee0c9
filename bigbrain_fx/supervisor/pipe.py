"""The line to one device process: a pair of sockets, one JSON object a packet, files beside it."""

from __future__ import annotations

import json
import socket
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 1 << 20  # bytes of a packet
MOST_FILES = 8
ROOM = 1 << 20  # bytes that may wait in the kernel, where it allows so many

NO_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

Said = dict[str, Any]


def line_pair() -> tuple[socket.socket, socket.socket]:
    """Return our end and the process's end of a new line."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
    return ours, theirs


def _rights(files: tuple[int, ...]) -> list[tuple[int, int, array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []


class Orders:
    """Orders to one process, in their order; those that its socket has no room for wait here."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()

    def give(self, do: str, files: Sequence[int] = (), **facts: object) -> None:
        """Give an order; to a process that is ending it means nothing."""
        self.waiting.append((json.dumps({"do": do, **facts}).encode(), tuple(files)))
        self.pass_on()

    def pass_on(self) -> None:
        """Send what waits, as far as there is room."""
        while self.waiting:
            packet, files = self.waiting[0]
            try:
                self.line.sendmsg([packet], _rights(files), NO_WAIT)  # send_fds drops its flags
            except BlockingIOError:
                return
            except OSError:
                self.waiting.clear()
                return
            self.waiting.popleft()


def hear(line: socket.socket) -> Said | None:
    """Return what a process said; None when its line is closed.

    Raises:
        ValueError: it is not what a process of ours says.
        BlockingIOError: nothing is there.
    """
    try:
        packet = line.recv(LONGEST, socket.MSG_DONTWAIT)
    except ConnectionError:
        return None
    if not packet:
        return None
    said = json.loads(packet)
    if not isinstance(said, Mapping) or not isinstance(said.get("say"), str):
        raise ValueError(f"not a message: {packet[:80]!r}")
    return dict(said)
