"""Execute programs in simulated time: when every instruction and every message begins and ends.

A device runs its instructions in order. A Send starts when it is reached and its link is free, and
does not hold the device up; a link is one way between two devices, carries one message at a time,
in the order they were sent, and latency does not occupy it. A Recv waits for the arrival. Since
only its source device ever uses a link, devices can be followed one after another, with no queue of
events: each as far as the messages that were sent let it come.

It knows nothing of memory, and of how a schedule came to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.core import Backward, Edge, Forward, OptimizerStep, Program, Recv, Send, Stages
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
    runnable = list(reversed(programs))
    while runnable:
        stopped = run.follow(runnable.pop())
        runnable.extend(reversed(stopped))
    if any(len(run.spans[p.device]) < len(p.instructions) for p in programs):
        require_sound(programs, stages)
        raise AssertionError("a program is stuck, but the checker finds no fault")
    spans = {program.device: run.spans[program.device] for program in programs}
    return Execution(spans, sorted(run.flights.values(), key=lambda flight: flight.start_s))


class _Run:
    """The state of one execution: mutable, used once."""

    def __init__(self, stages: Stages, costs: StageCosts) -> None:
        self.stages, self.costs = stages, costs
        self.spans: dict[str, list[tuple[float, float]]] = {}
        self.flights: dict[Message, Flight] = {}
        self.waiting: dict[Message, Program] = {}
        self._link_free_s: dict[tuple[str, str], float] = {}

    def follow(self, program: Program) -> list[Program]:
        """Run a device until it is done or waits; return the programs that its messages woke."""
        spans = self.spans.setdefault(program.device, [])
        now_s = spans[-1][1] if spans else 0.0
        woken: list[Program] = []
        for instruction in program.instructions[len(spans) :]:
            start_s = now_s
            match instruction:
                case Forward(stage):
                    now_s += self.costs.forward_s[stage]
                case Backward(stage):
                    now_s += self.costs.backward_s[stage]
                case OptimizerStep():
                    now_s += self.costs.optimizer_s.get(program.device, 0.0)
                case Send(edge, micro):
                    self._send(program.device, edge, micro, now_s)
                    if (edge, micro) in self.waiting:
                        woken.append(self.waiting.pop((edge, micro)))
                case Recv(edge, micro):
                    if (edge, micro) not in self.flights:
                        self.waiting[edge, micro] = program
                        break
                    now_s = max(now_s, self.flights[edge, micro].arrival_s)
            spans.append((start_s, now_s))
        return woken

    def _send(self, device: str, edge: Edge, micro: int | None, now_s: float) -> None:
        link = device, self.stages.stages[edge.target].device
        wire_s, latency_s = self.costs.wire_s(self.stages, edge)
        start_s = max(now_s, self._link_free_s.get(link, 0.0))
        free_s = self._link_free_s[link] = start_s + wire_s
        self.flights[edge, micro] = Flight(edge, micro, start_s, free_s, free_s + latency_s)
