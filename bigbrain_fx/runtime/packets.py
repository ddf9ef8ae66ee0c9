"""JSON objects over a line to the supervisor, with files beside them; long ones travel in parts."""

from __future__ import annotations

import errno
import json
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

LONGEST_ORDER = 1 << 20  # bytes
MOST_FILES = 8
PART = 1 << 15  # characters of an object that travel in one packet: kernels allow that many
LATER = (errno.ENOMEM, errno.ENOBUFS)  # the kernel has no memory for a packet just now
LATER_S = 0.01


class JsonLine:
    """This process's end.

    Args:
        end: a connected SOCK_SEQPACKET socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._speaking = threading.Lock()  # parts of what one thread says stay together
        self._parts: list[str] = []

    def say(self, said: Mapping[str, object]) -> None:
        """Send an object.

        Raises:
            OSError: the other end is gone.
        """
        text = json.dumps(said)
        with self._speaking:
            for packet in _packets(text):
                self._send(packet)

    def _send(self, packet: bytes) -> None:
        while True:
            try:
                self.end.sendall(packet)
            except OSError as error:
                if error.errno not in LATER:
                    raise
                time.sleep(LATER_S)
            else:
                return

    def take(self, within_s: float) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """Return an object and the files that came with it; None where none is whole in time.

        Raises:
            ConnectionError: the other end is gone.
            OSError: it cannot be read, in a while (`LATER`) or at all.
        """
        ready, _, _ = select.select([self.end], [], [], within_s)
        if not ready:
            return None
        packet, files, flags, _ = socket.recv_fds(self.end, LONGEST_ORDER, MOST_FILES)
        if not packet:
            raise ConnectionError("the supervisor has ended")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise OSError(errno.EMFILE, "an order, or a file that came with it, is cut off")
        order: dict[str, Any] = json.loads(packet)
        if order["do"] != "part":
            return order, tuple(files)
        return self._joined(order)

    def _joined(self, part: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """Put a part to those before it; return the object after the last one."""
        self._parts.append(part["text"])
        if not part["last"]:
            return None
        whole, self._parts = "".join(self._parts), []
        return json.loads(whole), ()


def _packets(text: str) -> list[bytes]:
    """Return what to send of an object: itself, or parts of its text, which is ASCII."""
    if len(text) <= PART:
        return [text.encode()]
    starts = range(0, len(text), PART)
    return [
        json.dumps({"say": "part", "text": text[at : at + PART], "last": at == starts[-1]}).encode()
        for at in starts
    ]
