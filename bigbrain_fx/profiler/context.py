"""Time ops where they stand: run a captured graph forward and backward, and clock every op.

In training an op's operands come from memory or from the op before it, its results go to freshly
allocated memory, and autograd adds up what several readers send back. A loop over one op alone has
none of that: over our models its sums come out 7 to 33 % too short. So the whole graph runs, in one
process, and each interval between two events is charged to one op: forward, from value to value;
backward, from one node of autograd to the next. The gradients of values alone come from a pass of
another kind, in which no parameter wants a gradient.

This file times; it knows no files and no machines.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbrain_fx.core import Op
from bigbrain_fx.profiler.subject import Subject
from bigbrain_fx.profiles import signatures

Clock: TypeAlias = Callable[[], float]

_CHAIN = 100  # nodes in the chain that tells what a hook costs
_CHAINS = 5


def clock(threads: int) -> Clock:
    """Return the clock to measure with.

    One thread's own processor time does not count what other processes take, nor a control group's
    quota; several threads have only the wall's time.
    """
    return time.thread_time if threads == 1 else time.perf_counter


@dataclass
class Timed:
    """Seconds of one run of a graph, by op (`id(op)`: names within regions may come twice).

    `nodes_s` is what autograd's nodes took, the gradients that they make of parameters included;
    `sums_s` adding those up over micro-batches.
    """

    forward_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    nodes_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    sums_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class Overheads:
    """What measuring adds: an interval with nothing in it, and a hook at one node of autograd."""

    tick_s: float
    hook_s: float


def whole_step_s(subject: Subject, now: Clock) -> float:
    """Time one run forward and backward, with nobody watching."""
    start_s = now()
    loss = subject.forward()
    if loss is not None:
        subject.backward(loss, subject.trained)
    return now() - start_s


def timed_step(subject: Subject, now: Clock, costs: Overheads, frozen: bool = False) -> Timed:
    """Run once, watched.

    Args:
        subject: what to run.
        now: the clock.
        costs: what measuring adds; taken off again.
        frozen: no parameter wants a gradient: the backward makes those of values alone.
    """
    watch = _Watch(subject, now, costs, frozen)
    loss = watch.forward()
    if loss is not None and loss.requires_grad:
        watch.backward(loss)
    return watch.timed


class _Watch:
    """Charge each interval to the op that it belongs to; used once."""

    def __init__(self, subject: Subject, now: Clock, costs: Overheads, frozen: bool) -> None:
        self.subject, self.now, self.costs, self.frozen = subject, now, costs, frozen
        self.timed = Timed()
        self._made: list[tuple[Node, int]] = []
        self._owner: dict[Node, int] = {}
        self._leaves: list[Tensor] = []
        self._events: list[tuple[float, int, bool]] = []  # when, whose, whether it adds up
        self._reader = _first_readers(subject)
        self._last_s = 0.0

    def forward(self) -> Tensor | None:
        """Run forward, noting values; return the loss."""
        self._last_s = self.now()
        loss = self.subject.forward(self._ran, self.frozen)
        for node, op in self._made:
            self._own(node, op)
        return loss

    def _ran(self, op: Op, value: object) -> None:
        """Note the time, and as little else as possible: what is done here cools the caches."""
        self.timed.forward_s[id(op)] += self.now() - self._last_s - self.costs.tick_s
        for tensor in (value,) if isinstance(value, Tensor) else _tensors(value):
            if self.frozen and op.requires_grad and not tensor.requires_grad:
                self._sprout(tensor)
            if tensor.grad_fn is not None:
                self._made.append((tensor.grad_fn, id(op)))
        self._last_s = self.now()

    def _sprout(self, tensor: Tensor) -> None:
        """Let gradients begin at what parameters alone made: an embedding's rows."""
        if tensor.is_floating_point() and torch.is_grad_enabled():
            self._leaves.append(tensor.requires_grad_())

    def _own(self, node: Node, op: int) -> None:
        """Charge all nodes that this op has made; those of earlier ops have an owner already."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node in self._owner or node.name().endswith("AccumulateGrad"):
                continue
            self._owner[node] = op
            node.register_prehook(self._note(op))
            waiting.extend(n for n, _ in node.next_functions if n is not None)

    def _note(self, op: int) -> Callable[[object], None]:
        def hook(_: object) -> None:
            self._events.append((self.now(), op, False))

        return hook

    def _added(self, param: str) -> None:
        self._events.append((self.now(), self._reader[param], True))

    def backward(self, loss: Tensor) -> None:
        """Run backward, noting nodes and sums; charge the time between them.

        Before the first node autograd walks through all of them: that is charged to each alike.
        """
        leaves = self._leaves if self.frozen else self.subject.trained
        start_s = self.now()
        with self.subject.telling(self._added):
            self.subject.backward(loss, leaves)
        ends = [when_s for when_s, _, _ in self._events[1:]] + [self.now()]
        for (begin_s, op, adds), end_s in zip(self._events, ends, strict=True):
            if adds:
                self.timed.sums_s[op] += end_s - begin_s - self.costs.tick_s
            else:
                self.timed.nodes_s[op] += end_s - begin_s - self.costs.hook_s
        walked_s = (self._events[0][0] if self._events else start_s) - start_s
        nodes = [op for _, op, adds in self._events if not adds]
        for op in nodes:
            self.timed.nodes_s[op] += walked_s / len(nodes)


def _first_readers(subject: Subject) -> Mapping[str, int]:
    """Map each parameter to the first op that reads it: autograd adds up its gradient there."""
    canonical = {param.name: param.canonical for param in subject.graph.params}
    found: dict[str, int] = {}
    for op, _ in signatures(subject.graph):
        for name in op.params:
            found.setdefault(canonical[name], id(op))
    return found


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def overheads(now: Clock) -> Overheads:
    """Measure what measuring costs, here and now: it differs with how busy the machine is.

    A chain of tiny ops runs with a look at the clock after each and a hook at each of their nodes,
    and without. To look is more than the clock's own time: what runs after a system call is slower.
    """
    pairs = [(_chain(now, watched=True), _chain(now, watched=False)) for _ in range(_CHAINS)]
    ticks = [(watched[0] - plain[0]) / _CHAIN for watched, plain in pairs]
    hooks = [(watched[1] - plain[1]) / _CHAIN for watched, plain in pairs]
    return Overheads(max(0.0, statistics.median(ticks)), max(0.0, statistics.median(hooks)))


def _chain(now: Clock, watched: bool) -> tuple[float, float]:
    """Return the seconds of forward and of backward of a chain; watched, the sum of intervals."""
    leaf = torch.ones(4, requires_grad=True)
    value, events, nodes, forward_s = leaf, [], [], 0.0
    start_s = last_s = now()
    for _ in range(_CHAIN):
        value = value * 1.5
        if watched:
            forward_s += now() - last_s
            nodes.append(value.grad_fn)
            last_s = now()
    forward_s = forward_s if watched else now() - start_s

    def note(_: object) -> None:
        events.append((now(), 0, False))

    for node in nodes:
        assert node is not None
        node.register_prehook(note)
    start_s = now()
    torch.autograd.grad([value], [leaf], [torch.ones(4)])
    return forward_s, now() - start_s
