"""The processes of a run: it starts them, gives them orders, and hears what they say and their end.

It knows lines and processes, and neither steps nor snapshots: what follows from a word or an end is
for who made it.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .events import EventLog
from .hanging import Pulse
from .job import Job
from .line import Orders, Said, hear, line_pair
from .processes import CONTROL, LOG_BYTES, LOG_SHARERS, Member, Order, Start, end_now, end_of


class Crew:
    """The processes of a run, devices and spares.

    Args:
        job: what they run.
        start: starts processes.
        events: takes what happens to them.
        hear: is given what a process says.
        ended: is given a process that has ended, and its exit code, once it is no member any more.

    Attributes:
        generation: the newest that was announced.
        ending: they have been told to end.
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
        self.generation = 0
        self.ending = False
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
        """Return those that are devices."""
        return [member for member in self.members if member.device is not None]

    def spares(self, host: str) -> list[Member]:
        """Return those of a host that are no device yet, the oldest first."""
        return [m for m in self.members if m.device is None and m.host == host]

    def all_are(self, generation_of: Callable[[Member], int]) -> bool:
        """Return whether all devices have come as far as the newest generation."""
        here = {m.device for m in self.at_work() if generation_of(m) == self.generation}
        return here == set(self.job.devices)

    # ------------------------------------------------------------------ waiting

    def turn(self, wait_s: float) -> None:
        """Wait for the next thing to happen, and act on it."""
        for key, _ in self._selector.select(wait_s):
            act, member = key.data
            act(member)

    def wake(self) -> None:
        """End the wait; signal handlers may call this."""
        with suppress(BlockingIOError):
            self._button.send(b"!")

    def _ring(self, _: None) -> None:
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
        """Hear of room in a process's socket if orders wait for it."""
        key = self._selector.get_map().get(member.line)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.orders.waiting else 0)
        if key is not None and key.events != wanted:
            self._selector.modify(member.line, wanted, key.data)

    # ------------------------------------------------------------------ listening

    def _listen(self, member: Member) -> None:
        if member.orders.waiting:
            member.orders.pass_on()
            self._watch_room(member)
        with suppress(BlockingIOError):
            self._hear_all(member)
            self._selector.unregister(member.line)  # it ends, or has been told to
            if not self.ending:
                member.kill()

    def _hear_all(self, member: Member) -> None:
        """Hear until the line is closed; `BlockingIOError` when nothing more is there yet."""
        while (said := hear(member.line)) is not None:
            self._hear(member, said)

    # ------------------------------------------------------------------ starting and ending

    def start(self, name: str, host: str) -> Member:
        """Start a process; `name` is a device's, or "spare"."""
        ours, theirs = line_pair()
        self._started += 1
        known = {member.name for member in self.members}
        own = name if name not in known and self.generation == 0 else f"{name}.{self._started}"
        log = self.job.logs / f"{own}.log"
        environment = {
            **self.job.environment,
            **self._log_limit(host),
            CONTROL: "0",
            "BIGBRAIN_BEAT_S": str(self.job.beat_s),
        }
        with theirs:
            words, folder = self.job.words, self.job.folder
            given = Order(own, words, folder, environment, theirs.fileno(), log, host)
            process = self._start(given)
        now = time.monotonic()
        member = Member(own, process, ours, log, Pulse(now, now), now, Orders(ours), host)
        self.members.append(member)
        self._selector.register(ours, selectors.EVENT_READ, (self._listen, member))
        self._selector.register(end_of(process), selectors.EVENT_READ, (self._ended, member))
        self.report("started", device=name, pid=process.pid)
        return member

    def _log_limit(self, host: str) -> dict[str, str]:
        """Say how much a process may keep of sent messages, or with how many it shares a host."""
        if self.job.log_bytes is not None:
            return {LOG_BYTES: str(self.job.log_bytes)}
        alike = [name for name in self.job.devices if self.job.host_of(name) == host]
        return {LOG_SHARERS: str(max(1, len(alike)))}

    def _ended(self, member: Member) -> None:
        code = member.process.poll()
        if code is None:
            return
        if member in self.members and member.line.fileno() >= 0:
            with suppress(BlockingIOError):
                self._hear_all(member)  # what it said last
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
            end_now(member.process)

    def close(self) -> None:
        """End every process and give back what was used to hear of it."""
        self.end_now()
        for member in self.members:
            member.line.close()
        self._forget(lambda _: True)
        self._selector.close()
        self._bell.close()
        self._button.close()
