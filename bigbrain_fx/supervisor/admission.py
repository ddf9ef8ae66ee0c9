"""The first host's port: agents of the other hosts are let in, strangers turned away."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from .console import warn
from .limits import with_remedy
from .secured import Pair, Secured, StrangerError

AT_ONCE = 64  # who introduce themselves at a time; of more, the first to come has to go
LOOK_S = 0.1


@dataclass(frozen=True)
class _Guest:
    """A connection that has introduced itself: an agent of a host, or a refusal (`why`)."""

    connection: socket.socket
    address: str
    secured: Secured | None = None
    host: object = None
    why: str = ""


class Door:
    """Take connections at a port; all introduce themselves at a time, so none holds up another."""

    def __init__(self, listener: socket.socket, pair: Pair) -> None:
        self.listener = listener
        self.pair = pair
        self.here: list[socket.socket] = []
        self.known: queue.SimpleQueue[_Guest] = queue.SimpleQueue()

    def admit(self, hosts: set[str], wait_s: float) -> dict[str, Secured]:
        """Wait for the agents of all hosts.

        Raises:
            TimeoutError: names the hosts that are missing.
        """
        until, found = time.monotonic() + wait_s, dict[str, Secured]()
        self.listener.settimeout(LOOK_S)
        try:
            while missing := hosts - found.keys():
                if time.monotonic() > until:
                    raise TimeoutError(f"no agent came from {', '.join(sorted(missing))}")
                self._open()
                self._take(missing, found.__setitem__)
        except BaseException:
            for secured in found.values():
                secured.dispose()
            raise
        finally:
            for connection in self.here:
                _shut(connection)
        return found

    def _open(self) -> None:
        try:
            connection, address = self.listener.accept()
        except TimeoutError:
            return
        except OSError as error:  # no more files, or it has gone again
            warn(f"a connection was not taken: {error}")
            time.sleep(LOOK_S)
            return
        given = connection, address[0]
        try:
            threading.Thread(target=self._introduce, args=given, daemon=True).start()
        except RuntimeError as error:
            connection.close()
            warn(f"{address[0]} was not heard: {with_remedy(error)}")
            return
        self.here.append(connection)
        if len(self.here) > AT_ONCE:
            _shut(self.here.pop(0))

    def _introduce(self, connection: socket.socket, address: str) -> None:
        try:
            secured = Secured(connection, self.pair, is_head=True)
            host = (secured.hear() or {}).get("host")
        except (StrangerError, OSError) as error:
            connection.close()
            self.known.put(_Guest(connection, address, why=str(error)))
        else:
            self.known.put(_Guest(connection, address, secured, host))

    def _take(self, missing: set[str], keep: Callable[[str, Secured], None]) -> None:
        while not self.known.empty():
            guest = self.known.get()
            with suppress(ValueError):
                self.here.remove(guest.connection)
            if guest.secured is not None and guest.host in missing:
                missing.discard(str(guest.host))
                keep(str(guest.host), guest.secured)
                continue
            warn(f"turned away {guest.address}: {guest.why or f'it is host {guest.host!r}'}")
            if guest.secured is not None:
                guest.secured.dispose()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
