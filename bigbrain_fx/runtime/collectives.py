"""Gradients of replicas summed by torch.distributed's own collectives, in whatever order it adds.

    ZeRO 0   all_reduce of each bucket, once a step
    ZeRO 1   reduce_scatter_tensor once a step;      all_gather_into_tensor of what was updated
    ZeRO 2   reduce_scatter_tensor each micro-batch; the same

Of several shard groups each does so by itself; all_reduce then adds a shard's sums over groups.
The replicas' devices at one place of the pipeline are a process group. Within one, collectives are
called in the order of buckets, as torch wants: a bucket that is complete waits for those before it.
Not tried on several GPUs over nccl.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .buckets import Bucket, Listed
from .channel import Transport
from .peers import PeerLostError
from .replicas import BucketSum, Replicas

# torch 2.13 has names of its own for these two, and warns of the old ones
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
MakeGroups = Callable[[Sequence[Sequence[str]]], Sequence[dist.ProcessGroup]]


@dataclass
class _Called:
    """A collective that is under way: on what, and where its result will be."""

    bucket: Bucket
    work: dist.Work
    flat: Tensor
    result: Tensor

    def done(self) -> Tensor:
        """Wait for the result; over nccl it is the GPU that waits.

        Raises:
            PeerLostError: one of the group is gone, or has not called it within the deadline.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            what = f"the sum of {self.bucket.name} over replicas"
            raise PeerLostError(f"a peer is gone, or too slow: {what}", code="BX5011") from error
        return self.result


class CollectiveReplicas(Replicas):
    """One device's knowledge of the other replicas, where torch.distributed adds.

    Args:
        groups: of each bucket, by name: the processes that sum it.
        zero_stage: from 1 on, each replica has the sums of its own piece only.
        across: of each bucket, the processes that have the same piece in other shard groups.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        micros: Sequence[Sequence[int]],
        parameters: Mapping[str, nn.Parameter],
        transport: Transport,
        groups: Mapping[str, dist.ProcessGroup],
        zero_stage: int,
        across: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        filled = [replace(bucket, filled=bool(zero_stage)) for bucket in buckets]
        about = micros, parameters, transport
        super().__init__(filled, "backend", *about, each=zero_stage >= 2)
        self.groups, self.zero, self.across = groups, bool(zero_stage), across or {}
        self._called: dict[str, _Called] = {}

    def begin(self) -> None:
        """Forget the step before."""
        super().begin()
        self._called = {}
        self._line: dict[int, deque[Bucket]] = {b.stage: self._all(b.stage) for b in self.buckets}

    def _all(self, stage: int) -> deque[Bucket]:
        """Return a stage's buckets, in the order in which its group sums them."""
        return deque(bucket for bucket in self.buckets if bucket.stage == stage)

    def _send_early(self, bucket: Bucket, running: BucketSum, micro: int) -> None:
        running.sent = micro
        self._call_next(bucket.stage, micro)

    def _after(self, bucket: Bucket, running: BucketSum, micro: int) -> None:
        running.now = set()
        if running.sent != micro and (self.each or micro == self._own(bucket)[-1]):
            running.sent = micro
            self._call_next(bucket.stage, micro)

    def _call_next(self, stage: int, micro: int) -> None:
        """Call the collectives of a stage's buckets as far as they are complete, in order."""
        line = self._line[stage]
        while line and self._now[line[0].name].sent == micro:
            self._call(line.popleft())
        if not line:
            self._line[stage] = self._all(stage)  # for the next micro-batch

    def _call(self, bucket: Bucket) -> None:
        if bucket.name in self._called:  # the micro-batch before: one at a time is in memory
            self._end(self._called.pop(bucket.name))
        running, group = self._now[bucket.name], self.groups[bucket.name]
        flat = self._flat(bucket, running)  # zeros where nothing was made: the others wait for it
        if not self.zero:
            work = dist.all_reduce(flat, group=group, async_op=True)
            result = flat
        else:
            result = flat.new_empty(bucket.room)
            work = _reduce_scatter(result, flat, group=group, async_op=True)
        if self.each:
            running.flat = None
        self._called[bucket.name] = _Called(bucket, work, flat, result)

    def _end(self, called: _Called) -> None:
        result, bucket = called.done(), called.bucket
        if self.zero:
            own = result[: bucket.size(bucket.place) + bucket.marks]
            self._now[bucket.name].total.add(0, 1, own)

    def sum(self) -> None:
        """Wait until all are summed; with ZeRO 2 add up what each micro-batch gave."""
        for called in self._called.values():
            self._end(called)
        self._called = {}
        for bucket in self.buckets if self.across else ():
            total = self._now[bucket.name].total
            flat = total.total()
            work = dist.all_reduce(flat, group=self.across[bucket.name], async_op=True)
            total.add(0, 1, _Called(bucket, work, flat, flat).done())

    def send_sums(self) -> None:
        """Send nothing: all have the sums."""

    def recv_sums(self) -> None:
        """Take nothing: all have the sums."""

    def send_weights(self) -> None:
        """Begin to gather the weights that each replica has updated."""
        for bucket in self.buckets:
            like = self.parameters[bucket.params[0]]
            own = torch.zeros(bucket.room, dtype=like.dtype, device=like.device)
            for name, (start, end) in self.names_in(bucket, bucket.place).items():
                own[start:end].copy_(self.parameters[name].detach().reshape(-1))
            flat = own.new_empty(bucket.elements)
            group = self.groups[bucket.name]
            work = _all_gather(flat, own, group=group, async_op=True)
            self._called[bucket.name] = _Called(bucket, work, own, flat)

    def recv_weights(self) -> None:
        """Take the weights that others have updated."""
        for called in self._called.values():
            flat, bucket = called.done(), called.bucket
            for place in range(len(bucket.pieces)):
                if place != bucket.place % len(bucket.pieces):
                    self._take_weights(bucket, place, bucket.piece(flat, place))
        self._called = {}


def new_groups(
    ranks: Mapping[str, int], deadline: timedelta, devices: Sequence[Sequence[str]]
) -> list[dist.ProcessGroup]:
    """Make a process group of each of these, of which this device may be none.

    torch numbers groups, so all devices must ask for the same ones in one order.
    """
    return [dist.new_group([ranks[name] for name in each], timeout=deadline) for each in devices]


def process_groups(
    listed: Listed, make: MakeGroups, device: str, *, across: bool = False
) -> dict[str, dist.ProcessGroup]:
    """Return the group of each bucket that a device is in: one for those that the same stages sum.

    All devices make all groups, in the order of buckets.json. Replicas of a shard group sum and
    gather; `across`: those that have the same piece in every such group; none, where there is one.
    """
    sets = {
        (tuple(entry["stages"]), tuple(each)): each
        for entry in listed.values()
        for each in _sets(entry["devices"], len(entry["pieces"]), across)
    }
    made = dict(zip(sets, make([*sets.values()]), strict=True))
    return {
        name: made[stages, each]
        for name, entry in listed.items()
        for stages, each in sets
        if stages == tuple(entry["stages"]) and device in each
    }


def _sets(devices: Sequence[str], pieces: int, across: bool) -> list[Sequence[str]]:
    count = len(devices)
    if across:
        return [devices[place::pieces] for place in range(pieces)] if pieces < count else []
    return [devices[first : first + pieces] for first in range(0, count, pieces)]
