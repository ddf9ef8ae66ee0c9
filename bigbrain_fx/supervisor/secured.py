"""Lines of JSON between supervisors over TCP; every one is authenticated, none is encrypted.

Both ends know a secret, which lies in a file that its owner alone can read. Each end first sends a
random number; the key of the connection is made of the secret and both numbers, so nothing that was
heard on one connection is taken on another. Every line carries the HMAC of its place and text.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LONGEST = 4 << 20  # characters of a line
PATIENCE_S = 10.0  # for the other end to show that it knows the secret


class StrangerError(Exception):
    """Report an end that does not know the secret, or a line that was changed."""


def read_secret(path: Path) -> bytes:
    """Return the secret of a file.

    Raises:
        StrangerError: others may read it, or it is too short.
    """
    found = path.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StrangerError(f"{path} must be readable by its owner only: chmod 600 {path}")
    secret = path.read_bytes().strip()
    if len(secret) < 16:
        raise StrangerError(f"{path} must hold 16 characters or more")
    return secret


class Secured:
    """One end of a connection; lines are read by one thread and written under a lock of its own.

    Raises:
        StrangerError: the other end does not know the secret.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, is_head: bool) -> None:
        self.connection = connection
        self.own, self.other = ("head", "agent") if is_head else ("agent", "head")
        self.sent = self.heard = 0
        self.key = b""
        connection.settimeout(PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader: IO[bytes] = connection.makefile("rb")
        mine = secrets.token_bytes(16)
        try:
            connection.sendall(mine)
            theirs = self.reader.read(16)
            both = mine + theirs if is_head else theirs + mine
            self.key = hmac.digest(secret, both, "sha256")
            self.say({"known": True})
            if self.hear() != {"known": True}:
                raise StrangerError("the other end is no supervisor of ours")
        except (OSError, ValueError, StrangerError) as error:
            self.dispose()
            raise StrangerError("the other end does not know the secret") from error
        connection.settimeout(None)

    def say(self, what: dict[str, Any]) -> None:
        """Send one object."""
        text = json.dumps(what).encode()
        line = self._mark(self.own, self.sent, text).encode() + b" " + text + b"\n"
        self.sent += 1
        self.connection.sendall(line)

    def hear(self) -> dict[str, Any] | None:
        """Wait for the next object; None when the connection has closed.

        Raises:
            StrangerError: it is not what the other end sent, or not in its place.
        """
        line = self.reader.readline(LONGEST)
        if not line:
            return None
        mark, _, text = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(mark, self._mark(self.other, self.heard, text).encode()):
            raise StrangerError("a message does not carry the mark of the other end")
        self.heard += 1
        found = json.loads(text)
        if not isinstance(found, dict):
            raise StrangerError("a message is no object")
        return found

    def close(self) -> None:
        """End it for both ends: a thread that waits for a line hears so."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Give the socket back; nobody may be waiting for a line."""
        self.close()
        self.reader.close()
        self.connection.close()

    def _mark(self, end: str, number: int, text: bytes) -> str:
        return hmac.digest(self.key, f"{end} {number} ".encode() + text, "sha256").hex()
