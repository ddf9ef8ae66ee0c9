"""Processes of a supervisor that a test plays: what they are told, what they say, when they end."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bigbrain_fx.supervisor import Event, EventLog, Job, Order, Rescue, Supervisor
from bigbrain_fx.supervisor.remaining import RemoteProcess

LIMIT_S = 20.0


class Puppet:
    """One process; `told` has its orders, the oldest first."""

    def __init__(self, order: Order) -> None:
        self.name = order.name
        self.line = socket.socket(fileno=os.dup(order.line))
        self.line.setblocking(False)
        self.process = RemoteProcess(lambda: self.end(-9))
        self.told: list[dict[str, Any]] = []
        self.is_silent = False

    def say(self, say: str, **facts: object) -> None:
        self.line.send(json.dumps({"say": say, **facts}).encode())

    def hear(self) -> list[str]:
        """Take what it has been told since; return what to do, all of it from the start."""
        while True:
            try:
                packet, files, _, _ = socket.recv_fds(self.line, 1 << 20, 8)
            except OSError:
                break
            for file in files:
                os.close(file)
            if not packet:
                break
            self.told.append(json.loads(packet))
        return [order["do"] for order in self.told]

    def order(self, do: str) -> dict[str, Any]:
        """Return the last order of a name."""
        self.hear()
        return [order for order in self.told if order["do"] == do][-1]

    def end(self, code: int) -> None:
        self.line.close()
        self.process.has_ended(code)


class Stage:
    """A supervisor that is turned by hand, and its puppets, by the number of their start."""

    def __init__(
        self,
        folder: Path,
        knows: Sequence[str] = (),
        rescue: Rescue | None = None,
        **options: Any,
    ) -> None:
        given = {"devices": ("d0", "d1"), "spares": 0, "hang_s": 0.4, **options}
        job = Job(words=("x",), folder=folder, environment={}, logs=folder, **given)
        self.events: list[Event] = []
        self.steps: list[int] = []
        self.puppets: list[Puppet] = []
        self.replicas: list[list[str]] = []  # that their program says it has
        self.knows = ["forget", "part", *knows]  # the orders that their program takes
        self.fail_starts: list[OSError] = []  # of the next ones
        log = EventLog(None, self.events.append)
        self.supervisor = Supervisor(
            job, self._start, lambda step, *_: self.steps.append(step), log, rescue
        )

    def _start(self, order: Order) -> RemoteProcess:
        if self.fail_starts:
            raise self.fail_starts.pop()
        self.puppets.append(Puppet(order))
        return self.puppets[-1].process

    def begin(self) -> None:
        """Start the devices and let them connect."""
        supervisor = self.supervisor
        for name in supervisor.job.devices:
            supervisor._become(supervisor.crew.start(name, ""), name)
        self.connect()

    def connect(self) -> None:
        generation = self.supervisor.crew.generation
        living = [p for p in self.puppets if p.process.poll() is None]
        for puppet in living:
            more = {"replicas": self.replicas} if self.replicas else {}
            puppet.say("hello", pid=1, plan="a", knows=self.knows, **more)
            puppet.say("ready", generation=generation, expected={}, layouts={})
        self.turn_until(lambda: all("go" in p.hear() for p in living))
        for puppet in living:
            puppet.say("formed", generation=generation)
        self.turn_until(self.supervisor.rendezvous.all_formed)

    def turn_until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            if is_so():
                return
            for puppet in self.puppets:  # hearts beat
                if puppet.line.fileno() >= 0 and not puppet.is_silent:
                    puppet.say("beat", n=0, step=-1, waiting=["", "a test"])
            self.supervisor._turn()
        raise AssertionError("it never came to be so")

    def of(self, event: str) -> list[Event]:
        return [entry for entry in self.events if entry["event"] == event]


@contextmanager
def stage(folder: Path, **options: Any) -> Iterator[Stage]:
    made = Stage(folder, **options)
    try:
        yield made
    finally:
        for puppet in made.puppets:
            puppet.end(-9)
        made.supervisor.crew.close()
        made.supervisor.snapshots.close()
        for puppet in made.puppets:
            puppet.process.dispose()
