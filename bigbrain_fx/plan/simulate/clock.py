"""Execute programs in simulated time: when every instruction and every message begins and ends.

A device runs its instructions in order. A Send takes the device for what handling the message costs
it, and then the message is on its way (`messages`). A Recv waits for the arrival, and then takes
the device.

Only its source device uses a link, so devices are simulated one after another, each as far as the
messages that were sent allow. Where NICs are shared, devices take turns: the earliest goes on until
another is earlier, so that messages are sent in order of time. Where devices of a host slow each
other, `crowd` simulates all of them at once.

A GPU has two clocks: what its process has started, and what it has computed. A computation ends
when both are done with it. A process that is slower than its GPU holds it up; otherwise it is ahead
of the GPU, also while that waits for a message.

    process  |f0|f1|b0|b1|          |f0 |f1 |b0 |b1 |
    GPU      |f0  |f1  |b0   |b1  |  .f0|. f1|. b0|. b1

The module knows nothing of memory, or of the origin of a schedule.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from bigbrain_fx.core import (
    Backward,
    BackwardWeight,
    Compute,
    Forward,
    OptimizerStep,
    Program,
    Recv,
    Send,
    Stages,
)
from bigbrain_fx.plan.schedule import StageCosts, require_sound
from bigbrain_fx.plan.simulate.messages import Flight, Message, Messages
from bigbrain_fx.planning import Crowds


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
    messages = Messages(stages, costs)
    if costs.alone is not None:
        spans = execute_crowded(programs, messages, costs)
    else:
        spans = _followed(programs, messages, costs)
    if any(len(spans[p.device]) < len(p.instructions) for p in programs):
        require_sound(programs, stages)
        raise AssertionError("a program is stuck, but the checker finds no fault")
    flights = sorted(messages.flights.values(), key=lambda flight: flight.start_s)
    return Execution(spans, flights)


def _followed(
    programs: Sequence[Program], messages: Messages, costs: StageCosts
) -> Mapping[str, Sequence[tuple[float, float]]]:
    run = _Execution(messages, costs)
    if costs.cluster.has_shared_nics:
        _in_turns(run, programs)
    else:
        _one_after_another(run, programs)
    return {program.device: run.spans[program.device] for program in programs}


def _one_after_another(run: _Execution, programs: Sequence[Program]) -> None:
    runnable = list(reversed(programs))
    while runnable:
        stopped = run.follow(runnable.pop(), math.inf)
        runnable.extend(reversed(stopped))


def _in_turns(run: _Execution, programs: Sequence[Program]) -> None:
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


class _Execution:
    """The state of one execution: mutable, used once."""

    def __init__(self, messages: Messages, costs: StageCosts) -> None:
        self.messages, self.costs = messages, costs
        self.flights = messages.flights
        self.spans: dict[str, list[tuple[float, float]]] = {}
        self.started_s: dict[str, float] = {}
        self.waiting: dict[Message, Program] = {}

    def ready_s(self, program: Program) -> float:
        """Return when a device can begin its next instruction."""
        spans = self.spans[program.device]
        if not spans:
            return self.messages.overheads(program.device).step_s
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
        own = self.messages.overheads(program.device)
        now_s = spans[-1][1] if spans else own.step_s
        woken: list[Program] = []
        while len(spans) < len(program.instructions):  # no slice: it may be woken for each
            instruction, start_s = program.instructions[len(spans)], now_s
            match instruction:
                case Forward(stage):
                    now_s += self.costs.forward_s[stage] + own.instruction_s
                    now_s = self._started(program.device, now_s, self.costs.host_forward_s[stage])
                case Backward(stage):
                    now_s += self.costs.backward_s[stage] + own.instruction_s
                    now_s = self._started(program.device, now_s, self.costs.host_backward_s[stage])
                case BackwardWeight(stage):
                    now_s += self.costs.weight_s[stage] + own.instruction_s
                case OptimizerStep():
                    now_s += self.costs.optimizer_s.get(program.device, 0.0)
                case Send(edge, micro):
                    now_s += self.messages.handling_s(program.device, edge)
                    sent = self.messages.send(program.device, edge, micro, now_s)
                    woken += [self.waiting.pop(each) for each in sent if each in self.waiting]
                    now_s = self.messages.sent_s(program.device, (edge, micro), now_s)
                case Recv(edge, micro):
                    if (edge, micro) not in self.flights:
                        self.waiting[edge, micro] = program
                        break
                    now_s = max(now_s, self.flights[edge, micro].arrival_s)
                    now_s += self.messages.handling_s(program.device, edge, receives=True)
            spans.append((start_s, now_s))
            if now_s >= until_s or (woken and until_s < math.inf):
                break
        return woken

    def _started(self, device: str, done_s: float, host_s: float) -> float:
        """Return when a computation ends whose GPU is done at `done_s`, its process maybe later."""
        if not host_s:
            return done_s
        begun_s = self.started_s.get(device, self.messages.overheads(device).step_s)
        self.started_s[device] = begun_s + host_s
        return max(done_s, begun_s + host_s)


# ------------------------------------------------------------------------------------------------
# Execute programs where devices slow each other: those of one host, while they compute at once.
#
# A computation is a piece of work; how fast it is done changes whenever a neighbour begins or
# ends:
#
#   d0   |forward 0 ----.--------|              d1 computes meanwhile: half as fast, say,
#   d1          |forward 1 --------|-----|      from its begin to the end of one of the two
#
# So time goes from one such event to the next for all devices together. Everything else takes as
# long as it does in `clock`.


_Work: TypeAlias = tuple[float, float]


@dataclass
class _Device:
    """State of one device in its program.

    Attributes:
        begun_s: when its instruction began, or will.
        end_s: when that ends; infinity: not known yet.
        waits_for: the awaited message, if any.
        work: seconds of a computation, alone and in the fullest crowd; None: it does not compute.
        left: the share of that work that is still to be done.
    """

    program: Program
    begun_s: float
    spans: list[tuple[float, float]] = field(default_factory=list)
    end_s: float = math.inf
    waits_for: Message | None = None
    work: _Work | None = None
    left: float = 0.0

    @property
    def name(self) -> str:
        """The device's own."""
        return self.program.device


def execute_crowded(
    programs: Sequence[Program], messages: Messages, costs: StageCosts
) -> Mapping[str, Sequence[tuple[float, float]]]:
    """Run all programs as far as they go; return (start_s, end_s) of each device's instructions."""
    run = _Crowded(programs, messages, costs)
    while run.advance():
        pass
    return {device.name: device.spans for device in run.devices}


class _Crowded:
    """The state of one execution: mutable, used once."""

    def __init__(self, programs: Sequence[Program], messages: Messages, costs: StageCosts) -> None:
        assert costs.alone is not None
        self.messages, self.costs, self.alone = messages, costs, costs.alone
        self.crowds = Crowds(costs.alone.cluster)
        self.now_s = 0.0
        self._levels: dict[frozenset[str], Mapping[str, float]] = {}
        self.devices = [_Device(p, messages.overheads(p.device).step_s) for p in programs]
        for device in self.devices:
            self._begin(device)

    def advance(self) -> bool:
        """Go on to the next event; False when there is none."""
        computing = [d for d in self.devices if d.work and d.begun_s <= self.now_s]
        levels = self._crowded_by(frozenset(d.name for d in computing))
        lasts_s = {device.name: self._lasts_s(device, levels) for device in computing}
        event_s = [self._event_s(d, lasts_s) for d in self.devices]
        next_s = min(event_s, default=math.inf)
        if next_s == math.inf:
            return False
        first = self.devices[event_s.index(next_s)]
        for device in self.devices:
            if lasts_s.get(device.name):  # work of no length has nothing left to shorten
                device.left -= (next_s - self.now_s) / lasts_s[device.name]
        self.now_s = next_s
        if first.work is None or first.name in lasts_s:
            self._end(first)
        return True

    def _crowded_by(self, computing: frozenset[str]) -> Mapping[str, float]:
        """Return how crowded it is for each device that computes; the same few sets come again."""
        if computing not in self._levels:
            found = {name: self.crowds.level(name, computing) for name in computing}
            self._levels[computing] = found
        return self._levels[computing]

    def _event_s(self, device: _Device, lasts_s: Mapping[str, float]) -> float:
        """Return when something changes for a device: its instruction ends, or its work begins."""
        if device.work is None:
            return device.end_s
        if device.name not in lasts_s:
            return device.begun_s
        return self.now_s + max(0.0, device.left) * lasts_s[device.name]

    def _lasts_s(self, device: _Device, levels: Mapping[str, float]) -> float:
        """Return how long all of a device's work lasts while its host is so crowded."""
        assert device.work is not None
        alone_s, crowded_s = device.work
        return alone_s + (crowded_s - alone_s) * levels[device.name]

    def _begin(self, device: _Device) -> None:
        """Begin a device's next instruction, or its wait for a message."""
        device.work, device.waits_for, device.end_s = None, None, math.inf
        if len(device.spans) == len(device.program.instructions):
            return
        match device.program.instructions[len(device.spans)]:
            case Send(edge):
                device.end_s = device.begun_s + self.messages.handling_s(device.name, edge)
            case Recv(edge, micro):
                self._receive(device, (edge, micro))
            case computation:
                device.work, device.left = self._work(device.name, computation), 1.0

    def _receive(self, device: _Device, message: Message) -> None:
        if message not in self.messages.flights:
            device.waits_for = message
            return
        ready_s = max(device.begun_s, self.messages.flights[message].arrival_s)
        handling_s = self.messages.handling_s(device.name, message[0], receives=True)
        device.end_s = ready_s + handling_s

    def _end(self, device: _Device) -> None:
        done = device.program.instructions[len(device.spans)]
        device.spans.append((device.begun_s, self.now_s))
        device.begun_s = self.now_s
        if isinstance(done, Send):
            sent = self.messages.send(device.name, done.edge, done.micro, self.now_s)
            own = done.edge, done.micro
            device.begun_s = self.messages.sent_s(device.name, own, self.now_s)
            for other in self.devices:
                if other.waits_for in sent:
                    self._begin(other)
        self._begin(device)

    def _work(self, device: str, computation: Compute | OptimizerStep) -> _Work:
        own_s = self.messages.overheads(device).instruction_s
        alone, crowded = self.alone, self.costs
        match computation:
            case Forward(stage):
                least_s = crowded.host_forward_s[stage]  # of a GPU, which nobody crowds
                return (
                    max(alone.forward_s[stage], least_s) + own_s,
                    max(crowded.forward_s[stage], least_s) + own_s,
                )
            case Backward(stage):
                least_s = crowded.host_backward_s[stage]
                return (
                    max(alone.backward_s[stage], least_s) + own_s,
                    max(crowded.backward_s[stage], least_s) + own_s,
                )
            case BackwardWeight(stage):
                return alone.weight_s[stage] + own_s, crowded.weight_s[stage] + own_s
            case OptimizerStep():
                return alone.optimizer_s.get(device, 0.0), crowded.optimizer_s.get(device, 0.0)
