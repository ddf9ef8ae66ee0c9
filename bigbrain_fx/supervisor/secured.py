"""Lines of JSON between supervisors over TCP, in TLS: both ends show the same certificate.

A file that its owner alone can read holds the certificate and its key, the same on all hosts. Each
end takes no other certificate than this one, so a process without the file receives and sends
nothing. Names and dates in it are not looked at: the clocks of hosts may differ.

Each end sends something at an even pace: a cut wire, or a host that is gone, shows by its silence.
A process that lives never ends a connection in order before its last message has left. An end in
order without a message therefore says that the process at the other end is gone. A process that
dies before it has read all may reset its connection, and so may what lies between. Where its port
takes calls no more, it was the process.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import select
import shlex
import shutil
import socket
import ssl
import stat
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .coded import CodedError

LONGEST = 4 << 20  # characters of a line
CALL_S = 2.0  # for a port to take a call, or to refuse it
CALL_AGAIN_S = 0.2
PATIENCE_S = 10.0  # for the other end to show its certificate
TICKS = 8  # looks, and words, within the longest silence
MOST_TICK_S = 1.0
SILENCE_S = 60.0  # unless the head says otherwise
BEAT = {"beat": 1}
PIECE = 1 << 16  # bytes that are read at a time
AT_ONCE = struct.pack("ii", 1, 0)  # of SO_LINGER: to close is to reset
NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python does not name

Object = dict[str, Any]


class SilentError(CodedError, OSError):
    """Report that nothing came for too long."""


class StrangerError(CodedError):
    """Report an end that does not have our certificate, or says what ours would not."""


def how_to_make(file: str) -> str:
    """Return what to type to make a certificate and its key, in one file; Python cannot."""
    name = shlex.quote(file)
    made = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
        f"-days 3650 -subj /CN=bigbrain -keyout {name} -out {name}"
    )
    where = "" if shutil.which("openssl") else " (openssl is not here: type it where it is)"
    return f"(umask 077; {made}){where}"


class Pair:
    """The certificate and the key of a file, for both ends of a connection.

    Raises:
        StrangerError: others may read it, or it holds something else.
    """

    def __init__(self, path: Path) -> None:
        remedy = f"make it anew, for all hosts: {how_to_make(str(path))}"
        try:
            found = path.stat()
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise StrangerError(
                    f"{path} must be readable by its owner only: chmod 600 {path}", code="BX6013"
                )
            if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
                raise ValueError("it is no file")
            self.certificate = ssl.PEM_cert_to_DER_cert(
                _certificate_in(path.read_text(encoding="utf-8"))
            )
            self.head = self._context(path, ssl.PROTOCOL_TLS_SERVER)
            self.agent = self._context(path, ssl.PROTOCOL_TLS_CLIENT)
        except FileNotFoundError as error:
            raise StrangerError(f"{path} is not there: {remedy}", code="BX6014") from error
        except (OSError, ValueError) as error:  # ssl's errors are OSErrors
            why = f"{path} is not a certificate with its key ({_reason(error)})"
            raise StrangerError(f"{why}: {remedy}", code="BX6015") from error

    @staticmethod
    def _context(path: Path, protocol: int) -> ssl.SSLContext:
        made = ssl.SSLContext(protocol)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.check_hostname = False
        made.verify_mode = ssl.CERT_REQUIRED
        made.verify_flags |= ssl.VerifyFlags(NO_CHECK_TIME | ssl.VERIFY_X509_PARTIAL_CHAIN)
        made.load_cert_chain(path, password="")  # one is never asked for at the terminal
        made.load_verify_locations(path)
        return made


def _certificate_in(text: str) -> str:
    head, begin, rest = text.partition("-----BEGIN CERTIFICATE-----")
    body, end, _ = rest.partition("-----END CERTIFICATE-----")
    if not end or "PRIVATE KEY-----" not in head + rest:
        raise ValueError("it needs both, as PEM")
    return begin + body + end


def _reason(error: Exception) -> str:
    text = str(getattr(error, "reason", None) or error) or type(error).__name__
    return text.splitlines()[0][:200]


class Secured:
    """One end of a connection; lines are read by one thread and written under a lock of its own.

    Args:
        connection: a connected TCP socket.
        pair: of both ends.
        is_head: whether this is the supervisor that decides.
        patience_s: for all of the other end's introduction, whatever it sends meanwhile.

    Attributes:
        silence_s: after so long without a word from the other end it is lost.

    Raises:
        StrangerError: the other end does not have our certificate.
    """

    def __init__(
        self,
        connection: socket.socket,
        pair: Pair,
        *,
        is_head: bool,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.connection = connection
        self.silence_s = patience_s
        self._read = bytearray()
        self._until: float | None = time.monotonic() + patience_s
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = pair.head if is_head else pair.agent
        self._tls = context.wrap_bio(self._in, self._out, server_side=is_head)
        self._ciphers = threading.Lock()  # OpenSSL takes one thread at a time
        self._speaking = threading.Lock()  # what is sealed first leaves first
        self._broken: str | None = None  # why nothing more goes through; None: it may
        self._was_reset = False
        self._peer = connection.getpeername()
        connection.settimeout(patience_s)  # of a whole `sendall`
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._introduce(pair)
        except (SilentError, TimeoutError) as error:
            self.dispose()
            why = f"the other end did not introduce itself within {patience_s:g} s"
            raise StrangerError(why, code="BX6016") from error
        except (OSError, StrangerError) as error:
            self.dispose()
            why = f"the other end does not have our certificate ({_reason(error)})"
            raise StrangerError(why, code="BX6017") from error
        self._until = None
        self.allow_silence(SILENCE_S)

    def _introduce(self, pair: Pair) -> None:
        while not self._has_shaken_hands():
            if not self._more():
                raise StrangerError("it has closed the connection", code="BX6018")
        if self._tls.getpeercert(binary_form=True) != pair.certificate:
            raise StrangerError("it shows another one", code="BX6019")
        self.say({"known": True})  # an agent learns only so that its own was taken
        if self.hear() != {"known": True}:
            raise StrangerError("it is no supervisor of ours", code="BX6020")

    def _has_shaken_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self.connection.sendall(self._out.read())  # also why it was refused
        return True

    @property
    def tick_s(self) -> float:
        """Seconds from one word to the next, and from one look for them to the next."""
        return min(MOST_TICK_S, self.silence_s / TICKS)

    def allow_silence(self, silence_s: float) -> None:
        """Let the other end be silent for so long, and no longer."""
        self.silence_s = silence_s
        self.connection.settimeout(silence_s)

    def say(self, what: Object) -> None:
        """Send one object."""
        line = json.dumps(what).encode() + b"\n"
        with self._speaking:
            with self._ciphers:
                self._tls.write(line)
                sealed = self._out.read()
            self.connection.sendall(sealed)

    def hear(self) -> Object | None:
        """Wait for the next object; None when the connection has closed.

        Raises:
            StrangerError: it is no object, or was changed on its way.
            SilentError: nothing came for too long.
        """
        found: Object | None = BEAT
        while found == BEAT:
            found = self._object()
        return found

    def _object(self) -> Object | None:
        while (end := self._find_end()) < 0:
            if len(self._read) > LONGEST:
                raise StrangerError("a message is too long", code="BX6021")
            if not self._more():
                return None
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return _object_of(line)

    def _find_end(self) -> int:
        """Open what has come; return where the next line ends, -1 where it does not yet."""
        try:
            with self._ciphers, suppress(ssl.SSLWantReadError):
                while some := self._tls.read(PIECE):
                    self._read += some
        except ssl.SSLError as error:
            raise StrangerError(
                f"a message was refused, or changed: {_reason(error)}", code="BX6022"
            ) from error
        return self._read.find(b"\n")

    def _more(self) -> bool:
        """Wait for bytes; return whether there are any: False when the connection has closed.

        Only time in which this process looked counts: it may have been stopped, and then has not
        heard what was said.
        """
        waiter, silent_s = select.poll(), 0.0
        waiter.register(self.connection, select.POLLIN)
        while not waiter.poll(1000 * self.tick_s):
            silent_s += self.tick_s
            if silent_s >= self.silence_s:
                raise SilentError(
                    f"nothing was heard of it for {self.silence_s:g} s", code="BX6023"
                )
            self._require_in_time()
        self._require_in_time()
        try:
            some = self.connection.recv(PIECE)
        except ConnectionResetError:
            self._was_reset = True
            raise
        if not some and self._broken is not None:  # it has not ended: this end listens no more
            raise SilentError(self._broken, code="BX6024")
        with self._ciphers:
            self._in.write(some)
        return bool(some)

    def _require_in_time(self) -> None:
        if self._until is not None and time.monotonic() > self._until:
            raise SilentError("it did not introduce itself in time", code="BX6025")

    def is_gone(self) -> bool:
        """Whether a connection that was reset was so by the end of the process that took it."""
        until = time.monotonic() + CALL_S
        while self._was_reset and time.monotonic() < until:
            try:
                socket.create_connection(self._peer[:2], CALL_S).close()
            except ConnectionRefusedError:
                return True
            except OSError:
                return False
            time.sleep(CALL_AGAIN_S)  # a process that ends closes one thing after another
        return False

    def break_off(self, why: OSError | str) -> None:
        """Receive and send no more, and let the other end not take that for an end in order."""
        self._was_reset = self._was_reset or isinstance(why, ConnectionResetError)
        self._broken = self._broken or str(why)
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            self.connection.shutdown(socket.SHUT_RD)  # who waits for a line hears so

    def close(self) -> None:
        """End it in order, for both ends: a thread that waits for a line returns.

        One that was broken off stays as it is.
        """
        if self._broken is not None:
            return
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Give the socket back; nobody may be waiting for a line."""
        self.close()
        self.connection.close()


def _object_of(text: bytes) -> Object:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StrangerError("a message is no object", code="BX6026") from error
    if not isinstance(found, dict):
        raise StrangerError("a message is no object", code="BX6027")
    return found


class Mouth:
    """Send messages over a connection in a thread of its own; a beat where none is waiting.

    No caller then waits for a connection that takes no more.
    """

    def __init__(self, connection: Secured) -> None:
        self.connection = connection
        self.waiting: queue.SimpleQueue[Object | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True, name="mouth")
        self.thread.start()

    def say(self, what: Object) -> None:
        """Let something be said soon."""
        self.waiting.put(what)

    def close(self, wait_s: float) -> None:
        """End it, once what waits has been said; a connection that takes no more is broken off."""
        self.waiting.put(None)
        self.thread.join(wait_s)
        if self.thread.is_alive():
            self.connection.break_off("it takes no more")

    def _run(self) -> None:
        try:
            while (what := self._next()) is not None:
                self.connection.say(what)
        except OSError as error:
            if error.errno != errno.EPIPE:  # then the other end has closed it: who listens hears so
                self.connection.break_off(error)

    def _next(self) -> Object | None:
        try:
            return self.waiting.get(timeout=self.connection.tick_s)
        except queue.Empty:
            return BEAT
