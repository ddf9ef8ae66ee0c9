"""Gradients of one device summed with those of its peers in other replicas, bucket by bucket.

    backward ──▶ bucket (flat) ──▶ reduce: each piece to who sums it ──▶ gather: the sums come back
                                                with ZeRO: only who sums a piece updates its weights

Sums are added up over micro-batches and replicas in the order of the plan:

    replica   each replica's own, ascending; then the replicas', ascending
    micro     all micro-batches, ascending by number
    tree      nodes of the binary tree over their numbers: what two siblings give is their parent

A part is a sum of neighbours: (first micro-batch, how many, numbers). The module knows buckets
(`buckets`), and no schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .buckets import Bucket
from .channel import Transport
from .gradients import laid_out
from .modules import AGAIN, WeightsError


@dataclass
class Sum:
    """A running sum: parts come ascending. The first of two that are added takes up the other."""

    is_tree: bool
    parts: list[tuple[int, int, Tensor]] = field(default_factory=list)

    def add(self, first: int, size: int, part: Tensor) -> None:
        """Add a part; it may be written into from now on."""
        self.parts.append((first, size, part))
        while len(self.parts) > 1 and self._joins():
            _, (_, more, right) = self.parts[-2:]
            first, size, left = self.parts[-2]
            self.parts[-2:] = [(first, size + more, left.add_(right))]

    def _joins(self) -> bool:
        if not self.is_tree:
            return True
        (first, size, _), (after, same, _) = self.parts[-2:]
        return _are_siblings(first, size, after, same)

    def total(self) -> Tensor:
        """Return the sum of all parts; what is left of a tree is added from the left."""
        _, _, total = self.parts[0]
        for _, _, right in self.parts[1:]:
            total = total.add_(right)
        self.parts = []
        return total


def sizes(order: str, micros: Sequence[int]) -> list[tuple[int, int]]:
    """Return the parts that a replica with these micro-batches sends: (first, how many)."""
    if order == "replica":
        return [(micros[0], len(micros))]
    if order == "micro":
        return [(micro, 1) for micro in micros]
    return _nodes(micros)


def _nodes(micros: Iterable[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for micro in micros:
        found.append((micro, 1))
        while len(found) > 1 and _are_siblings(*found[-2], *found[-1]):
            first, size = found[-2]
            found[-2:] = [(first, 2 * size)]
    return found


def _are_siblings(first: int, size: int, after: int, same: int) -> bool:
    """Whether two nodes, (first, size) and (after, same), are halves of one."""
    return size == same and after == first + size and first % (2 * size) == 0


OUT = 2
"""Buckets of a backward that have left and wait for parts of others, where each is summed then.

By the time that two more are complete, those parts have most likely come.
"""


@dataclass
class BucketSum:
    """One bucket in one step.

    Attributes:
        flat: of the micro-batch, or with the order "replica" of all that were computed here.
        piece: of the micro-batch, what is summed here, once the others' have left.
        made: which parameters have a gradient.
        filled: those in `flat`. now: those of this micro-batch.
        own: the sum here, where parts are sent when all is computed.
        total: the sum of the piece that is summed here.
        taken: parts of others that were added to it.
        sent: the micro-batch whose part has left, or with all others in it.
    """

    own: Sum
    total: Sum
    flat: Tensor | None = None
    piece: Tensor | None = None
    made: dict[str, None] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    now: set[str] = field(default_factory=set)
    taken: int = 0
    sent: int = -1


class Replicas:
    """One device's knowledge of the other replicas.

    Args:
        buckets: of this device.
        order: of sums: "replica", "micro" or "tree".
        micros: of each replica, the numbers of its micro-batches.
        parameters: by their names in the model.
        transport: to the other devices.
        each: whether each micro-batch is summed when it is there, and not all of them at last.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        order: str,
        micros: Sequence[Sequence[int]],
        parameters: Mapping[str, nn.Parameter],
        transport: Transport,
        each: bool,
    ) -> None:
        self.buckets, self.order, self.micros, self.each = buckets, order, micros, each
        self.parameters, self.transport = parameters, transport
        self._of = {(name, b.stage): b for b in buckets for name in b.params}
        self._at = {b.name: _offsets(b, parameters) for b in buckets}
        self._now: dict[str, BucketSum] = {}
        self._out: deque[tuple[Bucket, int]] = deque()

    def begin(self) -> None:
        """Forget the step before."""
        self._out.clear()
        self._now = {bucket.name: self._fresh() for bucket in self.buckets}

    def _fresh(self) -> BucketSum:
        is_tree = self.order == "tree"
        return BucketSum(Sum(is_tree), Sum(is_tree))

    def updated_here(self, name: str) -> bool:
        """Whether this replica sums all of a parameter's gradient, and so with ZeRO updates it."""
        own = [bucket for bucket in self.buckets if name in bucket.params]
        return any(self._is_here(bucket, name) for bucket in own)

    def _is_here(self, bucket: Bucket, name: str) -> bool:
        start, end = self._at[bucket.name][name]
        first = bucket.start(bucket.place)
        return first <= start and end <= first + bucket.size(bucket.place)

    def names_in(self, bucket: Bucket, place: int) -> dict[str, tuple[int, int]]:
        """Return the parameters in a replica's piece, with ZeRO, and where they are in it."""
        first = bucket.start(place)
        last = first + bucket.size(place)
        own = {n: at for n, at in self._at[bucket.name].items() if first <= at[0] and at[1] <= last}
        return {name: (start - first, end - first) for name, (start, end) in own.items()}

    # ------------------------------------------------------------------ while micro-batches run

    def add(self, name: str, stage: int, micro: int, gradient: Tensor) -> bool:
        """Add a gradient to its bucket; False when it is in none."""
        bucket = self._of.get((name, stage))
        if bucket is None:
            return False
        running = self._now[bucket.name]
        start, end = self._at[bucket.name][name]
        place = self._flat(bucket, running)[start:end].view(gradient.shape)
        if name in running.filled:
            place.add_(gradient)
        else:
            place.copy_(gradient)
        self._mark(bucket, running, name)
        running.filled.add(name)
        running.made[name] = None
        running.now.add(name)
        if self._leaves_now(bucket, running, micro):
            self._send_early(bucket, running, micro)
        return True

    def _mark(self, bucket: Bucket, running: BucketSum, name: str) -> None:
        """Say, after every piece, that a parameter has a gradient."""
        if bucket.marks and running.flat is not None:
            at = bucket.params.index(name)
            for place, piece in enumerate(bucket.pieces):
                running.flat[bucket.start(place) + piece + at] = 1

    def _leaves_now(self, bucket: Bucket, running: BucketSum, micro: int) -> bool:
        """Whether a bucket is complete while the backward still runs.

        Not on a GPU: other threads call there, and what they have queued is not done.
        """
        if self.order == "tree" and not self.each:
            return False
        is_last = self.each or micro == self._own(bucket)[-1]
        on_cpu = self.parameters[bucket.params[0]].device.type == "cpu"
        return is_last and on_cpu and len(running.now) == len(bucket.params)

    def _send_early(self, bucket: Bucket, running: BucketSum, micro: int) -> None:
        """Send what others sum; where that is each micro-batch's, keep no more than the rest."""
        assert running.flat is not None
        running.sent = micro
        self._send_part(bucket, running.flat)
        if self.each:
            running.piece = bucket.piece(running.flat, bucket.place).clone()
            running.flat = None
            self._out.append((bucket, micro))
            if len(self._out) > OUT:
                self._settle(*self._out.popleft())

    def _settle(self, bucket: Bucket, micro: int) -> None:
        """Add this replica's piece to its sum, after all that come before it."""
        running = self._now[bucket.name]
        assert running.piece is not None
        self._take(bucket, running, before=micro)
        running.total.add(micro, 1, running.piece)
        running.piece = None

    def _flat(self, bucket: Bucket, running: BucketSum) -> Tensor:
        """Return the flat tensor to add to; of zeros where nothing was added yet."""
        if running.flat is None:
            like, running.filled = self.parameters[bucket.params[0]], set()
            running.flat = torch.zeros(bucket.elements, dtype=like.dtype, device=like.device)
        return running.flat

    def after(self, stage: int, micro: int, *, waited: bool = False) -> None:
        """Send what is complete after a stage's backward; take what is due of the others'.

        `waited`: after its `backward_weight`, which completes other buckets.
        """
        for bucket in self.buckets:
            if bucket.stage == stage and bucket.waits == waited:
                self._after(bucket, self._now[bucket.name], micro)

    def _after(self, bucket: Bucket, running: BucketSum, micro: int) -> None:
        running.now = set()
        has_left = running.sent == micro
        if self.each and has_left:
            while (bucket, micro) in self._out:
                self._settle(*self._out.popleft())
            return
        flat = self._flat(bucket, running)
        if self.each:
            self._send_part(bucket, flat)
            running.piece = bucket.piece(flat, bucket.place).clone()
            running.flat = None
            self._settle(bucket, micro)
            return
        if self.order == "tree":
            running.own.add(micro, 1, flat)
            running.flat = None
        if micro == self._own(bucket)[-1] and not has_left:
            for _, _, part in self._own_parts(bucket, running):
                self._send_part(bucket, part)

    def _own(self, bucket: Bucket) -> Sequence[int]:
        """Return the numbers of the micro-batches that a bucket's stage computes here."""
        return self.micros[bucket.place]

    def _own_parts(self, bucket: Bucket, running: BucketSum) -> list[tuple[int, int, Tensor]]:
        """Return what this replica adds, where that is sent when all of it is there."""
        if self.order == "replica":
            assert running.flat is not None
            own = self._own(bucket)
            return [(own[0], len(own), running.flat)]
        return running.own.parts

    def _send_part(self, bucket: Bucket, flat: Tensor) -> None:
        for place, channel in bucket.parts.items():
            self.transport.send(channel, bucket.piece(flat, place))

    def take(self, name: str, count: int) -> None:
        """Take so many more of the others' parts of a bucket, each micro-batch being summed."""
        bucket = next(bucket for bucket in self.buckets if bucket.name == name)
        running = self._now[name]
        for first, size, place in self._others(bucket)[running.taken :][:count]:
            running.total.add(first, size, self.transport.recv(bucket.parts_in[place]))
            running.taken += 1

    # ------------------------------------------------------------------ once a step

    def sum(self) -> None:
        """Take the parts of the others, bucket by bucket, and add all in the order of the plan."""
        for bucket in self.buckets:
            running = self._now[bucket.name]
            if self.each:
                self._take(bucket, running, before=1 + max(map(max, filter(None, self.micros))))
            else:
                self._take_all(bucket, running)

    def _take(self, bucket: Bucket, running: BucketSum, before: int) -> None:
        """Add the parts of single micro-batches that come before a number, ascending."""
        others = self._others(bucket)
        for first, size, place in others[running.taken :]:
            if first >= before:
                return
            running.total.add(first, size, self.transport.recv(bucket.parts_in[place]))
            running.taken += 1

    def _take_all(self, bucket: Bucket, running: BucketSum) -> None:
        """Add the parts of all, this replica's own among them."""
        mine = [
            (first, size, bucket.piece(flat, bucket.place).clone())
            for first, size, flat in self._own_parts(bucket, running)
        ]
        received = [
            (first, size, self.transport.recv(bucket.parts_in[place]))
            for first, size, place in self._others(bucket)
        ]
        for part in sorted([*mine, *received], key=lambda part: part[0]):
            running.total.add(*part)

    def _others(self, bucket: Bucket) -> list[tuple[int, int, int]]:
        """Return the parts that the others send: first micro-batch, how many, whose; ascending."""
        return sorted(
            (first, size, place)
            for place in bucket.parts_in
            for first, size in sizes("micro" if self.each else self.order, self.micros[place])
        )

    def send_sums(self) -> None:
        """Send the summed pieces of gradients to the other replicas."""
        for bucket in self.buckets:
            running = self._now[bucket.name]
            total = running.total.total()
            for channel in bucket.sums.values():
                self.transport.send(channel, total)
            bucket.piece(self._flat(bucket, running), bucket.place).copy_(total)

    def recv_sums(self) -> None:
        """Take the pieces that others have summed."""
        for bucket in self.buckets:
            flat = self._flat(bucket, self._now[bucket.name])
            for place, channel in bucket.sums_in.items():
                bucket.piece(flat, place).copy_(self.transport.recv(channel))

    def gradients(self, zero: bool) -> Iterator[tuple[tuple[str, int], Tensor]]:
        """Yield the summed gradient of each parameter and stage; with ZeRO those updated here.

        Each is laid out as `.grad` would be: a norm adds in the order of memory.
        """
        for bucket in self.buckets:
            running = self._now[bucket.name]
            flat = running.total.total() if zero else self._flat(bucket, running)
            skip = bucket.start(bucket.place) if zero else 0
            for name in self._made(bucket, running, flat, skip):
                if zero and not self._is_here(bucket, name):
                    continue
                start, end = (at - skip for at in self._at[bucket.name][name])
                found = flat[start:end].view(self.parameters[name].shape)
                yield (name, bucket.stage), laid_out(found, self.parameters[name])

    def _made(self, bucket: Bucket, running: BucketSum, flat: Tensor, skip: int) -> list[str]:
        """Return the parameters with a gradient in any replica; without marks all make the same."""
        if not bucket.marks:
            return list(running.made)
        end = bucket.start(bucket.place) - skip + bucket.size(bucket.place)
        marks = flat[end : end + bucket.marks].tolist()
        return [name for name, mark in zip(bucket.params, marks, strict=True) if mark]

    # ------------------------------------------------------------------ weights, with ZeRO

    def send_weights(self) -> None:
        """Send the weights that were updated here to the other replicas."""
        for bucket in self.buckets:
            own = [name for name in bucket.params if self._is_here(bucket, name)]
            if not bucket.sums:
                continue
            like = self.parameters[bucket.params[0]]
            marks = torch.zeros(bucket.marks, dtype=like.dtype, device=like.device)
            parts = [self.parameters[name].detach().reshape(-1) for name in own]
            flat = torch.cat([*parts, marks])
            for channel in bucket.sums.values():
                self.transport.send(channel, flat)

    def recv_weights(self) -> None:
        """Take the weights that others have updated."""
        for bucket in self.buckets:
            for place, channel in bucket.sums_in.items():
                self._take_weights(bucket, place, self.transport.recv(channel))

    def _take_weights(self, bucket: Bucket, place: int, piece: Tensor) -> None:
        for name, (start, end) in self.names_in(bucket, place).items():
            held = self.parameters[name]
            held.detach().copy_(piece[start:end].view(held.shape))


def _offsets(bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, int]]:
    """Return where each parameter starts and ends in a bucket."""
    found: dict[str, tuple[int, int]] = {}
    ends = [sum(bucket.pieces[: place + 1]) for place in range(len(bucket.pieces))]
    start = 0
    for name in bucket.params:
        if name not in parameters:
            raise WeightsError(
                f"buckets.json: {bucket.name} has {name!r}, not held here: {AGAIN}", code="BX5136"
            )
        place = sum(end <= start for end in ends)
        skip = bucket.start(place) - sum(bucket.pieces[:place])  # what else lies before its piece
        found[name] = start + skip, start + skip + parameters[name].numel()
        start += parameters[name].numel()
    if start != sum(bucket.pieces):
        raise WeightsError(
            f"buckets.json: the pieces of {bucket.name} are not all of it: {AGAIN}", code="BX5137"
        )
    return found
