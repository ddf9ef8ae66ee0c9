"""Messages over torch.distributed: one process per device.

Over gloo receives are posted ahead, and sends leave in the background. gloo matches messages by
tag, so all channels share one group. nccl has no tags: there every channel gets a group of its own,
which keeps its order and lets channels pass each other. Its messages are kernels, each on the
stream of its channel, and the stream that computes waits for receives only.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .agreed import require_same
from .channel import Channel
from .checksum import is_whole, seal, sealed_length
from .gloo import AHEAD, ChannelEnd, GlooTransport
from .layout import Layout
from .peers import LateMessageError, PeerLostError, SpoiledError
from .relayout import pack

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .mpi import MpiWires, MpiWork

    Work: TypeAlias = dist.Work | MpiWork

ALARM = (1 << 31) - 1  # tag of a message that nobody sends
COMPARED = 64  # digests that a device leaves in the store: none is so many steps behind another


class NetworkTransport(GlooTransport):
    """Send and receive over an initialised torch.distributed group.

    Args:
        ranks: device name -> rank.
        device: where tensors live; cuda tensors go through host memory unless the backend is nccl.
        deadline_s: longest wait for any one message; see `_wait_on_gpu` for nccl.
        store: where devices compare what they must agree on.
        channels: those of all devices. With nccl each gets its group at once, in order of tags:
            torch numbers groups, so every device must make all of them, in one order.
        mesh: a gloo group of its own, which `abandon` may close, instead of the default group. Its
            messages have checksums: who knows how to connect anew can ask for one again.
        wires: carry the messages instead of either: MPI.
    """

    def __init__(
        self,
        ranks: dict[str, int],
        device: torch.device,
        deadline_s: float,
        store: Store | None = None,
        channels: Iterable[Channel] = (),
        mesh: dist.ProcessGroup | None = None,
        wires: MpiWires | None = None,
    ) -> None:
        super().__init__(ranks, device, deadline_s)
        self.wires: MpiWires | dist.ProcessGroup | None = wires if mesh is None else mesh
        self.store = store
        self.mesh = mesh
        self.alarms = _alarms(mesh) if mesh is not None else []
        self.is_nccl = mesh is None and dist.get_backend() == "nccl"
        self.wire = device if self.is_nccl else torch.device("cpu")
        self.ahead = 0 if self.is_nccl else AHEAD  # a receive of nccl would spin on the GPU
        self.reached: deque[torch.cuda.Event] = deque()
        self.said_first: deque[str] = deque()
        self.background = _Background(self.deadline, self.wire)
        if self.is_nccl:
            for _, channel in sorted({channel.tag: channel for channel in channels}.items()):
                self._connect(channel)

    def agree(self, what: str, digest: str, device: str) -> None:
        """Raise unless every device that names `what` gives the same digest."""
        mine = f"{device} {digest}"
        assert self.store is not None
        first = self.store.compare_set(f"agree/{what}", "", mine).decode()
        require_same(what, mine, first)
        if first == mine:
            self.said_first.append(f"agree/{what}")
        if len(self.said_first) > COMPARED:
            self.store.delete_key(self.said_first.popleft())

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        """Tell all devices what this one says of a step; return whether all say yes."""
        assert self.store is not None
        self.store.set(f"vote/{step}/{device}", "yes" if yes else "no")
        self.store.delete_key(f"vote/{step - 2}/{device}")  # all have voted on the next one
        return all([self.store.get(f"vote/{step}/{name}") == b"yes" for name in names])

    def groups(self, devices: Sequence[Sequence[str]]) -> list[dist.ProcessGroup | None]:
        """Make a process group of each of these, of which this device may be none.

        torch numbers groups, so all devices must ask for the same ones in one order.
        """
        assert self.wires is None, "collectives are of the default group's backend"
        return [
            dist.new_group([self.ranks[name] for name in names], timeout=self.deadline)
            for names in devices
        ]

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        self.background.drain()

    def layout(self, channel: Channel) -> Layout | None:
        """Return how a channel's messages lie in memory; None before its first one."""
        return self._line(channel).layout

    def sending(self) -> Channel | None:
        """Return the channel whose message has been leaving for longest, if any."""
        return self.background.current

    def abandon(self) -> None:
        """Close a mesh's connections at once, from any thread: whoever waits on them is woken.

        gloo closes all pairs of a group when one wait has lasted too long, so the wait for a
        message that nobody sends is given a millisecond. It must be one of a living peer: that of
        a dead one has failed, and closes nothing. (`abort` wakes no receive, and a pair stays open
        while any handle of it is held.)
        """
        for _, work in self.alarms:
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Abandon a mesh and drop everything that belongs to it."""
        self.abandon()
        self.background.stop()
        self.lines.clear()
        self.alarms = []
        self.mesh = self.wires = None

    def _line(self, channel: Channel) -> ChannelEnd:
        line = self.lines.get(channel.tag)
        if line is None:
            assert not self.is_nccl, f"no group was made for {channel}"
            line = self.lines[channel.tag] = ChannelEnd(channel, self._peer(channel))
        return line

    def _peer(self, channel: Channel) -> int:
        me = dist.get_rank() if self.mesh is None else self.mesh.rank()
        return self.ranks[channel.sender] + self.ranks[channel.receiver] - me

    def _connect(self, channel: Channel) -> None:
        """Give a channel a group of its own; pass a first message if it starts or ends here.

        nccl connects two ends in their first message, and each waits there for the other. In a step
        it would be too late: two ends that both send first would wait for ever.
        """
        sender, receiver = self.ranks[channel.sender], self.ranks[channel.receiver]
        group = dist.new_group([sender, receiver], timeout=self.deadline)
        if (me := dist.get_rank()) not in (sender, receiver):
            return
        line = self.lines[channel.tag] = ChannelEnd(channel, self._peer(channel), group)
        move = dist.send if me == sender else dist.recv
        with _to_a_living_peer(channel):
            move(torch.zeros(1, device=self.wire), line.peer, group=group)

    def _start_send(self, line: ChannelEnd, payload: Tensor, tag: int) -> None:
        with _to_a_living_peer(line.channel):
            work: Work | None
            if self.wires is None:
                work = dist.isend(payload, line.peer, group=line.group, tag=tag)
            else:
                work = self.wires.send([payload], line.peer, tag)
        if work is not None:
            self.background.keep(work, payload, line.channel)

    def _start_recv(self, line: ChannelEnd, payload: Tensor, tag: int) -> Work:
        with _to_a_living_peer(line.channel):
            work: Work | None
            if self.wires is None:
                work = dist.irecv(payload, line.peer, group=line.group, tag=tag)
            else:
                work = self.wires.recv([payload], line.peer, tag)
        if work is None:
            raise RuntimeError(f"this process is not part of {line.channel}")
        return work

    # ------------------------------------------------------------------ bytes on the wire

    def _pack(self, tensor: Tensor, layout: Layout) -> Tensor:
        return pack(tensor, layout)

    def _bytes(self, flat: Tensor) -> Tensor:
        payload = super()._bytes(flat)
        return payload if self.mesh is None else seal(payload)

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        length = nbytes if self.mesh is None else sealed_length(nbytes)
        return torch.empty(length, dtype=torch.uint8, device=self.wire)

    def _opened(self, arrived: Tensor, numel: int, dtype: torch.dtype, channel: Channel) -> Tensor:
        nbytes = numel * dtype.itemsize
        if self.mesh is not None and not is_whole(arrived, nbytes):
            raise SpoiledError(f"a message's checksum is wrong: {channel}", code="BX5087")
        return arrived[:nbytes].view(dtype)

    def _wait(self, work: Work, channel: Channel) -> None:
        self.background.check()
        if self.is_nccl:
            self._wait_on_gpu(work, channel)
            return
        start, seconds = time.monotonic(), self.deadline.total_seconds()
        try:
            work.wait(self.deadline)
        except RuntimeError as error:
            if time.monotonic() - start < seconds:
                raise PeerLostError(f"the peer is gone: {channel}", code="BX5088") from error
            raise LateMessageError(
                f"no message within {seconds:g} s: {channel}", code="BX5089"
            ) from error

    def _wait_on_gpu(self, work: Work, channel: Channel) -> None:
        """Let the stream that computes wait for a message over nccl; this thread goes on.

        No timeout is given: with one, nccl's `wait` polls here until the message has come. At the
        group's, which is the deadline, or when nccl sees that a peer is gone, torch's watchdog ends
        the process by SIGABRT; its text is in the log, ours is not
        (TORCH_NCCL_ASYNC_ERROR_HANDLING).

        This thread stays AHEAD messages ahead at most: what it sends has memory until it has left.
        """
        with _to_a_living_peer(channel):
            work.wait()
        if self.wire.type != "cuda":
            return
        self.reached.append(torch.cuda.Event(blocking=True))
        self.reached[-1].record()
        if len(self.reached) > AHEAD:
            self.reached.popleft().synchronize()


@contextmanager
def _to_a_living_peer(channel: Channel) -> Iterator[None]:
    """Say which peer is gone where torch only says that a connection was closed."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"the peer is gone: {channel}", code="BX5090") from error


def _alarms(mesh: dist.ProcessGroup) -> list[tuple[Tensor, Work]]:
    """Post receives that nobody answers, one for each peer; see `NetworkTransport.abandon`.

    Raises:
        PeerLostError: a peer is gone already.
    """
    posted: list[tuple[Tensor, Work]] = []
    for peer in (rank for rank in range(mesh.size()) if rank != mesh.rank()):
        nothing = torch.empty(1, dtype=torch.uint8)
        try:
            posted.append((nothing, mesh.recv([nothing], peer, ALARM)))
        except RuntimeError as error:
            raise PeerLostError(
                "a peer was gone before all were connected", code="BX5091"
            ) from error
    return posted


class _Background:
    """Hold what is being sent until it has left; threads wait so that the device need not.

    What goes to one peer, of one kind, leaves in turn, and has a thread: a part of a sum that is
    taken late keeps no weights here that were taken long ago.

    nccl's `wait` makes the thread's current stream wait. That is the one that computes, unless the
    thread has a stream of its own: then computing would wait for every send, and two devices that
    send to each other for ever. All messages have one such thread.
    """

    def __init__(self, deadline: timedelta, wire: torch.device) -> None:
        self.deadline = deadline
        # with a priority, so as not to be one of those that the channels have: torch hands out 32
        is_cuda = wire.type == "cuda"
        self.side = torch.cuda.Stream(wire, priority=-1) if is_cuda else None
        self.queues: dict[tuple[str, ...], _SendQueue] = {}
        self.failed: tuple[Channel, BaseException] | None = None
        self._making = threading.Lock()  # messages that were lost are sent by other threads

    @property
    def current(self) -> Channel | None:
        """The message that has been leaving for longest."""
        leaving = [found for sends in self.queues.copy().values() if (found := sends.leaving)]
        return min(leaving, key=lambda entry: entry[0])[1] if leaving else None

    def keep(self, work: Work, payload: Tensor, channel: Channel) -> None:
        self.check()
        self._queue(channel).under_way.put((work, payload, channel))

    def check(self) -> None:
        if self.failed is not None:
            channel, error = self.failed
            raise PeerLostError(
                f"a message could not be sent; the peer is gone or too slow: {channel}",
                code="BX5092",
            ) from error

    def drain(self) -> None:
        for sends in self.queues.copy().values():
            sends.under_way.join()
        self.check()

    def stop(self) -> None:
        """End the threads once they have let go of everything."""
        for sends in self.queues.copy().values():
            sends.under_way.put(None)

    def _queue(self, channel: Channel) -> _SendQueue:
        key = (channel.receiver, channel.kind) if self.side is None else ()
        with self._making:
            if key not in self.queues:
                name, sends = " ".join(("sends", *key)), _SendQueue()
                args = (sends,)
                threading.Thread(target=self._release, args=args, daemon=True, name=name).start()
                self.queues[key] = sends  # a thread that cannot be started leaves none
            return self.queues[key]

    def _wait(self, work: Work) -> None:
        if self.side is None:
            work.wait(self.deadline)
            return
        work.wait()  # see `NetworkTransport._wait_on_gpu`
        left = torch.cuda.Event(blocking=True)  # sleeps; to wait for a stream is to spin
        left.record()
        left.synchronize()

    def _release(self, sends: _SendQueue) -> None:
        if self.side is not None:
            torch.cuda.set_stream(self.side)  # of this thread, and its GPU
        while (entry := sends.under_way.get()) is not None:
            work, payload, channel = entry
            sends.leaving = time.monotonic(), channel
            try:
                if self.failed is None:  # after a failure no message is worth another deadline
                    self._wait(work)
            except RuntimeError as error:
                self.failed = channel, error
            del entry, work, payload
            sends.leaving = None
            sends.under_way.task_done()


@dataclass
class _SendQueue:
    """Messages that leave one after the other, and since when the first of them does."""

    under_way: queue.Queue[tuple[Work, Tensor, Channel] | None] = field(default_factory=queue.Queue)
    leaving: tuple[float, Channel] | None = None
