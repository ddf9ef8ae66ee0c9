"""How long a chain of stages takes under 1F1B, and how many micro-batches to keep in flight.

The physics is that of `simulate.clock`, for chains whose messages are one forward and one backward
per cut, so that a thousand splits can be compared in the time that one is simulated. Every plan
that is returned has been simulated as it is; this only chooses which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from bigbrain_fx.search.line import Line, Setting, Split


@dataclass(frozen=True, slots=True)
class Hop:
    """A cut: seconds that a message occupies the link, comes later, and takes of both ends."""

    forward_s: float
    backward_s: float
    latency_s: float
    sender_s: float
    receiver_s: float


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages in a row: seconds of one micro-batch, hops between them, what each does once."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    hops: tuple[Hop, ...]
    once_s: tuple[float, ...]
    begin_s: tuple[float, ...]


def chain_of(line: Line, split: Split, setting: Setting, again: Sequence[int]) -> Chain:
    """Return the chain that a split makes; stages `again` run their forward twice."""
    forward: list[float] = []
    backward: list[float] = []
    once: list[float] = []
    begin: list[float] = []
    cluster = setting.cluster
    for device, (a, b) in zip(split.sequence, pairwise(split.cuts), strict=True):
        until_f, until_b, until_once = line.until(device)
        own = cluster.device[device].overheads
        forward.append(float(until_f[b] - until_f[a]) + own.instruction_s)
        twice_s = forward[-1] if len(once) in again else 0.0
        backward.append(float(until_b[b] - until_b[a]) + own.instruction_s + twice_s)
        once.append(float(until_once[b] - until_once[a]))
        begin.append(own.step_s)
    hops = [
        _hop(line, setting, a, b, cut)
        for (a, b), cut in zip(pairwise(split.sequence), split.cuts[1:-1], strict=True)
    ]
    back = tuple(backward) if line.work.trains else (0.0,) * len(backward)
    return Chain(tuple(forward), back, tuple(hops), tuple(once), tuple(begin))


def _hop(line: Line, setting: Setting, a: str, b: str, cut: int) -> Hop:
    cluster, crossing = setting.cluster, line.crossing
    link = cluster.link(a, b)
    per_s = min([link.bytes_per_s, *(rate for _, rate in cluster.nics(a, b))])
    nbytes, count = float(crossing.forward_bytes[cut]), float(crossing.forward_count[cut])

    def handled(device: str) -> float:
        own = cluster.device[device].overheads
        rate = own.message_bytes_per_s
        return count * own.message_s + (nbytes / rate if rate else 0.0)

    back_s = float(crossing.backward_bytes[cut]) / per_s
    return Hop(nbytes / per_s, back_s, link.latency_s, handled(a), handled(b))


def step_s(
    chain: Chain, micro_batches: int, in_flight: Sequence[int], trains: bool = True
) -> float:
    """Play a chain through one step of 1F1B and return when its last device is done.

    Args:
        chain: the stages.
        micro_batches: of the step.
        in_flight: of each stage; never more than the stage's before it.
        trains: otherwise there are only forwards.
    """
    run = _Run(chain, micro_batches, in_flight, trains)
    run.play()
    return run.step_s


class _Run:
    """One play-through: each stage goes on as far as what it waits for is there."""

    def __init__(
        self, chain: Chain, micro_batches: int, in_flight: Sequence[int], trains: bool
    ) -> None:
        self.chain, self.micro_batches, self.trains = chain, micro_batches, trains
        count = len(chain.forward_s)
        self.now = list(chain.begin_s)
        self.arrived_f: list[list[float]] = [[] for _ in range(count)]
        self.arrived_b: list[list[float]] = [[] for _ in range(count)]
        self.free_f, self.free_b = [0.0] * count, [0.0] * count
        self.warm = [min(in_flight[s], micro_batches) if trains else 0 for s in range(count)]
        self.done_f, self.done_b = [0] * count, [0] * count

    def play(self) -> None:
        count = len(self.now)
        pending = list(range(count - 1, -1, -1))
        while pending:
            stage = pending.pop()
            sent_f, sent_b = self.follow(stage)
            if sent_b and stage > 0:
                pending.append(stage - 1)
            if sent_f and stage + 1 < count:
                pending.append(stage + 1)

    @property
    def step_s(self) -> float:
        return max(now + once for now, once in zip(self.now, self.chain.once_s, strict=True))

    def follow(self, stage: int) -> tuple[int, int]:
        """Run one stage until it waits; return how many forwards and backwards it did."""
        before_f, before_b = self.done_f[stage], self.done_b[stage]
        while self.forward(stage) if self._forward_is_next(stage) else self.backward(stage):
            pass
        return self.done_f[stage] - before_f, self.done_b[stage] - before_b

    def _forward_is_next(self, stage: int) -> bool:
        if not self.trains:
            return True
        done = self.done_f[stage]
        return done < self.micro_batches and done < self.warm[stage] + self.done_b[stage]

    def forward(self, stage: int) -> bool:
        chain, micro = self.chain, self.done_f[stage]
        if micro >= self.micro_batches:
            return False
        now = self.now[stage]
        if stage:
            if micro >= len(self.arrived_f[stage]):
                return False
            now = max(now, self.arrived_f[stage][micro]) + chain.hops[stage - 1].receiver_s
        now += chain.forward_s[stage]
        if stage < len(chain.hops):
            hop = chain.hops[stage]
            now += hop.sender_s
            free = max(now, self.free_f[stage]) + hop.forward_s
            self.free_f[stage] = free
            self.arrived_f[stage + 1].append(free + hop.latency_s)
        self.now[stage] = now
        self.done_f[stage] = micro + 1
        return True

    def backward(self, stage: int) -> bool:
        chain, micro = self.chain, self.done_b[stage]
        if micro >= self.micro_batches:
            return False
        now = self.now[stage]
        if stage < len(chain.hops):
            if micro >= len(self.arrived_b[stage]):
                return False
            now = max(now, self.arrived_b[stage][micro]) + chain.hops[stage].sender_s
        now += chain.backward_s[stage]
        if stage:
            hop = chain.hops[stage - 1]
            now += hop.receiver_s
            free = max(now, self.free_b[stage]) + hop.backward_s
            self.free_b[stage] = free
            self.arrived_b[stage - 1].append(free + hop.latency_s)
        self.now[stage] = now
        self.done_b[stage] = micro + 1
        return True


def in_flights(chain: Chain, micro_batches: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield how many micro-batches each stage may keep in flight, each choice once.

    Classic 1F1B; as many as fill the pipeline (each hop's time there and back, in cycles of the
    slowest device or link, rounded up on its own), one more, two more; twice the classic; and all.

    Args:
        chain: the stages.
        micro_batches: of a step.
        most: what each stage's memory has room for.
    """
    count = len(chain.forward_s)
    classic = tuple(range(count, 0, -1))
    fill = _to_fill(chain, micro_batches)
    more = [tuple(n + extra * (n > 1) for n in fill) for extra in (1, 2)]
    twice = tuple(2 * n - 1 for n in classic)
    seen = set()
    for wanted in (classic, fill, *more, twice, (micro_batches,) * count):
        found = falling(wanted, micro_batches, most)
        if found not in seen:
            seen.add(found)
            yield found


def falling(wanted: Sequence[int], micro_batches: int, most: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers within 1 .. micro_batches and `most`, none larger than the one before."""
    found, before = [], micro_batches
    for want, room in zip(wanted, most, strict=True):
        before = max(1, min(want, room, before))
        found.append(before)
    return tuple(found)


def _to_fill(chain: Chain, micro_batches: int) -> tuple[int, ...]:
    loads = [f + b for f, b in zip(chain.forward_s, chain.backward_s, strict=True)]
    cycle_s = max([*loads, *(max(h.forward_s, h.backward_s) for h in chain.hops)])
    if cycle_s <= 0:
        return (micro_batches,) * len(loads)
    hops = [h.forward_s + h.backward_s + 2 * h.latency_s + 2 * h.receiver_s for h in chain.hops]
    each = [load + hop for load, hop in zip(loads, [*hops, 0.0], strict=True)]
    rounds = [max(0, ceil(time_s / cycle_s - 1e-9)) for time_s in each]
    return tuple(max(1, sum(rounds[stage:])) for stage in range(len(rounds)))
