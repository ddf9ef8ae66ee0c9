"""Processes on other hosts: an agent there starts them for the one supervisor that decides.

    supervisor ── line ── bridge ════════ TLS ═════════════ agent ── line ── process
                                                            agent owns the slots of its devices

To the supervisor a process behind a bridge is like one of its own: it has a line, and an end.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from .admission import Door
from .console import warn
from .limits import with_remedy
from .pipe import ENDED, LATER, LONGEST, MOST_FILES, Orders, line_pair
from .processes import (
    ADDRESS,
    CALLED_IN,
    CONTROL,
    END_S,
    DeviceProcess,
    Order,
    Start,
    end_now,
    end_of,
    popen,
)
from .remaining import Places, Remaining, RemoteProcess, said_of
from .secured import SILENCE_S, Mouth, Pair, Secured, SilentError, StrangerError
from .snapshots import SnapshotMemory
from .starving import Starving

LOST = -9  # exit code of processes whose host is lost
NOT_STARTED = 71  # and of those that could not be started there; EX_OSERR of sysexits.h
READ = selectors.EVENT_READ
LAST_COMMIT_S = 300.0  # longest wait for what devices keep when the head is lost
LAST_WORD_S = 1.0  # longest wait for a wire to take it
LOOK_S = 1.0  # between two looks at what processes had of the processors
LEAST_STARVED_S = 0.1  # in that time: less is not worth a word
LATER_S = 0.01  # the kernel has no memory for a packet just now
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, StrangerError)


class Bridge:
    """The head's end of the connection to one agent; `start` starts processes there.

    Args:
        connection: to the agent.
        silence_s: after so long without a word of the other end either is lost to the other.
    """

    def __init__(self, connection: Secured, silence_s: float = SILENCE_S) -> None:
        self.connection = connection
        self.mouth = Mouth(connection)
        self.mouth.say({"silence_s": silence_s})
        connection.allow_silence(silence_s)
        self.processes: dict[int, RemoteProcess] = {}
        self.lines: dict[int, socket.socket] = {}
        self.is_lost = False
        self.is_asked_to_stop = False
        self.on_stop: Callable[[], None] | None = None
        self.listener = threading.Thread(target=self._listen, daemon=True, name="bridge")
        self.listener.start()

    def start(self, order: Order) -> RemoteProcess:
        """Start a process on the other host."""
        number = len(self.processes)
        process = RemoteProcess(lambda: self.mouth.say({"kill": number}))
        line = socket.socket(fileno=os.dup(order.line))
        self.processes[number], self.lines[number] = process, line
        if self.is_lost:
            process.is_lost = True
            process.has_ended(LOST)
            return process
        ours = {k: v for k, v in order.environment.items() if k.startswith("BIGBRAIN_")}
        ours.pop(CALLED_IN, None)  # it has been called there, too
        ours.pop(ADDRESS, None)  # of this host
        self.mouth.say(
            {"start": number, "name": order.name, "words": order.words[1:], "more": ours}
        )
        threading.Thread(target=self._forward, args=(number, line), daemon=True).start()
        return process

    def pass_on_stop(self, ask: Callable[[], None]) -> None:
        """Let the agent's host ask the run to stop: it may have asked already."""
        self.on_stop = ask
        if self.is_asked_to_stop:
            ask()

    def close(self, code: int = 0) -> None:
        """Say how the run has ended, and close the connection: the agent ends its processes."""
        if not self.is_lost:
            self.mouth.say({"over": code})
            self.mouth.close(END_S)  # before: an end without a word would say that we are gone
        self.connection.close()
        self.listener.join(END_S)
        self.mouth.close(END_S)
        self.connection.dispose()
        for process in self.processes.values():
            process.dispose()

    def _forward(self, number: int, line: socket.socket) -> None:
        """Pass on the supervisor's orders; the agent has slots of its own."""
        while True:
            try:
                packet, files, _, _ = socket.recv_fds(line, LONGEST, MOST_FILES)
            except OSError as error:
                if error.errno not in LATER:
                    return
                time.sleep(LATER_S)
                continue
            for file in files:
                os.close(file)
            if not packet:
                return
            self.mouth.say({"to": number, "packet": packet.decode()})

    def _listen(self) -> None:
        try:
            while (said := self.connection.hear()) is not None:
                self._take(said)
        except BROKEN as error:
            warn(f"an agent is lost: {error}")
            self.mouth.say({"given_up": str(error)})  # it may be there, and only its words be lost
            self.mouth.close(LAST_WORD_S)
        self.is_lost = True
        self.connection.close()
        for number, process in list(self.processes.items()):
            process.is_lost = True
            self._ended(number, process, LOST)

    def _take(self, said: dict[str, Any]) -> None:
        if "from" in said:
            self._pass_on(said["from"], said["packet"].encode())
        elif "ended" in said:
            self._ended(said["ended"], self.processes[said["ended"]], said["code"])
        elif "started" in said:
            self.processes[said["started"]].pid = said["pid"]
        elif "starved" in said:
            self.processes[said["starved"]].starving.total_s = float(said["seconds"])
        elif "stop" in said:
            self.is_asked_to_stop = True
            if self.on_stop is not None:
                self.on_stop()

    def _pass_on(self, number: int, packet: bytes) -> None:
        """Pass on a process's word; one that cannot be heard is ended, and so replaced."""
        while True:
            try:
                self.lines[number].send(packet)
            except OSError as error:
                if error.errno in LATER:
                    time.sleep(LATER_S)
                    continue
                if error.errno not in ENDED:
                    warn(f"a word of process {self.processes[number].pid} is lost: {error}")
                    self.mouth.say({"kill": number})
            return

    def _ended(self, number: int, process: RemoteProcess, code: int) -> None:
        with suppress(OSError):
            self.lines[number].shutdown(socket.SHUT_RDWR)
            self.lines[number].close()
        process.has_ended(code)


def admit(
    listener: socket.socket,
    pair: Pair,
    hosts: set[str],
    wait_s: float,
    silence_s: float = SILENCE_S,
) -> dict[str, Bridge]:
    """Wait for the agents of all hosts; who has not the same certificate is turned away.

    Raises:
        TimeoutError: names the hosts that are missing.
    """
    found = Door(listener, pair).admit(hosts, wait_s)
    return {host: Bridge(secured, silence_s) for host, secured in found.items()}


def start_on(bridges: Mapping[str, Bridge], start: Start = popen) -> Start:
    """Return what starts each process on its host: through a bridge, or here."""

    def chosen(order: Order) -> DeviceProcess:
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
        places: all hosts but the supervisor's, and their devices.
        grace_s: longest wait for a last commit, when the supervisor is lost.
        snapshots: folder of a disk where they lie; None: in memory.
    """

    def __init__(
        self,
        connection: Secured,
        folder: Path,
        environment: Mapping[str, str],
        logs: Path,
        start: Start = popen,
        places: Places = (),
        grace_s: float = LAST_COMMIT_S,
        snapshots: Path | None = None,
    ) -> None:
        self.connection = connection
        self.snapshots = snapshots
        self.mouth = Mouth(connection)
        self.folder = folder
        self.environment = environment
        self.logs = logs
        self.start = start
        self.slots: dict[str, SnapshotMemory] = {}
        self.processes: dict[int, DeviceProcess] = {}
        self.orders: dict[int, Orders] = {}
        self.starving: dict[int, Starving] = {}
        self.looked = 0.0
        self.places, self.grace_s = places, grace_s
        self.remaining = Remaining("", places, self.orders)
        self.lost: SilentError | None = None
        self.is_gone = False  # the supervisor's process has ended; else it may be there
        self.code: int | None = None
        self.heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.selector = selectors.DefaultSelector()
        self.bell, self.button = socket.socketpair()

    def run(self, host: str) -> int:
        """Serve until the supervisor says that the run is over; then every process is ended.

        Returns:
            The exit code of the run.

        Raises:
            StrangerError: a message was not the supervisor's.
            SilentError: nothing came from the supervisor for too long, or it ended without
                saying that the run is over; says what is kept here.
        """
        self.remaining = Remaining(host, self.places, self.orders)
        self.mouth.say({"host": host})
        self.selector.register(self.bell, selectors.EVENT_READ, (self._obey, -1))
        listener = threading.Thread(target=self._listen, daemon=True, name="agent")
        listener.start()
        try:
            while True:
                self._turn()
                self._tell_starved()
        except _OverError:
            if self.code is not None:
                return self.code
            self._keep_last()
            kept = said_of(self.remaining, is_gone=self.is_gone)
            raise SilentError(f"{self.lost}; {kept}", code="BX6007") from None
        finally:
            self.connection.close()
            for process in self.processes.values():
                process.kill()
            for number, process in self.processes.items():
                if not end_now(process):
                    warn(f"process {process.pid} (number {number}) could not be ended")
            for slots in self.slots.values():
                slots.close()
            listener.join(END_S)
            self.mouth.close(END_S)
            self._close()

    def ask_to_stop(self) -> None:
        """Ask the supervisor to end the run after its step; signal handlers may call this."""
        self.mouth.say({"stop": True})

    def _turn(self) -> None:
        for key, _ in self.selector.select(LOOK_S):
            act, number = key.data
            act(number)

    def _keep_last(self) -> None:
        """Let the devices here keep what they have, where nobody decides any more."""
        self.selector.unregister(self.bell)
        for number in self.processes.keys() - self.remaining.devices.keys():
            self._kill(number)  # spares
        until = time.monotonic() + self.grace_s
        if self.remaining.begin(is_gone=self.is_gone):
            while not self.remaining.is_over and time.monotonic() < until:
                self._turn()

    def _tell_starved(self) -> None:
        """Say how long processes had no processor here: it counts for nothing."""
        if time.monotonic() - self.looked < LOOK_S:
            return
        self.looked = time.monotonic()
        for number, starving in self.starving.items():
            before = starving.total_s
            if starving.look() - before > LEAST_STARVED_S:
                self.mouth.say({"starved": number, "seconds": starving.total_s})

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
            if self.lost is None:
                self.lost, self.is_gone = (
                    SilentError("its process has ended without a word", code="BX6008"),
                    True,
                )
        except SilentError as error:
            self.lost = error
        except (OSError, StrangerError) as error:
            self.lost = SilentError(str(error), code="BX6009")
        self.is_gone = self.is_gone or self.connection.is_gone()
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
            self._kill(said["kill"])
        elif "given_up" in said:
            self.lost = SilentError(f"it has given this host up: {said['given_up']}", code="BX6010")
            raise _OverError
        elif "over" in said:
            self.code = int(said["over"])
            raise _OverError
        elif "silence_s" in said:
            self.connection.allow_silence(float(said["silence_s"]))
        elif "to" in said:
            self._pass_on(said["to"], json.loads(said["packet"]))

    def _kill(self, number: int) -> None:
        if number in self.processes:  # it could be started
            self.processes[number].kill()

    def _require_ours(self, words: list[str]) -> None:
        program = Path(words[0])
        if program.name != words[0] or not (self.folder / program).is_file():
            raise StrangerError(
                f"asked to run {words[0]!r}, which is no file of {self.folder}", code="BX6011"
            )

    def _begin(self, number: int, name: str, words: list[str], more: dict[str, str]) -> None:
        environment = {**self.environment, **more, CONTROL: "0"}
        log = self.logs / f"{Path(name).name}.log"
        words = [sys.executable, *words]
        try:
            with ExitStack() as on_failure:
                ours, theirs = line_pair()
                on_failure.callback(ours.close)
                with theirs:
                    given = theirs.fileno(), log
                    order = Order(name, tuple(words), self.folder, environment, *given)
                    process = self.start(order)
                on_failure.callback(end_now, process)
                self.selector.register(end_of(process), READ, (self._ended, number))
                self.selector.register(ours, READ, (self._hear, number))
                on_failure.pop_all()
        except OSError as error:
            warn(f"no process can be started: {with_remedy(error)}")
            self.mouth.say({"ended": number, "code": NOT_STARTED})
            return
        self.processes[number], self.orders[number] = process, Orders(ours)
        self.starving[number] = Starving(process.pid)
        self.mouth.say({"started": number, "pid": process.pid})

    def _pass_on(self, number: int, order: dict[str, Any]) -> None:
        do, device = order.pop("do"), order.get("device")
        files: list[int] = []
        if do == "be" and device is not None:
            if device not in self.slots:
                self.slots[device] = SnapshotMemory.within(self.snapshots)
            files = self.slots[device].files
        if number in self.orders:
            self.remaining.pass_order(number, {"do": do, **order})
            self.orders[number].give(do, files, **order)

    def _hear(self, number: int) -> None:
        line = self.orders[number].line
        self.orders[number].pass_on()
        try:
            packet = line.recv(LONGEST, socket.MSG_DONTWAIT)
        except OSError as error:
            if isinstance(error, BlockingIOError) or error.errno in LATER:
                return
            packet = b""
        if packet:
            self.remaining.pass_word(number, packet)
            self.mouth.say({"from": number, "packet": packet.decode()})
        else:
            self.selector.unregister(line)
            line.close()

    def _ended(self, number: int) -> None:
        code = self.processes[number].poll()
        if code is None:
            return
        self.starving.pop(number, None)
        line = self.orders[number].line
        while line.fileno() >= 0:  # what it said last
            self._hear(number)
        for key in list(self.selector.get_map().values()):
            if key.data == (self._ended, number):
                self.selector.unregister(key.fd)
                os.close(key.fd)
        self.remaining.end(number)
        self.mouth.say({"ended": number, "code": code})


class _OverError(Exception):
    """The run is over, or the supervisor is lost."""
