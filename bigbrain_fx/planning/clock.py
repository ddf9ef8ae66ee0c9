"""Stages in seconds, and what each device computes in order -> when the last device is done.

The physics is that of `plan.simulate.clock`, without instructions, names and text: a device takes
its jobs in order; a job waits for its messages, takes the process for handling them, computes, and
sends; a message leaves when its link is free, and latency does not occupy the link. Every plan that
is returned has been simulated as it is; planners compare thousands of placements by this.

It knows no graph, no memory and no cluster; who makes `Stages` says what everything takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import add
from typing import Any

_KINDS = 3  # backward, forward, backward of weights alone; messages come of the first two
Job = tuple[bool, int, int]  # (is it a forward, stage, micro-batch)
Orders = Mapping[int, Sequence[Job]]  # device -> its jobs in order


@dataclass(frozen=True, slots=True)
class Message:
    """A value on its way to a later stage, or its gradient to an earlier one, of a micro-batch.

    Attributes:
        source, target: stages.
        nbytes: of the value.
        wire_s: for so long its link is taken; 0 within a device.
        latency_s: comes on top.
        sent_s, received_s: what handling it takes of the processes at its ends.
    """

    source: int
    target: int
    nbytes: int
    wire_s: float = 0.0
    latency_s: float = 0.0
    sent_s: float = 0.0
    received_s: float = 0.0

    @property
    def way_s(self) -> float:
        """When it is there, where nothing else is on its link."""
        return self.wire_s + self.latency_s


@dataclass(frozen=True)
class TimedStages:
    """Stages in an order in which they can run; devices are numbers.

    Attributes:
        device_of: per stage.
        forward_s, backward_s: per stage, of one micro-batch.
        values, gradients: what goes between stages, those on one device included.
        begin_s: per device: before its first job.
        instruction_s: per device: on top of each job.
        once_s: per device: after its last job.
    """

    device_of: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    values: tuple[Message, ...]
    gradients: tuple[Message, ...]
    begin_s: Mapping[int, float]
    instruction_s: Mapping[int, float]
    once_s: Mapping[int, float]

    @property
    def is_chain(self) -> bool:
        """Whether every device has exactly one stage."""
        return len(set(self.device_of)) == len(self.device_of)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The devices in use, in order of their first stage."""
        return tuple(dict.fromkeys(self.device_of))

    @cached_property
    def job_s(self) -> tuple[Sequence[float], Sequence[float]]:
        """What backward and forward of each stage take of its device."""
        own = [self.instruction_s[device] for device in self.device_of]
        return list(map(add, self.backward_s, own)), list(map(add, self.forward_s, own))

    def crosses(self, message: Message) -> bool:
        """Whether a message goes from one device to another."""
        return self.device_of[message.source] != self.device_of[message.target]

    @cached_property
    def links(self) -> Mapping[tuple[int, int], int]:
        """Numbers of the links that messages take, by the devices at their ends."""
        ends = dict.fromkeys(self._ends(message) for *_, message in self._crossing())
        return {pair: number for number, pair in enumerate(ends)}

    @cached_property
    def into(self) -> tuple[list[list[tuple[int, float]]], ...]:
        """What a job waits for, by kind and stage: the message's number, and its handling."""
        found: tuple[list[list[tuple[int, float]]], ...] = self._empty()
        for number, kind, message in self._crossing():
            found[kind][message.target].append((number, message.received_s))
        return found

    @cached_property
    def out_of(self) -> tuple[list[list[tuple[int, int, float, float, float]]], ...]:
        """What a job sends, in this order: the message's number, its link, and its seconds."""
        found: tuple[list[list[tuple[int, int, float, float, float]]], ...] = self._empty()
        for number, kind, message in self._crossing():
            link = self.links[self._ends(message)]
            seconds = message.sent_s, message.wire_s, message.latency_s
            found[kind][message.source].append((number, link, *seconds))
        return found

    def _empty(self) -> tuple[list[list[Any]], ...]:
        return tuple([[] for _ in self.device_of] for _ in range(_KINDS))

    def _ends(self, message: Message) -> tuple[int, int]:
        return self.device_of[message.source], self.device_of[message.target]

    def _crossing(self) -> Iterator[tuple[int, bool, Message]]:
        for number, message in enumerate((*self.values, *self.gradients)):
            if self.crosses(message):
                yield number, number < len(self.values), message


def forwards(stages: TimedStages, micro_batches: int) -> Orders:
    """Return the order of inference: micro-batch after micro-batch, as they come along."""
    cells = (
        (stage + micro, stage, micro, device)
        for stage, device in enumerate(stages.device_of)
        for micro in range(micro_batches)
    )
    orders: dict[int, list[Job]] = {device: [] for device in stages.devices}
    for _, stage, micro, device in sorted(cells):
        orders[device].append((True, stage, micro))
    return orders


def alternating(stages: TimedStages, micro_batches: int, in_flight: Sequence[int]) -> Orders:
    """Return the order of 1F1B, for one stage per device, with so many in flight at each."""
    return {
        device: one_f_one_b_of(stage, micro_batches, min(in_flight[stage], micro_batches))
        for stage, device in enumerate(stages.device_of)
    }


@lru_cache(maxsize=4096)
def one_f_one_b_of(stage: int, micro_batches: int, warm_up: int) -> tuple[Job, ...]:
    """Return F 0..w-1, then B0 F w B1 F w+1 ..., then the backwards that are left."""
    order = [(True, stage, micro) for micro in range(warm_up)]
    for micro in range(micro_batches):
        order.append((False, stage, micro))
        if warm_up + micro < micro_batches:
            order.append((True, stage, warm_up + micro))
    return tuple(order)


def played_s(stages: TimedStages, orders: Orders, trains: bool) -> float:
    """Return when the last device is done; infinity where devices wait for each other.

    Args:
        stages: what everything takes.
        orders: of each device; the micro-batches of a stage ascend.
        trains: whether there is something to do once a step.
    """
    end_s = {device: stages.begin_s[device] for device in orders}
    if not follow(stages, stages.job_s, orders, end_s, [0.0] * len(stages.links)):
        return float("inf")
    once_s = stages.once_s if trains else {}
    return max(now_s + once_s.get(device, 0.0) for device, now_s in end_s.items())


def follow(
    stages: TimedStages,
    job_s: Sequence[Sequence[float]],
    orders: Mapping[int, Sequence[tuple[int, int, int]]],
    end_s: dict[int, float],
    free_s: list[float],
) -> bool:
    """Follow the devices through their jobs; return whether all came to their end.

    Only its source device ever uses a link, so devices are followed one after another, each as far
    as what it waits for is there.

    Args:
        stages: what messages take.
        job_s: what each kind of job takes of each stage.
        orders: of each device: kind, stage and micro-batch; these ascend for a stage.
        end_s: when each device begins; then when it ends.
        free_s: when each link is free, by its number; likewise.
    """
    into, out_of = stages.into, stages.out_of
    arrived_s: list[list[float]] = [[] for _ in (*stages.values, *stages.gradients)]
    waiting = [-1] * len(arrived_s)  # by message: the device that waits for it
    done = dict.fromkeys(orders, 0)
    pending = list(reversed(tuple(orders)))
    while pending:
        device = pending.pop()
        now_s, jobs, at = end_s[device], orders[device], done[device]
        while at < len(jobs):  # no slice: a device may be woken for every job
            kind, stage, micro = jobs[at]
            begin_s = now_s
            for number, received_s in into[kind][stage]:
                there_s = arrived_s[number]
                if len(there_s) <= micro:
                    waiting[number] = device
                    break
                begin_s = max(begin_s, there_s[micro]) + received_s
            else:
                now_s = begin_s + job_s[kind][stage]
                for number, link, sent_s, wire_s, latency_s in out_of[kind][stage]:
                    now_s += sent_s
                    free_s[link] = max(now_s, free_s[link]) + wire_s
                    arrived_s[number].append(free_s[link] + latency_s)
                    if waiting[number] >= 0:
                        pending.append(waiting[number])
                        waiting[number] = -1
                at += 1
                continue
            break
        end_s[device], done[device] = now_s, at
    return all(done[device] == len(jobs) for device, jobs in orders.items())
