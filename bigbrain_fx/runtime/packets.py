"""JSON objects over a line to the supervisor, with files beside them, and what its orders say.

Long ones travel in parts.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .coded import CodedError
from .peers import PeerLostError

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


class SpoiledError(PeerLostError):
    """A message is not as it was sent: nobody has died, but it must be sent again."""


class StepAgainError(Exception):
    """Report that a step is begun again, by fewer devices: what this one has of it is gone."""


class HeadLostError(CodedError, RuntimeError):
    """Report that the supervisor that decides is lost: nobody takes another step."""


@dataclass(frozen=True)
class Duty:
    """Role of a process.

    Attributes:
        device: its name; None for a spare, which warms up and waits.
        rank: its number.
        local_rank: its number among those of this host, which chooses a GPU.
        epoch: the step to go on from, whose snapshot is in one of the slots; -1: from the start.
        slots: the step of the snapshot in each slot, -1 where there is none.
        files: the slots' file descriptors.
        again: all devices begin again, from the newest commit or, without one, from the start.
    """

    device: str | None
    rank: int = -1
    local_rank: int = 0
    epoch: int = -1
    slots: tuple[int, ...] = ()
    files: tuple[int, ...] = ()
    again: bool = False


@dataclass(frozen=True)
class Meeting:
    """Messages of all devices before they formed a generation.

    Attributes:
        generation: its number.
        expected: channel's tag -> the number of the message that its receiver waits for.
        layouts: tag -> shape and strides of the channel's messages, where somebody knows them.
        lacking: devices that take their state from peers -> the step that it is of.
    """

    generation: int
    expected: Mapping[int, int]
    layouts: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]
    lacking: Mapping[str, int]
