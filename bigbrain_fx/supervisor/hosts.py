"""Processes on other hosts: an agent there starts them for the one supervisor that decides.

    supervisor ── line ── bridge ═══ TCP, authenticated ═══ agent ── line ── process
                                                            agent owns the slots of its devices

To the supervisor a process behind a bridge is like one of its own: it has a line, and an end.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .line import LONGEST, MOST_FILES, Orders, line_pair
from .processes import ADDRESS, CONTROL, END_S, Order, Process, Start, end_now, end_of, popen
from .secured import Secured, StrangerError
from .slots import Slots

LOST = -9  # exit code of processes whose host is lost


class RemoteProcess:
    """A process behind a bridge, as `subprocess.Popen` shows one."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.pid = -1
        self.code: int | None = None
        self.is_lost = False  # with its host
        self.ended = threading.Event()
        self.end, self._end = os.pipe()  # readable once it has ended
        self._kill = kill

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` after `timeout` seconds."""
        if not self.ended.wait(timeout) or self.code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.code

    def kill(self) -> None:
        """End it."""
        self._kill()

    def dispose(self) -> None:
        """Give the pipe back."""
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def has_ended(self, code: int) -> None:
        """Take note of its end."""
        if self.code is None:
            self.code = code
            os.close(self._end)
            self.ended.set()


class Bridge:
    """The head's end of the connection to one agent; `start` starts processes there.

    Args:
        connection: to the agent.
    """

    def __init__(self, connection: Secured) -> None:
        self.connection = connection
        self.talk = threading.Lock()
        self.processes: dict[int, RemoteProcess] = {}
        self.lines: dict[int, socket.socket] = {}
        self.is_lost = False
        self.listener = threading.Thread(target=self._listen, daemon=True, name="bridge")
        self.listener.start()

    def start(self, order: Order) -> RemoteProcess:
        """Start a process on the other host."""
        number = len(self.processes)
        process = RemoteProcess(lambda: self._say({"kill": number}))
        line = socket.socket(fileno=os.dup(order.line))
        self.processes[number], self.lines[number] = process, line
        if self.is_lost:
            process.is_lost = True
            process.has_ended(LOST)
            return process
        ours = {k: v for k, v in order.environment.items() if k.startswith("BIGBRAIN_")}
        ours.pop(ADDRESS, None)  # of this host
        self._say({"start": number, "name": order.name, "words": order.words[1:], "more": ours})
        threading.Thread(target=self._forward, args=(number, line), daemon=True).start()
        return process

    def close(self) -> None:
        """Close the connection: the agent then ends its processes."""
        self.connection.close()
        self.listener.join(END_S)
        self.connection.dispose()
        for process in self.processes.values():
            process.dispose()

    def _say(self, what: dict[str, Any]) -> None:
        with self.talk, suppress(OSError):
            self.connection.say(what)

    def _forward(self, number: int, line: socket.socket) -> None:
        """Pass on the supervisor's orders; the agent has slots of its own."""
        while True:
            try:
                packet, files, _, _ = socket.recv_fds(line, LONGEST, MOST_FILES)
            except OSError:
                return
            for file in files:
                os.close(file)
            if not packet:
                return
            self._say({"to": number, "packet": packet.decode()})

    def _listen(self) -> None:
        try:
            while (said := self.connection.hear()) is not None:
                self._take(said)
        except (OSError, ValueError, StrangerError) as error:
            print(f"an agent is lost: {error}", file=sys.stderr)
        self.is_lost = True
        for number, process in list(self.processes.items()):
            process.is_lost = True
            self._ended(number, process, LOST)

    def _take(self, said: dict[str, Any]) -> None:
        if "from" in said:
            with suppress(OSError):
                self.lines[said["from"]].send(said["packet"].encode())
        elif "ended" in said:
            self._ended(said["ended"], self.processes[said["ended"]], said["code"])
        elif "started" in said:
            self.processes[said["started"]].pid = said["pid"]

    def _ended(self, number: int, process: RemoteProcess, code: int) -> None:
        with suppress(OSError):
            self.lines[number].shutdown(socket.SHUT_RDWR)
            self.lines[number].close()
        process.has_ended(code)


def admit(
    listener: socket.socket, secret: bytes, hosts: set[str], wait_s: float
) -> dict[str, Bridge]:
    """Wait for the agents of all hosts; who does not know the secret is turned away.

    Raises:
        TimeoutError: names the hosts that are missing.
    """
    listener.settimeout(wait_s)
    found: dict[str, Bridge] = {}
    while missing := hosts - found.keys():
        try:
            connection, address = listener.accept()
        except TimeoutError as error:
            raise TimeoutError(f"no agent came from {', '.join(sorted(missing))}") from error
        try:
            secured = Secured(connection, secret, is_head=True)
            said = secured.hear() or {}
        except (StrangerError, OSError, ValueError) as error:
            print(f"turned away {address[0]}: {error}", file=sys.stderr)
            connection.close()
            continue
        if said.get("host") in missing:
            found[said["host"]] = Bridge(secured)
        else:
            print(f"turned away {address[0]}: it is host {said.get('host')!r}", file=sys.stderr)
            secured.close()
    return found


def start_on(bridges: Mapping[str, Bridge], start: Start = popen) -> Start:
    """Return what starts each process on its host: through a bridge, or here."""

    def chosen(order: Order) -> Process:
        bridge = bridges.get(order.host)
        return start(order) if bridge is None else bridge.start(order)

    return chosen


class Agent:
    """Start processes for a supervisor on another host, and pass on what they say.

    Args:
        connection: to the supervisor.
        folder: of the bundle on this host; processes may run nothing else.
        environment: for every process.
        logs: folder of what each writes.
        start: starts processes.
    """

    def __init__(
        self,
        connection: Secured,
        folder: Path,
        environment: Mapping[str, str],
        logs: Path,
        start: Start = popen,
    ) -> None:
        self.connection = connection
        self.folder = folder
        self.environment = environment
        self.logs = logs
        self.start = start
        self.slots: dict[str, Slots] = {}
        self.processes: dict[int, Process] = {}
        self.orders: dict[int, Orders] = {}
        self.heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.selector = selectors.DefaultSelector()
        self.bell, self.button = socket.socketpair()

    def run(self, host: str) -> None:
        """Serve until the supervisor closes the connection; then every process is ended.

        Raises:
            StrangerError: a message was not the supervisor's.
        """
        self.connection.say({"host": host})
        self.selector.register(self.bell, selectors.EVENT_READ, (self._obey, -1))
        listener = threading.Thread(target=self._listen, daemon=True, name="agent")
        listener.start()
        try:
            while True:
                for key, _ in self.selector.select(1.0):
                    act, number = key.data
                    act(number)
        except _OverError:
            return
        except OSError:  # the supervisor's host is gone
            return
        finally:
            for process in self.processes.values():
                end_now(process)
            for slots in self.slots.values():
                slots.close()
            self.connection.close()
            listener.join(END_S)
            self._close()

    def _close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self.selector.close()
        for orders in self.orders.values():
            orders.line.close()
        self.bell.close()
        self.button.close()
        self.connection.dispose()

    def _listen(self) -> None:
        try:
            while (said := self.connection.hear()) is not None:
                self.heard.put(said)
                self.button.send(b"!")
        except (OSError, ValueError, StrangerError) as error:
            print(f"the supervisor is lost: {error}", file=sys.stderr)
        self.heard.put(None)
        self.button.send(b"!")

    def _obey(self, _: int) -> None:
        self.bell.recv(1)
        said = self.heard.get()
        if said is None:
            raise _OverError
        if "start" in said:
            self._require_ours(said["words"])
            self._begin(said["start"], said["name"], said["words"], said["more"])
        elif "kill" in said:
            self.processes[said["kill"]].kill()
        elif "to" in said:
            self._pass_on(said["to"], json.loads(said["packet"]))

    def _require_ours(self, words: list[str]) -> None:
        program = Path(words[0])
        if program.name != words[0] or not (self.folder / program).is_file():
            raise StrangerError(f"asked to run {words[0]!r}, which is no file of {self.folder}")

    def _begin(self, number: int, name: str, words: list[str], more: dict[str, str]) -> None:
        ours, theirs = line_pair()
        environment = {**self.environment, **more, CONTROL: "0"}
        with theirs:
            order = Order(
                name,
                (sys.executable, *words),
                self.folder,
                environment,
                theirs.fileno(),
                self.logs / f"{Path(name).name}.log",
            )
            process = self.start(order)
        self.processes[number], self.orders[number] = process, Orders(ours)
        self.selector.register(ours, selectors.EVENT_READ, (self._hear, number))
        self.selector.register(end_of(process), selectors.EVENT_READ, (self._ended, number))
        self.connection.say({"started": number, "pid": process.pid})

    def _pass_on(self, number: int, order: dict[str, Any]) -> None:
        do, device = order.pop("do"), order.get("device")
        files: list[int] = []
        if do == "be" and device is not None:
            files = self.slots.setdefault(device, Slots()).files
        self.orders[number].give(do, files, **order)

    def _hear(self, number: int) -> None:
        line = self.orders[number].line
        self.orders[number].pass_on()
        try:
            packet = line.recv(LONGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet:
            self.connection.say({"from": number, "packet": packet.decode()})
        else:
            self.selector.unregister(line)
            line.close()

    def _ended(self, number: int) -> None:
        code = self.processes[number].poll()
        if code is None:
            return
        line = self.orders[number].line
        while line.fileno() >= 0:  # what it said last
            self._hear(number)
        for key in list(self.selector.get_map().values()):
            if key.data == (self._ended, number):
                self.selector.unregister(key.fd)
                os.close(key.fd)
        self.connection.say({"ended": number, "code": code})


class _OverError(Exception):
    """The supervisor has closed the connection."""
