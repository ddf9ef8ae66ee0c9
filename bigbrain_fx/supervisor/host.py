"""The supervisor of one host: starts device processes and spares, and replaces what has died.

The supervisor lives outside every device, knows no torch, and computes nothing, so that hardly
anything can end it. The files that this module imports decide; this module receives messages and
passes them on.

    a process ends ──▶ generation g+1 is announced ──▶ all say which messages they wait for
                       a spare becomes the device      ──▶ all know it ──▶ they connect and go on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from .crew import Crew, Spares, StartError
from .events import EventLog
from .job import FailedError, Job, OnStep, Outcome, Rescue
from .judging import Death, Failure, Judge, Stop
from .pipe import PARTS, Said
from .policies import END, HAS_MORE
from .processes import Member, Start, popen
from .protocol import LastWord
from .rendezvous import Rendezvous
from .snapshots import Snapshots, Snapshotting
from .stopping import Ending, Stopping, ToldSteps
from .votes import Posting, Votes

if TYPE_CHECKING:
    from .feeding import Feed


class Supervisor:
    """Run a job to its end.

    Args:
        job: what to run.
        start: starts processes.
        on_step: receives each step once, as soon as its loss is known.
        events: receives everything else.
        rescue: gets, when a run ends early, the step of the newest snapshot that all devices have,
            and each device's file descriptor of it.
        feed: the batches, where the caller sends them.
    """

    def __init__(
        self,
        job: Job,
        start: Start = popen,
        on_step: OnStep | None = None,
        events: EventLog | None = None,
        rescue: Rescue | None = None,
        feed: Feed | None = None,
    ) -> None:
        self.job = job
        self.told = ToldSteps(on_step)
        self.rescue = rescue
        self.snapshots = Snapshots(job.devices, job.every, job.snapshots)
        self.crew = Crew(job, start, events or EventLog(None), self._hear, self._ended)
        self.stopping = Stopping()
        self.spares = Spares(self.crew)
        self.votes = Votes(frozenset(job.devices))
        self.policies = self.crew.policies
        self.judge = Judge(job.restarts, job.window_s)
        if HAS_MORE:
            from .more import add_policies  # only bundles with any of them have it

            add_policies(self, feed)
        self.rendezvous = Rendezvous(self.crew)
        self.ending = Ending(self.crew, self.stopping, self.snapshots, self.told)
        self.posting = Posting(self.crew, self.votes)
        self.snapshotting = Snapshotting(self.crew, self.snapshots, self.votes)
        self.restarts = 0
        self.behind: dict[str, int] = {}  # devices that repeat steps -> the first that is new
        self.acts = self._acts()

    def _acts(self) -> dict[str, Callable[..., object]]:
        """Return what follows from each thing that a process can say."""
        return {
            **self.policies.joined("acts"),
            "hello": self._hear_hello,
            "warm": self.spares.hear_warm,
            "beat": self._hear_beat,
            "begins": self._hear_begins,
            "ready": self.rendezvous.hear_ready,
            "put": self.rendezvous.hear_put,
            "formed": self._hear_formed,
            "lost": self.rendezvous.hear_lost,
            "first": self.posting.hear_first,
            "post": self.posting.hear_post,
            "vote": self._hear_vote,
            "step": self._hear_step,
            "cost": self.snapshotting.hear_cost,
            "snapshot": self.snapshotting.hear_snapshot,
            "at": self.ending.hear_at,
            "failed": self._hear_failed,
            "finished": self._hear_finished,
        }

    # ------------------------------------------------------------------ the run

    def run(self) -> Outcome:
        """Run to the last step, or to where it is stopped.

        Every process is ended, whatever happens, before this returns.

        Raises:
            FailedError: a process died and is not worth a restart, or too many did.
        """
        self.rendezvous.break_up(self.crew.clock.now())
        try:
            for name in self.job.devices:
                self._become(self._started(name), name)
            while not (self.crew.ending and not self.crew.members):
                self._turn()
        except FailedError as error:
            device = error.death.device
            named = {} if device is None else {"device": device}
            self.crew.report("failed", **named, text=str(error), code=error.code)
            self._rescue(error)
            raise
        finally:
            self.crew.close()
            self.snapshots.close()
            self.policies.ask("close")
        stopped_at = self.stopping.at
        name = "finished" if stopped_at is None else "stopped"
        self.policies.ask("report_end")
        self.crew.report(name, restarts=self.restarts)
        return Outcome(stopped_at, self.restarts)

    def _rescue(self, error: FailedError) -> None:
        error.left_out = tuple(self.crew.lost)
        has_none = self.snapshots.epoch < 0 or self.policies.any("has_states")
        if self.rescue is None or not error.moves or has_none:
            return
        self.crew.end_now()  # nobody writes to the slots then
        self.rescue(self.snapshots.epoch, self.snapshots.files())

    def ask_to_stop(self) -> None:
        """End the run after the step that it is in; signal handlers may call this."""
        self.stopping.ask(self.crew.clock.now())
        self.crew.wake()

    def _turn(self) -> None:
        """Wait for the next thing to happen and act on it, and on what has not happened."""
        self.crew.turn(self.job.beat_s)
        now = self.crew.clock.now()
        self.policies.ask("look", now)
        if self.rendezvous.all_formed() and self.policies.any("is_locked", now):
            self.rendezvous.lock(now)
        if not self.crew.ending and self.rendezvous.must_meet_anew(now):
            self._next_generation()
        if not self.crew.ending:
            self.ending.look()
            self.policies.ask("require_end", now)

    def _next_generation(self) -> None:
        self.crew.generation += 1
        if self.policies.any("take_back", self.snapshots.start):
            self.take_all_back()
        self.rendezvous.announce()

    def take_all_back(self) -> None:
        """End all processes: what they would have to send again was dropped."""
        why = "messages that a replacement would want were dropped"
        if not self.policies.any("begin_anew", why):
            self.crew.recall()
            self.crew.report("rolled_back", step=self.snapshots.start)

    # ------------------------------------------------------------------ processes come and go

    def _started(self, name: str) -> Member:
        try:
            return self.crew.start(name, self.job.host_of(name))
        except StartError as error:
            what = f"the process of device {name} does not start"
            failure = Failure(name, what, str(self.job.logs))
            raise FailedError(failure, str(error), code=error.code, is_short=True) from error

    def _become(self, member: Member, device: str) -> None:
        """Let a process be a device, from the newest step that all devices have."""
        slots, rank = self.snapshots.slots[device], self.job.devices.index(device)
        member.device, member.rank = device, rank
        member.since, member.began = self.crew.clock.now(), self.snapshots.start
        for key, text in self.votes.board.notes.items():
            self.crew.order(member, "post", key=key, text=text)
        if self.stopping.is_under_way:
            self.crew.order(member, "pause")  # before it can begin a step
            self.stopping.hear(device, -1)
        self.crew.order(
            member,
            "be",
            device=device,
            rank=rank,
            local_rank=self.job.local_rank(device),
            epoch=self.snapshots.epoch,
            every=self.snapshots.every,
            stop_at=self.stopping.at,
            slots=slots.steps,
            files=slots.files,
            **self.policies.joined("orders"),
            **({"lost": self.crew.lost} if self.crew.lost else {}),
        )
        self.crew.order(member, "generation", **self.rendezvous.generation())

    def _fill_spares(self) -> None:
        """Start spares, if nobody needs the processors for something more urgent."""
        is_behind = not self.behind.keys().isdisjoint(self.crew.devices)
        if not (is_behind or self.crew.ending or self.stopping.asked):
            self.spares.fill()

    def _ended(self, member: Member, code: int) -> None:
        """Note that a process has ended."""
        self.policies.ask("hear_end", member)
        if member.device is None:
            self.spares.hear_end(member, code)
        elif member.device in self.crew.devices:
            self._replace(member, member.device, code)

    def _replace(self, dead: Member, device: str, code: int) -> None:
        """Let another process go on as a device whose process has ended, if that is worth it."""
        now = self.crew.clock.now()
        is_of_memory = self.policies.any("meant", code, now)
        death = replace(_death_of(dead, device, code), for_memory=is_of_memory)
        self.rendezvous.break_up(now)
        self._report_death(dead, death, now)
        stop = self._stop_for(dead, death, now)
        if stop is None and self.policies.any("lacks_snapshot"):
            stop = Stop(
                "no replica but its own is left, which had no in-memory checkpoint yet", moves=True
            )
        if stop is not None:
            self._go_on_without(death, stop)
            return
        self.restarts += 1
        self.snapshots.fall_back(device)
        self.policies.ask("take_over", device)
        self.behind[device] = max(dead.done + 1, self.behind.get(device, 0))
        self.policies.ask("falls_back", device, dead.done, self.snapshots.start, now)
        self.policies.ask("move", now)
        self._next_generation()
        try:
            chosen = self.spares.take(device)
        except StartError as error:
            self._go_on_without(death, Stop(str(error), moves=True, is_short=True))
            return
        self._become(chosen, device)
        self.ending.look_where()
        self.crew.report(
            "assigned",
            device=device,
            pid=chosen.process.pid,
            warm=chosen.is_warm,
            step=-1 if self.policies.any("starts_over") else self.snapshots.start,
        )

    def _go_on_without(self, death: Death, stop: Stop) -> None:
        """Leave a device out that cannot be replaced, with its replica, or end the run."""
        if not (stop.moves and self.policies.any("can_leave_out", death.device)):
            how = {"moves": stop.moves, "is_short": stop.is_short}
            why = "".join((stop.reason, stop.more, *self.policies.ask("why_not", stop)))
            raise FailedError(death, why, code="BX6005", **how)
        self.policies.ask("leave_out", death, stop.reason)
        self.policies.ask("move", self.crew.clock.now())
        self.ending.look_where()
        self._look_for_end()
        if not self.crew.ending:
            self._next_generation()

    def _report_death(self, dead: Member, death: Death, now: float) -> None:
        self.crew.report(
            "died",
            device=death.device,
            pid=dead.process.pid,
            step=death.step,
            how=death.how,
            text=death.text,
            silent_s=now - dead.heard,
        )

    def _stop_for(self, dead: Member, death: Death, now: float) -> Stop | None:
        stop = None if dead.recalled else self.judge.stop_for(death, now)
        if getattr(dead.process, "is_lost", False):
            more = ", and the in-memory checkpoints there: go on from a checkpoint (--resume)"
            return Stop("its host is lost", moves=True, more=more)
        return stop

    # ------------------------------------------------------------------ what processes say

    def _hear(self, member: Member, said: Said) -> None:
        member.heard = self.crew.clock.now()
        self.policies.ask("hears", member, member.heard)
        what = said.pop("say")
        if member.device in self.crew.lost or self.policies.any("ignores", member):
            return
        act = self.acts.get(what)
        if act is None:
            raise ValueError(f"it says {what!r}")
        try:
            act(member, **said)
        except TypeError as error:
            if _fits(act, member, said):
                raise
            raise ValueError(f"it says {what!r} with {sorted(said)}") from error

    def _hear_hello(
        self,
        member: Member,
        pid: int,
        plan: str,
        knows: Sequence[str] = (),
        replicas: Sequence[list[str]] = (),
    ) -> None:
        """Note that it has imported its program; from now on its heart beats.

        A bundle's program may be older than this: `knows` has the orders that came later.
        """
        member.greeted = True
        member.knows, member.replicas = frozenset(knows), list(replicas)
        member.orders.takes_parts = PARTS in member.knows
        self.policies.ask("greet", member)

    def _hear_beat(self, member: Member, n: int, step: int, waiting: Sequence[str] | None) -> None:
        member.step = max(member.step, step)
        self.policies.ask("beats", member, n, waiting, self.crew.clock.now())

    def _hear_begins(self, member: Member, step: int) -> None:
        """Note from which step a device goes on after a commit that the run resumes."""
        self.snapshots.first = step
        self.policies.ask("begins", member, step)

    def _hear_formed(self, member: Member, generation: int) -> None:
        if self.rendezvous.hear_formed(member, generation):
            self.policies.ask("all_begin", self.crew.clock.now())
            start = self.snapshots.start
            self.behind = {name: step for name, step in self.behind.items() if step > start}
            self._fill_spares()

    def _hear_vote(
        self, member: Member, step: int, yes: bool, loss: float | None = None, step_s: float = 0.0
    ) -> None:
        if self.policies.any("is_of_before", member):
            return
        self.policies.ask("hear_loss", step, loss, step_s)
        decision = self.votes.vote(str(member.device), step, yes)
        if decision is None:
            return
        self.crew.tell("voted", step=step, yes=not decision.against)
        if decision.against and decision.is_new:
            self.crew.report("skipped", step=step, devices=", ".join(decision.against))
        self.policies.ask("end_step", step)

    def _hear_step(self, member: Member, step: int, loss: float | None, step_s: float) -> None:
        assert member.device is not None
        member.done = step
        member.step = max(member.step, step)
        self.policies.ask("step_took", step_s, self.crew.clock.now())
        self.judge.born(member.device)
        self.policies.ask("has_done", member, step, self.crew.clock.now())
        if step + 1 >= self.behind.get(member.device, step + 2):
            del self.behind[member.device]
            self._fill_spares()
        if loss is not None:
            self.told.tell(step, loss, step_s)

    def _hear_failed(self, member: Member, text: str, **more: Any) -> None:  # noqa: ANN401
        if "exit" not in more:  # a bundle until 0.2.0
            more = {"exit": more["code"]}
        member.failure = LastWord(text, **more)

    def _hear_finished(self, member: Member) -> None:
        member.finished = True
        self.policies.ask("has_finished", member)
        self._look_for_end()

    def _look_for_end(self) -> None:
        done = {m.device for m in self.crew.at_work() if m.finished}
        if done == set(self.crew.devices):
            self.policies.when_clean(END, self.crew.end)


def _fits(act: Callable[..., object], member: Member, said: Said) -> bool:
    """Return whether something can be told so."""
    try:
        signature(act).bind(member, **said)
    except TypeError:
        return False
    return True


def _death_of(dead: Member, device: str, code: int) -> Death:
    """Return how a device's process ended; its own word on that, unless a signal ended it."""
    word = dead.failure
    was_in_one = dead.formed >= 0 or dead.step >= 0
    step = max(dead.step, dead.done + 1, dead.began) if was_in_one else -1
    was_hung = dead.ended_at is not None
    death = Death(device, step, code, None, str(dead.log), dead.done >= 0, was_hung)
    if word is None:
        return death
    return replace(
        death,
        code=code if code < 0 else word.exit,
        text=word.said,
        shown=word.shown,
        told_memory=word.of_memory,
    )
