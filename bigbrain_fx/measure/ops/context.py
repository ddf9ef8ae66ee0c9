"""Time ops where they stand: run a captured graph forward and backward, and clock every op.

In training an op's operands come from memory or from the op before it, and its results go to newly
allocated memory. Autograd adds up the gradients of several readers. A loop over one op alone has
none of that: over our models its sums come out 7 to 33 % too short. The whole graph therefore runs,
in one process, and each interval between two events is charged to one op. Forward it is from value
to value, backward from one node of autograd to the next. The gradients of values alone come from a
pass of another kind, in which no parameter wants a gradient.

This file times; it knows no files and no machines.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bigbrain_fx.core import Op
from bigbrain_fx.costs import signatures
from bigbrain_fx.measure.ops.stopwatch import Mark, Stopwatch
from bigbrain_fx.measure.ops.subject import Subject

_CHAIN = 100  # nodes in the chain that tells what a hook costs
_CHAINS = 5


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
class WatchOverheads:
    """Costs of measuring: an empty interval, and a hook at one node of autograd."""

    tick_s: float
    hook_s: float


def whole_step_s(subject: Subject, watch: Stopwatch) -> float:
    """Time one run forward and backward, with nobody watching."""
    begin = watch.mark()
    loss = subject.forward()
    if loss is not None:
        subject.backward(loss, subject.trained)
    end = watch.mark()
    watch.settle()
    return watch.between_s(begin, end)


def timed_step(
    subject: Subject, watch: Stopwatch, costs: WatchOverheads, frozen: bool = False
) -> Timed:
    """Run once, watched.

    Args:
        subject: what to run.
        watch: to measure with.
        costs: what measuring adds; taken off again.
        frozen: no parameter wants a gradient: the backward makes those of values alone.
    """
    run = _Watched(subject, watch, frozen)
    loss = run.forward()
    if loss is not None and loss.requires_grad:
        run.backward(loss)
    watch.settle()
    run.forget()
    return run.timed(costs)


class _Watched:
    """Mark where each op's intervals begin and end, then charge them to it; used once."""

    def __init__(self, subject: Subject, watch: Stopwatch, frozen: bool) -> None:
        self.subject, self.watch, self.frozen = subject, watch, frozen
        self._mark = watch.mark
        self._made: list[tuple[Node, int]] = []
        self._owner: dict[Node, int] = {}
        self._leaves: list[Tensor] = []
        self._calls: list[tuple[int, Mark, Mark]] = []  # whose, from when, to when
        self._events: list[tuple[Mark, int, bool]] = []  # when, whose, whether it adds up
        self._backward: tuple[Mark, Mark] | None = None
        self._reader = _first_readers(subject)
        self._last: Mark = None

    def forward(self) -> Tensor | None:
        """Run forward, noting values; return the loss."""
        self._last = self._mark()
        loss = self.subject.forward(self._ran, self.frozen)
        for node, op in self._made:
            self._own(node, op)
        return loss

    def _ran(self, op: Op, value: object) -> None:
        """Mark, and do as little else as possible: what is done here cools the caches."""
        self._calls.append((id(op), self._last, self._mark()))
        for tensor in (value,) if isinstance(value, Tensor) else _tensors(value):
            if self.frozen and op.requires_grad and not tensor.requires_grad:
                self._sprout(tensor)
            if tensor.grad_fn is not None:
                self._made.append((tensor.grad_fn, id(op)))
        self._last = self._mark()

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
            self._events.append((self._mark(), op, False))

        return hook

    def _added(self, param: str) -> None:
        self._events.append((self._mark(), self._reader[param], True))

    def backward(self, loss: Tensor) -> None:
        """Run backward, marking nodes and sums."""
        leaves = self._leaves if self.frozen else self.subject.trained
        begin = self._mark()
        with self.subject.telling(self._added):
            self.subject.backward(loss, leaves)
        self._backward = begin, self._mark()

    def forget(self) -> None:
        """Let go of autograd's nodes: they hold our hooks, and no collector sees through them."""
        self._made.clear()
        self._owner.clear()

    def timed(self, costs: WatchOverheads) -> Timed:
        """Charge what passed between marks; the stopwatch has settled."""
        found = Timed()
        for op, begin, end in self._calls:
            found.forward_s[op] += self.watch.between_s(begin, end, costs.tick_s)
        if self._backward is not None:
            self._charge_backward(found, costs, *self._backward)
        return found

    def _charge_backward(self, found: Timed, costs: WatchOverheads, begin: Mark, end: Mark) -> None:
        """Charge the time between events of backward.

        Before the first node autograd walks through all of them: that is charged to each alike.
        """
        ends = [when for when, _, _ in self._events[1:]] + [end]
        for (when, op, adds), until in zip(self._events, ends, strict=True):
            if adds:
                found.sums_s[op] += self.watch.between_s(when, until, costs.tick_s)
            else:
                found.nodes_s[op] += self.watch.between_s(when, until, costs.hook_s)
        nodes = [op for _, op, adds in self._events if not adds]
        walked_s = self.watch.between_s(begin, self._events[0][0]) if nodes else 0.0
        for op in nodes:
            found.nodes_s[op] += walked_s / len(nodes)


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


def overheads(watch: Stopwatch) -> WatchOverheads:
    """Measure what measuring costs, here and now: it differs with how busy the machine is.

    A chain of tiny ops runs with a mark after each and a hook at each of their nodes, and without.
    To mark is more than the clock's own time: what runs after a system call is slower.
    """
    pairs = [(_chain(watch, watched=True), _chain(watch, watched=False)) for _ in range(_CHAINS)]
    ticks = [(watched[0] - plain[0]) / _CHAIN for watched, plain in pairs]
    hooks = [(watched[1] - plain[1]) / _CHAIN for watched, plain in pairs]
    return WatchOverheads(max(0.0, statistics.median(ticks)), max(0.0, statistics.median(hooks)))


def _chain(watch: Stopwatch, watched: bool) -> tuple[float, float]:
    """Return the seconds of forward and of backward of a chain; watched, the sum of intervals."""
    mark, leaf = watch.mark, torch.ones(4, device=watch.device, requires_grad=True)
    value, calls, events, nodes = leaf, [], [], []
    begin = last = mark()
    for _ in range(_CHAIN):
        value = value * 1.5
        if watched:
            calls.append((0, last, mark()))
            nodes.append(value.grad_fn)
            last = mark()
    if not watched:
        calls.append((0, begin, mark()))

    def note(_: object) -> None:
        events.append((mark(), 0, False))

    for node in nodes:
        assert node is not None
        node.register_prehook(note)
    begin = mark()
    torch.autograd.grad([value], [leaf], [torch.ones(4, device=watch.device)])
    end = mark()
    watch.settle()
    return sum(watch.between_s(*call[1:]) for call in calls), watch.between_s(begin, end)
