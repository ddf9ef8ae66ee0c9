"""The line to one device process: a pair of sockets, one JSON object a packet, files beside it.

The kernel takes packets up to a size that its administrator chose (`net.core.wmem_max`). A long
object therefore travels in parts, to processes that know of them.
"""

from __future__ import annotations

import errno
import json
import socket
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 1 << 20  # bytes of a packet
MOST_FILES = 8
ROOM = 1 << 20  # bytes that may wait in the kernel, where it allows so many
PART = 1 << 15  # characters of an object that travel in one packet
PARTS = "part"  # what a process must know to be given orders in parts
WHOLE = 1 << 28  # characters of an object that came in parts, at most

NO_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
# The kernel is short of memory, or of files under way: a little later there may be room.
LATER = (errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS)
ENDED = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF, errno.ECONNREFUSED)

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
    """Orders to one process, in their order; those that its socket cannot take yet wait here.

    Attributes:
        takes_parts: the process puts long orders together.
        refused: why an order could not be given at all; None: all could.
    """

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.takes_parts = False
        self.refused: str | None = None

    def give(self, do: str, files: Sequence[int] = (), **facts: object) -> None:
        """Give an order; to a process that is ending it means nothing."""
        text = json.dumps({"do": do, **facts})
        if self.takes_parts and len(text) > PART and not files:
            self.waiting += ((packet, ()) for packet in in_parts("do", text))
        else:
            self.waiting.append((text.encode(), tuple(files)))
        self.pass_on()

    def pass_on(self) -> None:
        """Send what waits, as far as the socket takes it."""
        while self.waiting:
            packet, files = self.waiting[0]
            try:
                self.line.sendmsg([packet], _rights(files), NO_WAIT)  # send_fds drops its flags
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in LATER:
                    return
                if error.errno not in ENDED:
                    self.refused = f"an order of {len(packet)} bytes cannot be given: {error}"
                self.waiting.clear()
                return
            self.waiting.popleft()


def in_parts(verb: str, text: str) -> list[bytes]:
    """Return the packets of an object that is too long for one; its text is ASCII."""
    starts = range(0, len(text), PART)
    return [
        json.dumps({verb: PARTS, "text": text[at : at + PART], "last": at == starts[-1]}).encode()
        for at in starts
    ]


class Ears:
    """Receive what a process says, packet by packet; what comes in parts is put together."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.parts: list[str] = []

    def hear(self) -> Said | None:
        """Return the next thing that is whole; None when the line is closed.

        Raises:
            ValueError: it is not what a process of ours says.
            BlockingIOError: nothing is there.
        """
        while (said := hear(self.line)) is not None:
            if said["say"] != PARTS:
                return said
            whole = self._whole(said)
            if whole is not None:
                return whole
        return None

    def _whole(self, part: Said) -> Said | None:
        text = part.get("text")
        if not isinstance(text, str) or len(self.parts) * PART > WHOLE:
            raise ValueError("not a part of a message")
        self.parts.append(text)
        if not part.get("last"):
            return None
        whole, self.parts = "".join(self.parts), []
        return _message(whole.encode())


def hear(line: socket.socket) -> Said | None:
    """Return what one packet of a process says; None when its line is closed.

    Raises:
        ValueError: it is not what a process of ours says.
        BlockingIOError: nothing is there.
    """
    try:
        packet = line.recv(LONGEST, socket.MSG_DONTWAIT)
    except ConnectionError:
        return None
    except OSError as error:
        if error.errno in LATER:
            raise BlockingIOError(error.errno, "later") from error
        raise
    return _message(packet) if packet else None


def _message(packet: bytes) -> Said:
    try:
        said = json.loads(packet)
    except RecursionError as error:
        raise ValueError(f"not a message: {packet[:80]!r}") from error
    if not isinstance(said, Mapping) or not isinstance(said.get("say"), str):
        raise ValueError(f"not a message: {packet[:80]!r}")
    return dict(said)
