"""Play one step through in time: a device that is free takes, of what is ready, the most urgent.

The physics is that of `simulate`: a message starts when its link is free, and latency does not
occupy the link. Priorities: a backward before a forward, an early micro-batch before a late one,
and of one micro-batch the stage with the longest way still to go. A device has at most its limit of
micro-batches on it, from their first to their last computation there. That cannot block:
micro-batches enter every stage in ascending order, so the earliest unfinished one was let in
everywhere before any later one.

Source: Graham, Bounds on Multiprocessing Timing Anomalies, 1969 (list scheduling); the rank is the
upward rank of HEFT (Topcuoglu et al., 2002), used here only among equals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from bigbrain_fx.core import Backward, Compute, Edge, Forward, Stages
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders


@dataclass(frozen=True)
class Played:
    """What happened: each device's computations in order, and when it began and ended."""

    orders: Orders
    first_start_s: Mapping[str, float]
    last_end_s: Mapping[str, float]


def play(
    stages: Stages,
    micro_batches: int,
    costs: StageCosts,
    trained: frozenset[int],
    limits: Mapping[str, int],
) -> Played:
    """Play one step through; deterministic."""
    run = _Playthrough(stages, micro_batches, costs, trained, limits)
    run.play()
    orders = {device: tuple(compute for compute, _, _ in work) for device, work in run.done.items()}
    return Played(
        orders,
        first_start_s={device: work[0][1] for device, work in run.done.items()},
        last_end_s={device: work[-1][2] for device, work in run.done.items()},
    )


_Urgency: TypeAlias = tuple[int, float, int]  # (micro, -rank, stage): the smallest goes first


class _Playthrough:
    """One play-through: mutable, used once."""

    def __init__(
        self,
        stages: Stages,
        micro_batches: int,
        costs: StageCosts,
        trained: frozenset[int],
        limits: Mapping[str, int],
    ) -> None:
        self.stages, self.micro_batches, self.costs = stages, micro_batches, costs
        self.trained, self.limits = trained, limits
        self.done: dict[str, list[tuple[Compute, float, float]]] = {d: [] for d in stages.devices}
        self._ranks = _ranks(stages, costs, trained)
        self._missing: dict[Compute, int] = {}  # inputs that have not come yet
        self._backwards: dict[str, list[_Urgency]] = {device: [] for device in stages.devices}
        self._forwards: dict[str, list[_Urgency]] = {device: [] for device in stages.devices}
        self._running: set[str] = set()
        self._inside: dict[str, dict[int, int]] = {
            d: {} for d in stages.devices
        }  # micro -> work left
        self._work = {
            device: sum(1 + (stage.index in trained) for stage in stages.of(device))
            for device in stages.devices
        }
        self._link_free_s: dict[tuple[str, str], float] = {}
        self._events: list[tuple[float, int, Compute, bool]] = []  # when, number, what, it is done
        self._count = 0

    def play(self) -> None:
        for stage in self.stages.stages:
            if self._inputs(Forward(stage.index, 0)) == 0:
                self._offer(Forward(stage.index, 0))
        for device in self.stages.devices:
            self._start(device, 0.0)
        while self._events:
            now_s = self._events[0][0]
            touched: dict[str, None] = {}  # everything of one moment happens before anyone decides
            while self._events and self._events[0][0] == now_s:
                _, _, compute, is_done = heappop(self._events)
                touched[self._device(compute)] = None
                (self._finish if is_done else self._supply)(compute, now_s)
            for device in touched:
                self._start(device, now_s)

    def _device(self, compute: Compute) -> str:
        return self.stages.stages[compute.stage].device

    def _inputs(self, compute: Compute) -> int:
        """Count what a computation waits for: messages, the micro-batch before, its own forward."""
        before = int(compute.micro > 0)
        if isinstance(compute, Forward):
            return before + len(self.stages.into(compute.stage, "activation"))
        return before + 1 + len(self.stages.into(compute.stage, "gradient"))

    def _supply(self, compute: Compute, now_s: float) -> None:
        """Count one input of a computation as there."""
        left = self._missing.get(compute)
        left = self._inputs(compute) - 1 if left is None else left - 1
        self._missing[compute] = left
        if left == 0:
            del self._missing[compute]
            self._offer(compute)

    def _offer(self, compute: Compute) -> None:
        heaps = self._forwards if isinstance(compute, Forward) else self._backwards
        rank = self._ranks[isinstance(compute, Forward)][compute.stage]
        heappush(heaps[self._device(compute)], (compute.micro, -rank, compute.stage))

    def _start(self, device: str, now_s: float) -> None:
        """Let a free device take the most urgent computation that it may."""
        if device in self._running:
            return
        compute = self._take(device)
        if compute is None:
            return
        is_forward = isinstance(compute, Forward)
        took_s = (self.costs.forward_s if is_forward else self.costs.backward_s)[compute.stage]
        self._running.add(device)
        self._inside[device].setdefault(compute.micro, self._work[device])
        self.done[device].append((compute, now_s, now_s + took_s))
        self._at(now_s + took_s, compute, is_done=True)

    def _take(self, device: str) -> Compute | None:
        if self._backwards[device]:
            micro, _, stage = heappop(self._backwards[device])
            return Backward(stage, micro)
        forwards, inside = self._forwards[device], self._inside[device]
        # if the earliest may not come in yet, no later one is in
        if forwards and (forwards[0][0] in inside or len(inside) < self.limits[device]):
            micro, _, stage = heappop(forwards)
            return Forward(stage, micro)
        return None

    def _finish(self, compute: Compute, now_s: float) -> None:
        device = self._device(compute)
        self._running.remove(device)
        self._inside[device][compute.micro] -= 1
        if self._inside[device][compute.micro] == 0:
            del self._inside[device][compute.micro]
        for follower in self._followers(compute):
            self._supply(follower, now_s)
        is_forward = isinstance(compute, Forward)
        for edge in self.stages.out_of(compute.stage, "activation" if is_forward else "gradient"):
            reader = type(compute)(edge.target, compute.micro)
            self._at(self._arrival_s(edge, now_s), reader, is_done=False)

    def _followers(self, compute: Compute) -> Iterator[Compute]:
        """Yield what waits for a computation on its own stage."""
        if compute.micro + 1 < self.micro_batches:
            yield type(compute)(compute.stage, compute.micro + 1)
        if isinstance(compute, Forward) and compute.stage in self.trained:
            yield Backward(compute.stage, compute.micro)

    def _arrival_s(self, edge: Edge, now_s: float) -> float:
        if self.stages.is_local(edge):
            return now_s
        ends = self.stages.stages[edge.source].device, self.stages.stages[edge.target].device
        wire_s, latency_s = self.costs.wire_s(self.stages, edge)
        self._link_free_s[ends] = max(now_s, self._link_free_s.get(ends, 0.0)) + wire_s
        return self._link_free_s[ends] + latency_s

    def _at(self, when_s: float, compute: Compute, *, is_done: bool) -> None:
        # the number keeps events of one moment in the order in which they were caused
        self._count += 1
        heappush(self._events, (when_s, self._count, compute, is_done))


def _ranks(
    stages: Stages, costs: StageCosts, trained: frozenset[int]
) -> tuple[list[float], list[float]]:
    """Return each stage's longest way to the end of the step, from its backward and its forward."""
    backward = [0.0] * len(stages.stages)
    for stage in range(len(stages.stages)):  # gradients go to earlier stages
        ways = (
            sum(costs.wire_s(stages, edge)) + backward[edge.target]
            for edge in stages.out_of(stage, "gradient")
        )
        if stage in trained:
            backward[stage] = costs.backward_s[stage] + max(ways, default=0.0)
    forward = list(backward)
    for stage in reversed(range(len(stages.stages))):
        ways = (
            sum(costs.wire_s(stages, edge)) + forward[edge.target]
            for edge in stages.out_of(stage, "activation")
        )
        forward[stage] = costs.forward_s[stage] + max(ways, default=0.0)
        forward[stage] = max(forward[stage], costs.forward_s[stage] + backward[stage])
    return backward, forward
