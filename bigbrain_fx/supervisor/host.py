"""The supervisor of one host: starts device processes and spares, and replaces what has died.

It lives outside every device, knows no torch, and computes nothing, so hardly anything can end it.
What it decides is in `judging`, `hanging`, `interval` and `slots`; this file waits and acts.

    a process ends ──▶ generation g+1 is announced ──▶ all say which messages they wait for
                       a spare becomes the device      ──▶ all are told ──▶ they connect and go on
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .board import Board
from .events import EventLog
from .hanging import Pulse, hung, locked, slow
from .interval import Cost, available_bytes, interval
from .judging import Death, Judge, Stop
from .line import Orders, hear, line_pair
from .processes import CONTROL, Member, Order, Start, end_now, end_of, popen
from .slots import Slots, common

LINKS_S = 0.5  # connections that were lost without a death are made anew after this
BEATS = 8  # heartbeats within the time after which a process is said to hang
LEAST_BEAT_S, MOST_BEAT_S = 0.05, 1.0
LEAVE_S = 30.0  # longest time for processes to end by themselves after the last step

OnStep = Callable[[int, float, float], None]  # step, loss, seconds
Rescue = Callable[[int, Mapping[str, int]], None]  # step, device -> file descriptor


@dataclass(frozen=True)
class Job:
    """What to run on this host, and how patiently.

    Attributes:
        devices: their names, by rank.
        words: the program of every process; it asks its line what to be.
        folder, environment: for every process.
        logs: folder of what each writes.
        spares: how many processes are kept warm.
        restarts, window_s: so many within so many seconds are allowed.
        hang_s: a process without progress for so long is ended.
        start_s: longest time from a process's start to its first step.
        every: steps between snapshots in memory; None chooses after two steps.
        log_bytes: of sent messages that a device keeps at most; beyond it forgets them, and a death
            takes all devices back. None: its share of half of the memory that is free.
        grace_s: longest time from a request to stop to the end of the step.
        hosts: where each device is; empty: all are on this host. Snapshots stay on their host, so
            every host has spares of its own.
    """

    devices: tuple[str, ...]
    words: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    logs: Path
    spares: int = 1
    restarts: int = 20
    window_s: float = 600.0
    hang_s: float = 60.0
    start_s: float = 300.0
    every: int | None = None
    log_bytes: int | None = None
    grace_s: float = 30.0
    hosts: tuple[str, ...] = ()

    def host_of(self, device: str) -> str:
        """Return where a device is; "" is this host."""
        return self.hosts[self.devices.index(device)] if self.hosts else ""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `stopped_at` is the step before which it was stopped; None: it finished."""

    stopped_at: int | None
    restarts: int


class FailedError(Exception):
    """Report a run that ended before its time: whose death it was, and why nobody replaced it.

    `moves`: the run could go on without that device.
    """

    def __init__(self, death: Death, reason: str, *, moves: bool = False) -> None:
        super().__init__(f"the process of device {death.device} {death.how}: {reason}")
        self.death = death
        self.reason = reason
        self.moves = moves


@dataclass
class _Behind:
    """A device that does again what its dead process had done: up to step `goal`."""

    goal: int
    since: float
    start: int


class Supervisor:
    """Run a job to its end.

    Args:
        job: what to run.
        start: starts processes.
        on_step: hears of each step once, as soon as its loss is known.
        events: hears of everything else.
        rescue: gets, when a run ends before its time, the step of the newest snapshot that all
            devices have, and each device's file descriptor of it.
    """

    def __init__(
        self,
        job: Job,
        start: Start = popen,
        on_step: OnStep | None = None,
        events: EventLog | None = None,
        rescue: Rescue | None = None,
    ) -> None:
        self.job = job
        self.start = start
        self.on_step = on_step
        self.events = events or EventLog(None)
        self.rescue = rescue
        self.generation = 0
        self.members: list[Member] = []
        self.slots = {name: Slots() for name in job.devices}
        self.epoch = -1
        self.every = job.every
        self.costs: dict[str, Cost] = {}
        self.judge = Judge(job.restarts, job.window_s)
        self.relinks = Judge(job.restarts, job.window_s)
        self.firsts: dict[str, str] = {}
        self.board = Board()
        self.votes: dict[int, dict[str, bool]] = {}
        self.logless = -1  # messages up to this step were dropped
        share = _log_share(len(job.devices))
        self.log_bytes = share if job.log_bytes is None else job.log_bytes
        self.reported = -1
        self.restarts = 0
        self.started = 0
        self.lost_spares = 0
        self.broken_since: float | None = None
        self.links_lost: tuple[float, int, str] | None = None
        self.behind: dict[str, _Behind] = {}
        self.ending = False
        self.stop_asked: float | None = None
        self.positions: dict[str, int] | None = None
        self.stop_at: int | None = None
        self.looked = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.bell, self.button = socket.socketpair()
        self.button.setblocking(False)

    # ------------------------------------------------------------------ the run

    def run(self) -> Outcome:
        """Run to the last step, or to where it is stopped.

        Every process is ended, whatever happens, before this returns.

        Raises:
            FailedError: a process died and is not worth a restart, or too many did.
        """
        self.broken_since = time.monotonic()
        try:
            self.selector.register(self.bell, selectors.EVENT_READ, (self._ring, None))
            for name in self.job.devices:
                self._become(self._start(name, self.job.host_of(name)), name)
            while not (self.ending and not self.members):
                self._turn()
        except FailedError as error:
            self.events.write("failed", self.generation, device=error.death.device, text=str(error))
            self._rescue(error)
            raise
        finally:
            self._close()
        name = "finished" if self.stop_at is None else "stopped"
        self.events.write(name, self.generation, restarts=self.restarts)
        return Outcome(self.stop_at, self.restarts)

    def _rescue(self, error: FailedError) -> None:
        if self.rescue is None or not error.moves or self.epoch < 0:
            return
        for member in self.members:
            member.kill()
            end_now(member.process)  # nobody writes to the slots now
        found = {name: s.files[s.steps.index(self.epoch)] for name, s in self.slots.items()}
        self.rescue(self.epoch, found)

    def ask_to_stop(self) -> None:
        """End the run after the step that it is in; signal handlers may call this."""
        self.stop_asked = self.stop_asked or time.monotonic()
        with suppress(BlockingIOError):
            self.button.send(b"!")

    def _turn(self) -> None:
        """Wait for the next thing to happen and act on it."""
        for key, _ in self.selector.select(self._beat_s()):
            act, member = key.data
            act(member)
        now = time.monotonic()
        if now - self.looked > max(0.5 * self.job.hang_s, 2 * self._beat_s()):
            for member in self.members:  # this process, or all, were stopped or starved
                member.pulse.shift(now - self.looked)
        self.looked = now
        self._look_for_hangs(now)
        self._look_at_links(now)
        self._look_at_stop(now)

    def _ring(self, _: None) -> None:
        self.bell.recv(100)

    def _beat_s(self) -> float:
        return min(MOST_BEAT_S, max(LEAST_BEAT_S, self.job.hang_s / BEATS))

    def _close(self) -> None:
        for member in self.members:
            member.kill()
        for member in self.members:
            end_now(member.process)
            member.line.close()
        for slots in self.slots.values():
            slots.close()
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fd)
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self.selector.close()
        self.bell.close()
        self.button.close()

    # ------------------------------------------------------------------ processes

    def _start(self, name: str, host: str) -> Member:
        ours, theirs = line_pair()
        self.started += 1
        known = {member.name for member in self.members}
        own = name if name not in known and self.generation == 0 else f"{name}.{self.started}"
        log = self.job.logs / f"{own}.log"
        environment = {
            **self.job.environment,
            CONTROL: "0",
            "BIGBRAIN_BEAT_S": str(self._beat_s()),
        }
        with theirs:
            words, folder = self.job.words, self.job.folder
            given = Order(own, words, folder, environment, theirs.fileno(), log, host)
            process = self.start(given)
        now = time.monotonic()
        member = Member(own, process, ours, log, Pulse(now, now), now, Orders(ours), host)
        self.members.append(member)
        self.selector.register(ours, selectors.EVENT_READ, (self._listen, member))
        self.selector.register(end_of(process), selectors.EVENT_READ, (self._ended, member))
        self.events.write("started", self.generation, device=name, pid=process.pid)
        return member

    def _become(self, member: Member, device: str) -> None:
        """Let a process be a device, from the newest step that all devices have."""
        slots, rank = self.slots[device], self.job.devices.index(device)
        member.device, member.rank = device, rank
        member.since = time.monotonic()
        for key, text in self.board.notes.items():
            self._order(member, "post", key=key, text=text)
        self._order(
            member,
            "be",
            device=device,
            rank=rank,
            local_rank=self._local_rank(device),
            epoch=self.epoch,
            every=self.every,
            stop_at=self.stop_at,
            log_bytes=self.log_bytes,
            slots=slots.steps,
            files=slots.files,
        )
        self._order(member, "generation", number=self.generation)

    def _local_rank(self, device: str) -> int:
        """Return its number among the devices of its host."""
        host, rank = self.job.host_of(device), self.job.devices.index(device)
        return sum(self.job.host_of(other) == host for other in self.job.devices[:rank])

    def _fill_spares(self) -> None:
        """Start spares, if nobody needs the processors for something more urgent."""
        if self.behind or self.ending or self.stop_asked or self.lost_spares > self.job.spares:
            return
        for host in sorted(set(self.job.hosts)) or [""]:
            here = [m for m in self.members if m.device is None and m.host == host]
            for _ in range(self.job.spares - len(here)):
                self._order(self._start("spare", host), "be", device=None)

    def _ended(self, member: Member) -> None:
        """A process has ended."""
        code = member.process.poll()
        if code is None:
            return
        if member in self.members and member.line.fileno() >= 0:
            self._listen_to_the_end(member)
        self.members.remove(member)
        for key in list(self.selector.get_map().values()):
            if key.data[1] is member:
                self.selector.unregister(key.fd)
                if isinstance(key.fileobj, int):
                    os.close(key.fileobj)
        member.line.close()
        if self.ending:
            return
        if member.device is None:
            self.lost_spares += 1
            self.events.write(
                "died",
                self.generation,
                device="spare",
                pid=member.process.pid,
                step=-1,
                how=f"ended with exit code {code}",
                silent_s=0.0,
            )
            return
        self._replace(member, member.device, code)

    def _replace(self, dead: Member, device: str, code: int) -> None:
        now = time.monotonic()
        text, told = dead.failure or (None, code)
        step = max(dead.step, dead.done + 1) if dead.formed >= 0 else -1
        death = Death(device, step, code if code < 0 else told, text, str(dead.log), dead.done >= 0)
        self.broken_since = self.broken_since or now
        self.events.write(
            "died",
            self.generation,
            device=device,
            pid=dead.process.pid,
            step=step,
            how=death.how,
            text=text,
            silent_s=now - dead.pulse.heard,
        )
        stop = None if dead.recalled else self.judge.stop_for(death, now)
        if getattr(dead.process, "is_lost", False):
            stop = Stop("its host is lost, and the snapshots there: go on from a commit (--resume)")
        if stop is not None:
            raise FailedError(death, stop.reason, moves=stop.moves)
        self.restarts += 1
        before = self.behind.get(device)
        goal = max(dead.done + 1, before.goal if before else 0)
        self.behind[device] = _Behind(goal, before.since if before else now, max(self.epoch, 0))
        self._next_generation()
        host = self.job.host_of(device)
        spares = [m for m in self.members if m.device is None and m.host == host]
        spares.sort(key=lambda member: not member.is_warm)
        chosen = spares[0] if spares else self._start(device, host)
        self._become(chosen, device)
        self.events.write(
            "assigned",
            self.generation,
            device=device,
            pid=chosen.process.pid,
            warm=chosen.is_warm,
            step=max(self.epoch, 0),
        )

    # ------------------------------------------------------------------ generations

    def _at_work(self) -> list[Member]:
        return [member for member in self.members if member.device is not None]

    def _order(self, member: Member, do: str, **facts: Any) -> None:  # noqa: ANN401  # JSON, files
        member.orders.give(do, **facts)
        self._watch_room(member)

    def _watch_room(self, member: Member) -> None:
        """Hear of room in a process's socket if orders wait for it."""
        key = self.selector.get_map().get(member.line)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.orders.waiting else 0)
        if key is not None and key.events != wanted:
            self.selector.modify(member.line, wanted, key.data)

    def _tell(self, do: str, **facts: object) -> None:
        for member in self._at_work():
            self._order(member, do, **facts)

    def _next_generation(self) -> None:
        self.generation += 1
        self._take_all_back()
        self.links_lost = None
        self.broken_since = self.broken_since or time.monotonic()
        self._tell("generation", number=self.generation)

    def _take_all_back(self) -> None:
        """End all processes if what they would have to send again was dropped: all start again."""
        if self.logless < max(self.epoch, 0):
            return
        others = [m for m in self._at_work() if not m.recalled and m.process.poll() is None]
        for member in others:
            member.recalled = True
            member.kill()
        self.logless = -1
        self.events.write("rolled_back", self.generation, step=max(self.epoch, 0))

    def _all_are(self, generation_of: Callable[[Member], int]) -> bool:
        members = self._at_work()
        here = {m.device for m in members if generation_of(m) == self.generation}
        return here == set(self.job.devices)

    # ------------------------------------------------------------------ what processes say

    def _listen(self, member: Member) -> None:
        if member.orders.waiting:
            member.orders.pass_on()
            self._watch_room(member)
        with suppress(BlockingIOError):
            while (said := hear(member.line)) is not None:
                self._hear(member, said)
            self.selector.unregister(member.line)  # it ends, or has been told to
            if not self.ending:
                member.kill()

    def _listen_to_the_end(self, member: Member) -> None:
        with suppress(BlockingIOError):
            while (said := hear(member.line)) is not None:
                self._hear(member, said)

    def _hear(self, member: Member, said: dict[str, Any]) -> None:
        act = getattr(self, f"_hear_{said.pop('say')}")
        member.pulse.heard = time.monotonic()
        act(member, **said)

    def _hear_hello(self, member: Member, pid: int, plan: str) -> None:
        """Hear that it has imported its program; from now on its heart beats."""
        member.greeted = True

    def _hear_warm(self, member: Member) -> None:
        member.is_warm = True
        if member.device is None:
            self.lost_spares = 0
            self.events.write(
                "spare_ready", self.generation, device=member.name, pid=member.process.pid
            )

    def _hear_beat(
        self, member: Member, n: int, step: int, waiting: tuple[str, str] | None
    ) -> None:
        member.step = max(member.step, step)
        member.pulse.beat(time.monotonic(), n, tuple(waiting) if waiting else None)  # type: ignore[arg-type]

    def _hear_ready(
        self, member: Member, generation: int, expected: dict[str, int], layouts: dict[str, Any]
    ) -> None:
        member.ready = generation, {"expected": expected, "layouts": layouts}
        if not self._all_are(lambda m: m.ready[0]):
            return
        told: dict[str, dict[str, Any]] = {"expected": {}, "layouts": {}}
        for other in self._at_work():
            for kind, found in other.ready[1].items():
                told[kind] |= found
        self._tell("go", generation=self.generation, **told)

    def _hear_put(self, member: Member, key: str, value: str) -> None:
        if key.startswith(f"{self.generation}/"):
            self._tell("value", key=key, value=value)

    def _hear_formed(self, member: Member, generation: int) -> None:
        member.formed = generation
        member.pulse.is_at_work = not member.finished
        member.pulse.moved = time.monotonic()
        if not self._all_are(lambda m: m.formed) or self.broken_since is None:
            return
        after_s, self.broken_since = time.monotonic() - self.broken_since, None
        self.events.write("formed", self.generation, after_s=after_s)
        for device, behind in list(self.behind.items()):
            if behind.goal <= behind.start:
                self._caught_up(device)
        self._fill_spares()

    def _hear_lost(self, member: Member, generation: int, text: str) -> None:
        if generation == self.generation and self.links_lost is None:
            self.links_lost = time.monotonic(), generation, f"{member.device}: {text}"

    def _hear_first(self, member: Member, what: str, text: str) -> None:
        self._order(member, "first", what=what, text=self.firsts.setdefault(what, text))

    def _hear_post(self, member: Member, key: str, text: str) -> None:
        dropped = self.board.post(key, text)
        self._tell("post", key=key, text=text)
        if dropped:
            self._tell("forget", keys=dropped)

    def _hear_vote(self, member: Member, step: int, yes: bool) -> None:
        """Tell all what they decided; a device that does a step again hears of it again."""
        votes = self.votes.setdefault(step, {})
        is_new = member.device not in votes
        votes[str(member.device)] = yes
        if set(votes) != set(self.job.devices):
            return
        against = [name for name, says in votes.items() if not says]
        self._tell("voted", step=step, yes=not against)
        if against and is_new:
            self.events.write("skipped", self.generation, step=step, devices=", ".join(against))

    def _hear_log_dropped(self, member: Member, step: int, bytes: int) -> None:
        if self.logless < 0:
            self.events.write(
                "log_dropped", self.generation, device=member.device, step=step, bytes=bytes
            )
        self.logless = max(self.logless, step)

    def _hear_step(self, member: Member, step: int, loss: float | None, step_s: float) -> None:
        assert member.device is not None
        member.done = step
        member.step = max(member.step, step)
        self.judge.born(member.device)
        behind = self.behind.get(member.device)
        if behind is not None and step + 1 >= behind.goal:
            self._caught_up(member.device)
            self._fill_spares()
        if loss is not None and step > self.reported:
            self.reported = step
            if self.on_step is not None:
                self.on_step(step, loss, step_s)

    def _caught_up(self, device: str) -> None:
        behind = self.behind.pop(device)
        after_s, steps = time.monotonic() - behind.since, max(behind.goal - behind.start, 0)
        self.events.write(
            "caught_up",
            self.generation,
            device=device,
            step=behind.goal,
            after_s=after_s,
            steps=steps,
        )

    def _hear_cost(
        self, member: Member, state: int, log: int, copy_s: float, step_s: float
    ) -> None:
        assert member.device is not None
        self.costs[member.device] = Cost(state, log, copy_s, step_s)
        if self.every is None and len(self.costs) == len(self.job.devices):
            self.every = interval(self.costs.values(), available_bytes())
            self._tell("every", steps=self.every)

    def _hear_snapshot(self, member: Member, step: int, slot: int, bytes: int) -> None:
        assert member.device is not None
        self.slots[member.device].steps[slot] = step
        newest = common(list(self.slots.values()))
        if newest > self.epoch:
            self.epoch = newest
            self._tell("epoch", step=newest)
            self.votes = {step: votes for step, votes in self.votes.items() if step >= newest}
            if 0 <= self.logless < newest:
                self.logless = -1
                self.events.write("log_whole", self.generation, step=newest)
            self.events.write("snapshot", self.generation, step=newest, every=self.every)

    def _hear_failed(self, member: Member, text: str, code: int) -> None:
        member.failure = text, code

    def _hear_finished(self, member: Member) -> None:
        member.finished = True
        member.pulse.is_at_work = False
        done = {m.device for m in self._at_work() if m.finished}
        if done == set(self.job.devices):
            self.ending = True
            self._tell("end")
            for spare in self.members:
                if spare.device is None:
                    spare.kill()

    # ------------------------------------------------------------------ what takes too long

    def _look_for_hangs(self, now: float) -> None:
        limit_s, members = self.job.hang_s, {m.name: m for m in self.members if m.greeted}
        pulses = {name: member.pulse for name, member in members.items()}
        for name in hung(pulses, now, limit_s):
            self._end_hanging(members[name], now)
        by_device = {str(m.device): m for m in self._at_work()}
        working = {name: m.pulse for name, m in by_device.items()}
        for name in slow(working, now, limit_s):
            if by_device[name].warned != working[name].instruction:
                by_device[name].warned = working[name].instruction
                seconds = now - working[name].moved
                self.events.write("slow", self.generation, device=name, seconds=seconds)
        if self._all_are(lambda m: m.formed) and locked(working, now, limit_s):
            self.links_lost = now - LINKS_S, self.generation, "all devices wait for each other"
        for member in self._at_work():
            if member.formed < 0 and now - member.since > self.job.start_s:
                self._end_hanging(member, now)

    def _end_hanging(self, member: Member, now: float) -> None:
        """End a process; that it has ended is then heard as of any other."""
        seconds = now - min(member.pulse.heard, member.pulse.moved)
        name = member.device or member.name
        self.events.write("hang", self.generation, device=name, seconds=seconds)
        member.kill()
        member.pulse.heard = member.pulse.moved = member.since = now

    def _look_at_links(self, now: float) -> None:
        """Connect anew when connections failed though nobody has died."""
        if self.links_lost is None or now - self.links_lost[0] < LINKS_S or self.ending:
            return
        text = self.links_lost[2]
        self.events.write("links_lost", self.generation, device=text.split(":")[0], text=text)
        death = Death(text.split(":")[0], -1, 1, None, str(self.job.logs), True)
        if self.relinks.stop_for(death, now) is not None:
            raise FailedError(death, f"connections are lost again and again ({text})")
        self._next_generation()

    # ------------------------------------------------------------------ stopping

    def _look_at_stop(self, now: float) -> None:
        if self.stop_asked is None or self.ending:
            return
        if self.positions is None:
            self.positions = {}
            self._tell("pause")
        if now - self.stop_asked > self.job.grace_s:
            device = next(m for m in self._at_work() if not m.finished).device
            death = Death(str(device), -1, 1, None, str(self.job.logs), True)
            raise FailedError(death, f"it did not stop within {self.job.grace_s:g} s")

    def _hear_at(self, member: Member, step: int) -> None:
        """Stop all devices before the same step: none has begun it, and all can reach it."""
        if self.positions is None or self.stop_at is not None:
            return
        self.positions[str(member.device)] = step
        running = {str(m.device) for m in self._at_work() if m.formed >= 0}
        if running <= set(self.positions):
            self.stop_at = max(self.positions.values()) + 1
            self.events.write("stopping", self.generation, step=self.stop_at)
            self._tell("stop_at", step=self.stop_at)


def _log_share(devices: int) -> int:
    """Return what each device's messages may take of the memory that is free, half of it in all."""
    return available_bytes() // (2 * devices)
