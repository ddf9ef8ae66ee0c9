"""The processes of a run: starts them, sends orders, receives their messages and their ends.

The module knows connections and processes, and neither steps nor snapshots. The part that asked for
a message or an end decides what follows.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from .coded import CodedError
from .events import EventLog
from .job import Job
from .limits import with_remedy
from .pipe import Ears, Orders, Said, line_pair
from .policies import Policies
from .processes import (
    CONTROL,
    AwakeClock,
    Member,
    Order,
    Start,
    end_now,
    end_of,
)
from .protocol import LastWord


class Spares:
    """Keep spares among the processes of a crew.

    Attributes:
        lost: how many ended, one after another, without that one came to be warm.
    """

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.lost = 0

    def fill(self) -> None:
        """Start as many as are missing, unless they end again and again."""
        job = self.crew.job
        if self.lost > job.spares:
            return
        for host in sorted({job.host_of(device) for device in self.crew.devices}):
            for _ in range(job.spares - len(self.crew.spares(host))):
                self._start(host)

    def _start(self, host: str) -> None:
        try:
            self.crew.order(self.crew.start("spare", host), "be", device=None)
        except StartError as error:  # the run goes on without
            self.lost += 1
            self.crew.report("no_spare", text=str(error))

    def take(self, device: str) -> Member:
        """Return a spare of a device's host, a warm one if there is; else a new process."""
        host = self.crew.job.host_of(device)
        spares = sorted(self.crew.spares(host), key=lambda member: not member.is_warm)
        return spares[0] if spares else self.crew.start(device, host)

    def hear_warm(self, member: Member) -> None:
        """Note that a process could become a device at once."""
        member.is_warm = True
        if member.device is None:
            self.lost = 0
            self.crew.report("spare_ready", device=member.name, pid=member.process.pid)

    def hear_end(self, spare: Member, code: int) -> None:
        """Note that a spare has ended; another is started when devices are next connected."""
        self.lost += 1
        self.crew.report(
            "died",
            device="spare",
            pid=spare.process.pid,
            step=-1,
            how=f"ended with exit code {code}",
            silent_s=0.0,
        )


AGAIN_S = (0.1, 0.5)  # a process that cannot be started for want of memory or files is tried again


class StartError(CodedError):
    """Report that no process can be started here."""


class Crew:
    """The processes of a run, devices and spares.

    Args:
        job: what they run.
        start: starts processes.
        events: takes what happens to them.
        hear: is given what a process says.
        ended: is given a process that has ended, and its exit code, once it has left the crew.

    Attributes:
        clock: what all deadlines of the run are of.
        generation: the newest that was announced.
        devices: that are left; others were lost for good, with their replicas.
        ending: they have the order to end.
        policies: what the run has besides.
    """

    def __init__(
        self,
        job: Job,
        start: Start,
        events: EventLog,
        hear: Callable[[Member, Said], None],
        ended: Callable[[Member, int], None],
    ) -> None:
        self.job = job
        self.events = events
        self.clock = AwakeClock(job.beat_s)
        self.generation = 0
        self.devices = job.devices
        self.ending = False
        self.policies = Policies()
        self.members: list[Member] = []
        self._start = start
        self._hear = hear
        self._has_ended = ended
        self._started = 0
        self._selector = selectors.DefaultSelector()
        self._bell, self._button = socket.socketpair()
        self._button.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, (self._ring, None))

    # ------------------------------------------------------------------ who is there

    def at_work(self) -> list[Member]:
        """Return those that are devices, and not lost."""
        return [member for member in self.members if member.device in self.devices]

    def spares(self, host: str) -> list[Member]:
        """Return those of a host that are no device yet, the oldest first."""
        alike = (m for m in self.members if m.device is None and m.host == host)
        return [member for member in alike if not member.recalled]

    def all_are(self, generation_of: Callable[[Member], int]) -> bool:
        """Return whether all devices have come as far as the newest generation."""
        here = {m.device for m in self.at_work() if generation_of(m) == self.generation}
        return here == set(self.devices)

    @property
    def lost(self) -> list[str]:
        """The devices that the run goes on without."""
        return [device for device in self.job.devices if device not in self.devices]

    # ------------------------------------------------------------------ waiting

    def turn(self, wait_s: float) -> None:
        """Wait for the next thing to happen, and act on it."""
        for key, _ in self._selector.select(wait_s):
            act, member = key.data
            act(member)

    def wake(self) -> None:
        """End the wait; signal handlers may call this."""
        with suppress(OSError):  # full: it will wake; or no memory: it does so before long
            self._button.send(b"!")

    def _ring(self, _: None) -> None:
        with suppress(OSError):  # it rings again
            self._bell.recv(100)

    # ------------------------------------------------------------------ telling

    def report(self, event: str, **facts: object) -> None:
        """Write an event of this generation."""
        self.events.write(event, self.generation, **facts)

    def order(self, member: Member, do: str, **facts: Any) -> None:  # noqa: ANN401  # JSON, files
        """Give an order to one process."""
        member.orders.give(do, **facts)
        self._watch_room(member)

    def tell(self, do: str, **facts: object) -> None:
        """Give an order to all devices."""
        for member in self.at_work():
            self.order(member, do, **facts)

    def _watch_room(self, member: Member) -> None:
        """Note room in a process's socket if orders wait for it."""
        if member.orders.refused is not None and member.failure is None:
            self.refuse(member, member.orders.refused)
        key = self._selector.get_map().get(member.line)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.orders.waiting else 0)
        if key is not None and key.events != wanted:
            self._selector.modify(member.line, wanted, key.data)

    # ------------------------------------------------------------------ listening

    def _listen(self, member: Member) -> None:
        if member.line.fileno() < 0:  # its end was heard in this very turn
            return
        if member.orders.waiting:
            member.orders.pass_on()
            self._watch_room(member)
        if self._is_closed_after_all(member):
            self._selector.unregister(member.line)  # it ends, or has been told to
            if not self.ending:
                member.kill()

    def _is_closed_after_all(self, member: Member) -> bool:
        """Hear all that a process has said; return whether no more will come."""
        try:
            while (said := member.ears.hear()) is not None:
                self._hear(member, said)
        except BlockingIOError:
            return False
        except ValueError as error:
            self.refuse(member, str(error))
        return True

    def refuse(self, member: Member, why: str) -> None:
        """End a process that cannot be spoken with; the reason counts as its own word."""
        member.failure = member.failure or LastWord(f"its line to the supervisor failed: {why}", 1)
        member.kill()

    # ------------------------------------------------------------------ starting and ending

    def start(self, name: str, host: str) -> Member:
        """Start a process; `name` is a device's, or "spare".

        Raises:
            StartError: there is no memory, or no file, for another one.
        """
        self._started += 1
        known = {member.name for member in self.members}
        own = name if name not in known and self.generation == 0 else f"{name}.{self._started}"
        for pause_s in AGAIN_S:
            try:
                return self._start_once(name, own, host)
            except OSError:
                time.sleep(pause_s)
        try:
            return self._start_once(name, own, host)
        except OSError as error:
            raise StartError(
                f"no process can be started: {with_remedy(error)}", code="BX6003"
            ) from error

    def _start_once(self, name: str, own: str, host: str) -> Member:
        environment = {
            **self.job.environment,
            **self.policies.joined("limits", host),
            CONTROL: "0",
            "BIGBRAIN_BEAT_S": str(self.job.beat_s),
        }
        log, (words, folder) = self.job.logs / f"{own}.log", (self.job.words, self.job.folder)
        with ExitStack() as on_failure:
            ours, theirs = line_pair()
            on_failure.callback(ours.close)
            with theirs:
                given = Order(own, words, folder, environment, theirs.fileno(), log, host)
                process = self._start(given)
            on_failure.callback(end_now, process)
            now = self.clock.now()
            about = Orders(ours), Ears(ours), host
            member = Member(own, process, ours, log, now, now, *about)
            self._selector.register(end_of(process), selectors.EVENT_READ, (self._ended, member))
            self._selector.register(ours, selectors.EVENT_READ, (self._listen, member))
            on_failure.pop_all()
        self.members.append(member)
        self.report("started", device=name, pid=process.pid)
        no_log = getattr(process, "no_log", None)
        if no_log is not None:
            self.report("log_lost", device=own, text=no_log)
        return member

    def _ended(self, member: Member) -> None:
        code = member.process.poll()
        if code is None:
            return
        if member in self.members and member.line.fileno() >= 0:
            self._is_closed_after_all(member)  # what it said last
        self.members.remove(member)
        self._forget(lambda known: known is member)
        member.line.close()
        if not self.ending:
            self._has_ended(member, code)

    def _forget(self, is_one: Callable[[Member | None], bool]) -> None:
        """Wait no more for some processes."""
        for key in list(self._selector.get_map().values()):
            if is_one(key.data[1]):
                self._selector.unregister(key.fd)
                if isinstance(key.fileobj, int):
                    os.close(key.fileobj)

    def end(self) -> None:
        """Let all end: devices by themselves, spares at once."""
        self.ending = True
        self.tell("end")
        for spare in self.members:
            if spare.device is None:
                spare.kill()

    def end_now(self) -> None:
        """End every process and wait for it."""
        for member in self.members:
            member.kill()
        for member in self.members:
            if not end_now(member.process):
                self.report("left", device=member.device or member.name, pid=member.process.pid)

    def recall(self) -> None:
        """End the processes of all devices, so that others begin as them."""
        for member in self.at_work():
            self.recall_one(member)

    def recall_one(self, member: Member) -> None:
        """End a process, whose end says nothing then."""
        if not member.recalled and member.process.poll() is None:
            member.recalled = True
            member.kill()

    def close(self) -> None:
        """End every process and close what its messages came by."""
        self.end_now()
        for member in self.members:
            member.line.close()
        self._forget(lambda _: True)
        self._selector.close()
        self._bell.close()
        self._button.close()
