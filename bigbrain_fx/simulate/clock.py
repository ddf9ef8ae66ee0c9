"""Execute programs in simulated time: when every instruction and every message begins and ends.

A device runs its instructions in order. A Send takes the device for what handling the message costs
it, and then starts when its link is free; a link is one way between two devices, carries one
message at a time, in the order they were sent, and latency does not occupy it. Hosts may have a
NIC that all messages out of the host share, and all into it: each takes its own part of the NIC's
time, in the order they were sent. A Recv waits for the arrival, and then takes the device.

Since only its source device ever uses a link, devices can be followed one after another, each as
far as the messages that were sent let it come. Where NICs are shared they take turns instead: the
device that is earliest goes on until another is, so that messages are sent in order of time.

It knows nothing of memory, and of how a schedule came to be.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.core import (
    Backward,
    Edge,
    Forward,
    OptimizerStep,
    Overheads,
    Program,
    Recv,
    Send,
    Stages,
)
from bigbrain_fx.schedule import StageCosts, require_sound

Message: TypeAlias = tuple[Edge, int | None]


@dataclass(frozen=True, slots=True)
class Flight:
    """One message: its link is busy from start_s to free_s, and it is there at arrival_s."""

    edge: Edge
    micro: int | None
    start_s: float
    free_s: float
    arrival_s: float


@dataclass(frozen=True)
class Execution:
    """When everything happened: `spans[device]` has (start_s, end_s) of each instruction."""

    spans: Mapping[str, Sequence[tuple[float, float]]]
    flights: Sequence[Flight]

    @property
    def step_s(self) -> float:
        """When the last device is done."""
        return max((spans[-1][1] for spans in self.spans.values() if spans), default=0.0)


def execute(programs: Sequence[Program], stages: Stages, costs: StageCosts) -> Execution:
    """Run the programs in simulated time.

    Raises:
        ScheduleError: a device waits for a message that never comes; shows the programs.
    """
    run = _Run(stages, costs)
    if costs.cluster.has_shared_nics:
        _in_turns(run, programs)
    else:
        _one_after_another(run, programs)
    if any(len(run.spans[p.device]) < len(p.instructions) for p in programs):
        require_sound(programs, stages)
        raise AssertionError("a program is stuck, but the checker finds no fault")
    spans = {program.device: run.spans[program.device] for program in programs}
    return Execution(spans, sorted(run.flights.values(), key=lambda flight: flight.start_s))


def _one_after_another(run: _Run, programs: Sequence[Program]) -> None:
    runnable = list(reversed(programs))
    while runnable:
        stopped = run.follow(runnable.pop(), math.inf)
        runnable.extend(reversed(stopped))


def _in_turns(run: _Run, programs: Sequence[Program]) -> None:
    """Let the earliest device go on until another is earlier; equal ones in program order."""
    place = {program.device: i for i, program in enumerate(programs)}
    ready = [(0.0, i) for i in range(len(programs))]
    while ready:
        _, i = heapq.heappop(ready)
        until_s = ready[0][0] if ready else math.inf
        for woken in run.follow(programs[i], until_s):
            heapq.heappush(ready, (run.ready_s(woken), place[woken.device]))
        if run.goes_on(programs[i]):
            heapq.heappush(ready, (run.ready_s(programs[i]), i))


class _Run:
    """The state of one execution: mutable, used once."""

    def __init__(self, stages: Stages, costs: StageCosts) -> None:
        self.stages, self.costs = stages, costs
        self.spans: dict[str, list[tuple[float, float]]] = {}
        self.flights: dict[Message, Flight] = {}
        self.waiting: dict[Message, Program] = {}
        self._free_s: dict[tuple[str, str] | str, float] = {}

    def ready_s(self, program: Program) -> float:
        """Return when a device can begin its next instruction."""
        spans = self.spans[program.device]
        if not spans:
            return self._overheads(program.device).step_s
        following = program.instructions[len(spans)]
        now_s = spans[-1][1]
        if isinstance(following, Recv):
            return max(now_s, self.flights[following.edge, following.micro].arrival_s)
        return now_s

    def goes_on(self, program: Program) -> bool:
        """Return whether a device has something to do now; note what it waits for."""
        done = len(self.spans[program.device])
        if done == len(program.instructions):
            return False
        following = program.instructions[done]
        if not isinstance(following, Recv):
            return True
        message = following.edge, following.micro
        if message not in self.flights:
            self.waiting[message] = program
        return message in self.flights

    def follow(self, program: Program, until_s: float) -> list[Program]:
        """Run a device until it is done, waits, or no longer earlier than `until_s`.

        Returns:
            The programs that its messages woke.
        """
        spans = self.spans.setdefault(program.device, [])
        own = self._overheads(program.device)
        now_s = spans[-1][1] if spans else own.step_s
        woken: list[Program] = []
        for instruction in program.instructions[len(spans) :]:
            start_s = now_s
            match instruction:
                case Forward(stage):
                    now_s += self.costs.forward_s[stage] + own.instruction_s
                case Backward(stage):
                    now_s += self.costs.backward_s[stage] + own.instruction_s
                case OptimizerStep():
                    now_s += self.costs.optimizer_s.get(program.device, 0.0)
                case Send(edge, micro):
                    now_s += own.handling_s(edge.nbytes)
                    self._send(program.device, edge, micro, now_s)
                    if (edge, micro) in self.waiting:
                        woken.append(self.waiting.pop((edge, micro)))
                case Recv(edge, micro):
                    if (edge, micro) not in self.flights:
                        self.waiting[edge, micro] = program
                        break
                    now_s = max(now_s, self.flights[edge, micro].arrival_s)
                    now_s += own.handling_s(edge.nbytes)
            spans.append((start_s, now_s))
            if now_s >= until_s or (woken and until_s < math.inf):
                break
        return woken

    def _overheads(self, device: str) -> Overheads:
        return self.costs.cluster.device[device].overheads

    def _send(self, device: str, edge: Edge, micro: int | None, now_s: float) -> None:
        target = self.stages.stages[edge.target].device
        wire_s, latency_s = self.costs.wire_s(self.stages, edge)
        taken: dict[tuple[str, str] | str, float] = {(device, target): wire_s}
        for nic, bytes_per_s in self.costs.cluster.nics(device, target):
            taken[nic] = edge.nbytes / bytes_per_s
        start_s = max(now_s, *(self._free_s.get(way, 0.0) for way in taken))
        for way, occupied_s in taken.items():
            self._free_s[way] = start_s + occupied_s
        free_s = start_s + max(taken.values())
        self.flights[edge, micro] = Flight(edge, micro, start_s, free_s, free_s + latency_s)
