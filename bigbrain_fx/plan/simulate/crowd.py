"""Execute programs where devices slow each other: those of one host, while they compute at once.

A computation is a piece of work; how fast it is done changes whenever a neighbour begins or ends:

    d0   |forward 0 ----.--------|              d1 computes meanwhile: half as fast, say,
    d1          |forward 1 --------|-----|      from its begin to the end of one of the two

So time goes from one such event to the next for all devices together. Everything else takes as long
as it does in `clock`.
"""

from __future__ import annotations

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
)
from bigbrain_fx.plan.schedule import StageCosts
from bigbrain_fx.plan.simulate.collectives import Message
from bigbrain_fx.plan.simulate.messages import Messages
from bigbrain_fx.planning import Crowds

_Work: TypeAlias = tuple[float, float]


@dataclass
class _Device:
    """Where one device is in its program.

    Attributes:
        begun_s: when its instruction began, or will.
        end_s: when that ends; infinity: nobody knows yet.
        waits_for: the message that it waits for, if any.
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
